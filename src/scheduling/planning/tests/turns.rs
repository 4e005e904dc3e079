//! Many waiting pods of one tenant, each of another size, and one of another tenant: how many runs there are until its turn.

use super::*;
use crate::ids::PodKey;
use crate::ledger::{ObservedPhase, ObservedWaiting, PodObservation};
use crate::policy::Tenant;
use crate::testkit::with_namespace;
use crate::verbs::observe::PodObserved;
use crate::vocabulary::cluster_share::TenantUsage;

/// A run has steps for a few kinds of pods.
const BOUNDS: PlanBounds<'static> = PlanBounds {
    free_steps: 60,
    eviction_steps: 60,
    max_placements: usize::MAX,
    is_stopped: &|| false,
};

fn tenants(of: &[(&str, &str)]) -> Policy {
    let none = TenantUsage {
        vram: Bytes::ZERO,
        milli_gpus: u64::MAX,
    };
    let tenant = |(name, namespace): &(&str, &str)| Tenant {
        guarantee: none,
        ..Tenant::new(name, &[namespace])
    };
    Policy::default()
        .with_tenants(of.iter().map(tenant).collect())
        .unwrap()
}

impl LedgerCluster {
    fn refused_in(&mut self, namespace: &str, name: &str, demand: Demand) {
        let demand = with_namespace(demand, namespace, &self.ledger().policy().clone());
        let key = PodKey::parse(namespace, name).unwrap();
        let state = ObservedPhase::Waiting(ObservedWaiting::default());
        self.apply(PodObserved(PodObservation {
            uid: uid(name),
            key,
            demand,
            state,
            observed: None,
        }));
        self.ledger_mut().record_refusal(&uid(name), None);
    }

    /// Pods of different sizes that fit nowhere.
    fn crowd(&mut self, namespace: &str, count: u64) {
        for n in 0..count {
            let demand = demand_of((40 << 30) + (n << 20), 1, Sharing::Shared, -10);
            self.refused_in(namespace, &format!("{namespace}-{n}"), demand);
        }
    }

    /// How many runs there are until the pod has its place.
    fn runs_until(&mut self, placed: &str, limit: usize) -> usize {
        for run in 1..200 {
            let pending = self.ledger_mut().pending(limit);
            let plan = plan_within(
                self.ledger().scratch(),
                &accepting_filters(self.ledger()),
                &pending,
                BOUNDS,
            );
            self.ledger_mut().put_back(&plan.unreached);
            for step in plan.steps {
                match step {
                    PlanStep::Place(placements) if placements[0].uid == uid(placed) => return run,
                    PlanStep::Wait { uid, .. } => {
                        let generation = self.ledger().generation();
                        self.ledger_mut().record_no_placement(&uid, generation);
                    }
                    other => panic!("{other:?}"),
                }
            }
            self.advance(1);
        }
        usize::MAX
    }
}

fn cluster(policy: Policy) -> LedgerCluster {
    let mut cluster = LedgerCluster::with_policy_and_nodes(
        policy,
        &[
            ("a", 1),
            ("b", 1),
            ("c", 1),
            ("d", 1),
            ("e", 1),
            ("f", 1),
            ("g", 1),
            ("h", 1),
        ],
    );
    for (n, on) in ["a", "b", "c", "d", "e", "f", "g", "h"].iter().enumerate() {
        cluster.bound(&format!("there-{n}"), on, 0, shared(40, 100));
    }
    cluster
}

#[test]
fn one_namespaces_many_pod_sizes_do_not_delay_another_namespace() {
    let mut cluster = cluster(Policy::default());
    cluster.crowd("many", 300);
    cluster.advance(1);
    cluster.refused_in("few", "one", job(20));
    cluster.advance(2);
    assert!(cluster.runs_until("one", 2048) <= 2);
}

/// More than a run is handed, and than become due for one.
#[test]
fn another_tenants_pod_does_not_wait_for_a_larger_crowd() {
    let mut cluster = cluster(tenants(&[("many", "many"), ("few", "few")]));
    cluster.crowd("many", 600);
    cluster.advance(1);
    cluster.refused_in("few", "one", job(20));
    cluster.advance(2);
    assert!(cluster.runs_until("one", 64) <= 4);
}

/// The one who borrows least has the first turns, and not all of them.
#[test]
fn a_tenant_that_borrows_does_not_wait_for_a_crowd_of_one_that_does_not() {
    let mut cluster = cluster(tenants(&[("many", "many"), ("few", "few")]));
    let policy = cluster.ledger().policy().clone();
    cluster.bound("borrows", "a", 0, with_namespace(job(10), "few", &policy));
    cluster.crowd("many", 300);
    cluster.advance(1);
    cluster.refused_in("few", "one", job(20));
    cluster.advance(2);
    assert!(cluster.runs_until("one", 2048) <= 3);
}

#[test]
fn a_pod_that_evicts_does_not_wait_for_a_crowd_that_would() {
    let mut cluster = cluster(Policy::default());
    for n in 0..300u64 {
        let demand = demand_of((73 << 30) + (n << 20), 1, Sharing::Shared, 200);
        cluster.refused_in("many", &format!("many-{n}"), demand);
    }
    cluster.advance(1);
    cluster.refused_in("few", "one", shared(25, 200));
    for on in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        cluster.bound(&format!("victim-{on}"), on, 0, job(30));
    }
    cluster.advance(2);
    assert!(cluster.runs_until("one", 2048) <= 2);
}

/// A run has steps for fewer kinds than there are crowds.
#[test]
fn another_namespaces_pod_has_its_turn_among_many_crowds() {
    let mut cluster = cluster(Policy::default());
    (0..12).for_each(|n| cluster.crowd(&format!("many-{n}"), 40));
    cluster.advance(1);
    cluster.refused_in("few", "one", job(20));
    cluster.advance(2);
    assert!(cluster.runs_until("one", 2048) <= 13);
}
