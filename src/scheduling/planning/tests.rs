//! The planner's rules, one by one, on clusters small enough to see what is right.

use super::*;
use crate::ids::OwnerUid;
use crate::kube_filters::{ClusterFilters, Requirements, UnsupportedRule};
use crate::policy::{Consolidation, GroupPlacement, Policy};
use crate::testkit::{
    LedgerCluster, accepting_filters, apply_plan, demand_of, gpu_at, node, plan_steps, uid,
};
use crate::units::{Bytes, Millis, Percent};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::disruption_budget::DisruptionBudget;
use crate::vocabulary::disruption_info::{
    DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo, PodDeletion,
};
use crate::vocabulary::label_selector::Selector;
use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};
use std::collections::BTreeSet;
use std::sync::Arc;

mod allowance;
mod consolidation;
mod departed;
mod groups;
mod ranking;
mod relief;
mod spare;
mod turns;
mod undone;
mod windows;

fn shared(gib: u64, priority: i32) -> Demand {
    demand_of(gib << 30, 1, Sharing::Shared, priority)
}

/// The demand of a class whose start excludes no pod.
fn job(gib: u64) -> Demand {
    shared(gib, -10)
}

impl LedgerCluster {
    fn member(&mut self, name: &str, demand: Demand, disruption_info: DisruptionInfo) {
        let observed = ObservedDisruptionInfo {
            disruption_info,
            ..ObservedDisruptionInfo::default()
        };
        self.add_gated_with(name, demand, observed);
    }

    fn refused(&mut self, name: &str, demand: Demand, queried: &[&str]) {
        self.add_waiting(name, demand);
        let snapshot = self.snapshot();
        let queried =
            snapshot.node_set(queried.iter().map(|name| snapshot.index_of(name).unwrap()));
        self.ledger_mut().record_refusal(&uid(name), Some(queried));
    }

    fn bound(&mut self, name: &str, on: &str, gpu: u32, demand: Demand) {
        let owner = OwnerUid::parse(&format!("owner-of-{name}")).ok();
        self.bound_with(
            name,
            (on, gpu),
            demand,
            DisruptionInfo {
                owner,
                ..DisruptionInfo::default()
            },
        );
    }

    fn bound_with(
        &mut self,
        name: &str,
        on: (&str, u32),
        demand: Demand,
        disruption_info: DisruptionInfo,
    ) {
        let observed = ObservedDisruptionInfo {
            disruption_info,
            ..ObservedDisruptionInfo::default()
        };
        self.add_running(name, on, demand, Some(Millis::seconds(600)), observed);
    }

    /// Each step in words: `a on n`, `a on n after b c`, `a waits: insufficient-vram`.
    fn plan(&mut self) -> Vec<String> {
        plan_steps(self.ledger_mut(), 64)
            .into_iter()
            .map(describe)
            .collect()
    }

    fn plan_by(&mut self, kube_filters: &FilterSnapshot) -> Vec<String> {
        let pending = self.ledger_mut().pending(64);
        plan(Ledger::clone(self.ledger()), kube_filters, &pending)
            .into_iter()
            .map(describe)
            .collect()
    }
}

fn describe(step: PlanStep) -> String {
    let describe_placement = |PlannedPlacement {
                                  uid, reservation, ..
                              }: &PlannedPlacement| {
        let victims: Vec<&str> = reservation.victims.iter().map(PodUid::as_str).collect();
        let after = if victims.is_empty() {
            String::new()
        } else {
            format!(" after {}", victims.join(" "))
        };
        format!("{uid} on {}{after}", reservation.node)
    };
    match step {
        PlanStep::Place(placements) => placements
            .iter()
            .map(describe_placement)
            .collect::<Vec<_>>()
            .join(", "),
        PlanStep::Requeue { uid, .. } => format!("{uid} asks again"),
        PlanStep::Wait { uid, why, .. } => format!("{uid} waits: {}", why.code()),
    }
}

fn group(name: &str, size: Option<u32>) -> DisruptionInfo {
    let key = GroupKey {
        namespace: "default".into(),
        kind: GroupKind::Stowage,
        name: name.into(),
    };
    DisruptionInfo {
        group: Some(key),
        group_size: size,
        ..DisruptionInfo::default()
    }
}

fn with_placement(placement: GroupPlacement) -> Policy {
    let mut policy = Policy::default();
    policy.planning.groups.placement = placement;
    policy
}

fn consolidating(gain: Millis) -> Policy {
    let mut policy = Policy::default();
    policy.planning.consolidation = Some(Consolidation { gain });
    policy
}

#[test]
fn gated_pods_are_placed_in_one_run_each_beside_the_earlier_ones() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    for name in ["a", "b", "c"] {
        cluster.add_gated(name, job(40));
    }
    assert_eq!(
        cluster.plan(),
        ["a on m", "b on n", "c waits: insufficient-vram"]
    );
}

#[test]
fn a_higher_priority_is_placed_first_whatever_the_arrival_order() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.add_gated("early", job(60));
    cluster.advance(5);
    cluster.add_gated("late", shared(60, 100));
    assert_eq!(
        cluster.plan(),
        ["late on n", "early waits: insufficient-vram"]
    );
}

#[test]
fn if_the_nodes_sum_suffices_but_no_gpu_does_only_the_cheapest_pods_are_evicted() {
    let mut cluster = LedgerCluster::new(&[("n", 2)]);
    cluster.bound("a", "n", 0, job(40));
    cluster.bound("b", "n", 1, job(30));
    cluster.bound("c", "n", 1, job(20));
    cluster.refused("serving", shared(50, 100), &["n"]);
    assert!(
        cluster.plan().is_empty(),
        "the scheduler has its turn first"
    );
    cluster.advance(2);
    assert_eq!(cluster.plan(), ["serving on n after b"]);
}

#[test]
fn no_pod_is_evicted_on_a_node_that_the_scheduler_did_not_name() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("cheap", "m", 0, job(72));
    cluster.bound("dear", "n", 0, job(72));
    cluster.bound("dearest", "n", 0, job(0));
    cluster.refused("serving", shared(50, 100), &["n"]);
    cluster.advance(2);
    assert_eq!(cluster.plan(), ["serving on n after dear"]);
}

#[test]
fn no_pod_is_evicted_where_the_kube_filters_refuse_with_any_victims() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("on-n", "n", 0, job(72));
    cluster.bound("on-m", "m", 0, job(72));
    cluster.add_gated("serving", shared(50, 100));
    let mut view = ClusterFilters::default();
    let wants = Requirements {
        node_selector: [("zone".into(), "a".into())].into(),
        ..Requirements::default()
    };
    view.set_pending(uid("serving"), wants);
    let machine = |name: &str, zone: &str| crate::kube_filters::FilterNode {
        name: node(name),
        labels: Arc::new([("zone".into(), zone.into())].into()),
        taints: Arc::new([]),
        allocatable: Default::default(),
        pods: 110,
    };
    view.set_node(machine("n", "b"));
    view.set_node(machine("m", "a"));
    assert_eq!(
        cluster.plan_by(&view.snapshot()),
        ["serving on m after on-m"]
    );
    view.set_node(machine("m", "b"));
    cluster.advance(5);
    assert_eq!(
        cluster.plan_by(&view.snapshot()),
        ["serving waits: no-node"]
    );
}

#[test]
fn with_unknown_kube_filters_no_pod_is_evicted_and_none_nominated() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.add_gated("a", shared(50, 100));
    let mut kube_filters = ClusterFilters::default();
    let roomy = accepting_filters(cluster.ledger());
    assert_eq!(cluster.plan_by(&roomy), ["a on n"]);
    kube_filters.set_pending(
        uid("a"),
        Requirements {
            unsupported: Some(UnsupportedRule::TopologySpread),
            ..Requirements::default()
        },
    );
    kube_filters.set_node(crate::kube_filters::FilterNode {
        name: node("n"),
        labels: Arc::default(),
        taints: Arc::new([]),
        allocatable: Default::default(),
        pods: 110,
    });
    assert_eq!(
        cluster.plan_by(&kube_filters.snapshot()),
        ["a waits: unsupported-filter"]
    );
}

#[test]
fn a_pod_that_may_not_preempt_waits() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.bound("job", "n", 0, job(72));
    cluster.add_gated(
        "polite",
        Demand {
            may_preempt: false,
            ..shared(50, 100)
        },
    );
    assert_eq!(cluster.plan(), ["polite waits: insufficient-vram"]);
}

#[test]
fn vram_reserved_for_one_pod_is_not_planned_for_another() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.bound("job", "n", 0, job(72));
    cluster.add_gated("first", shared(50, 100));
    assert_eq!(apply_plan(cluster.ledger_mut()), [uid("first")]);
    cluster.add_gated("second", shared(50, 100));
    cluster.advance(1);
    assert_eq!(cluster.plan(), ["second waits: insufficient-vram"]);
}

#[test]
fn the_same_ledger_gives_the_same_plan() {
    let mut cluster = LedgerCluster::new(&[("n", 2), ("m", 2)]);
    for name in ["a", "b", "c", "d", "e"] {
        cluster.add_gated(name, job(50));
    }
    let once = plan_steps(cluster.ledger_mut(), 64);
    assert_eq!(plan_steps(cluster.ledger_mut(), 64), once);
    assert_eq!(once.len(), 5);
}

#[test]
fn nodes_named_by_the_scheduler_allow_a_free_placement_and_no_eviction() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.refused("a", shared(50, 100), &["n"]);
    let mut kube_filters = ClusterFilters::default();
    let spreads = || Requirements {
        unsupported: Some(UnsupportedRule::TopologySpread),
        ..Requirements::default()
    };
    kube_filters.set_pending(uid("a"), spreads());
    for name in ["n", "m"] {
        kube_filters.set_node(crate::kube_filters::FilterNode {
            name: node(name),
            labels: Arc::default(),
            taints: Arc::new([]),
            allocatable: Default::default(),
            pods: 110,
        });
    }
    cluster.advance(2);
    assert_eq!(
        cluster.plan_by(&kube_filters.snapshot()),
        ["a on n"],
        "m was not asked about"
    );
    cluster.bound("job", "n", 0, job(60));
    assert_eq!(
        cluster.plan_by(&kube_filters.snapshot()),
        ["a waits: insufficient-vram"],
        "the victim may be what it came for"
    );
}
