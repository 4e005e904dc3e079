//! What kube-scheduler's filters say in tests of the core: every node accepts every pod. And application of a plan to a ledger.

use crate::ids::PodUid;
use crate::kube_filters::{ClusterFilters, FilterNode, FilterSnapshot, Requirements, ResourceList};
use crate::ledger::Ledger;
use crate::planning::{PlanStep, PlannedPlacement, plan};
use crate::units::{Bytes, MilliCpu};
use std::sync::Arc;

/// Every node of the ledger accepts every pod of it.
pub fn accepting_filters(ledger: &Ledger) -> FilterSnapshot {
    let mut view = ClusterFilters::default();
    for (name, _) in ledger.node_views() {
        let allocatable = ResourceList {
            cpu: MilliCpu(1 << 40),
            memory: Bytes::gib(1 << 20),
            ..ResourceList::default()
        };
        let (labels, taints) = (Arc::default(), Arc::new([]));
        view.set_node(FilterNode {
            name: name.clone(),
            labels,
            taints,
            allocatable,
            pods: 1 << 20,
        });
    }
    for uid in ledger.pod_states().into_keys() {
        view.set_pending(uid.clone(), Requirements::default());
        view.set_successor(uid.clone(), Requirements::default());
    }
    view.snapshot()
}

/// What the planner would do for the pods that are due.
pub fn plan_steps(ledger: &mut Ledger, limit: usize) -> Vec<PlanStep> {
    let seen = accepting_filters(ledger);
    steps_with_filters(ledger, &seen, limit)
}

/// What the planner would do for the pods that are due, by the verdicts of these filters.
pub fn steps_with_filters(
    ledger: &mut Ledger,
    filters: &FilterSnapshot,
    limit: usize,
) -> Vec<PlanStep> {
    let pending = ledger.pending(limit);
    plan(ledger.clone(), filters, &pending)
}

/// Applies the plan: takes the reservations, and notes the woken pods. Returns the pods that have a place now, in that order.
pub fn apply_plan(ledger: &mut Ledger) -> Vec<PodUid> {
    let mut placed = Vec::new();
    for step in plan_steps(ledger, 64) {
        match step {
            PlanStep::Place(placements) => {
                for PlannedPlacement {
                    uid, reservation, ..
                } in placements
                {
                    ledger
                        .reserve(&uid, reservation)
                        .expect("what was planned on a copy holds");
                    placed.push(uid);
                }
            }
            PlanStep::Requeue { uid, .. } => {
                ledger.record_requeue(&uid);
                placed.push(uid);
            }
            PlanStep::Wait { .. } => {}
        }
    }
    placed
}
