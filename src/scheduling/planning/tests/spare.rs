//! The planner leaves the last free GPUs that `planning.spare` keeps to classes that are not preemptible.

use super::*;
use crate::policy::SpareRule;

fn keeping(gpus: u32) -> Policy {
    let mut policy = Policy::default();
    policy.planning.spare = vec![SpareRule {
        gpus,
        model: None,
        pool: None,
        when: Vec::new(),
    }];
    policy
}

#[test]
fn jobs_are_placed_up_to_the_last_free_gpus_and_a_replica_takes_one_without_an_eviction() {
    let mut cluster = LedgerCluster::with_policy_and_nodes(keeping(2), &[("m", 2), ("n", 2)]);
    ["a", "b", "c"]
        .iter()
        .for_each(|name| cluster.add_gated(name, job(60)));
    assert_eq!(
        cluster.plan(),
        ["a on m", "b on m", "c waits: insufficient-vram"]
    );
    apply_plan(cluster.ledger_mut());
    cluster.add_gated("replica", shared(60, 100));
    assert_eq!(
        cluster.plan(),
        ["replica on n", "c waits: insufficient-vram"]
    );
}

#[test]
fn a_job_still_joins_a_gpu_that_has_pods() {
    let mut cluster = LedgerCluster::with_policy_and_nodes(keeping(1), &[("m", 1), ("n", 1)]);
    cluster.bound("early", "n", 0, job(30));
    cluster.add_gated("small", job(40));
    cluster.add_gated("large", job(60));
    assert_eq!(
        cluster.plan(),
        ["small on n", "large waits: insufficient-vram"]
    );
}

#[test]
fn a_job_takes_the_place_of_a_lesser_one_and_no_free_gpu() {
    let mut cluster = LedgerCluster::with_policy_and_nodes(keeping(1), &[("m", 1), ("n", 1)]);
    cluster.bound("lesser", "n", 0, shared(60, -20));
    cluster.add_gated("job", job(60));
    assert_eq!(cluster.plan(), ["job on n after lesser"]);
}

#[test]
fn a_pod_over_several_gpus_leaves_as_many_as_are_kept() {
    let wide = |priority| demand_of(60 << 30, 2, Sharing::Shared, priority);
    let mut cluster = LedgerCluster::with_policy_and_nodes(keeping(2), &[("m", 3)]);
    cluster.add_gated("wide", wide(-10));
    assert_eq!(cluster.plan(), ["wide waits: insufficient-vram"]);
    let mut cluster = LedgerCluster::with_policy_and_nodes(keeping(2), &[("m", 4)]);
    cluster.add_gated("wide", wide(-10));
    cluster.add_gated("wide-too", wide(-10));
    assert_eq!(
        cluster.plan(),
        ["wide on m", "wide-too waits: insufficient-vram"]
    );
}

#[test]
fn jobs_are_moved_to_no_gpu_that_is_kept_free() {
    let mut policy = keeping(1);
    policy.planning.consolidation = Some(Consolidation {
        gain: Millis::seconds(3600),
    });
    let modest = Demand {
        may_preempt: false,
        ..shared(60, 50)
    };
    let cluster = |gpus| {
        let mut cluster = LedgerCluster::with_policy_and_nodes(policy.clone(), &[("m", gpus)]);
        cluster.bound("job", "m", 0, job(30));
        cluster
    };
    // The pod itself may take the free GPU; were that too small for it, the job would have to.
    let mut one = cluster(2);
    one.add_gated("modest", modest);
    assert_eq!(one.plan(), ["modest on m"]);
}

/// The GPU of each pod of a group of jobs that is placed on one island of `n`, whose last two GPUs have pods.
fn on_one_island(spare: u32, jobs: &[(&str, u64)]) -> Vec<String> {
    let mut policy = keeping(spare);
    policy.planning.groups.placement = GroupPlacement::OneIsland;
    let mut cluster = LedgerCluster::with_policy_and_nodes(policy, &[("n", 4)]);
    cluster.bound("x", "n", 2, job(10));
    cluster.bound("y", "n", 3, job(10));
    for (name, gib) in jobs {
        cluster.member(name, job(*gib), group("some", Some(jobs.len() as u32)));
    }
    let steps = plan_steps(cluster.ledger_mut(), 64);
    let [PlanStep::Place(placements)] = &steps[..] else {
        return Vec::new();
    };
    placements
        .iter()
        .map(|placement| placement.reservation.devices[0].to_string())
        .collect()
}

#[test]
fn a_group_of_jobs_is_placed_beside_the_gpus_that_are_kept_free() {
    assert_eq!(
        on_one_island(2, &[("a", 50), ("b", 50)]),
        ["GPU-n-2", "GPU-n-3"]
    );
    assert_eq!(
        on_one_island(0, &[("a", 50), ("b", 50)]),
        ["GPU-n-0", "GPU-n-1"]
    );
    // The first may have one of the two free GPUs, and the second none any more.
    assert_eq!(
        on_one_island(1, &[("a", 50), ("b", 50)]),
        ["GPU-n-2", "GPU-n-3"]
    );
    assert_eq!(
        on_one_island(1, &[("a", 40), ("b", 30)]),
        ["GPU-n-0", "GPU-n-0"],
        "both are on the one GPU"
    );
}
