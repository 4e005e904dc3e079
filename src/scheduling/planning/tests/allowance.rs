//! The planner evicts no more pods than `preemption.evictionsPerMinute` allows, and places every pod that it can within that.

use super::*;
use crate::policy::EvictionRates;

fn limited(eviction_rates: EvictionRates) -> Policy {
    let mut policy = Policy::default();
    policy.preemption.evictions_per_minute = eviction_rates;
    policy
}

fn rates() -> EvictionRates {
    EvictionRates::default()
}

/// One job of 60 GiB on the only GPU of each node.
fn full(policy: Policy, nodes: &[&'static str]) -> LedgerCluster {
    let machines: Vec<(&str, u32)> = nodes.iter().map(|name| (*name, 1)).collect();
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &machines);
    nodes
        .iter()
        .for_each(|name| cluster.bound(&format!("job-{name}"), name, 0, job(60)));
    cluster
}

#[test]
fn a_pod_that_waits_because_of_the_eviction_limit_gets_that_reason() {
    let mut cluster = full(
        limited(EvictionRates {
            cluster: 1,
            ..rates()
        }),
        &["m", "n"],
    );
    cluster.add_gated("y", shared(50, 50));
    cluster.add_gated("z", shared(50, 50));
    cluster.add_gated("zz", shared(73, 50));
    assert_eq!(
        cluster.plan(),
        [
            "y on m after job-m",
            "z waits: eviction-limit",
            "zz waits: insufficient-vram"
        ],
        "no eviction frees 73 GiB"
    );
}

#[test]
fn pods_without_a_tenant_are_limited_by_the_cluster_and_the_node() {
    let mut cluster = full(
        limited(EvictionRates {
            tenant: 1,
            ..rates()
        }),
        &["m", "n"],
    );
    cluster.add_gated("y", shared(50, 50));
    cluster.add_gated("z", shared(50, 50));
    assert_eq!(cluster.plan(), ["y on m after job-m", "z on n after job-n"]);
}

#[test]
fn free_gpus_are_preferred_to_evictions() {
    let mut cluster = LedgerCluster::new(&[("m", 1), ("n", 1)]);
    cluster.bound("stays", "m", 0, shared(40, 1000));
    cluster.bound("job", "n", 0, job(60));
    cluster.add_gated("high", shared(50, 100));
    cluster.add_gated("low", job(30));
    assert_eq!(cluster.plan(), ["high on n after job", "low on m"]);
}

#[test]
fn a_dearer_victim_set_within_the_limit_is_chosen_over_the_cheapest_beyond_it() {
    let mut cluster = LedgerCluster::with_policy_and_nodes(
        limited(EvictionRates { node: 2, ..rates() }),
        &[("m", 1), ("n", 1)],
    );
    // The lower priority is evicted first, whatever it costs.
    (0..3).for_each(|n| cluster.bound(&format!("small-{n}"), "m", 0, shared(20, -20)));
    cluster.bound("large", "n", 0, job(72));
    cluster.add_gated("pod", shared(72, 50));
    assert_eq!(cluster.plan(), ["pod on n after large"]);
}

/// Twelve jobs on the six GPUs of one node.
fn twelve(policy: Policy) -> LedgerCluster {
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 6)]);
    for n in 0..12 {
        cluster.bound(&format!("job-{n:02}"), "n", n / 2, job(30));
    }
    cluster
}

fn of_six_gpus() -> Demand {
    demand_of(60 << 30, 6, Sharing::Shared, 100)
}

#[test]
fn a_victim_set_larger_than_the_limit_is_evicted_alone_in_a_free_minute() {
    let mut cluster = twelve(Policy::default());
    cluster.add_gated("pod", of_six_gpus());
    let all = "job-00 job-01 job-02 job-03 job-04 job-05 job-06 job-07 job-08 job-09 job-10 job-11";
    assert_eq!(cluster.plan(), [format!("pod on n after {all}")]);
    cluster.ledger_mut().record_evictions(&[uid("job-00")]);
    assert_eq!(
        cluster.plan(),
        ["pod waits: eviction-limit"],
        "one was evicted there within the minute"
    );
    cluster.advance(61);
    assert_eq!(cluster.plan(), [format!("pod on n after {all}")]);
    cluster.ledger_mut().record_evictions(
        &(0..12)
            .map(|n| uid(&format!("job-{n:02}")))
            .collect::<Vec<_>>(),
    );
    assert!(
        !cluster.ledger().is_within_eviction_rates(&[uid("job-00")]),
        "it was all that the minute had"
    );
}

#[test]
fn other_evictions_wait_for_a_set_larger_than_the_limit_but_not_forever() {
    let mut cluster = twelve(Policy::default());
    cluster.ledger_mut().record_evictions(&[uid("job-00")]);
    cluster.add_gated("large", of_six_gpus());
    cluster.add_gated("small", shared(40, 100));
    assert_eq!(
        cluster.plan(),
        ["large waits: eviction-limit", "small waits: eviction-limit"]
    );
    let pending = cluster.ledger_mut().pending(64);
    let plan = plan_within(
        Ledger::clone(cluster.ledger()),
        &accepting_filters(cluster.ledger()),
        &pending,
        PlanBounds::NONE,
    );
    plan.reserved_scopes
        .into_iter()
        .for_each(|(scope, uid)| cluster.ledger_mut().reserve_scope(scope, &uid));
    // The large one is not due now, and another one of no higher priority asks.
    let generation = cluster.ledger().generation();
    cluster
        .ledger_mut()
        .record_no_placement(&uid("large"), generation);
    assert_eq!(cluster.plan(), ["small waits: eviction-limit"]);
    cluster.add_gated("urgent", shared(40, 200));
    assert_eq!(cluster.plan()[0], "urgent on n after job-00");
    cluster.ledger_mut().release(&uid("large"));
    assert!(
        cluster
            .plan()
            .contains(&"small on n after job-02".to_owned()),
        "it does not wait any more"
    );
}

/// One after the other, pods that need a whole minute's evictions want the node for themselves: for how long, and of what priority.
#[test]
fn a_scope_is_reserved_for_at_most_half_of_the_time() {
    for waves in [&[(60, 100)][..], &[(80, 200), (10, 100)]] {
        let mut cluster = twelve(Policy::default());
        cluster.add_gated("small", shared(40, 100));
        let (mut kept, mut seconds) = (0, 0);
        for (n, (lasts, priority)) in waves.iter().cycle().enumerate().take(9 * waves.len()) {
            let wave = format!("wave-{n}");
            cluster.add_gated(&wave, demand_of(60 << 30, 6, Sharing::Shared, *priority));
            for _ in 0..*lasts {
                cluster
                    .ledger_mut()
                    .reserve_scope(ScopeKey::Node(node("n")), &uid(&wave));
                kept += u32::from(
                    !cluster
                        .ledger()
                        .scopes_reserved_for_others(&uid("small"), 100)
                        .is_empty(),
                );
                seconds += 1;
                cluster.advance(1);
            }
            cluster.ledger_mut().release(&uid(&wave));
        }
        assert!(
            kept * 3 > seconds && kept * 20 <= seconds * 11,
            "{kept} s of {seconds}: {waves:?}"
        );
    }
}

#[test]
fn equal_pods_get_the_same_answer_after_the_step_budget_is_spent() {
    let mut cluster = full(Policy::default(), &["m", "n"]);
    // No pod is evicted for these; the first of each kind costs a look at every node.
    for n in 0..6 {
        cluster.add_gated(&format!("pod-{n}"), shared(70 + n % 3, -100));
    }
    let (pending, roomy) = (
        cluster.ledger_mut().pending(64),
        accepting_filters(cluster.ledger()),
    );
    let bounds = PlanBounds {
        free_steps: 1,
        eviction_steps: u64::MAX,
        ..PlanBounds::NONE
    };
    let plan = plan_within(Ledger::clone(cluster.ledger()), &roomy, &pending, bounds);
    assert_eq!(
        plan.steps.into_iter().map(describe).collect::<Vec<_>>(),
        [
            "pod-0 waits: insufficient-vram",
            "pod-3 waits: insufficient-vram"
        ]
    );
    assert_eq!(
        plan.unreached,
        ["pod-1", "pod-2", "pod-4", "pod-5"].map(uid)
    );
}

#[test]
fn pods_equal_to_a_placed_one_are_placed_after_the_step_budget_is_spent() {
    let mut cluster = LedgerCluster::with_policy_and_nodes(Policy::default(), &[("n", 8)]);
    // One of low priority that has waited for long, and its like behind all others.
    cluster.add_gated("low-0", shared(40, 0));
    for n in 0..6 {
        cluster.add_gated(&format!("pod-{n}"), shared(40 + n % 2, 100));
    }
    cluster.add_gated("low-1", shared(40, 0));
    let (mut pending, roomy) = (
        cluster.ledger_mut().pending(64),
        accepting_filters(cluster.ledger()),
    );
    pending.sort_by_key(|pod| (&*pod.key.name != "low-0", -pod.demand.priority));
    let planned = |bounds: PlanBounds<'_>| {
        let plan = plan_within(Ledger::clone(cluster.ledger()), &roomy, &pending, bounds);
        let placed: Vec<String> = plan.steps.into_iter().map(describe).collect();
        (placed, plan.unreached)
    };
    // The first look at each kind costs a step for the node.
    let bounds = PlanBounds {
        free_steps: 200,
        eviction_steps: 200,
        ..PlanBounds::NONE
    };
    let (placed, left_over) = planned(bounds);
    assert_eq!(
        placed,
        ["low-0 on n", "pod-0 on n", "pod-2 on n", "pod-4 on n"]
    );
    assert_eq!(
        left_over,
        ["pod-1", "pod-3", "pod-5", "low-1"].map(uid),
        "the last has a lower priority"
    );
    let (placed, left_over) = planned(PlanBounds {
        max_placements: 3,
        ..bounds
    });
    assert_eq!(
        (placed.len(), left_over.len()),
        (3, 5),
        "no more than so many at once"
    );
}
