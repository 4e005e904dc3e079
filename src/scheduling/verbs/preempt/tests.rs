//! What changes between the question of the preempt verb and its decision.

use super::*;
use crate::scheduling::ledger::ObservedWaiting;
use crate::scheduling::policy::Policy;
use crate::scheduling::testkit::{LedgerCluster, demand_of, gpu_at, key, node, uid};
use crate::scheduling::verbs::wait::Reserve;
use crate::scheduling::vocabulary::demand::Sharing;
use crate::scheduling::vocabulary::disruption_budget::DisruptionBudget;
use crate::scheduling::vocabulary::disruption_info::ObservedDisruptionInfo;
use crate::scheduling::vocabulary::label_selector::Selector;

/// A job of low priority on each of two nodes, a budget that covers both and lets one go, and a pod for each of their places.
fn two_jobs(policy: Policy) -> LedgerCluster {
    let mut cluster = LedgerCluster::by(policy, &[("a", 1), ("b", 1)]);
    for (job, on) in [("on-a", "a"), ("on-b", "b")] {
        let demand = demand_of(60 << 30, 1, Sharing::Shared, -10);
        cluster.run(job, (on, 0), demand, None, ObservedDisruptionInfo::default());
    }
    let namespace = demand_of(1, 1, Sharing::Shared, 0).traits.namespace.to_string();
    cluster.ledger.set_budget(DisruptionBudget {
        namespace,
        name: "jobs".into(),
        selector: Selector::EVERYTHING,
        allowed: 1,
    });
    for preemptor in ["first", "second"] {
        cluster.wait(preemptor, demand_of(50 << 30, 1, Sharing::Shared, 100));
    }
    cluster
}

/// The victims for the second pod on node `b`, chosen on the cluster as it is now.
fn chosen_on_b(cluster: &mut LedgerCluster) -> VictimSet {
    let demand = cluster.pod_state(&uid("second")).unwrap().demand.clone();
    let (uid, key, waiting) = (uid("second"), key("second"), ObservedWaiting::default());
    let request = VerbRequest { uid, key, demand, waiting, disruption: None };
    let offered = vec![OfferedNode { node: "b".into(), victims: vec!["on-b".into()], pdb_violations: 0 }];
    let asked = PreemptAsked { request, wants: Requirements::default(), offered };
    let (_, view) = cluster.apply(asked).unwrap();
    match preempt(view) {
        PreemptDecision::Evict { victims, .. } => victims,
        other => panic!("{other:?}"),
    }
}

fn decide(cluster: &mut LedgerCluster, victims: &VictimSet) -> Result<ReservationMade, NotReserved> {
    let policy = cluster.policy().version;
    cluster.apply(PreemptDecided { uid: uid("second"), victims: victims.clone(), policy })
}

fn reserve_on_a(cluster: &mut LedgerCluster) {
    let reservation = Reservation {
        node: node("a"),
        devices: [gpu_at("a", 0)].into(),
        victims: [uid("on-a")].into(),
        deadline: cluster.now() + Millis::seconds(60),
    };
    cluster.apply(Reserve { uid: uid("first"), reservation }).unwrap();
}

#[test]
fn victims_whose_budget_another_reservation_has_used_since_are_not_evicted() {
    for is_used in [false, true] {
        let mut cluster = two_jobs(Policy::default());
        let victims = chosen_on_b(&mut cluster);
        assert_eq!(victims.victims, [uid("on-b")]);
        if is_used {
            reserve_on_a(&mut cluster);
        }
        let made = decide(&mut cluster, &victims);
        assert_eq!(made.is_err(), is_used, "{made:?}");
    }
}

#[test]
fn victims_that_overdraw_a_budget_by_the_policys_leave_are_evicted() {
    let mut policy = Policy::default();
    policy.preemption.violate_budgets = ViolateBudgets::WhenNothingElse;
    let mut cluster = two_jobs(policy);
    reserve_on_a(&mut cluster);
    let victims = chosen_on_b(&mut cluster);
    assert_eq!(victims.eviction_cost.violations, 1);
    let made = decide(&mut cluster, &victims);
    assert!(made.is_ok(), "{made:?}");
}
