//! The state of one pod, and its transitions.
//!
//! ```text
//!            assume                  confirm
//!  Waiting ─────────► Assumed ─────────────────► Bound ───► (released)
//!     ▲                  │                         ▲
//!     └──────────────────┘                         │ observed, bound by another
//!            forget                             Waiting
//! ```
//!
//! Until it has a node it is a [`WaitingPod`]: what was asked and answered about it, and its reservation.

use super::evictions::EvictionRefusal;
use super::start_times::PodStart;
use crate::ids::{GpuUuid, LeaderEpoch, NodeName, PodKey};
use crate::placing::snapshot::NodeSet;
use crate::units::Moment;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::disruption_info::{Checkpoint, DisruptionInfo, ObservedLoan, PodDeletion};
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::is_default;
use crate::vocabulary::placement::{Placement, Reservation};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodState {
    pub key: PodKey,
    pub demand: Demand,
    /// What its eviction depends on, as last observed.
    pub disruption_info: Arc<DisruptionInfo>,
    /// No watch has shown the pod yet: its disruption info comes from kube-scheduler's requests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_unwatched: bool,
    pub phase: PodPhase,
    /// While its engine starts, until when no other may start on its GPUs. Of an assumed pod, as if its Binding had landed with the
    /// decision: until the Binding is settled, no other may start there.
    pub starting: Option<Moment>,
    /// When its engine is expected to answer, and when it did, if this ledger saw the pod being bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Arc<PodStart>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PodPhase {
    /// Boxed, as `Assumed` is: most pods are bound, and should take no more memory than that needs.
    Waiting(Box<WaitingPod>),
    /// Its GPUs are allocated, and the Binding is on its way.
    Assumed(Box<AssumedPod>),
    Bound(BoundPod),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssumedPod {
    pub placement: Placement,
    /// The epoch of the decision.
    pub epoch: Option<LeaderEpoch>,
    /// When it was decided.
    pub since: Moment,
    /// What it goes back to if the Binding fails.
    pub before: WaitingPod,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundPod {
    pub node: NodeName,
    /// What its Binding recorded; `None` if another scheduler bound it.
    pub devices: Option<Arc<[GpuUuid]>>,
    /// Where an agent found it, if nothing is recorded, or only indices are.
    pub located: Option<Arc<[GpuUuid]>>,
    /// When this ledger learned of it. A reading sampled earlier says nothing about it.
    pub since: Moment,
    /// Since when it runs, as far as that is known.
    pub started: Moment,
    /// It is being deleted: when its grace ends.
    pub leaving: Option<Moment>,
    /// It was to be evicted, and stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction_refusal: Option<Box<EvictionRefusal>>,
    /// Its VRAM is lent by engines: it leaves when one of them needs it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub borrows: bool,
    /// The driver keeps it within its VRAM, as its Binding says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_vram_limits: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub wake: WakeMarks,
}

/// Whether a bound pod's engine is to wake. While its annotation requests that, or its condition allows it, it lends nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WakeMarks {
    /// What its annotation says, while it is there.
    pub request: Option<Arc<str>>,
    /// The request that its condition answers, while it is true.
    #[serde(rename = "told")]
    pub answered_request: Option<Arc<str>>,
    /// When the last of the two went. A reading sampled earlier does not show that the engine sleeps.
    pub over: Moment,
}

impl WakeMarks {
    /// Whether the engine wants to wake or may: its whole grant has to be free.
    pub(super) fn is_waking(&self) -> bool {
        self.request.is_some() || self.answered_request.is_some()
    }
}

impl BoundPod {
    pub(super) fn new(node: NodeName, devices: Option<Arc<[GpuUuid]>>, since: Moment) -> Self {
        Self {
            node,
            devices,
            located: None,
            since,
            started: since,
            leaving: None,
            eviction_refusal: None,
            borrows: false,
            has_vram_limits: false,
            wake: WakeMarks::default(),
        }
    }

    /// Whether its Binding recorded GPUs by UUID: then only that record counts.
    pub(super) fn has_recorded_uuids(&self) -> bool {
        self.devices
            .as_ref()
            .is_some_and(|devices| devices.iter().all(|uuid| uuid.index().is_none()))
    }
}

impl PodState {
    /// A pod that was observed without a node at `now`.
    pub(super) fn new_waiting(now: Moment, key: PodKey, demand: Demand) -> Self {
        let phase = PodPhase::Waiting(Box::new(WaitingPod {
            since: now,
            ..WaitingPod::default()
        }));
        let disruption_info = Arc::default();
        Self {
            key,
            demand,
            disruption_info,
            is_unwatched: false,
            phase,
            starting: None,
            start: None,
        }
    }

    /// The pod is about to be bound as `placement` says, as decided in this epoch and at `since`. Were the Binding to land at once, no
    /// other engine might start on its GPUs until `starting`.
    pub(super) fn assume(
        &mut self,
        placement: Placement,
        epoch: Option<LeaderEpoch>,
        since: Moment,
        starting: Option<Moment>,
        start: Option<Arc<PodStart>>,
    ) {
        (self.starting, self.start) = (starting, start);
        if let PodPhase::Waiting(before) = &mut self.phase {
            let before = std::mem::take(&mut **before);
            self.phase = PodPhase::Assumed(Box::new(AssumedPod {
                placement,
                epoch,
                since,
                before,
            }));
        }
    }

    /// The pod was not bound and waits again, with the reservation that it had before.
    pub(super) fn forget(&mut self) {
        if let PodPhase::Assumed(assumed) = &mut self.phase {
            (self.starting, self.start) = (None, None);
            let (offered, before) = (
                Some(assumed.placement.node.clone()),
                std::mem::take(&mut assumed.before),
            );
            let waiting = WaitingPod {
                offered,
                soft_reservation: None,
                ..before
            };
            self.phase = PodPhase::Waiting(Box::new(waiting));
        }
    }

    /// Until `starting` no other engine may start on its GPUs.
    pub(super) fn set_bound(
        &mut self,
        bound: BoundPod,
        starting: Option<Moment>,
        start: Option<Arc<PodStart>>,
    ) {
        (self.phase, self.starting, self.start) = (PodPhase::Bound(bound), starting, start);
    }

    pub(super) fn set_soft_reservation(&mut self, soft_reservation: Option<SoftReservation>) {
        if let PodPhase::Waiting(waiting) = &mut self.phase {
            waiting.soft_reservation = soft_reservation;
        }
    }

    pub(super) fn set_reservation(&mut self, reservation: Option<Reservation>, now: Moment) {
        if let PodPhase::Waiting(waiting) = &mut self.phase {
            waiting.replace_reservation(reservation, now);
        }
    }

    /// The pod shows this demand, and a reservation that counts if it is new, until `latest` at the latest.
    pub(super) fn observe_waiting(
        &mut self,
        demand: Demand,
        observed: Option<Reservation>,
        latest: Moment,
        now: Moment,
    ) {
        self.demand = demand;
        if let PodPhase::Waiting(waiting) = &mut self.phase
            && let Some(new) = observed.filter(|observed| waiting.is_new_reservation(observed))
        {
            let reservation = Reservation {
                deadline: new.deadline.min(latest),
                ..new
            };
            waiting.replace_reservation(Some(reservation), now);
        }
    }

    /// An agent found the pod on these GPUs.
    pub(super) fn set_located_gpus(&mut self, gpus: Arc<[GpuUuid]>) {
        if let PodPhase::Bound(bound) = &mut self.phase {
            bound.located = Some(gpus);
        }
    }

    /// Which GPUs it is on is what its record says, if anything.
    pub(super) fn forget_location(&mut self) {
        if let PodPhase::Bound(bound) = &mut self.phase {
            bound.located = None;
        }
    }

    /// Other engines may start on the pod's GPUs then, or before; at once, if no moment is given.
    pub(super) fn open_start_gate(&mut self, at: Option<Moment>) {
        self.starting = self
            .starting
            .and_then(|closed_until| Some(closed_until.min(at?)));
    }

    /// Sets when the pod began to run, if that is earlier than recorded.
    pub(super) fn set_earlier_start(&mut self, started: Moment) {
        if let PodPhase::Bound(bound) = &mut self.phase {
            bound.started = bound.started.min(started);
        }
    }

    /// Shortens a refused eviction: what the eviction depends on has changed.
    pub(super) fn shorten_eviction_refusal(&mut self) {
        if let PodPhase::Bound(BoundPod {
            eviction_refusal: Some(refusal),
            ..
        }) = &mut self.phase
        {
            refusal.shorten();
        }
    }

    /// The pod is being deleted.
    pub(super) fn record_deletion(&mut self, deletion: PodDeletion, now: Moment) {
        if let PodPhase::Bound(bound) = &mut self.phase {
            let (grace_end, from_now) = (deletion.deadline(now), now + deletion.grace);
            // A deletion is never taken back, and its grace only grows shorter. The API server counts a shorter one from the first
            // request on, but the kubelet gives it from now on; to a replica that sees it then for the first time, it is over already.
            let first = if grace_end < now { from_now } else { grace_end };
            bound.leaving = Some(
                bound
                    .leaving
                    .map_or(first, |expected| expected.min(grace_end.max(from_now))),
            );
        }
    }

    /// The pod shows this of VRAM that is lent. A mark that it borrows was written by its Binding, and is never taken back.
    pub(super) fn observe_loan(&mut self, loan: &ObservedLoan, now: Moment) {
        let PodPhase::Bound(bound) = &mut self.phase else {
            return;
        };
        bound.borrows |= loan.borrows;
        bound.has_vram_limits |= loan.has_vram_limits;
        let was_open = bound.wake.is_waking();
        (bound.wake.request, bound.wake.answered_request) =
            (loan.wake_requested.clone(), loan.wakeable.clone());
        if was_open && !bound.wake.is_waking() {
            bound.wake.over = now;
        }
    }

    /// Whether the observed loan marks differ from the recorded ones.
    pub(super) fn has_loan_change(&self, loan: &ObservedLoan) -> bool {
        self.bound().is_some_and(|bound| {
            loan.borrows && !bound.borrows
                || loan.has_vram_limits && !bound.has_vram_limits
                || (&loan.wake_requested, &loan.wakeable)
                    != (&bound.wake.request, &bound.wake.answered_request)
        })
    }

    /// Whether the driver keeps it within its VRAM, as its Binding says.
    pub(super) fn has_vram_limits(&self) -> bool {
        match &self.phase {
            PodPhase::Waiting(_) => false,
            PodPhase::Assumed(assumed) => assumed.placement.has_vram_limits,
            PodPhase::Bound(bound) => bound.has_vram_limits,
        }
    }

    /// Whether its VRAM is lent by engines.
    pub fn borrows(&self) -> bool {
        match &self.phase {
            PodPhase::Waiting(_) => false,
            PodPhase::Assumed(assumed) => !assumed.placement.borrowed_from.is_empty(),
            PodPhase::Bound(bound) => bound.borrows,
        }
    }

    /// The pod while it waits for a node.
    pub fn waiting(&self) -> Option<&WaitingPod> {
        match &self.phase {
            PodPhase::Waiting(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// The pod once it is bound.
    pub(crate) fn bound(&self) -> Option<&BoundPod> {
        match &self.phase {
            PodPhase::Bound(bound) => Some(bound),
            _ => None,
        }
    }

    /// Whether it is being deleted.
    pub(crate) fn is_leaving(&self) -> bool {
        self.bound().is_some_and(|bound| bound.leaving.is_some())
    }

    /// Where it is or is about to be.
    pub fn node(&self) -> Option<&NodeName> {
        match &self.phase {
            PodPhase::Waiting(_) => None,
            PodPhase::Assumed(assumed) => Some(&assumed.placement.node),
            PodPhase::Bound(bound) => Some(&bound.node),
        }
    }

    /// Whether it is assumed on a node or has a reservation there, and is not bound yet.
    pub(super) fn is_coming_to(&self, node: &NodeName) -> bool {
        match &self.phase {
            PodPhase::Waiting(waiting) => waiting
                .reservation
                .as_ref()
                .is_some_and(|reservation| reservation.node == *node),
            PodPhase::Assumed(assumed) => assumed.placement.node == *node,
            PodPhase::Bound(_) => false,
        }
    }

    /// Since when what it does would be lost: its last checkpoint, or its start.
    pub(crate) fn unsaved_since(&self) -> Option<Moment> {
        let bound = self.bound()?;
        Some(match self.disruption_info.checkpoint {
            Checkpoint::At(moment) => bound.started.max(moment),
            Checkpoint::Never => bound.started,
        })
    }

    pub fn is_assumed(&self) -> bool {
        matches!(self.phase, PodPhase::Assumed(_))
    }

    /// When it was first refused, or first seen behind the planner's gate, if it has no place yet.
    pub fn unplaced_since(&self) -> Option<Moment> {
        self.waiting()?.unplaced_since
    }

    pub fn reservation(&self) -> Option<&Reservation> {
        self.waiting()?.reservation.as_ref()
    }

    pub fn soft_reservation(&self) -> Option<&SoftReservation> {
        self.waiting()?.soft_reservation.as_ref()
    }

    /// The devices it counts on: what its placement names, or where it was found.
    pub fn devices(&self) -> Option<&Arc<[GpuUuid]>> {
        match &self.phase {
            PodPhase::Waiting(_) => None,
            PodPhase::Assumed(assumed) => Some(&assumed.placement.devices),
            PodPhase::Bound(bound) => bound.located.as_ref().or(bound.devices.as_ref()),
        }
    }

    /// The devices its placement names, if it has one that names any.
    pub fn recorded_devices(&self) -> Option<&Arc<[GpuUuid]>> {
        match &self.phase {
            PodPhase::Bound(bound) => bound.devices.as_ref(),
            _ => self.devices(),
        }
    }

    pub fn refusal(&self) -> Option<&FilterRefusal> {
        self.waiting()?.refused.as_ref()
    }
}

/// What is remembered of a pod that has no node yet. All but the reservation may be lost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingPod {
    /// Filters that passed without a bind after them.
    pub tries: u32,
    /// The node that was ranked first in the latest of them.
    pub offered: Option<NodeName>,
    pub soft_reservation: Option<SoftReservation>,
    pub reservation: Option<Reservation>,
    pub refused: Option<FilterRefusal>,
    /// How often in a row it was requeued, tried again, and was refused again.
    #[serde(rename = "unanswered_wakes")]
    pub failed_requeues: u32,
    /// On how many nodes the scheduler last asked for victims for it.
    pub offered_to_preempt: Option<u32>,
    /// The victims last named to kube-scheduler, for a pod that requests devices of a plugin. This reserves no GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub narrowed_to: Option<Reservation>,
    /// What keeps it from the scheduler.
    pub gate: SchedulingGate,
    /// Since when it waits behind that gate, or without one, as far as this ledger knows.
    pub since: Moment,
    /// When it was first refused, or first seen behind the planner's gate; `None` for one that may get a place at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unplaced_since: Option<Moment>,
    /// Since when GPUs of its node are reserved for it, as far as this ledger knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_since: Option<Moment>,
    /// Its `status.nominatedNodeName`.
    pub nominated: Option<NodeName>,
    /// When the planner last failed to place it, and how often in a row.
    pub failed_attempt: Option<FailedAttempt>,
    /// When it was last not bound in place of evicted victims, and how often that has happened.
    pub failed_eviction: Option<FailedAttempt>,
}

/// Which scheduling gates a pod has: kube-scheduler ignores a gated pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulingGate {
    #[default]
    Open,
    /// The planner's alone: it is placed first, and let through then.
    Planned,
    /// Another scheduling gate keeps the pod, with or without ours.
    Others,
}

/// An attempt to place a pod, or to evict for it, that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedAttempt {
    pub at: Moment,
    /// How often in a row, with this one. Recordings call it something else.
    #[serde(rename = "unanswered_wakes")]
    pub times: u32,
    /// The ledger's generation then: as long as nothing changes, the result is the same.
    pub generation: u64,
}

/// A filter that passed no node: the pod is requeued when one would pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterRefusal {
    /// When the pod was last refused, or requeued.
    pub at: Moment,
    /// The nodes it asked about; `None` if they are not known.
    #[serde(rename = "asked")]
    pub queried_nodes: Option<Arc<NodeSet>>,
    /// How often it was requeued since its last attempt. Recordings call it something else.
    #[serde(rename = "unanswered")]
    pub requeues: u32,
    /// This process did not refuse the pod; an earlier leader or process may have.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_supposed: bool,
}

/// GPUs that were just offered to a pod, so that the next pod looks elsewhere first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoftReservation {
    pub node: NodeName,
    pub gpus: GpuSet,
    pub expires: Moment,
}

impl WaitingPod {
    /// Begins an attempt to find a node. Returns how many attempts have failed, and the node that was ranked first in the latest one
    /// if that failed.
    pub(super) fn begin_attempt(&mut self) -> (u32, Option<NodeName>) {
        if self
            .refused
            .take()
            .is_some_and(|refused| refused.requeues > 0)
        {
            self.failed_requeues = self.failed_requeues.saturating_add(1);
        }
        let failed_node = self.offered.take();
        self.tries += u32::from(failed_node.is_some());
        (self.tries, failed_node)
    }

    pub(super) fn record_offer(&mut self, node: &NodeName) {
        self.offered = Some(node.clone());
        self.failed_requeues = 0;
    }

    pub(super) fn record_preempt_query(&mut self, nodes: usize) {
        self.offered_to_preempt = Some(u32::try_from(nodes).unwrap_or(u32::MAX));
    }

    pub(super) fn record_refusal(&mut self, at: Moment, nodes: Option<NodeSet>) {
        self.unplaced_since.get_or_insert(at);
        let nodes = nodes.map(Arc::new);
        self.refused = Some(FilterRefusal {
            at,
            queried_nodes: nodes,
            requeues: 0,
            is_supposed: false,
        });
    }

    pub(super) fn presume_refused(&mut self, at: Moment) {
        self.record_refusal(at, None);
        self.refused
            .iter_mut()
            .for_each(|refused| refused.is_supposed = true);
    }

    pub(super) fn record_requeue(&mut self, at: Moment) {
        if let Some(refused) = &mut self.refused {
            (refused.at, refused.requeues) = (at, refused.requeues + 1);
        }
    }

    pub(super) fn record_no_placement(&mut self, at: Moment, generation: u64) {
        self.failed_attempt = Some(FailedAttempt::after(self.failed_attempt, at, generation));
    }

    pub(super) fn record_failed_eviction(&mut self, at: Moment, generation: u64) {
        self.failed_eviction = Some(FailedAttempt::after(self.failed_eviction, at, generation));
    }

    pub(super) fn observe_gate(
        &mut self,
        gate: SchedulingGate,
        nominated: Option<NodeName>,
        now: Moment,
    ) {
        if self.gate != gate {
            (self.since, self.failed_attempt) = (now, None);
        }
        if gate == SchedulingGate::Planned {
            self.unplaced_since.get_or_insert(now);
        }
        (self.gate, self.nominated) = (gate, nominated);
    }

    /// A reservation on the same node is the same one, with another deadline or fewer victims.
    fn replace_reservation(&mut self, reservation: Option<Reservation>, now: Moment) {
        let is_same_node = self.reservation.as_ref().map(|current| &current.node)
            == reservation.as_ref().map(|new| &new.node);
        if !is_same_node {
            self.reserved_since = reservation.as_ref().map(|_| now);
        }
        self.reservation = reservation;
    }

    /// Whether an observed reservation differs from the recorded one.
    pub(super) fn is_new_reservation(&self, observed: &Reservation) -> bool {
        !self
            .reservation
            .as_ref()
            .is_some_and(|recorded| recorded.is_same(observed))
    }
}

impl FailedAttempt {
    /// One more, after the last one.
    fn after(last: Option<Self>, at: Moment, generation: u64) -> Self {
        let times = last.map_or(0, |last| last.times).saturating_add(1);
        Self {
            at,
            times,
            generation,
        }
    }
}
