//! What watches and requests show, brought into the ledger: nodes, their devices, and pods as the API server shows them.

use super::Ledger;
use super::node_state::{LoansEndedUnasked, NodeState};
use super::pod_state::SchedulingGate;
use super::pod_state::{BoundPod, PodPhase, PodState};
use super::start_gates::start_gate_end;
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::units::{Millis, Moment};
use crate::vocabulary::demand::Demand;
use crate::vocabulary::disruption_info::{CheckpointAge, ObservedDisruptionInfo, PodHealth};
use crate::vocabulary::gpu::Device;
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_reading::NodeReading;
use crate::vocabulary::placement::Reservation;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A pod as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodObservation {
    pub uid: PodUid,
    pub key: PodKey,
    pub demand: Demand,
    pub state: ObservedPhase,
    /// What its eviction depends on; `None` if that was not read, and stays as it was.
    pub observed: Option<ObservedDisruptionInfo>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObservedPhase {
    Waiting(ObservedWaiting),
    Bound {
        node: NodeName,
        devices: Option<Arc<[GpuUuid]>>,
        /// It is not ready yet, and none of its containers has been restarted.
        starting: bool,
        /// For how long it has run, if the API server says so.
        ran: Option<Millis>,
    },
}

/// What a pod without a node shows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedWaiting {
    pub reservation: Option<Reservation>,
    pub gate: SchedulingGate,
    pub nominated: Option<NodeName>,
}

/// What an operator should know about a pod that was observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodWarning {
    Nothing,
    /// Its recorded devices were edited after it was bound. The edit is ignored.
    DevicesEdited,
    /// What it asks for was edited after it was bound. The edit is ignored.
    DemandEdited,
    /// It is on a node, and no record says on which GPUs.
    Unplaced,
    /// Its checkpoint's time cannot be read; it counts as never having saved its work.
    CheckpointUnreadable,
    /// Its checkpoint's time is still to come; it counts as having saved its work just now.
    CheckpointInFuture,
}

impl Ledger {
    /// The node exists. What its labels say of its devices counts until an agent reports.
    pub(crate) fn set_node(
        &mut self,
        name: &NodeName,
        kind: NodeKind,
        labelled_devices: Option<Vec<Device>>,
    ) {
        if self
            .node_states
            .create(name, kind, &self.pod_states, &self.policy)
        {
            self.update_published(name);
        }
        if let Some(devices) = labelled_devices.filter(|_| !self.node_states[name].is_reported()) {
            self.set_labelled_devices(name, devices);
        }
    }

    /// Replaces the names in a reading by the node's own shared strings. Otherwise each report would keep new copies of the same
    /// names, every second and for every node.
    pub fn intern_names(&self, node: &NodeName, reading: &mut NodeReading) {
        if let Some(node_state) = self.node_states.get(node) {
            node_state.intern_names(reading);
        }
    }

    /// Takes a reading of a node, whose devices were reported before; what it says of other devices is ignored.
    /// Returns the loans that engines ended without asking.
    pub(crate) fn take_reading(
        &mut self,
        name: &NodeName,
        reading: Arc<NodeReading>,
    ) -> LoansEndedUnasked {
        if !self.has_node(name) {
            return LoansEndedUnasked::default();
        }
        self.record_overuse(name, &reading.over_grant, reading.sampled);
        let located = self.node_states.take_reading(name, reading, &self.policy);
        // It may be old already.
        self.update_freshness(name);
        self.record_work(name);
        for (uid, gpus) in located {
            self.set_located_gpus(&uid, gpus);
        }
        self.node_states
            .get_mut(name)
            .map(NodeState::take_loans_ended_unasked)
            .unwrap_or_default()
    }

    /// Updates a node's freshness to the age of its reading, and records when it changes next.
    pub(super) fn update_freshness(&mut self, name: &NodeName) {
        self.node_states
            .update_freshness(name, self.now, &self.policy);
        self.node_states
            .refresh_view(name, &self.pod_states, &self.policy);
    }

    pub(super) fn set_located_gpus(&mut self, uid: &PodUid, gpus: Arc<[GpuUuid]>) {
        self.edit_pod(uid, |pod_state| pod_state.set_located_gpus(gpus));
    }

    /// The node is gone. Its pods keep their charge until they are gone too.
    pub(crate) fn remove_node(&mut self, name: &NodeName) {
        self.observe_images(name, None);
        self.overuse.forget_node(name);
        if self.node_states.remove(name, &self.policy) {
            self.remove_soft_reservations_on(name);
            self.refresh(name);
            self.expire_reservations_on(name, |_, _| true);
            self.node_states.forget_if_empty(name);
        }
    }

    /// Updates the ledger to a pod as the API server shows it.
    pub(crate) fn observe_pod(&mut self, mut observation: PodObservation) -> PodWarning {
        if observation.demand.classified_by != self.policy.version {
            // The policy changed while the pod was read.
            let classification = self.policy.classify(&observation.demand.traits);
            observation.demand.reclassify(classification);
        }
        self.shared_parts.share(&mut observation.demand);
        let uid = observation.uid.clone();
        self.count_arrival(&uid, &observation.demand);
        let warning = match observation.state {
            ObservedPhase::Waiting(ObservedWaiting {
                reservation,
                gate,
                nominated,
            }) => {
                // A request of kube-scheduler says nothing of it.
                if observation.observed.is_some() {
                    self.record_observed_reservation(&uid, reservation.as_ref());
                }
                let reservation = self.accept_observed_reservation(&uid, reservation);
                let had_reservation = self.pod_states.reservation(&uid).is_some();
                self.observe_waiting(
                    observation.uid,
                    observation.key,
                    observation.demand,
                    reservation.clone(),
                );
                if !had_reservation {
                    self.record_missed_victims(&uid);
                }
                if let Some(observed) = &reservation {
                    self.observe_deadline(&uid, observed);
                }
                let now = self.now;
                self.pod_states
                    .edit_waiting(&uid, |waiting| waiting.observe_gate(gate, nominated, now));
                self.update_queue(&uid);
                PodWarning::Nothing
            }
            ObservedPhase::Bound {
                node,
                devices,
                starting,
                ran,
            } => {
                self.record_observed_reservation(&uid, None);
                self.leader_record.forget(&uid);
                let bound = BoundPod::new(node, devices, self.now);
                let health = observation
                    .observed
                    .as_ref()
                    .map(|observed| observed.disruption_info.health);
                let is_unready = health.is_some_and(|health| health != PodHealth::Ready);
                if !starting && health == Some(PodHealth::Ready) {
                    self.record_engine_ready(&uid, &bound.node);
                }
                let start = (starting, is_unready);
                let warning = self.observe_bound(
                    observation.uid,
                    observation.key,
                    observation.demand,
                    bound,
                    start,
                );
                if let Some(ran) = ran {
                    self.record_running_since(&uid, self.now.before(ran));
                }
                let stamp = observation
                    .observed
                    .as_ref()
                    .map(|observed| observed.stamp)
                    .unwrap_or_default();
                if warning == PodWarning::Nothing {
                    checkpoint_warning(stamp)
                } else {
                    warning
                }
            }
        };
        if let Some(observed) = &observation.observed {
            self.mark_watched(&uid);
            self.apply_disruption_info(&uid, observed);
        }
        warning
    }

    /// Updates the ledger to a pod as a request of kube-scheduler shows it. Its disruption info from there counts until a watch has
    /// shown the pod: a request may be older than the watch.
    pub(crate) fn observe_request(
        &mut self,
        observation: PodObservation,
        disruption: Option<&ObservedDisruptionInfo>,
    ) {
        let (uid, is_new) = (
            observation.uid.clone(),
            !self.pod_states.contains(&observation.uid),
        );
        self.observe_pod(observation);
        let Some(disruption) = disruption else { return };
        if is_new {
            self.pod_states
                .edit_without_move(&uid, |pod_state| pod_state.is_unwatched = true);
        }
        if self
            .pod_states
            .get(&uid)
            .is_some_and(|pod_state| pod_state.is_unwatched)
        {
            self.apply_disruption_info(&uid, disruption);
        }
    }

    fn mark_watched(&mut self, uid: &PodUid) {
        if self
            .pod_states
            .get(uid)
            .is_some_and(|pod_state| pod_state.is_unwatched)
        {
            self.pod_states
                .edit_without_move(uid, |pod_state| pod_state.is_unwatched = false);
        }
    }

    /// Applies what a pod shows of its disruption. No VRAM depends on it, so no node changes.
    fn apply_disruption_info(&mut self, uid: &PodUid, observed: &ObservedDisruptionInfo) {
        let now = self.now;
        let Some(pod_state) = self.pod_states.get(uid) else {
            return;
        };
        let disruption_info = observed.at(now);
        if !disruption_info.is_nearly_equal(&pod_state.disruption_info) {
            self.pod_states.set_disruption_info(uid, disruption_info);
            self.pod_states
                .edit_without_move(uid, PodState::shorten_eviction_refusal);
            self.refresh_right_to_borrow(uid);
        }
        for (pods_showing, is_shown) in [
            (
                &mut self.pods_with_eviction_condition,
                observed.shows_eviction,
            ),
            (
                &mut self.pods_with_reservation_condition,
                observed.shows_reservation,
            ),
        ] {
            match is_shown {
                true => _ = pods_showing.insert(uid.clone()),
                false => _ = pods_showing.remove(uid),
            }
        }
        if let Some(leaving) = observed.leaving {
            self.pod_states
                .edit_without_move(uid, |pod_state| pod_state.record_deletion(leaving, now));
        }
        self.update_node_disruption_info(uid);
        if self
            .pod_states
            .get(uid)
            .is_some_and(|pod_state| pod_state.has_loan_change(&observed.loan))
        {
            self.edit_pod(uid, |pod_state| pod_state.observe_loan(&observed.loan, now));
        }
    }

    /// Where GPUs are reserved for a pod, engines lend only if it may borrow there, which its disruption decides.
    fn refresh_right_to_borrow(&mut self, uid: &PodUid) {
        let Some(pod_state) = self
            .pod_states
            .get(uid)
            .filter(|pod_state| pod_state.demand.terms.borrows)
        else {
            return;
        };
        if let Some(reservation) = pod_state.reservation() {
            self.node_states
                .refresh_view(&reservation.node, &self.pod_states, &self.policy);
        }
    }

    /// The pod is gone or finished; what it had is free.
    pub(crate) fn release(&mut self, uid: &PodUid) -> Option<PodState> {
        self.set_placeless_member(uid, None);
        let pod_state = self.pod_states.get(uid)?.clone();
        if !self.was_evicted_for_others(uid) {
            self.record_gate_time(uid, pod_state.disruption_info.health == PodHealth::Ready);
        }
        self.record_observed_reservation(uid, None);
        self.leader_record.forget(uid);
        self.pods_with_eviction_condition.remove(uid);
        self.pods_with_reservation_condition.remove(uid);
        if let Some(node_state) = pod_state
            .node()
            .and_then(|node| self.node_states.get_mut(node))
        {
            node_state.record_departed(uid, &pod_state, self.now);
        }
        self.count_departure(&pod_state);
        if let Some(node) = pod_state.node() {
            self.forget_overuse(uid, node);
        }
        let moved = self.pod_states.remove(uid);
        self.apply_pod_move(uid, &moved);
        Some(pod_state)
    }

    /// Updates the node after a change of the pod's disruption info.
    pub(super) fn update_node_disruption_info(&mut self, uid: &PodUid) {
        let Some(pod_state) = self.pod_states.get(uid) else {
            return;
        };
        let Some(node) = pod_state.node() else { return };
        let node_state = self.node_states.get_mut(node);
        if node_state.is_some_and(|node_state| node_state.update_disruption_info(uid, pod_state)) {
            self.node_states
                .refresh_view(node, &self.pod_states, &self.policy);
        }
    }

    /// Records victims that may have ended before this process began, as their reservation did: this ledger has not observed their
    /// end, and their memory may still be in use.
    fn record_missed_victims(&mut self, preemptor: &PodUid) {
        let Some(reservation) = self.pod_states.reservation(preemptor) else {
            return;
        };
        if let Some(node_state) = self.node_states.get_mut(&reservation.node) {
            let unknown = reservation
                .victims
                .iter()
                .filter(|victim| !self.pod_states.contains(victim));
            unknown.for_each(|victim| node_state.record_missed_departure(victim, self.now));
        }
    }

    pub(super) fn expire_reservations_on(
        &mut self,
        name: &NodeName,
        is_broken: impl Fn(&NodeState, &Reservation) -> bool,
    ) {
        let Some(node_state) = self.node_states.get(name) else {
            return;
        };
        let broken = |uid: &&PodUid| {
            let reservation = self.pod_states[*uid]
                .reservation()
                .filter(|reservation| reservation.node == *name);
            reservation.is_some_and(|reservation| is_broken(node_state, reservation))
        };
        let broken: Vec<PodUid> = node_state.pods().iter().filter(broken).cloned().collect();
        for uid in broken {
            let reservation = self.pod_states.reservation(&uid).cloned();
            let ended = |reservation| Reservation {
                deadline: Moment::default(),
                ..reservation
            };
            self.set_reservation(&uid, reservation.map(ended));
        }
    }

    fn observe_waiting(
        &mut self,
        uid: PodUid,
        key: PodKey,
        demand: Demand,
        reservation: Option<Reservation>,
    ) {
        let (now, latest, is_leading) = (
            self.now,
            self.latest_deadline(),
            self.leader_record.is_leading(),
        );
        match self
            .pod_states
            .get(&uid)
            .map(|pod_state| (&pod_state.phase, &pod_state.demand))
        {
            // Not bound yet in what is observed, which is older than what is known.
            Some((PodPhase::Assumed(_) | PodPhase::Bound(_), _)) => {}
            Some((PodPhase::Waiting(waiting), waiting_demand))
                if *waiting_demand == demand
                    && reservation
                        .as_ref()
                        .is_none_or(|reservation| !waiting.is_new_reservation(reservation)) => {}
            _ => {
                let new = PodState::new_waiting(now, key, demand.clone());
                // What a leader knows of a reservation is never older than what is shown; any other replica mirrors.
                let mirrored = reservation.filter(|_| !is_leading);
                let moved = self.pod_states.edit_or_insert(&uid, new, |pod_state| {
                    pod_state.observe_waiting(demand, mirrored, latest, now);
                });
                self.apply_pod_move(&uid, &moved);
            }
        }
    }

    fn observe_bound(
        &mut self,
        uid: PodUid,
        key: PodKey,
        demand: Demand,
        bound: BoundPod,
        (is_starting, is_unready): (bool, bool),
    ) -> PodWarning {
        let recorded = self
            .pod_states
            .get(&uid)
            .filter(|pod_state| pod_state.node() == Some(&bound.node));
        if let Some(pod_state) = recorded.filter(|pod_state| !pod_state.is_assumed()) {
            // The record is written with the node: over an assume it is the truth, after that an edit.
            let warning = edit_warning(pod_state, &bound, &demand);
            if pod_state.starting.is_some() && !is_starting {
                self.release_start_gate(&uid, is_unready);
            }
            return warning;
        }
        let is_unplaced = bound.devices.is_none() && !demand.is_allocated_externally();
        let warning = if is_unplaced {
            PodWarning::Unplaced
        } else {
            PodWarning::Nothing
        };
        let node = bound.node.clone();
        let was_assumed = recorded.is_some();
        let (gate_end, start) = self.start_after_binding(&uid, &node);
        let start_model = self.start_times.model();
        let node_state = self.node_states.get_or_create(&node);
        let is_by_index = node_state.is_reported() && !bound.has_recorded_uuids();
        // It is unknown since when an engine that was bound before this ledger began has been starting.
        let starting = match was_assumed {
            true => gate_end,
            false => start_gate_end(
                &demand,
                node_state.view(),
                self.now,
                start_model,
                &self.policy,
            ),
        };
        let gpus = bound.devices.as_deref().unwrap_or_default();
        let starting = self.capped_by_gate_share(starting, &demand, &node, gpus);
        let (starting, start) = if is_starting || was_assumed {
            (starting, start)
        } else {
            (None, None)
        };
        let disruption_info = Arc::default();
        let phase = PodPhase::Bound(bound);
        let moved = self.pod_states.replace(
            &uid,
            PodState {
                key,
                demand,
                disruption_info,
                is_unwatched: false,
                phase,
                starting,
                start,
            },
        );
        self.apply_pod_move(&uid, &moved);
        self.forget_start_if_wakeable(&uid);
        // It was assumed here, and the watch is faster than the answer to its Binding.
        if was_assumed && starting.is_some() && !is_starting {
            self.release_start_gate(&uid, is_unready);
        }
        if is_by_index {
            self.pin_indices(&node);
        }
        warning
    }

    /// Opens a pod's start gate, because its engine has started or failed to, but not before its class's minimum.
    fn release_start_gate(&mut self, uid: &PodUid, is_unready: bool) {
        let Some(PodState {
            demand,
            phase: PodPhase::Bound(bound),
            ..
        }) = self.pod_states.get(uid)
        else {
            return;
        };
        let earliest = bound.since + self.policy.class(demand.class).start_gate.min;
        if earliest <= self.now {
            self.record_gate_time(uid, !is_unready);
            return self.edit_pod(uid, |pod_state| pod_state.open_start_gate(None));
        }
        self.edit_pod(uid, |pod_state| pod_state.open_start_gate(Some(earliest)));
    }
}

fn checkpoint_warning(age: CheckpointAge) -> PodWarning {
    match age {
        CheckpointAge::Unreadable => PodWarning::CheckpointUnreadable,
        stamp if stamp.is_ahead() => PodWarning::CheckpointInFuture,
        _ => PodWarning::Nothing,
    }
}

/// What was edited on a bound pod since it was bound.
fn edit_warning(pod_state: &PodState, observed: &BoundPod, demand: &Demand) -> PodWarning {
    match pod_state.recorded_devices() {
        // The kubelet has counted it, whatever is edited since.
        _ if pod_state.demand.is_allocated_externally() => PodWarning::Nothing,
        None => PodWarning::Unplaced,
        recorded if recorded != observed.devices.as_ref() => PodWarning::DevicesEdited,
        _ if !pod_state.demand.is_same_request(demand) => PodWarning::DemandEdited,
        _ => PodWarning::Nothing,
    }
}
