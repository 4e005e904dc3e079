//! What kube-scheduler's filters say in tests of the core: every node accepts every pod. And application of a plan to a ledger.

use crate::ids::PodUid;
use crate::kube_filters::{Amounts, ClusterFilters, FilterNode, FilterSnapshot, Requirements};
use crate::ledger::Ledger;
use crate::planning::{PlanStep, PlannedPlacement, plan};
use crate::units::{Bytes, MilliCpu};
use std::sync::Arc;

/// Every node of the ledger accepts every pod of it.
pub fn roomy(ledger: &Ledger) -> FilterSnapshot {
    let mut view = ClusterFilters::default();
    for (name, _) in ledger.node_states() {
        let allocatable = Amounts {
            cpu: MilliCpu(1 << 40),
            memory: Bytes::gib(1 << 20),
            ..Amounts::default()
        };
        let (labels, taints) = (Arc::default(), Arc::new([]));
        view.set_machine(FilterNode {
            name: name.clone(),
            labels,
            taints,
            allocatable,
            pods: 1 << 20,
        });
    }
    for uid in ledger.pod_states().into_keys() {
        view.set_waiting(uid.clone(), Requirements::default());
        view.set_movable(uid.clone(), Requirements::default());
    }
    view.snapshot()
}

/// What the planner would do for the pods that are due.
pub fn steps(ledger: &mut Ledger, limit: usize) -> Vec<PlanStep> {
    let seen = roomy(ledger);
    steps_beside(ledger, &seen, limit)
}

/// What the planner would do for the pods that are due, by the verdicts of these filters.
pub fn steps_beside(ledger: &mut Ledger, seen: &FilterSnapshot, limit: usize) -> Vec<PlanStep> {
    let pending = ledger.pending(limit);
    plan(ledger.clone(), seen, &pending)
}

/// Applies the plan: takes the reservations, and notes the woken pods. Returns the pods that have a place now, in that order.
pub fn placed(ledger: &mut Ledger) -> Vec<PodUid> {
    let mut placed = Vec::new();
    for step in steps(ledger, 64) {
        match step {
            PlanStep::Place(places) => {
                for PlannedPlacement {
                    uid, reservation, ..
                } in places
                {
                    ledger
                        .reserve(&uid, reservation)
                        .expect("what was planned on a copy holds");
                    placed.push(uid);
                }
            }
            PlanStep::Wake { uid, .. } => {
                ledger.note_woken(&uid);
                placed.push(uid);
            }
            PlanStep::Wait { .. } => {}
        }
    }
    placed
}
