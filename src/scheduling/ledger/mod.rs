//! Which pod has which VRAM: the one truth about allocations.
//!
//! What is durable is read back from the API server (bound pods, reservations); soft reservations may be lost. The ledger has no
//! clock: the caller sets the time first ([`Ledger::set_now`]). It takes one lock outside, held for single calls and never across
//! an await.
//!
//! A pod is charged from [`Ledger::assume`], before its Binding is written, to [`Ledger::release`]. On each GPU it is charged
//! what it asks for, or the whole GPU if it is exclusive, or, if it is unknown on which GPUs it runs, that much on every GPU of
//! its node.
//!
//! The ledger consists of parts that keep their own invariants behind their methods; no file reads or writes the fields of
//! another:
//!
//! | part | what it is | what it keeps |
//! |---|---|---|
//! | [`pod_states`] | a [`pod_state`] for each pod, members of groups that are no pods here, what pods show alike | groups and deadlines follow from the pods; equal parts are one |
//! | [`node_states`] | a [`node_state`] for each node | sums by tenant, spare GPUs, aging and the snapshot follow from the nodes |
//! | [`waiting_pods`] | refused pods, and the [`waiting_queue`] | turns |
//! | [`evictions`] | evictions of the last minute and by owner, reserved scopes | counts follow from the evictions |
//! | [`overuse`] | pods over their grants, by node | only bound pods of the node |
//! | [`disruption_budgets`] | disruption budgets | order of names |
//! | [`packing`] | demand history and packing model | generations of models |
//! | [`expected_work`] | how much of the time engines have requests, by model | |
//! | [`start_times`] | observed starts of engines, sizes of images | the start model follows from them |
//! | [`reservations`] | the leader's epoch, and reservations of others | |
//!
//! [`copy_on_write`] makes a copy of pods and nodes cost next to nothing and keeps the snapshot current, [`state`] stores and loads
//! all parts. The other files say what a change means for several parts:
//!
//! - in: [`observe`] (what watches and requests show), [`node_devices`], [`resource_slices`], [`set_policy`];
//! - acts: [`assume`], [`reservations`];
//! - out: [`query`], [`preemptor`], [`quotas`], [`start_gates`].

mod assume;
mod copy_on_write;
mod disruption_budgets;
pub(crate) mod evictions;
mod expected_work;
mod node_devices;
mod node_state;
mod node_states;
mod observe;
mod overuse;
mod packing;
mod pod_state;
mod pod_states;
mod preemptor;
mod query;
mod quotas;
mod reservations;
mod resource_slices;
mod set_policy;
mod start_gates;
mod start_times;
mod state;
mod waiting_pods;
mod waiting_queue;

pub(crate) use assume::AssumeResult;
pub use assume::{AllocationFailure, ExpiryResult};
pub use node_devices::DeviceReportError;
pub use node_state::{LoanStage, LoansEndedUnasked, WakeStatus};
pub(crate) use node_state::{NodeState, PodLoan, ResidentPod};
pub use observe::{ObservedPhase, ObservedWaiting, PodObservation, PodWarning};
pub use overuse::{Overuse, OveruseAction, OveruseStep};
pub(crate) use pod_state::{AssumedPod, BoundPod};
pub use pod_state::{FailedAttempt, SchedulingGate, WaitingPod};
pub(crate) use pod_state::{FilterRefusal, SoftReservation};
pub use pod_state::{PodPhase, PodState, WakeMarks};
pub(crate) use preemptor::{Departure, NearestModels};
pub use preemptor::{KeepReason, Preemptor};
pub(crate) use preemptor::{PodEvictionCost, recompute_class_exclusions, returned_quota};
pub use preemptor::{PotentialVictim, discharge};
pub(crate) use query::Occupant;
pub use query::OccupantPhase;
pub use query::is_made_from_template;
pub use query::{CapacityBasis, NodesBaseline, Totals};
pub(crate) use quotas::{QuotaStatus, TenantQuota};
pub use reservations::{RemainingVictim, ReservationStatus};
pub use resource_slices::{DeviceSlice, DeviceUuids, NewlyPublished, PublishedDevices};
pub(crate) use set_policy::RetiredPolicy;
pub use set_policy::{Classifications, GPU_LABELS, PreparedPolicy};
pub(crate) use set_policy::{NamespaceEdits, PreparedLabels};
pub use start_times::{Percentiles, PodStart, StartErrors, StartProgress, TimedStart};
pub(crate) use state::LedgerState;
pub use state::LoadError;
pub use waiting_pods::{PendingPod, PodGroup, WaitKind};

pub(crate) use disruption_budgets::BudgetIndex;

use super::placing::snapshot::Snapshot;
use super::policy::{NamespaceLabels, Policy};
use super::vocabulary::placement::Reservation;
use crate::ids::{NodeName, PodUid};
use crate::units::Moment;
#[cfg(any(test, feature = "testkit"))]
pub use copy_on_write::PODS_LOOKED_AT;
use disruption_budgets::DisruptionBudgets;
use evictions::OwnerEvictions;
use evictions::RecentEvictions;
use expected_work::ModelWork;
use node_states::NodeStates;
use overuse::OverusingPods;
use packing::PackingState;
use pod_states::PlacelessMembers;
use pod_states::SharedParts;
use pod_states::{PodMove, PodStates};
use reservations::LeaderRecord;
use resource_slices::ResourceSlices;
use start_times::StartTimes;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use waiting_pods::WaitingPods;

/// The ledger. Its parts keep their own invariants; the methods here and in the files beside say what a change of one means for
/// the others.
#[derive(Debug, Default, Clone)]
pub struct Ledger {
    policy: Arc<Policy>,
    /// Labels of namespaces, which the policy's selectors match.
    namespaces: Arc<NamespaceLabels>,
    /// The time that the caller has set.
    now: Moment,
    pod_states: PodStates,
    node_states: NodeStates,
    waiting_pods: WaitingPods,
    evictions: RecentEvictions,
    owner_evictions: Arc<OwnerEvictions>,
    budgets: DisruptionBudgets,
    packing: PackingState,
    start_times: StartTimes,
    model_work: ModelWork,
    leader_record: LeaderRecord,
    /// Reservations in the conditions of pods without a node, made by this replica or another, as the watch showed them last.
    observed_reservations: Arc<BTreeMap<PodUid, Reservation>>,
    /// Pods whose condition says that GPUs are reserved for them, bound pods included, also where it names no GPU.
    pods_with_reservation_condition: BTreeSet<PodUid>,
    slices: Arc<ResourceSlices>,
    overuse: OverusingPods,
    /// Pods whose condition says that they are about to be evicted.
    pods_with_eviction_condition: BTreeSet<PodUid>,
    placeless_members: PlacelessMembers,
    shared_parts: SharedParts,
}

impl Ledger {
    pub(crate) fn new(policy: Arc<Policy>) -> Self {
        let packing = PackingState::with_window(policy.packing.window);
        Self {
            policy,
            packing,
            ..Self::default()
        }
    }

    /// An empty ledger under this policy. Its generations continue those of this ledger, so that nothing cached for a state of this
    /// one is taken for a state of the new one.
    pub(crate) fn emptied(&self, policy: Arc<Policy>) -> Self {
        Self {
            node_states: self.node_states.emptied(),
            ..Self::new(policy)
        }
    }

    /// The present, as the ledger knows it.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// Sets the present, which never goes back.
    pub(crate) fn set_now(&mut self, now: Moment) {
        self.now = self.now.max(now);
        self.evictions.remove_expired(self.now);
    }

    /// Rises with every change of what a pod could be allocated.
    pub fn generation(&self) -> u64 {
        self.node_states.generation()
    }

    /// The cluster as it is now. Cheap: most changes are in it already, and of the others only what changed is copied.
    pub fn snapshot(&mut self) -> Arc<Snapshot> {
        self.node_states
            .snapshot(self.packing.model(), self.start_times.model())
    }

    /// A copy to read, made in no time: both sides share what neither changes. Readings do not age in it.
    pub fn read_copy(&self) -> Self {
        Self {
            waiting_pods: self.waiting_pods.clone(),
            packing: self.packing.clone(),
            start_times: self.start_times.clone(),
            leader_record: self.leader_record.clone(),
            slices: self.slices.clone(),
            overuse: self.overuse.clone(),
            pods_with_reservation_condition: self.pods_with_reservation_condition.clone(),
            pods_with_eviction_condition: self.pods_with_eviction_condition.clone(),
            ..self.scratch()
        }
    }

    /// A copy to plan on, made at once: it shares what neither side changes. Readings do not age there and the queue is empty,
    /// because no time passes on a copy; and it does not lead.
    pub fn scratch(&self) -> Self {
        Self {
            policy: self.policy.clone(),
            namespaces: self.namespaces.clone(),
            now: self.now,
            pod_states: self.pod_states.clone(),
            node_states: self.node_states.scratch(),
            waiting_pods: WaitingPods::default(),
            evictions: self.evictions.clone(),
            owner_evictions: self.owner_evictions.clone(),
            budgets: self.budgets.clone(),
            packing: self.packing.scratch(),
            start_times: self.start_times.scratch(),
            model_work: self.model_work.clone(),
            leader_record: LeaderRecord::default(),
            observed_reservations: self.observed_reservations.clone(),
            pods_with_reservation_condition: BTreeSet::new(),
            // Nodes change kind on the ledger itself only.
            slices: Arc::default(),
            overuse: OverusingPods::default(),
            pods_with_eviction_condition: BTreeSet::new(),
            placeless_members: self.placeless_members.clone(),
            shared_parts: SharedParts::default(),
        }
    }

    /// Changes a pod in any way, and updates nodes and queue.
    fn edit_pod(&mut self, uid: &PodUid, edit: impl FnOnce(&mut PodState)) {
        let moved = self.pod_states.edit(uid, edit);
        self.apply_pod_move(uid, &moved);
    }

    /// Updates nodes and queue after a change of a pod.
    fn apply_pod_move(&mut self, uid: &PodUid, moved: &PodMove) {
        self.node_states
            .apply_pod_move(uid, moved, &self.pod_states, &self.policy);
        self.update_queue(uid);
    }

    /// Recomputes a node from its pods and devices.
    fn refresh(&mut self, name: &NodeName) {
        self.node_states
            .refresh(name, &self.pod_states, &self.policy);
    }

    fn set_soft_reservation(&mut self, uid: &PodUid, soft_reservation: Option<SoftReservation>) {
        let Some(waiting) = self.pod_states.waiting(uid) else {
            return;
        };
        if waiting.soft_reservation != soft_reservation {
            self.edit_pod(uid, |pod_state| {
                pod_state.set_soft_reservation(soft_reservation)
            });
        }
    }

    fn set_reservation(&mut self, uid: &PodUid, reservation: Option<Reservation>) {
        let now = self.now;
        self.edit_pod(uid, |pod_state| pod_state.set_reservation(reservation, now));
    }

    fn remove_soft_reservations_on(&mut self, node: &NodeName) {
        let Some(node_state) = self.node_states.get(node) else {
            return;
        };
        let is_softly_reserved = |uid: &&PodUid| {
            self.pod_states[*uid]
                .soft_reservation()
                .is_some_and(|soft_reservation| soft_reservation.node == *node)
        };
        let uids: Vec<PodUid> = node_state
            .pods()
            .iter()
            .filter(is_softly_reserved)
            .cloned()
            .collect();
        uids.iter()
            .for_each(|uid| self.set_soft_reservation(uid, None));
    }
}

#[cfg(test)]
mod order_tests;
#[cfg(test)]
mod policy_tests;
#[cfg(test)]
mod tests;
