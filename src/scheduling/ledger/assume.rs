//! What is promised, and to whom: offers, what runs out, and the way from assume to confirm or forget. Holds are made in `holding`.

use super::Ledger;
use super::node_state::NodeState;
use super::pod_state::{AssumedPod, BoundPod, PodPhase, PodState, SoftReservation, WaitingPod};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::scheduling::placing::fit::is_allowed;
use crate::scheduling::placing::fit::{Misfit, check_node_admission, fit, misfit};
use crate::scheduling::placing::learned::NodeGpus;
use crate::scheduling::placing::pack;
use crate::scheduling::placing::rank;
use crate::scheduling::policy::{Policy, StartGate};
use crate::scheduling::vocabulary::cluster_share::TenantLimit;
use crate::scheduling::vocabulary::demand::{Demand, Sharing};
use crate::scheduling::vocabulary::device_plugin::Ask;
use crate::scheduling::vocabulary::gpu::{Gpu, GpuSet};
use crate::scheduling::vocabulary::model_tier::time_to_ready;
use crate::scheduling::vocabulary::node::Node;
use crate::scheduling::vocabulary::node_reading::EngineLoad;
use crate::scheduling::vocabulary::placement::{Placement, Reservation};
use crate::units::{Bytes, Moment};
use std::sync::Arc;

/// Why a promise could not be made. Every one of them is retried by the scheduler from filter on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AssumeConflict {
    #[error("no pod with this UID is pending")]
    UnknownPod,
    #[error("the pod is already bound to {node}")]
    BoundElsewhere { node: NodeName },
    #[error("an earlier Binding of this pod to {node} is not settled yet")]
    Unsettled { node: NodeName },
    #[error("the node no longer fits: {0}")]
    NoLongerFits(#[from] Misfit),
    #[error("a victim is gone")]
    VictimGone,
    #[error("a victim may no longer be evicted for this pod")]
    VictimProtected,
    #[error("the pod already has a reservation on {node}")]
    AlreadyReserved { node: NodeName },
}

impl AssumeConflict {
    /// A short name for metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownPod => "unknown-pod",
            Self::BoundElsewhere { .. } => "bound-elsewhere",
            Self::Unsettled { .. } => "unsettled",
            Self::NoLongerFits(misfit) => misfit.code(),
            Self::VictimGone => "victim-gone",
            Self::VictimProtected => "victim-protected",
            Self::AlreadyReserved { .. } => "already-reserved",
        }
    }

    /// What goes on the wire; the same text each time.
    pub fn phrase(&self) -> &'static str {
        match self {
            Self::UnknownPod => "conflict: pod unknown to Stowage or gone",
            Self::BoundElsewhere { .. } => "conflict: pod is bound to another node",
            Self::Unsettled { .. } => "conflict: an earlier binding is not settled",
            Self::NoLongerFits(Misfit::UnknownNode) => "conflict: node unknown to Stowage",
            Self::NoLongerFits(Misfit::DevicePluginNode) => {
                "conflict: a device plugin allocates the node's GPUs"
            }
            Self::NoLongerFits(Misfit::StowageNode) => "conflict: Stowage allocates the node's GPUs",
            Self::NoLongerFits(Misfit::VictimsLeaving { .. }) => {
                "conflict: preempted pods have not terminated yet"
            }
            Self::NoLongerFits(Misfit::EngineStarting { .. }) => "conflict: another engine began to start",
            Self::NoLongerFits(Misfit::TenantLimit { .. } | Misfit::TenantLimitOnNode { .. }) => {
                "conflict: the tenant's limit was reached"
            }
            Self::NoLongerFits(Misfit::ClassNotAdmitted | Misfit::MigLayoutMismatch) => {
                "conflict: the node's pool has changed"
            }
            Self::NoLongerFits(
                Misfit::EnginesBusy { .. } | Misfit::Occupied { .. } | Misfit::NoFreshReport,
            ) => "conflict: what the node's agent reports has changed",
            Self::NoLongerFits(_) => "conflict: the GPU was taken meanwhile",
            Self::VictimGone => "conflict: a victim terminated meanwhile",
            Self::VictimProtected => "conflict: a victim is protected by now",
            Self::AlreadyReserved { .. } => "conflict: the pod already has a reservation",
        }
    }
}

/// What becomes of holds whose deadline has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpiredReservations {
    End,
    Stand,
}

/// A promise that is in the books.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AssumeResult {
    /// Charged by this call.
    New(Placement),
    /// Charged by an earlier call that is still on its way.
    InFlight(Placement),
    /// Bound there already.
    Bound,
}

impl Ledger {
    /// Lets hints, holds, start gates and readings run out. Answers whose holds did.
    pub(in crate::scheduling) fn expire(&mut self, now: Moment) -> Vec<PodUid> {
        self.run_out(now, ExpiredReservations::End)
    }

    /// The same on a standby: reservations stand until the API server shows that the leader has ended them, or until
    /// this replica acts and ends them itself.
    pub(in crate::scheduling) fn expire_except_reservations(&mut self, now: Moment) {
        self.run_out(now, ExpiredReservations::Stand);
    }

    fn run_out(&mut self, now: Moment, reservations: ExpiredReservations) -> Vec<PodUid> {
        self.set_now(now);
        let mut ended = Vec::new();
        while let Some((deadline, uid)) = self.next_due(reservations) {
            self.deadlines.remove(&(deadline, uid.clone()));
            let Some(pod_state) = self.pod_states.get(&uid) else { continue };
            let is_over = |moment: Option<Moment>| moment.is_some_and(|moment| moment <= deadline);
            if is_over(pod_state.starting) {
                self.open_start_gate(&uid);
            } else if is_over(pod_state.soft_reservation().map(|soft_reservation| soft_reservation.expires)) {
                self.set_soft_reservation(&uid, None);
            } else if is_over(pod_state.reservation().map(|reservation| reservation.deadline)) {
                if pod_state.reservation().is_some_and(|reservation| !reservation.victims.is_empty()) {
                    self.note_failed_eviction(&uid);
                }
                self.release_reservation(&uid);
                ended.push(uid);
            }
        }
        while self.aging.first().is_some_and(|(due, _)| *due <= self.now) {
            if let Some((_, node)) = self.aging.pop_first() {
                self.age(&node);
            }
        }
        ended
    }

    fn next_due(&self, reservations: ExpiredReservations) -> Option<(Moment, PodUid)> {
        let mut due = self.deadlines.iter().take_while(|(deadline, _)| *deadline <= self.now);
        let is_of_hold = |(deadline, uid): &(Moment, PodUid)| {
            let pod_state = self.pod_states.get(uid);
            pod_state.is_some_and(|pod_state| {
                let hint_is_over = pod_state
                    .soft_reservation()
                    .is_some_and(|soft_reservation| soft_reservation.expires <= *deadline);
                !hint_is_over
                    && pod_state.reservation().is_some_and(|reservation| reservation.deadline <= *deadline)
            })
        };
        due.find(|due| reservations == ExpiredReservations::End || !is_of_hold(due)).cloned()
    }

    /// The pod asks for a node (again): what it was offered before is open, and did not lead to a bind. Answers how often
    /// that has happened, and the node that was ranked first if the latest attempt was such a one.
    pub(in crate::scheduling) fn begin_attempt(&mut self, uid: &PodUid) -> (u32, Option<NodeName>) {
        self.set_soft_reservation(uid, None);
        let attempt = self.count_attempt(uid);
        self.requeue(uid);
        attempt
    }

    fn count_attempt(&mut self, uid: &PodUid) -> (u32, Option<NodeName>) {
        match self.pod_states.get_mut(uid).map(|pod_state| &mut pod_state.phase) {
            Some(PodPhase::Waiting(waiting)) => {
                if waiting.refused.take().is_some_and(|refused| refused.unanswered > 0) {
                    waiting.unanswered_wakes = waiting.unanswered_wakes.saturating_add(1);
                }
                let failed = waiting.offered.take();
                waiting.tries += u32::from(failed.is_some());
                (waiting.tries, failed)
            }
            _ => (0, None),
        }
    }

    /// Makes a soft reservation of these GPUs of `node`, in place of any earlier one: filters of other pods steer around it for
    /// a while. Changes nothing if a GPU is gone since the view was taken.
    pub(in crate::scheduling) fn offer(&mut self, uid: &PodUid, node: &NodeName, devices: &[GpuUuid]) {
        let Some(node_state) = self.node_states.get(node).filter(|node_state| node_state.exists) else {
            return;
        };
        // Of a device plugin's GPUs none is offered: kube-scheduler counts them itself.
        let gpus = if devices.is_empty() { Some(GpuSet::EMPTY) } else { node_state.resolve(devices) };
        let Some(gpus) = gpus else { return };
        let expires = self.now + self.policy.soft_reservation_lifetime;
        let soft_reservation =
            (!gpus.is_empty()).then(|| SoftReservation { node: node.clone(), gpus, expires });
        self.set_soft_reservation(uid, soft_reservation);
        if let Some(PodPhase::Waiting(waiting)) =
            self.pod_states.get_mut(uid).map(|pod_state| &mut pod_state.phase)
        {
            waiting.offered = Some(node.clone());
            waiting.unanswered_wakes = 0;
        }
    }

    /// The scheduler asked on how many nodes others could leave for the pod.
    pub(in crate::scheduling) fn note_offered_to_preempt(&mut self, uid: &PodUid, nodes: usize) {
        if let Some(PodPhase::Waiting(waiting)) =
            self.pod_states.get_mut(uid).map(|pod_state| &mut pod_state.phase)
        {
            waiting.offered_to_preempt = Some(u32::try_from(nodes).unwrap_or(u32::MAX));
        }
    }

    /// The room that is the pod's already: where it is bound or assumed, or what its hold keeps, with how many victims
    /// are still in the way.
    pub fn reserved_placement(&self, uid: &PodUid) -> Option<(NodeName, Result<GpuSet, Misfit>)> {
        let pod_state = self.pod_states.get(uid)?;
        let node = pod_state.node().or(pod_state.reservation().map(|reservation| &reservation.node))?;
        let verdict = match (
            self.node_states.get(node).filter(|node_state| node_state.exists),
            pod_state.reservation(),
        ) {
            (None, _) => Err(Misfit::UnknownNode),
            (Some(node_state), Some(reservation)) => {
                self.placement_of_reservation(uid, &pod_state.demand, reservation, node_state)
            }
            (Some(node_state), None) => {
                Ok(node_state.charge_of(pod_state).map(|charge| charge.gpus).unwrap_or_default())
            }
        };
        Some((node.clone(), verdict))
    }

    /// Promises the pod its GPUs on `node`, checking again that they are free. Idempotent.
    pub(in crate::scheduling) fn assume(
        &mut self,
        uid: &PodUid,
        node: &NodeName,
    ) -> Result<AssumeResult, AssumeConflict> {
        let pod_state = self.pod_states.get(uid).ok_or(AssumeConflict::UnknownPod)?;
        match &pod_state.phase {
            PodPhase::Bound(bound) if bound.node == *node => return Ok(AssumeResult::Bound),
            PodPhase::Bound(bound) => {
                return Err(AssumeConflict::BoundElsewhere { node: bound.node.clone() });
            }
            PodPhase::Assumed(assumed) if assumed.placement.node == *node => {
                return Ok(AssumeResult::InFlight(assumed.placement.clone()));
            }
            PodPhase::Assumed(assumed) => {
                return Err(AssumeConflict::Unsettled { node: assumed.placement.node.clone() });
            }
            PodPhase::Waiting(_) => {}
        }
        let placement = match self.passes_through(&pod_state.demand) {
            true => Placement::by_plugin(node.clone()),
            false => self.checked(uid, pod_state, node)?,
        };
        let starting = self
            .node_states
            .get(node)
            .and_then(|node_state| gate(&pod_state.demand, &node_state.view, self.now, &self.policy));
        self.change(uid, |pod_states| {
            let pod_state = pod_states.get_mut(uid).expect("the entry was just read");
            pod_state.starting = starting;
            if let PodPhase::Waiting(before) = &mut pod_state.phase {
                let before = std::mem::take(before);
                pod_state.phase = PodPhase::Assumed(AssumedPod { placement: placement.clone(), before });
            }
        });
        Ok(AssumeResult::New(placement))
    }

    /// Where the pod goes on `node`, by what is free there now.
    fn checked(&self, uid: &PodUid, pod_state: &PodState, node: &NodeName) -> Result<Placement, Misfit> {
        let node_state =
            self.node_states.get(node).filter(|node_state| node_state.exists).ok_or(Misfit::UnknownNode)?;
        let gpus = match pod_state.reservation().filter(|reservation| reservation.node == *node) {
            Some(reservation) => {
                self.placement_of_reservation(uid, &pod_state.demand, reservation, node_state)?
            }
            None => self.free_gpus_for(uid, &pod_state.demand, node_state)?,
        };
        Ok(placement(node_state, &pod_state.demand, gpus))
    }

    /// The pod is bound to `node` with these devices: its Binding was written, or a read past every cache said so. It
    /// counts there from now on, whatever was assumed. Where the watch was faster, what it has shown stays.
    pub(in crate::scheduling) fn confirm(
        &mut self,
        uid: &PodUid,
        node: &NodeName,
        devices: Option<Arc<[GpuUuid]>>,
    ) {
        let bound = match self.pod_states.get(uid).map(|pod_state| &pod_state.phase) {
            Some(PodPhase::Bound(known)) if known.node == *node => {
                BoundPod { devices: known.devices.clone().or(devices), ..known.clone() }
            }
            _ => BoundPod::new(node.clone(), devices, self.now),
        };
        self.change(uid, |pod_states| {
            if let Some(pod_state) = pod_states.get_mut(uid) {
                pod_state.phase = PodPhase::Bound(bound);
            }
        });
        if self.node_states.get(node).is_some_and(|node_state| node_state.reported) {
            self.pin_indices(node);
        }
    }

    /// The Binding was not written. The pod waits again, with the hold it had before.
    pub(in crate::scheduling) fn forget(&mut self, uid: &PodUid) {
        self.change(uid, |pod_states| {
            let Some(pod_state) = pod_states.get_mut(uid) else { return };
            if let PodPhase::Assumed(AssumedPod { placement, before }) = &mut pod_state.phase {
                pod_state.starting = None;
                let offered = Some(placement.node.clone());
                pod_state.phase = PodPhase::Waiting(WaitingPod {
                    offered,
                    soft_reservation: None,
                    ..std::mem::take(before)
                });
            }
        });
    }

    pub(super) fn waiting(&self, uid: &PodUid) -> Result<&PodState, AssumeConflict> {
        let pod_state = self.pod_states.get(uid).ok_or(AssumeConflict::UnknownPod)?;
        match &pod_state.phase {
            PodPhase::Waiting(_) => Ok(pod_state),
            PodPhase::Assumed(assumed) => {
                Err(AssumeConflict::Unsettled { node: assumed.placement.node.clone() })
            }
            PodPhase::Bound(bound) => Err(AssumeConflict::BoundElsewhere { node: bound.node.clone() }),
        }
    }

    fn free_gpus_for(&self, uid: &PodUid, demand: &Demand, node_state: &NodeState) -> Result<GpuSet, Misfit> {
        check_node_admission(&node_state.view, demand)?;
        let gpus = node_state.gpus_without(uid, &self.pod_states, &self.policy);
        let chosen = match &demand.ask {
            Ask::Vram => self.choice(node_state, &gpus, demand, GpuSet::ALL),
            Ask::Plugin { .. } => Some(fit(&node_state.view, demand)?),
        };
        let chosen = chosen.ok_or_else(|| misfit(&gpus, demand))?;
        self.within_limit(self.allowance(uid, demand), demand, &gpus, chosen)
    }

    /// The GPUs for the demand among the `allowed` ones of a node whose GPUs are these.
    fn choice(
        &self,
        node_state: &NodeState,
        gpus: &[Gpu],
        demand: &Demand,
        allowed: GpuSet,
    ) -> Option<GpuSet> {
        pack::choose_at(
            &self.packing_model,
            NodeGpus { gpus, ..node_state.view.node_gpus() },
            demand,
            allowed,
        )
    }

    /// These GPUs, if the pod's tenant may take them of what is left to it.
    pub(super) fn within_limit(
        &self,
        left: TenantLimit,
        demand: &Demand,
        gpus: &[Gpu],
        chosen: GpuSet,
    ) -> Result<GpuSet, Misfit> {
        let is_within = is_allowed(left, gpus, demand, chosen);
        is_within.then_some(chosen).ok_or(Misfit::TenantLimitOnNode { left })
    }

    pub(super) fn placement_of_reservation(
        &self,
        uid: &PodUid,
        demand: &Demand,
        reservation: &Reservation,
        node_state: &NodeState,
    ) -> Result<GpuSet, Misfit> {
        let mut gpus = node_state.gpus_without(uid, &self.pod_states, &self.policy);
        match check_node_admission(&node_state.view, demand) {
            // The policy, or the node's pool, may have changed since. That nobody sees the node now changes nothing.
            Ok(()) | Err(Misfit::NoFreshReport) => {}
            Err(misfit) => return Err(misfit),
        }
        let remaining = self.victims_on(reservation, node_state);
        if remaining > 0 {
            return Err(Misfit::VictimsLeaving { remaining });
        }
        forget_measured(&mut gpus);
        let held = node_state
            .resolve(&reservation.devices)
            .and_then(|held| self.choice(node_state, &gpus, demand, held));
        let held = held.ok_or_else(|| misfit(&gpus, demand))?;
        self.within_limit(self.allowance(uid, demand), demand, &gpus, held)
    }

    /// How many of a hold's victims still take room on its node. The driver gives memory back later than the API server
    /// forgets a pod: where an agent looks, a victim has left when a reading sampled after its end shows nothing of it.
    pub(super) fn victims_on(&self, reservation: &Reservation, node_state: &NodeState) -> u32 {
        let is_charged =
            |victim: &PodUid| self.pod_states.get(victim).is_some_and(|v| node_state.charge_of(v).is_some());
        let is_there = |victim: &&PodUid| is_charged(victim) || node_state.may_have_memory(victim, self.now);
        reservation.victims.iter().filter(is_there).count() as u32
    }
}

/// Room that was made for a pod: what a reading says of it is about the pods that just left.
pub(super) fn forget_measured(gpus: &mut [Gpu]) {
    for gpu in gpus {
        *gpu = Gpu { unaccounted_vram: Bytes::ZERO, engine_load: EngineLoad::default(), ..*gpu };
    }
}

/// Until when an engine that begins to start now keeps others from starting on its GPUs; `None` if it is none, or nobody knows
/// which they are.
pub(super) fn gate(demand: &Demand, node: &Node, now: Moment, policy: &Policy) -> Option<Moment> {
    let expected = rank::ready(node, demand, &policy.loading)
        .unwrap_or_else(|| time_to_ready(None, demand.weights(), &policy.loading));
    let StartGate { min, max } = policy.class(demand.class).start_gate;
    // Twice, because nobody's loading takes exactly as long as it should.
    let is_gated = demand.terms.engine && !demand.asks_plugin();
    is_gated.then(|| now + expected.times(2).clamp(min.min(max), max))
}

/// What the pod gets on these GPUs.
fn placement(node_state: &NodeState, demand: &Demand, gpus: GpuSet) -> Placement {
    let granted_on = |place: usize| match demand.sharing {
        Sharing::Shared => demand.per_gpu,
        // A GPU that is to be a pod's own may have something of somebody's on it all the same.
        Sharing::Exclusive => node_state.view.gpus[place].most(),
    };
    let hundredths = |place: usize| {
        let total = u128::from(node_state.devices[place].total.0);
        let share = (u128::from(granted_on(place).0) * 100).checked_div(total);
        share.unwrap_or(0).min(100) as u8
    };
    Placement {
        node: node_state.view.name.clone(),
        devices: gpus.iter().map(|place| node_state.devices[place].uuid.clone()).collect(),
        granted: gpus.iter().map(granted_on).sum(),
        memory_hundredths: gpus.iter().map(hundredths).min().unwrap_or(0),
    }
}
