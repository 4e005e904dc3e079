//! The search on hand-made candidates, one rule of the cost at a time. Random candidates against brute force are in
//! `scheduling::proptests::victims`.

use super::*;
use crate::ids::GpuUuid;
use crate::ledger::{PodEvictionCost, PotentialVictim, QuotaStatus};
use crate::policy::Policy;
use crate::testkit::{self, demand_of, uid, whole_gpu};
use crate::units::{Bytes, Percent};
use crate::vocabulary::classification::ClassId;
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::{HostResources, Sharing};
use crate::vocabulary::gpu::Gpu;

/// 80 GiB, of which 72 are allocatable; residents are charged as they are added.
fn gpu() -> Gpu {
    let device = whole_gpu(GpuUuid::from_index(0), 0, Bytes::gib(80));
    Gpu::from_device(&device, &Policy::default().headroom)
}

fn resident(name: &str, on: usize, gib: u64, cost: u64) -> PotentialVictim {
    PotentialVictim {
        uid: uid(name),
        gpus: [on].into_iter().collect(),
        per_gpu: Bytes::gib(gib),
        used_beyond_grant: Bytes::ZERO,
        sharing: Sharing::Shared,
        busy: Percent::FULL,
        priority: -10,
        class: ClassId::default(),
        tenant: None,
        host_resources: HostResources::default(),
        grace: Millis::seconds(30),
        eviction_cost: PodEvictionCost {
            work: cost,
            ..PodEvictionCost::default()
        },
        deletion_cost: 0,
        quota_status: QuotaStatus::Guaranteed,
        returned_quota: TenantUsage::default(),
        budgets: Vec::new(),
        gang: None,
        has_ended: false,
    }
}

fn candidate(
    node: &str,
    gpus: usize,
    potential_victims: Vec<PotentialVictim>,
) -> PreemptionCandidate {
    let mut candidate = PreemptionCandidate::new(testkit::node(node), vec![gpu(); gpus]);
    for victim in &potential_victims {
        victim.gpus.iter().for_each(|gpu_index| {
            candidate.gpus[gpu_index].charge(victim.per_gpu, Sharing::Shared)
        });
    }
    candidate.potential_victims = potential_victims;
    candidate
}

fn victims_of(
    candidates: &[PreemptionCandidate],
    gib: u64,
    rules: BudgetRules,
) -> Option<Vec<String>> {
    let demand = demand_of(gib << 30, 1, Sharing::Shared, 100);
    let set = cheapest(candidates, &demand, rules, SearchEffort::default())?;
    assert!(set.exact);
    Some(set.all_victims().iter().map(PodUid::to_string).collect())
}

#[test]
fn two_cheap_victims_are_preferred_to_one_that_loses_more_work() {
    let two = vec![resident("a", 0, 30, 4), resident("b", 0, 30, 4)];
    let candidates = [
        candidate("n", 1, two),
        candidate("m", 1, vec![resident("c", 0, 60, 9)]),
    ];
    assert_eq!(
        victims_of(&candidates, 70, BudgetRules::Keep).unwrap(),
        ["a", "b"]
    );
}

#[test]
fn no_pod_is_evicted_from_a_gpu_where_it_would_not_help() {
    let candidates = [candidate(
        "n",
        2,
        vec![
            resident("cheap", 0, 10, 1),
            resident("expensive", 1, 60, 50),
        ],
    )];
    assert_eq!(
        victims_of(&candidates, 70, BudgetRules::Keep).unwrap(),
        ["cheap"],
        "the two GPUs' rests are no free VRAM"
    );
    assert_eq!(
        victims_of(&candidates, 60, BudgetRules::Keep).unwrap(),
        Vec::<String>::new()
    );
    assert_eq!(
        victims_of(&candidates, 73, BudgetRules::Keep),
        None,
        "no GPU is so large"
    );
}

#[test]
fn borrowing_pods_are_evicted_before_guaranteed_ones_and_low_priority_before_low_cost() {
    let borrowed = PotentialVictim {
        quota_status: QuotaStatus::Borrowed { spared: 7 },
        ..resident("borrows", 0, 60, 90)
    };
    let candidates = [
        candidate("n", 1, vec![borrowed]),
        candidate("m", 1, vec![resident("owns", 0, 60, 1)]),
    ];
    assert_eq!(
        victims_of(&candidates, 50, BudgetRules::Keep).unwrap(),
        ["borrows"]
    );
    let low = PotentialVictim {
        priority: -20,
        ..resident("low", 0, 60, 90)
    };
    let candidates = [
        candidate("n", 1, vec![resident("higher", 0, 60, 1)]),
        candidate("m", 1, vec![low]),
    ];
    assert_eq!(
        victims_of(&candidates, 50, BudgetRules::Keep).unwrap(),
        ["low"]
    );
}

#[test]
fn an_exhausted_disruption_budget_is_respected_unless_the_policy_ignores_it() {
    let covered = PotentialVictim {
        budgets: vec![0],
        ..resident("covered", 0, 60, 1)
    };
    let mut guarded = candidate("n", 1, vec![covered]);
    guarded.budgets = vec![0];
    assert_eq!(
        victims_of(std::slice::from_ref(&guarded), 50, BudgetRules::Keep),
        None
    );
    assert_eq!(
        victims_of(std::slice::from_ref(&guarded), 50, BudgetRules::Violate).unwrap(),
        ["covered"]
    );
    let candidates = [
        guarded,
        candidate("m", 1, vec![resident("expensive", 0, 60, 1000)]),
    ];
    assert_eq!(
        victims_of(&candidates, 50, BudgetRules::Violate).unwrap(),
        ["expensive"],
        "not while another pod can"
    );
}

#[test]
fn a_pod_group_is_evicted_whole_and_at_the_cost_of_all_members() {
    let member = PotentialVictim {
        gang: Some(0),
        ..resident("member", 0, 60, 1)
    };
    let mut grouped = candidate("n", 1, vec![member]);
    grouped.gangs = vec![VictimGroup {
        members: [uid("elsewhere"), uid("member")].into(),
        eviction_cost: EvictionCost::default().plus(&resident("elsewhere", 0, 60, 10)),
        grace: Millis::seconds(60),
        given_back: TenantUsage::default(),
        budgets: Vec::new(),
        elsewhere: MembersElsewhere::default(),
    }];
    assert_eq!(
        victims_of(std::slice::from_ref(&grouped), 50, BudgetRules::Keep).unwrap(),
        ["elsewhere", "member"]
    );
    let candidates = [
        grouped,
        candidate("m", 1, vec![resident("alone", 0, 60, 10)]),
    ];
    assert_eq!(
        victims_of(&candidates, 50, BudgetRules::Keep).unwrap(),
        ["alone"]
    );
}
