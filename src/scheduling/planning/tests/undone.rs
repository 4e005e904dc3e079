//! Reservations for a group that cannot be placed after all, or for a move that does not work out, leave no trace.

use super::*;
use crate::policy::EvictionRates;

/// A job on each of two nodes, and a pod that stays on a third: not enough for three.
fn for_two(policy: Policy) -> LedgerCluster {
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("l", 1), ("m", 1), ("n", 1)]);
    cluster.bound("stays", "l", 0, shared(60, 1000));
    cluster.bound("j", "m", 0, job(60));
    cluster.bound("k", "n", 0, job(60));
    for name in ["a", "b", "c"] {
        cluster.member(name, shared(50, 100), group("trio", Some(3)));
    }
    cluster
}

fn limited(eviction_rates: EvictionRates) -> Policy {
    let mut policy = Policy::default();
    policy.preemption.evictions_per_minute = eviction_rates;
    policy
}

const WITHOUT_EFFECT: [&str; 3] = [
    "a waits: group-too-large",
    "b waits: group-too-large",
    "c waits: group-too-large",
];

#[test]
fn victims_of_a_failed_group_placement_may_be_evicted_for_the_next_pod() {
    let eviction_rates = EvictionRates {
        cluster: 2,
        ..EvictionRates::default()
    };
    let mut cluster = for_two(limited(eviction_rates));
    cluster.add_gated("y", shared(50, 50));
    cluster.add_gated("z", shared(50, 50));
    assert_eq!(
        cluster.plan(),
        [&WITHOUT_EFFECT[..], &["y on m after j", "z on n after k"]].concat()
    );
}

#[test]
fn pods_equal_to_a_failed_groups_members_find_the_places_it_left() {
    let mut cluster = for_two(Policy::default());
    cluster.add_gated("z", shared(50, 100));
    assert_eq!(
        cluster.plan(),
        [&WITHOUT_EFFECT[..], &["z on m after j"]].concat()
    );
}

#[test]
fn beyond_the_eviction_limit_no_pod_is_evicted_and_pending_pods_wait() {
    let eviction_rates = EvictionRates {
        cluster: 1,
        ..EvictionRates::default()
    };
    let mut cluster =
        LedgerCluster::with_policy_and_nodes(limited(eviction_rates), &[("m", 1), ("n", 1)]);
    cluster.bound("j", "m", 0, job(60));
    cluster.bound("k", "n", 0, job(60));
    cluster.add_gated("y", shared(50, 50));
    cluster.add_gated("z", shared(50, 50));
    assert_eq!(
        cluster.plan(),
        ["y on m after j", "z waits: eviction-limit"]
    );
}

/// A job of 30 GiB on n, which fits beside the 40 on m; o is full.
#[test]
fn a_failed_group_placement_leaves_no_reservation_for_moved_pods() {
    let mut cluster = LedgerCluster::with_policy_and_nodes(
        consolidating(Millis::seconds(36_000)),
        &[("m", 1), ("n", 1), ("o", 1)],
    );
    cluster.bound("k", "m", 0, job(40));
    cluster.bound("j", "n", 0, job(30));
    cluster.bound("stays", "o", 0, shared(70, 1000));
    let polite = Demand {
        may_preempt: false,
        ..shared(60, 100)
    };
    for name in ["a", "b"] {
        cluster.member(name, polite.clone(), group("pair", Some(2)));
    }
    cluster.add_gated(
        "z",
        Demand {
            may_preempt: false,
            ..shared(32, 50)
        },
    );
    let waits = ["a waits: group-too-large", "b waits: group-too-large"];
    assert_eq!(cluster.plan(), [&waits[..], &["z on m"]].concat());
}

#[test]
fn a_step_that_is_undone_is_never_ordered() {
    let rates = EvictionRates::default();
    for eviction_rates in [
        EvictionRates {
            cluster: 1,
            ..rates
        },
        EvictionRates {
            cluster: 1,
            tenant: 1,
            ..rates
        },
    ] {
        let mut cluster =
            LedgerCluster::with_policy_and_nodes(limited(eviction_rates), &[("m", 1), ("n", 1)]);
        cluster.bound("j", "m", 0, job(60));
        cluster.bound("k", "n", 0, job(60));
        let (ledger, victims) = (&mut *cluster, ["j", "k"].map(uid));
        let may = |ledger: &Ledger| ledger.is_within_eviction_rates(&victims[1..]);
        assert!(may(ledger.ledger()));
        ledger.ledger_mut().record_evictions(&victims[..1]);
        assert!(!may(ledger.ledger()));
        ledger.ledger_mut().take_back_evictions(&victims[..1]);
        assert!(may(ledger.ledger()));
    }
}

#[test]
fn the_eviction_that_is_taken_back_is_the_one_that_was_not_made() {
    let rates = EvictionRates {
        cluster: 1,
        ..EvictionRates::default()
    };
    // How long before the second one the first was ordered, and what becomes of its pod: its own entry goes, or none.
    for (ahead, change) in [(50, None), (61, None), (0, Some(Millis::seconds(20)))] {
        let mut cluster = LedgerCluster::with_policy_and_nodes(limited(rates), &[("n", 1)]);
        ["j", "k", "l"]
            .into_iter()
            .for_each(|name| cluster.bound(name, "n", 0, job(20)));
        cluster.ledger_mut().record_evictions(&[uid("j")]);
        cluster.advance(ahead);
        cluster.ledger_mut().record_evictions(&[uid("k")]);
        if let Some(grace) = change {
            let leaving = Some(PodDeletion {
                asked_ago: Millis(0),
                grace,
            });
            let observed = ObservedDisruptionInfo {
                leaving,
                ..ObservedDisruptionInfo::default()
            };
            cluster.add_running("j", ("n", 0), job(20), None, observed);
        }
        cluster.ledger_mut().take_back_evictions(&[uid("j")]);
        cluster.advance(15);
        assert!(
            !cluster.ledger().is_within_eviction_rates(&[uid("l")]),
            "{ahead}: that of k counts"
        );
        cluster.ledger_mut().take_back_evictions(&[uid("k")]);
        assert!(
            cluster.ledger().is_within_eviction_rates(&[uid("l")]),
            "{ahead}: none counts"
        );
    }
}
