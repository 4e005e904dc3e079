//! The planner: finds places for pending pods, one after the other, on a scratch copy of the ledger. A place is free now, or
//! needs evictions.
//!
//! The queue is processed in its order, twice: first every pod that needs no eviction is placed or requeued, then pods are
//! evicted for the rest. Within one priority the tenants have their [`turns`]. After the first pod that may evict, those of lower
//! priority wait until it has its place: what they would take may be what it evicts least for. Each pod is placed beside those
//! before it: of ten that wait for one GPU, one gets it. The steps are data; nothing takes effect before the ledger itself has
//! taken each reservation, checking it again. A plan keeps to its bounds ([`step_budget`]): it lists the pods that it did not
//! reach, and the next plan begins there.
//!
//! [`node_ranking`] sorts the nodes for equal pods, [`state`] is the state between one pod and the next, [`preemption`] finds
//! victims within the [`EvictionLimit`](super::reasons::EvictionLimit)s, [`consolidation`] finds pods to move, [`groups`] places pods
//! that are useful only together; [`relief`] finds pods to evict from the GPU of an engine under pressure, [`loans`] those whose lenders
//! wake, and [`recall`] lenders that will be needed soon.

mod consolidation;
mod groups;
mod loans;
mod node_ranking;
mod preemption;
mod recall;
mod relief;
mod state;
mod step_budget;
mod turns;

#[cfg(test)]
mod tests;

pub use loans::{LoanEviction, is_vram_owed, loans_to_end};
pub(crate) use recall::LoansRecalled;
pub use recall::RecallWatch;
pub use relief::{PressureWatch, ReliefEviction, is_relief_due};
pub use step_budget::{PlanBounds, steps_of_run};

use super::evicting::EvictionCost;
use super::kube_filters::FilterSnapshot;
use super::ledger::{AllocationFailure, Ledger, PendingPod};
use super::placing::snapshot::Snapshot;
pub use super::reasons::WaitReason;
use super::vocabulary::placement::Reservation;
use crate::ids::{PodKey, PodUid};
use crate::ledger::evictions::ScopeKey;
use serde::{Deserialize, Serialize};
use state::{PassedPods, PlanReach, PlanningState};
use step_budget::StepBudget;

/// A step of a plan: the result for one pod of the queue, or for a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanStep {
    /// Places for one pod, or for a whole group: all are reserved, or none.
    Place(Vec<PlannedPlacement>),
    /// A device plugin has what the pod requests, or only kube-scheduler can judge the node: the scheduler tries the pod again.
    Requeue { uid: PodUid, key: PodKey },
    /// There is no place for it now.
    Wait {
        uid: PodUid,
        key: PodKey,
        why: WaitReason,
    },
}

/// The place of one pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedPlacement {
    pub uid: PodUid,
    pub key: PodKey,
    /// Its victims are the pods that must be gone first, whether they are evicted for it or leave anyway.
    pub reservation: Reservation,
    pub eviction_cost: EvictionCost,
    /// False if the search for victims ended early: cheaper ones may exist.
    pub exact: bool,
    pub by: EvictionRight,
}

/// The right by which pods are evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum EvictionRight {
    /// The pod's own: its priority, and its tenant's quota.
    Preemption,
    /// The policy's: the victims fit on other nodes.
    Moves,
}

impl PlannedPlacement {
    /// Takes the reservation in a ledger, which checks it again.
    pub fn reserve_in(&self, ledger: &mut Ledger) -> Result<(), AllocationFailure> {
        match self.by {
            EvictionRight::Preemption => ledger.reserve(&self.uid, self.reservation.clone()),
            EvictionRight::Moves => {
                ledger.reserve_by_moving_victims(&self.uid, self.reservation.clone())
            }
        }
    }
}

/// The ledger and its snapshot, as the planner examines a node.
struct PlanView<'a> {
    ledger: &'a Ledger,
    snapshot: &'a Snapshot,
}

/// The steps, and the pods that the plan did not reach within its bounds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<PlanStep>,
    /// Pods that were not examined at all, and pods that would need evictions.
    pub unreached: Vec<PodUid>,
    /// Pods that need more evictions at once than a limit allows, and in which scope: [`Ledger::reserve_scope`].
    pub reserved_scopes: Vec<(ScopeKey, PodUid)>,
    /// Steps that the plan took of its budget.
    pub steps_spent: u64,
}

/// Plans the queue in its order, but for the turns of tenants. `scratch` is a copy of the ledger that the pods wait in.
pub fn plan(scratch: Ledger, kube_filters: &FilterSnapshot, queue: &[PendingPod]) -> Vec<PlanStep> {
    plan_within(scratch, kube_filters, queue, PlanBounds::NONE).steps
}

/// [`plan`] within bounds. Whatever the bounds, the first pod of the queue is examined, and so is the first that would need
/// evictions: each plan makes progress.
pub fn plan_within(
    scratch: Ledger,
    kube_filters: &FilterSnapshot,
    queue: &[PendingPod],
    bounds: PlanBounds<'_>,
) -> Plan {
    let step_budget = StepBudget::new(bounds);
    let mut planning_state = PlanningState::new(scratch, kube_filters, &step_budget);
    let mut plan = Plan::default();
    let mut queue: Vec<&PendingPod> = queue.iter().collect();
    let (mut free, mut evictions) = (bounds.free_steps, bounds.eviction_steps);
    while !queue.is_empty() {
        let spent_before = step_budget.spent();
        let PassedPods {
            needing_evictions,
            lower_priority,
        } = planning_state.run_pass(
            &queue,
            PlanReach::Free,
            (free, bounds.max_placements),
            &mut plan,
        );
        let spent_between = step_budget.spent();
        planning_state.run_pass(
            &needing_evictions,
            PlanReach::Evictions,
            (evictions, bounds.max_placements),
            &mut plan,
        );
        free = free.saturating_sub(spent_between - spent_before);
        evictions = evictions.saturating_sub(step_budget.spent() - spent_between);
        planning_state.has_begun = true;
        queue = lower_priority;
    }
    plan.steps_spent = step_budget.spent();
    plan.reserved_scopes = planning_state.reserved_scopes;
    plan
}
