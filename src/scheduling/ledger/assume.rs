//! A pod's path to its node: attempt, soft reservation, assume, then confirm or forget; and the deadlines on that path.

use super::Ledger;
use super::node_state::NodeState;
use super::pod_state::{AssumedPod, BoundPod, PodPhase, PodState};
use super::pod_state::{SoftReservation, WaitingPod};
use super::pod_states::ExpiredReservations;
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::placing::fit::{
    Misfit, check_node_admission, fit, is_allowed, misfit, writes_vram_limits,
};
use crate::placing::learned::NodeGpus;
use crate::placing::pack;
pub use crate::reasons::AllocationFailure;
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::cluster_share::TenantLimit;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::GpuRequest;
use crate::vocabulary::disruption_info::PodHealth;
use crate::vocabulary::engine_model::ReusableEngineSet;
use crate::vocabulary::gpu::{Gpu, GpuSet};
use crate::vocabulary::latency::NeighborRoom;
use crate::vocabulary::memory_fraction::MemoryFraction;
use crate::vocabulary::node_reading::EngineLoad;
use crate::vocabulary::placement::{Placement, Reservation};
use std::sync::Arc;

/// A pod that is assumed or bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AssumeResult {
    /// Charged by this call.
    New(Placement),
    /// Charged by an earlier call that is still on its way.
    InFlight(Placement),
    /// Bound there already.
    Bound,
}

/// The result of one round of expiring deadlines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpiryResult {
    /// Pods whose reservations ended.
    pub ended_reservations: Vec<PodUid>,
    pub may_be_more: bool,
}

/// How long after its decision a Binding is written again: later the decision may be out of date. kube-scheduler retries anyway.
const BINDING_RETRY_TIMEOUT: Millis = Millis::seconds(10);

/// Deadlines that pass under one lock. Each changes a pod and its node: some tens of microseconds while a plan or a page has a
/// copy, and longer where their memory has gone cold.
const MAX_DEADLINES_PER_LOCK: usize = 4;

impl Ledger {
    /// Expires soft reservations, reservations, start gates and readings. Returns the pods whose reservations expired.
    pub(crate) fn expire(&mut self, now: Moment) -> Vec<PodUid> {
        self.expire_deadlines(now, ExpiredReservations::End, usize::MAX)
            .ended_reservations
    }

    /// Expires everything but reservations, as a standby does: these last until the API server shows that the leader ended them, or
    /// until this replica leads and ends them itself.
    pub(crate) fn expire_except_reservations(&mut self, now: Moment) {
        self.expire_deadlines(now, ExpiredReservations::Keep, usize::MAX);
    }

    /// Expires the first few deadlines only, so that nothing waits long for the lock.
    pub(crate) fn expire_few(&mut self, now: Moment, is_leading: bool) -> ExpiryResult {
        let reservations = if is_leading {
            ExpiredReservations::End
        } else {
            ExpiredReservations::Keep
        };
        self.expire_deadlines(now, reservations, MAX_DEADLINES_PER_LOCK)
    }

    fn expire_deadlines(
        &mut self,
        now: Moment,
        reservations: ExpiredReservations,
        limit: usize,
    ) -> ExpiryResult {
        self.set_now(now);
        let (mut ended, mut remaining) = (Vec::new(), limit);
        while remaining > 0
            && let Some((deadline, uid)) = self.pod_states.pop_due(self.now, reservations)
        {
            remaining -= 1;
            let Some(pod_state) = self.pod_states.get(&uid) else {
                continue;
            };
            let is_over = |moment: Option<Moment>| moment.is_some_and(|moment| moment <= deadline);
            if is_over(pod_state.starting) {
                let is_ready = pod_state.disruption_info.health == PodHealth::Ready;
                self.record_gate_time(&uid, is_ready);
                self.edit_pod(&uid, |pod_state| pod_state.open_start_gate(None));
            } else if is_over(
                pod_state
                    .soft_reservation()
                    .map(|soft_reservation| soft_reservation.expires),
            ) {
                self.set_soft_reservation(&uid, None);
            } else if is_over(
                pod_state
                    .reservation()
                    .map(|reservation| reservation.deadline),
            ) {
                // Victims that were told to leave and have not are at fault themselves, and are not chosen again.
                let is_leaving = |victim: &PodUid| {
                    self.pod_states
                        .get(victim)
                        .is_some_and(PodState::is_leaving)
                };
                let victims = pod_state
                    .reservation()
                    .map(|reservation| &*reservation.victims)
                    .unwrap_or_default();
                if !victims.is_empty() && !victims.iter().any(is_leaving) {
                    self.record_failed_eviction(&uid);
                }
                self.release_reservation(&uid);
                ended.push(uid);
            }
        }
        while remaining > 0
            && let Some(node) = self.node_states.pop_aged(self.now)
        {
            remaining -= 1;
            self.update_freshness(&node);
        }
        ExpiryResult {
            ended_reservations: ended,
            may_be_more: remaining == 0,
        }
    }

    /// The pod asks for a node (again): its soft reservation is open, and did not lead to a bind. Returns how often that has
    /// happened, and the node that was ranked first if the latest attempt was such a one.
    pub(crate) fn begin_attempt(&mut self, uid: &PodUid) -> (u32, Option<NodeName>) {
        self.set_soft_reservation(uid, None);
        let attempt = self
            .pod_states
            .edit_waiting(uid, WaitingPod::begin_attempt)
            .unwrap_or_default();
        self.update_queue(uid);
        attempt
    }

    /// Makes a soft reservation of these GPUs of `node`, in place of any earlier one: filters of other pods steer around it for
    /// a while. Changes nothing if a GPU is gone since the view was taken.
    pub(crate) fn reserve_softly(&mut self, uid: &PodUid, node: &NodeName, devices: &[GpuUuid]) {
        let Some(node_state) = self.node_states.existing(node) else {
            return;
        };
        // Of a device plugin's GPUs none is offered: kube-scheduler counts them itself.
        let gpus = if devices.is_empty() {
            Some(GpuSet::EMPTY)
        } else {
            node_state.resolve(devices)
        };
        let Some(gpus) = gpus else { return };
        let expires = self.now + self.policy.scoring.soft_reservation_lifetime;
        let soft_reservation = (!gpus.is_empty()).then(|| SoftReservation {
            node: node.clone(),
            gpus,
            expires,
        });
        self.set_soft_reservation(uid, soft_reservation);
        self.pod_states
            .edit_waiting(uid, |waiting| waiting.record_offer(node));
    }

    /// Records on how many nodes the scheduler asked for victims for the pod.
    pub(crate) fn record_preempt_query(&mut self, uid: &PodUid, nodes: usize) {
        self.pod_states
            .edit_waiting(uid, |waiting| waiting.record_preempt_query(nodes));
    }

    /// Records that the preempt verb named these victims to kube-scheduler, which evicts them itself for the pod.
    pub(crate) fn record_scheduler_evictions(
        &mut self,
        uid: &PodUid,
        node: NodeName,
        victims: Vec<PodUid>,
    ) {
        let known_victims = victims
            .iter()
            .filter_map(|victim| self.pod_states.get(victim));
        let longest_termination = known_victims
            .map(|victim| self.termination_time(victim))
            .max();
        let narrowed_to = Reservation {
            node,
            devices: Arc::new([]),
            deadline: self.now
                + longest_termination.unwrap_or_default()
                + self.policy.preemption.reservation_slack,
            victims: victims.into(),
        };
        self.pod_states.edit_waiting(uid, |waiting| {
            let previous = waiting.narrowed_to.as_ref();
            let recorded = previous.filter(|previous| previous.node == narrowed_to.node);
            // Victims that are named again have no more time for it: they may never leave.
            let deadline = recorded.map_or(narrowed_to.deadline, |recorded| recorded.deadline);
            waiting.narrowed_to = Some(Reservation {
                deadline,
                ..narrowed_to
            });
        });
    }

    /// The node on which kube-scheduler evicts for the pod, while a victim counts as there and has not had its time.
    pub(crate) fn scheduler_eviction_node(&self, uid: &PodUid) -> Option<&NodeName> {
        let waiting = self.pod_states.get(uid)?.waiting()?;
        let Reservation {
            node,
            victims,
            deadline,
            ..
        } = waiting.narrowed_to.as_ref()?;
        let is_there = |victim: &PodUid| {
            let pod_state = self.pod_states.get(victim);
            pod_state.is_some_and(|pod_state| pod_state.node() == Some(node))
        };
        (self.now < *deadline && victims.iter().any(is_there)).then_some(node)
    }

    /// The pod's own placement: where it is bound or assumed, or what is reserved for it; an error says how many victims are still
    /// there.
    pub(crate) fn reserved_placement(
        &self,
        uid: &PodUid,
    ) -> Option<(NodeName, Result<GpuSet, Misfit>)> {
        let pod_state = self.pod_states.get(uid)?;
        let node = pod_state
            .node()
            .or(pod_state.reservation().map(|reservation| &reservation.node))?;
        let placement = match (self.node_states.existing(node), pod_state.reservation()) {
            (None, _) => Err(Misfit::UnknownNode),
            (Some(node_state), Some(reservation)) => {
                let demand = self.for_placing(uid, pod_state.demand.clone());
                self.reserved_gpus(uid, &demand, reservation, node_state)
            }
            (Some(node_state), None) => Ok(node_state
                .charge_of(pod_state)
                .map(|charge| charge.gpus)
                .unwrap_or_default()),
        };
        Some((node.clone(), placement))
    }

    /// Allocates the pod its GPUs on `node`, checking again that they are free. Idempotent.
    pub(crate) fn assume(
        &mut self,
        uid: &PodUid,
        node: &NodeName,
    ) -> Result<AssumeResult, AllocationFailure> {
        let pod_state = self
            .pod_states
            .get(uid)
            .ok_or(AllocationFailure::UnknownPod)?;
        match &pod_state.phase {
            PodPhase::Bound(bound) if bound.node == *node => return Ok(AssumeResult::Bound),
            PodPhase::Bound(bound) => {
                return Err(AllocationFailure::BoundElsewhere {
                    node: bound.node.clone(),
                });
            }
            PodPhase::Assumed(assumed)
                if assumed.placement.node == *node && self.may_be_written(assumed) =>
            {
                return Ok(AssumeResult::InFlight(assumed.placement.clone()));
            }
            PodPhase::Assumed(assumed) => {
                return Err(AllocationFailure::Unsettled {
                    node: assumed.placement.node.clone(),
                });
            }
            PodPhase::Waiting(_) => {}
        }
        let placement = match self.passes_through(&pod_state.demand) {
            true => Placement::from_plugin(node.clone()),
            false => self.choose_placement(uid, pod_state, node)?,
        };
        let view = self.node_states.get(node).map(NodeState::view);
        let (starting, start) = view.map_or((None, None), |view| {
            self.expected_start(&pod_state.demand, view)
        });
        let starting =
            self.capped_by_gate_share(starting, &pod_state.demand, node, &placement.devices);
        let (epoch, now) = (self.leader().cloned(), self.now);
        self.edit_pod(uid, |pod_state| {
            pod_state.assume(placement.clone(), epoch, now, starting, start)
        });
        self.forget_start_if_wakeable(uid);
        Ok(AssumeResult::New(placement))
    }

    /// Whether the Binding of an assumed pod may be written again. In another epoch another leader may have allocated its GPUs since;
    /// and what the decision rests on grows old: processes of ended pods may have the memory, and the start gate opens.
    pub(crate) fn may_be_written(&self, assumed: &AssumedPod) -> bool {
        assumed.epoch.as_ref() == self.leader()
            && self.now.since(assumed.since) < BINDING_RETRY_TIMEOUT
    }

    /// A pod that may wake an engine says nothing of how long starts take.
    pub(super) fn forget_start_if_wakeable(&mut self, uid: &PodUid) {
        if self.has_wakeable_engine(uid) {
            self.pod_states
                .edit_without_move(uid, |pod_state| pod_state.start = None);
        }
    }

    /// Whether an engine sleeps on the pod's GPUs that it may wake.
    pub(crate) fn has_wakeable_engine(&self, uid: &PodUid) -> bool {
        let pod_and_node = || {
            let pod_state = self.pod_states.get(uid)?;
            Some((pod_state, self.node_states.get(pod_state.node()?)?))
        };
        let Some((pod_state, node_state)) = pod_and_node() else {
            return false;
        };
        let charge = node_state
            .charge_of(pod_state)
            .filter(|charge| charge.is_placed);
        let reusable = node_state.reusable_engines(&self.pod_states, &self.policy, Some(uid));
        let reusable = ReusableEngineSet::from(reusable);
        charge.is_some_and(|charge| reusable.best_on(charge.gpus, &pod_state.demand).is_some())
    }

    /// Where the pod goes on `node`, by what is free there now.
    fn choose_placement(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        node: &NodeName,
    ) -> Result<Placement, Misfit> {
        let node_state = self.node_states.existing(node).ok_or(Misfit::UnknownNode)?;
        let demand = self.for_placing(uid, pod_state.demand.clone());
        let gpus = match pod_state
            .reservation()
            .filter(|reservation| reservation.node == *node)
        {
            Some(reservation) => self.reserved_gpus(uid, &demand, reservation, node_state)?,
            None => self.choose_free_gpus(uid, &demand, node_state)?,
        };
        let borrowed_from =
            node_state.lenders_for(uid, &demand, gpus, &self.pod_states, &self.policy);
        Ok(Placement {
            borrowed_from,
            ..placement(node_state, &demand, gpus)
        })
    }

    /// The pod is bound to `node` with these devices: its Binding was written, or a read past every cache said so. It
    /// counts there from now on, whatever was assumed. Where the watch was faster, what it has shown stays.
    pub(crate) fn confirm(
        &mut self,
        uid: &PodUid,
        node: &NodeName,
        devices: Option<Arc<[GpuUuid]>>,
    ) {
        self.confirm_with_loan(uid, node, devices, false);
    }

    /// Confirms a Binding that also says whether the pod borrows. It may be another than the one that was assumed.
    pub(crate) fn confirm_with_loan(
        &mut self,
        uid: &PodUid,
        node: &NodeName,
        devices: Option<Arc<[GpuUuid]>>,
        borrows: bool,
    ) {
        let bound = match self.pod_states.get(uid).map(|pod_state| &pod_state.phase) {
            Some(PodPhase::Bound(bound)) if bound.node == *node => BoundPod {
                devices: bound.devices.clone().or(devices),
                borrows: bound.borrows || borrows,
                ..bound.clone()
            },
            Some(PodPhase::Assumed(assumed)) if assumed.placement.recorded_gpus() == devices => {
                BoundPod {
                    borrows: borrows || !assumed.placement.borrowed_from.is_empty(),
                    has_vram_limits: assumed.placement.has_vram_limits,
                    ..BoundPod::new(node.clone(), devices, self.now)
                }
            }
            _ => BoundPod {
                borrows,
                ..BoundPod::new(node.clone(), devices, self.now)
            },
        };
        let (starting, start) = self.start_after_binding(uid, node);
        self.edit_pod(uid, |pod_state| pod_state.set_bound(bound, starting, start));
        if self
            .node_states
            .get(node)
            .is_some_and(NodeState::is_reported)
        {
            self.pin_indices(node);
        }
    }

    /// The Binding was not written. The pod waits again, with the reservation it had before.
    pub(crate) fn forget(&mut self, uid: &PodUid) {
        self.edit_pod(uid, PodState::forget);
    }

    pub(super) fn waiting_pod(&self, uid: &PodUid) -> Result<&PodState, AllocationFailure> {
        let pod_state = self
            .pod_states
            .get(uid)
            .ok_or(AllocationFailure::UnknownPod)?;
        match &pod_state.phase {
            PodPhase::Waiting(_) => Ok(pod_state),
            PodPhase::Assumed(assumed) => Err(AllocationFailure::Unsettled {
                node: assumed.placement.node.clone(),
            }),
            PodPhase::Bound(bound) => Err(AllocationFailure::BoundElsewhere {
                node: bound.node.clone(),
            }),
        }
    }

    fn choose_free_gpus(
        &self,
        uid: &PodUid,
        demand: &Demand,
        node_state: &NodeState,
    ) -> Result<GpuSet, Misfit> {
        check_node_admission(node_state.view(), demand)?;
        let gpus = node_state.gpus_without(uid, &self.pod_states, &self.policy);
        let demand = &*self.with_spare_rules(demand);
        let chosen = match &demand.ask {
            GpuRequest::Vram => self.choose_gpus(uid, node_state, &gpus, demand, GpuSet::ALL),
            GpuRequest::Plugin { .. } | GpuRequest::Claims => Some(fit(node_state.view(), demand)?),
        };
        let chosen = chosen.ok_or_else(|| misfit(&gpus, demand))?;
        self.check_tenant_limit(self.tenant_allowance(uid, demand), demand, &gpus, chosen)
    }

    /// The GPUs for the pod's demand among the `allowed` ones of a node whose GPUs are these.
    fn choose_gpus(
        &self,
        uid: &PodUid,
        node_state: &NodeState,
        gpus: &[Gpu],
        demand: &Demand,
        allowed: GpuSet,
    ) -> Option<GpuSet> {
        let reusable = node_state.reusable_engines(&self.pod_states, &self.policy, Some(uid));
        pack::choose_unsummarized(
            self.packing.model(),
            NodeGpus {
                gpus,
                ..node_state.view().node_gpus()
            },
            demand,
            &reusable.into(),
            allowed,
        )
    }

    /// Returns the chosen GPUs if they are within what the pod's tenant may still take.
    pub(super) fn check_tenant_limit(
        &self,
        remaining: TenantLimit,
        demand: &Demand,
        gpus: &[Gpu],
        chosen: GpuSet,
    ) -> Result<GpuSet, Misfit> {
        let is_within = is_allowed(remaining, gpus, demand, chosen);
        is_within
            .then_some(chosen)
            .ok_or(Misfit::TenantLimitOnNode { left: remaining })
    }

    pub(super) fn reserved_gpus(
        &self,
        uid: &PodUid,
        demand: &Demand,
        reservation: &Reservation,
        node_state: &NodeState,
    ) -> Result<GpuSet, Misfit> {
        let mut gpus = node_state.gpus_without(uid, &self.pod_states, &self.policy);
        match check_node_admission(node_state.view(), demand) {
            // The policy, or the node's pool, may have changed since. That no agent reports the node now changes nothing.
            Ok(()) | Err(Misfit::NoFreshReport) => {}
            Err(misfit) => return Err(misfit),
        }
        let remaining = self.count_remaining_victims(reservation, node_state);
        if remaining > 0 {
            return Err(Misfit::VictimsLeaving { remaining });
        }
        clear_measurements(&mut gpus);
        // The victims have left, memory and all. What others have had no part in the reservation, or came to light after it.
        for (index, gpu) in gpus.iter_mut().enumerate() {
            gpu.unaccounted_vram = node_state.used_without_grant(index);
        }
        let reserved = node_state
            .resolve(&reservation.devices)
            .and_then(|reserved| self.choose_gpus(uid, node_state, &gpus, demand, reserved));
        let reserved = reserved.ok_or_else(|| misfit(&gpus, demand))?;
        self.check_tenant_limit(self.tenant_allowance(uid, demand), demand, &gpus, reserved)
    }

    /// How many of a reservation's victims still take VRAM on its node. The driver gives memory back later than the API server
    /// forgets a pod: where an agent reports, a victim has left when a reading sampled after its end shows nothing of it.
    pub(super) fn count_remaining_victims(
        &self,
        reservation: &Reservation,
        node_state: &NodeState,
    ) -> u32 {
        let is_charged = |victim: &PodUid| {
            self.pod_states
                .get(victim)
                .is_some_and(|v| node_state.charge_of(v).is_some())
        };
        let is_there =
            |victim: &&PodUid| is_charged(victim) || node_state.may_have_memory(victim, self.now);
        reservation.victims.iter().filter(is_there).count() as u32
    }
}

/// Forgets what a reading says of reserved GPUs: it is about the pods that just left, or a margin for want of a reading.
pub(super) fn clear_measurements(gpus: &mut [Gpu]) {
    for gpu in gpus {
        *gpu = Gpu {
            unaccounted_vram: Bytes::ZERO,
            engine_load: EngineLoad::default(),
            neighbors: NeighborRoom::EMPTY,
            ..*gpu
        };
    }
}

/// What the pod gets on these GPUs.
fn placement(node_state: &NodeState, demand: &Demand, gpus: GpuSet) -> Placement {
    let grant_on = |index: usize| match demand.sharing {
        Sharing::Shared => demand.per_gpu,
        // A GPU that is to be a pod's own may have unaccounted VRAM all the same. Of a GPU that was kept for the pod that is about
        // pods that have left, or a margin for want of a report: it gets what it requests.
        Sharing::Exclusive => node_state.view().gpus[index]
            .free_without_pods()
            .max(demand.per_gpu),
    };
    let has_vram_limits = writes_vram_limits(node_state.view(), demand);
    let fraction = |index: usize| match has_vram_limits {
        true => demand.fraction_of_limit(),
        false => MemoryFraction::new(grant_on(index), node_state.devices()[index].total),
    };
    let memory_fraction = gpus.iter().map(fraction).min().unwrap_or_default();
    let max_fraction = gpus.iter().map(fraction).max();
    Placement {
        node: node_state.view().name.clone(),
        devices: gpus
            .iter()
            .map(|index| node_state.devices()[index].uuid.clone())
            .collect(),
        granted: gpus.iter().map(grant_on).sum(),
        memory_fraction,
        greatest_fraction: max_fraction.filter(|greatest| *greatest != memory_fraction),
        borrowed_from: Arc::new([]),
        has_vram_limits,
    }
}
