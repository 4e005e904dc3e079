//! What lending must not do, on clusters small enough to see it. [`crate::proptests::lending`] has the random
//! histories.

use crate::ids::PodUid;
use crate::ledger::{AllocationFailure, ObservedPhase, ObservedWaiting};
use crate::planning::{is_vram_owed, loans_to_end};
use crate::policy::{Class, Policy, UnusedRule};
use crate::testkit::{
    LedgerCluster, demand_of, gpu_at, key, lending_policy, node, uid, with_namespace,
};
use crate::units::Millis;
use crate::verbs::bind::{BindAnswer, BindAsked};
use crate::verbs::binding::{BindingFailed, BindingRead, BindingStage, BindingWritten, PodRead};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::disruption_info::{DisruptionInfo, ObservedDisruptionInfo, ObservedLoan};
use crate::vocabulary::placement::{Placement, Reservation};
use std::collections::BTreeSet;
use std::sync::Arc;

fn shared(gib: u64, priority: i32) -> Demand {
    with_namespace(
        demand_of(gib << 30, 1, Sharing::Shared, priority),
        "default",
        &lending_policy(),
    )
}

/// A GPU of 72 GiB, on which an engine sleeps that was granted 60 GiB and uses 4.
fn asleep() -> LedgerCluster {
    asleep_by(lending_policy())
}

fn asleep_by(policy: Policy) -> LedgerCluster {
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 1)]);
    cluster.add_running(
        "engine",
        ("n", 0),
        shared(60, 0),
        None,
        ObservedDisruptionInfo::default(),
    );
    cluster.report_engine_asleep("engine", "n");
    cluster
}

impl LedgerCluster {
    fn reserve_on_n(&mut self, pod: &str) -> Result<(), AllocationFailure> {
        let deadline = self.ledger().now() + Millis::seconds(60);
        let (devices, victims) = ([gpu_at("n", 0)].into(), Arc::new([]));
        self.ledger_mut().reserve(
            &uid(pod),
            Reservation {
                node: node("n"),
                devices,
                victims,
                deadline,
            },
        )
    }

    /// The pod's placement on the node, if it gets one.
    fn bind_on_n(&mut self, pod: &str) -> Option<Placement> {
        match self.apply(BindAsked {
            uid: uid(pod),
            key: key(pod),
            node: node("n"),
        }) {
            Ok(BindAnswer::Write(decision)) => Some(decision.placement),
            _ => None,
        }
    }

    /// A job that borrows 30 GiB, and uses them.
    fn lend_to_a_job(&mut self) {
        self.add_waiting("job", shared(30, -10));
        let placement = self.bind_on_n("job").unwrap();
        assert_eq!(*placement.borrowed_from, [uid("engine")]);
        self.apply(BindingWritten {
            uid: uid("job"),
            node: node("n"),
            devices: Some(placement.devices),
        });
        self.report_use("n", &[("engine", 4), ("job", 30)], 0, &["engine"]);
    }

    fn ask_to_wake(&mut self) {
        let loan = ObservedLoan {
            wake_requested: Some("1".into()),
            ..ObservedLoan::default()
        };
        let asks = ObservedDisruptionInfo {
            loan,
            ..ObservedDisruptionInfo::default()
        };
        self.add_running("engine", ("n", 0), shared(60, 0), None, asks);
    }

    fn evicted(&self) -> Vec<PodUid> {
        let evictions = loans_to_end(self.ledger(), &BTreeSet::new(), &BTreeSet::new());
        evictions.into_iter().map(|eviction| eviction.uid).collect()
    }

    /// A pod that Kueue manages, which could not be evicted alone.
    fn wait_in_kueue(&mut self, pod: &str, demand: Demand) {
        let disruption_info = DisruptionInfo {
            queue_managed: true,
            ..DisruptionInfo::default()
        };
        let observed = ObservedDisruptionInfo {
            disruption_info,
            ..ObservedDisruptionInfo::default()
        };
        self.observe(
            pod,
            demand,
            ObservedPhase::Waiting(ObservedWaiting::default()),
            Some(observed),
        );
    }
}

#[test]
fn a_gpu_reserved_for_a_pod_that_could_not_be_evicted_alone_lends_nothing_more() {
    let mut cluster = asleep();
    cluster.wait_in_kueue("kept", shared(10, -10));
    assert_eq!(
        cluster.reserve_on_n("kept"),
        Ok(()),
        "12 GiB are free without the engine"
    );
    cluster.add_waiting("job", shared(30, -10));
    assert_eq!(
        cluster.bind_on_n("job"),
        None,
        "the reservation would be worth nothing"
    );
    assert!(cluster.bind_on_n("kept").is_some());
    assert!(
        cluster.bind_on_n("job").is_some(),
        "once it is bound, the engine lends again"
    );
}

#[test]
fn lent_vram_is_reserved_for_no_pod_that_may_not_borrow() {
    let mut cluster = asleep();
    cluster.wait_in_kueue("kept", shared(30, -10));
    assert!(cluster.reserve_on_n("kept").is_err());
    cluster.add_waiting("job", shared(30, -10));
    assert_eq!(cluster.reserve_on_n("job"), Ok(()));
}

#[test]
fn a_pod_whose_class_lets_it_take_an_hour_to_leave_borrows_nothing() {
    let slow = || Demand {
        grace: Millis::seconds(3600),
        ..shared(30, -10)
    };
    let mut cluster = asleep();
    cluster.add_waiting("slow", slow());
    assert!(
        cluster.bind_on_n("slow").is_some(),
        "it is evicted with ten minutes"
    );
    let policy = lending_policy();
    let patient = |class: &Class| Class {
        max_grace_period: Millis::seconds(3600),
        ..class.clone()
    };
    let classes = policy.classes().iter().map(patient).collect();
    let mut cluster = asleep_by(policy.with_classes(classes).unwrap());
    cluster.add_waiting("slow", slow());
    assert_eq!(
        cluster.bind_on_n("slow"),
        None,
        "its lender would wait for an hour"
    );
    cluster.add_waiting(
        "job",
        Demand {
            grace: Millis::seconds(600),
            ..shared(30, -10)
        },
    );
    assert!(cluster.bind_on_n("job").is_some());
}

#[test]
fn a_binding_that_is_read_says_whether_its_pod_borrows() {
    let mut cluster = asleep();
    cluster.add_waiting("job", shared(30, -10));
    let placement = cluster.bind_on_n("job").unwrap();
    // Its Binding was given up, and had been written all the same; or another process wrote it.
    cluster.apply(BindingFailed(uid("job")));
    let (node, devices) = (node("n"), placement.recorded_gpus());
    let pod = PodRead::Bound {
        node,
        devices,
        borrows: true,
    };
    let stage = BindingStage::Request { is_new: true };
    let max_commit_delay = Millis::seconds(16);
    let asked = cluster.ledger().now();
    cluster.apply(BindingRead {
        uid: uid("job"),
        placement,
        stage,
        pod,
        requested_at: asked,
        max_commit_delay,
    });
    cluster.ask_to_wake();
    cluster.report_use("n", &[("engine", 4), ("job", 30)], 0, &["engine"]);
    assert!(
        !cluster.ledger().unanswered_wakes()[0].is_wakeable,
        "the job has what the engine was granted"
    );
    assert_eq!(cluster.evicted(), [uid("job")]);
}

#[test]
fn a_borrower_is_to_go_only_as_long_as_its_lender_is_to_wake() {
    let mut cluster = asleep();
    cluster.lend_to_a_job();
    let is_to_go = |cluster: &LedgerCluster| is_vram_owed(cluster.ledger(), &uid("job"));
    assert!(!is_to_go(&cluster));
    cluster.ask_to_wake();
    assert!(is_to_go(&cluster));
    // It asks no more, and sleeps on.
    cluster.add_running(
        "engine",
        ("n", 0),
        shared(60, 0),
        None,
        ObservedDisruptionInfo::default(),
    );
    cluster.advance(1);
    cluster.report_use("n", &[("engine", 4), ("job", 30)], 0, &["engine"]);
    assert!(!is_to_go(&cluster) && cluster.evicted().is_empty());
}

#[test]
fn an_engine_that_has_restarted_gets_back_what_it_lent() {
    let mut cluster = asleep();
    cluster.lend_to_a_job();
    // Its process is gone, and its next one fails for lack of memory: no report will ever show it awake.
    cluster.report_use("n", &[("job", 30)], 0, &[]);
    assert!(cluster.evicted().is_empty(), "one report may err");
    cluster.report_use("n", &[("job", 30)], 0, &[]);
    cluster.report_use("n", &[("job", 30)], 0, &[]);
    assert_eq!(cluster.evicted(), [uid("job")]);
    cluster.add_waiting("other", shared(20, -10));
    assert_eq!(cluster.bind_on_n("other"), None, "nothing more is lent");
}

#[test]
fn an_engine_that_asks_ends_its_loan_when_it_wakes_although_its_use_is_unknown() {
    let asleep_only = lending_policy();
    let classes = asleep_only.classes().iter().map(|class| Class {
        unused: UnusedRule::Lend,
        ..class.clone()
    });
    let mut cluster = asleep_by(lending_policy().with_classes(classes.collect()).unwrap());
    let loan = ObservedLoan {
        has_vram_limits: true,
        ..ObservedLoan::default()
    };
    let limited = ObservedDisruptionInfo {
        loan,
        ..ObservedDisruptionInfo::default()
    };
    cluster.add_running("engine", ("n", 0), shared(60, 0), None, limited);
    cluster.lend_to_a_job();
    cluster.report_sleep("n", &[("job", 30)], 4, &[], &["engine"]);
    assert_eq!(cluster.evicted(), [uid("job")]);
}

#[test]
fn an_agent_that_cannot_tell_whose_memory_it_is_ends_no_loan() {
    let mut cluster = asleep();
    cluster.lend_to_a_job();
    (0..5).for_each(|_| cluster.report_use("n", &[], 34, &[]));
    assert!(cluster.evicted().is_empty());
    (0..5).for_each(|_| cluster.report_use("n", &[("job", 30)], 4, &[]));
    assert!(cluster.evicted().is_empty(), "its memory is there");
}

#[test]
fn a_pod_of_which_nothing_is_known_delays_a_wake_only_by_vram_that_a_borrower_could_have() {
    let mut cluster = asleep();
    cluster.ask_to_wake();
    cluster.report_use("n", &[("engine", 4), ("unknown", 30)], 0, &["engine"]);
    assert!(
        !cluster.ledger().unanswered_wakes()[0].is_wakeable,
        "it may have borrowed before this ledger began"
    );
    // As an MPS server has it, which stays.
    cluster.report_use("n", &[("engine", 4), ("unknown", 1)], 0, &["engine"]);
    assert!(cluster.ledger().unanswered_wakes()[0].is_wakeable);
}

/// Two engines sleep on the GPU, and lend to a job.
fn two_lenders() -> LedgerCluster {
    let mut cluster = LedgerCluster::with_policy_and_nodes(lending_policy(), &[("n", 1)]);
    for engine in ["llama", "phi"] {
        let observed = ObservedDisruptionInfo::default();
        cluster.add_running(engine, ("n", 0), shared(30, 0), None, observed);
    }
    let asleep = ["llama", "phi"];
    (0..3).for_each(|_| cluster.report_use("n", &[("llama", 4), ("phi", 4)], 0, &asleep));
    cluster.add_waiting("job", shared(50, -10));
    let placement = cluster.bind_on_n("job").unwrap();
    cluster.apply(BindingWritten {
        uid: uid("job"),
        node: node("n"),
        devices: Some(placement.devices),
    });
    let used = [("llama", 4), ("phi", 4), ("job", 50)];
    cluster.report_use("n", &used, 0, &asleep);
    cluster
}

/// The lender that each eviction of a borrower names.
fn blamed(cluster: &LedgerCluster) -> Vec<String> {
    let evictions = loans_to_end(cluster.ledger(), &BTreeSet::new(), &BTreeSet::new());
    let lenders = evictions.into_iter().map(|eviction| eviction.lender);
    lenders
        .map(|lender| lender.map_or("none".into(), |lender| lender.to_string()))
        .collect()
}

#[test]
fn the_engine_that_woke_without_asking_is_named_and_not_one_that_sleeps() {
    for (woken, sleeps) in [("llama", "phi"), ("phi", "llama")] {
        let mut cluster = two_lenders();
        let used = [("llama", 4), ("phi", 4), ("job", 50)];
        cluster.report_sleep("n", &used, 0, &[sleeps], &[woken]);
        assert_eq!(blamed(&cluster), [key(woken).to_string()]);
        // One that was awake long before is not why.
        let mut cluster = two_lenders();
        cluster.advance(7200);
        cluster.report_sleep("n", &used, 0, &[sleeps], &[woken]);
        assert_eq!(blamed(&cluster), [key(woken).to_string()]);
    }
}

#[test]
fn an_engine_that_needs_more_while_it_sleeps_is_named() {
    let mut cluster = two_lenders();
    let used = [("llama", 25), ("phi", 4), ("job", 50)];
    cluster.report_use("n", &used, 0, &["llama", "phi"]);
    assert_eq!(blamed(&cluster), [key("llama").to_string()]);
}

#[test]
fn of_two_engines_that_wake_at_once_none_is_named() {
    let mut cluster = two_lenders();
    let used = [("llama", 4), ("phi", 4), ("job", 50)];
    cluster.report_sleep("n", &used, 0, &[], &["llama", "phi"]);
    assert_eq!(blamed(&cluster), ["none"]);
}
