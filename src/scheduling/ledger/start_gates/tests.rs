//! What a tenant whose engines never become ready keeps from others of a GPU, whatever it does with its pods.

use crate::explaining::explanation::PodStage;
use crate::explaining::{ShownNodes, explain};
use crate::ledger::ObservedPhase;
use crate::policy::{Class, Policy, StartGate, Tenant};
use crate::testkit::{LedgerCluster, demand_of, gpu_at, node, uid, with_namespace};
use crate::units::Millis;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::disruption_info::{DisruptionInfo, ObservedDisruptionInfo, PodHealth};
use std::sync::Arc;

/// The default policy's `startGate.max`, and the hour in which it counts.
const MAX: u64 = 600;
const HOUR: u64 = 3600;

/// What a pod shows while its engine starts, becomes ready, has been restarted, or is to leave.
#[derive(Clone, Copy, PartialEq)]
enum Shown {
    Starting,
    Ready,
    Restarted,
    Evicted,
}

impl LedgerCluster {
    fn show(&mut self, name: &str, namespace: &str, gpus: &[u32], shown: Shown) {
        let demand = demand_of(30 << 30, gpus.len().max(1) as u32, Sharing::Shared, 100);
        let demand = with_namespace(demand, namespace, &self.ledger().policy().clone());
        let devices = gpus
            .iter()
            .map(|gpu| gpu_at("n", *gpu))
            .collect::<Arc<[_]>>();
        let devices = Some(devices).filter(|devices| !devices.is_empty());
        let starting = matches!(shown, Shown::Starting | Shown::Evicted);
        let state = ObservedPhase::Bound {
            node: node("n"),
            devices,
            starting,
            ran: None,
        };
        let health = if shown == Shown::Ready {
            PodHealth::Ready
        } else {
            PodHealth::Unready
        };
        let disruption_info = DisruptionInfo {
            health,
            ..DisruptionInfo::default()
        };
        let shows_eviction = shown == Shown::Evicted;
        let observed = ObservedDisruptionInfo {
            disruption_info,
            shows_eviction,
            ..ObservedDisruptionInfo::default()
        };
        self.observe(name, demand, state, Some(observed));
    }

    fn closed(&mut self) -> Vec<bool> {
        self.snapshot()
            .node("n")
            .unwrap()
            .gpus
            .iter()
            .map(|gpu| gpu.starting)
            .collect()
    }

    /// For how many of the next seconds the first GPU is closed to engines, while pod after pod starts there: each shows `ends` after
    /// so many seconds, and is deleted.
    fn closed_by(
        &mut self,
        of: &[&str],
        gpus: &[u32],
        (seconds, lives, ends): (u64, u64, Shown),
    ) -> u64 {
        let mut closed = 0;
        for second in 0..seconds {
            let name = |n: u64| format!("{}-{n}", of[n as usize % of.len()]);
            let (n, age) = (second / lives, second % lives);
            if age == 0 {
                if n > 0 {
                    self.show(&name(n - 1), of[(n - 1) as usize % of.len()], gpus, ends);
                    self.ledger_mut().release(&uid(&name(n - 1)));
                }
                self.show(&name(n), of[n as usize % of.len()], gpus, Shown::Starting);
            }
            closed += u64::from(self.closed()[0]);
            self.advance(1);
        }
        closed
    }
}

fn two_gpus() -> LedgerCluster {
    LedgerCluster::new(&[("n", 2)])
}

#[test]
fn engines_that_never_become_ready_close_a_gpu_for_at_most_their_class_maximum_per_hour() {
    for (lives, ends) in [
        (500, Shown::Starting),
        (20, Shown::Starting),
        (15, Shown::Restarted),
        (1, Shown::Starting),
    ] {
        for gpus in [&[0][..], &[0, 1], &[]] {
            let closed = two_gpus().closed_by(&["bad"], gpus, (HOUR - 1, lives, ends));
            assert!(
                (20..=MAX + lives.min(60)).contains(&closed),
                "{closed} s, in lives of {lives} s on {gpus:?}"
            );
        }
    }
}

#[test]
fn namespaces_of_one_tenant_have_one_share() {
    let tenant = Tenant::new("bad", &["bad-*"]);
    let policy = Policy::default().with_tenants(vec![tenant]).unwrap();
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 2)]);
    let closed = cluster.closed_by(
        &["bad-1", "bad-2", "bad-3"],
        &[0],
        (HOUR - 1, 20, Shown::Starting),
    );
    assert!(closed <= MAX + 20, "{closed}");
}

/// The gate stays shut for a while after that, and what the pod shows meanwhile is no further start.
#[test]
fn an_engine_that_is_restarted_has_failed_once_however_often_it_shows_that() {
    let start_gate = StartGate {
        min: Millis::seconds(60),
        ..StartGate::default()
    };
    let policy = Policy::default();
    let classes = policy
        .classes()
        .iter()
        .map(|class| Class {
            start_gate,
            ..class.clone()
        })
        .collect();
    let policy = Policy::default().with_classes(classes).unwrap();
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 1)]);
    cluster.show("once", "good", &[0], Shown::Starting);
    for _ in 0..59 {
        cluster.advance(1);
        cluster.show("once", "good", &[0], Shown::Restarted);
        assert!(cluster.closed()[0]);
    }
    cluster.advance(1);
    assert!(!cluster.closed()[0]);
    cluster.ledger_mut().release(&uid("once"));
    assert_eq!(
        cluster.closed_by(&["good"], &[0], (HOUR - 61, 100, Shown::Starting)),
        MAX - 60
    );
}

#[test]
fn an_engine_that_becomes_ready_is_left_alone_while_it_starts_however_often_it_does() {
    let closed = two_gpus().closed_by(&["good"], &[0], (1700, 20, Shown::Ready));
    assert_eq!(closed, 1700);
}

/// However many are ready just before their gates open.
#[test]
fn all_engines_of_one_tenant_together_close_a_gpu_for_a_bounded_part_of_an_hour() {
    for lives in [20, 120] {
        let closed = two_gpus().closed_by(&["bad"], &[0], (HOUR - 1, lives, Shown::Ready));
        assert!((1700..=3 * MAX).contains(&closed), "{closed}");
    }
}

#[test]
fn an_engine_that_is_ready_after_its_gate_has_opened_has_not_failed() {
    let mut cluster = two_gpus();
    for n in 0..8 {
        let name = format!("slow-{n}");
        cluster.show(&name, "good", &[0], Shown::Starting);
        assert!(cluster.closed()[0], "{n}");
        cluster.advance(200);
        assert!(!cluster.closed()[0]);
        cluster.show(&name, "good", &[0], Shown::Ready);
        cluster.ledger_mut().release(&uid(&name));
    }
}

#[test]
fn an_engine_that_is_evicted_while_it_starts_has_not_failed() {
    let mut cluster = two_gpus();
    for n in 0..100 {
        let name = format!("victim-{n}");
        cluster.show(&name, "good", &[0], Shown::Starting);
        assert!(cluster.closed()[0], "{n}");
        cluster.advance(20);
        cluster.show(&name, "good", &[0], Shown::Evicted);
        cluster.ledger_mut().release(&uid(&name));
    }
}

#[test]
fn gate_time_is_counted_per_tenant_and_gpu_and_expires() {
    let mut cluster = two_gpus();
    cluster.closed_by(&["bad"], &[0], (1800, 20, Shown::Starting));
    let explained = explain(&mut cluster.copy(), &uid("bad-89"), &ShownNodes::default()).unwrap();
    assert!(
        matches!(
            explained.stage,
            PodStage::Bound {
                gate_time_taken_millis: Some(Millis(600_000)),
                start_gate_opens_in_millis: None,
                ..
            }
        ),
        "{:?}",
        explained.stage
    );
    cluster.ledger_mut().release(&uid("bad-89"));
    let mut starts = |name: &str, namespace: &str, gpu: u32| {
        cluster.show(name, namespace, &[gpu], Shown::Starting);
        let closed = cluster.closed()[gpu as usize];
        cluster.ledger_mut().release(&uid(name));
        closed
    };
    assert!(!starts("again", "bad", 0));
    assert!(starts("other", "good", 0));
    assert!(starts("elsewhere", "bad", 1));
    cluster.advance(HOUR);
    cluster.show("later", "bad", &[0], Shown::Starting);
    assert!(cluster.closed()[0]);
}

/// As where a budget of its owner's forbids the eviction.
#[test]
fn an_engine_whose_eviction_was_cancelled_counts_its_gate_time() {
    let (mut cluster, mut closed) = (two_gpus(), 0);
    for n in 0..(HOUR - 1) / 200 {
        let name = format!("stays-{n}");
        cluster.show(&name, "bad", &[0], Shown::Starting);
        for _ in 0..200 {
            cluster.show(&name, "bad", &[0], Shown::Evicted);
            closed += u64::from(cluster.closed()[0]);
            cluster.advance(1);
        }
        cluster.ledger_mut().release(&uid(&name));
    }
    assert!((100..=MAX + 60).contains(&closed), "{closed} s");
}
