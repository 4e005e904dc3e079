//! Consolidation moves pods only if each has another place and the moves cost less than they gain.

use super::*;
use crate::testkit::{lending_policy, with_namespace};
use crate::verbs::tick::PolicySet;
use crate::verbs::wait::ReservePlaces;

/// Two nodes, each half full of a job; neither has free VRAM for a pod that never preempts.
fn halves(policy: Policy) -> LedgerCluster {
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 1), ("m", 1)]);
    cluster.bound("j", "n", 0, job(30));
    cluster.bound("k", "m", 0, job(40));
    cluster.add_gated(
        "polite",
        Demand {
            may_preempt: false,
            ..shared(60, 100)
        },
    );
    cluster
}

#[test]
fn consolidation_moves_pods_that_fit_elsewhere_for_a_pod_that_fits_nowhere() {
    assert_eq!(
        halves(Policy::default()).plan(),
        ["polite waits: insufficient-vram"],
        "off by default"
    );
    let mut cluster = halves(consolidating(Millis::seconds(36_000)));
    let steps = plan_steps(cluster.ledger_mut(), 64);
    let [PlanStep::Place(placements)] = &steps[..] else {
        panic!("{steps:?}")
    };
    let placement = &placements[0];
    assert_eq!(
        (placement.by, placement.reservation.node.as_str()),
        (EvictionRight::Moves, "n"),
        "the smaller job moves"
    );
    assert!(
        Ledger::clone(cluster.ledger())
            .reserve(&placement.uid, placement.reservation.clone())
            .is_err(),
        "by no other right"
    );
    assert_eq!(placement.reserve_in(cluster.ledger_mut()), Ok(()));
}

#[test]
fn no_pod_is_moved_that_was_to_move_when_consolidation_was_switched_off() {
    let mut cluster = halves(consolidating(Millis::seconds(36_000)));
    let steps = plan_steps(cluster.ledger_mut(), 64);
    let [PlanStep::Place(placements)] = &steps[..] else {
        panic!("{steps:?}")
    };
    cluster.apply(PolicySet {
        policy: Policy::default(),
        prepared: None,
    });
    let reserved = cluster.apply(ReservePlaces {
        placements: placements.clone(),
        generation: 0,
    });
    assert!(
        reserved.is_err() && cluster.ledger().totals().reservations == 0,
        "{reserved:?}"
    );
}

#[test]
fn consolidation_moves_no_pod_at_a_loss_or_without_another_place() {
    assert_eq!(
        halves(consolidating(Millis::seconds(60))).plan(),
        ["polite waits: insufficient-vram"]
    );
    let mut cluster = halves(consolidating(Millis::seconds(36_000)));
    cluster.bound("l", "n", 0, job(20));
    cluster.bound("o", "m", 0, job(20));
    assert_eq!(
        cluster.plan(),
        ["polite waits: insufficient-vram"],
        "a moved pod would have no place"
    );
}

#[test]
fn consolidation_moves_no_pod_onto_vram_that_is_lent() {
    let mut policy = lending_policy();
    policy.planning.consolidation = Some(Consolidation {
        gain: Millis::seconds(36_000),
    });
    let of = |demand: Demand| with_namespace(demand, "default", &lending_policy());
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 1), ("m", 1)]);
    cluster.bound("engine", "m", 0, of(shared(60, 0)));
    cluster.bound("j", "n", 0, of(job(30)));
    cluster.add_gated(
        "polite",
        of(Demand {
            may_preempt: false,
            ..shared(60, 100)
        }),
    );
    cluster.report_engine_asleep("engine", "m");
    let borrower = of(job(30));
    assert!(
        cluster.snapshot().node("m").unwrap().gpus[0].can_take(&borrower),
        "the engine lends"
    );
    assert_eq!(
        cluster.plan(),
        ["polite waits: insufficient-vram"],
        "it would soon be evicted a second time"
    );
}
