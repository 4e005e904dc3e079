//! What is seen of the world, brought into the books: nodes, their devices, and pods as the API server shows them.

use super::Ledger;
use super::assume::gate;
use super::node_state::NodeState;
use super::pod_state::{BoundPod, PodPhase, PodState, SchedulingGate, WaitingPod};
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::scheduling::vocabulary::demand::Demand;
use crate::scheduling::vocabulary::disruption_info::{CheckpointAge, DisruptionInfo, ObservedDisruptionInfo};
use crate::scheduling::vocabulary::gpu::Device;
use crate::scheduling::vocabulary::node::NodeKind;
use crate::scheduling::vocabulary::node_reading::NodeReading;
use crate::scheduling::vocabulary::placement::Reservation;
use crate::units::{Millis, Moment};
use std::sync::Arc;

/// A pod as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodObservation {
    pub uid: PodUid,
    pub key: PodKey,
    pub demand: Demand,
    pub state: ObservedPhase,
    /// What its eviction depends on; `None` if that was not looked at, and stays as it was.
    pub observed: Option<ObservedDisruptionInfo>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedWaiting {
    pub reservation: Option<Reservation>,
    pub gate: SchedulingGate,
    pub nominated: Option<NodeName>,
}

/// What is remarkable about a pod that was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodWarning {
    Nothing,
    /// Its recorded devices were edited after it was bound. The edit is ignored.
    DevicesEdited,
    /// What it asks for was edited after it was bound. The edit is ignored.
    DemandEdited,
    /// It is on a node, and nobody recorded on which GPUs.
    Unplaced,
    /// Its checkpoint's time cannot be read; it counts as never having saved its work.
    CheckpointUnreadable,
    /// Its checkpoint's time is still to come; it counts as having saved its work just now.
    CheckpointInFuture,
}

impl Ledger {
    /// The node exists. What its labels say of its devices counts until an agent reports.
    pub(in crate::scheduling) fn set_node(
        &mut self,
        name: &NodeName,
        kind: NodeKind,
        labelled: Option<Vec<Device>>,
    ) {
        let node_state = self.node_states.open(name);
        if !node_state.exists || node_state.kind != kind {
            node_state.exists = true;
            node_state.kind = kind;
            // A pool may take every node, those without labels too.
            node_state.admission = self.policy.admission(&node_state.labels);
            self.nodes_changed = true;
            self.epoch += 1;
            self.refresh(name);
        }
        if let Some(devices) = labelled.filter(|_| !self.node_states[name].reported) {
            self.set_labelled_devices(name, devices);
        }
    }

    /// What was measured on a node. Its devices were reported before; a reading of others says nothing of these.
    pub(in crate::scheduling) fn read(&mut self, name: &NodeName, reading: NodeReading) {
        let Some(node_state) = self.node_states.get_mut(name).filter(|node_state| node_state.exists) else {
            return;
        };
        if let Some(due) = node_state.ages_at(&self.policy.telemetry) {
            self.aging.remove(&(due, name.clone()));
        }
        let found = node_state.read(reading, &self.policy);
        // It may be old already.
        self.age(name);
        for (uid, gpus) in found {
            self.locate(&uid, gpus);
        }
    }

    /// Brings a node's reading to what its age allows, and notes when that changes.
    pub(super) fn age(&mut self, name: &NodeName) {
        self.note_age(name);
        self.refresh_view(name);
    }

    /// The same, for one who brings the view up to date himself.
    pub(super) fn note_age(&mut self, name: &NodeName) {
        let rules = &self.policy.telemetry;
        let Some(node_state) = self.node_states.get_mut(name) else { return };
        node_state.freshness = node_state.freshness_at(self.now, rules);
        if let Some(due) = node_state.ages_at(rules) {
            self.aging.insert((due, name.clone()));
        }
    }

    pub(super) fn forget_reading(&mut self, name: &NodeName) {
        let Some(node_state) = self.node_states.get_mut(name) else { return };
        if let Some(due) = node_state.forget_reading(&self.policy.telemetry) {
            self.aging.remove(&(due, name.clone()));
        }
    }

    pub(super) fn locate(&mut self, uid: &PodUid, gpus: Arc<[GpuUuid]>) {
        self.change(uid, |pod_states| {
            if let Some(PodPhase::Bound(bound)) =
                pod_states.get_mut(uid).map(|pod_state| &mut pod_state.phase)
            {
                bound.located = Some(gpus);
            }
        });
    }

    /// The node is gone. Its pods keep their charge until they are gone too.
    pub(in crate::scheduling) fn remove_node(&mut self, name: &NodeName) {
        if let Some(node_state) = self.node_states.get_mut(name).filter(|node_state| node_state.exists) {
            node_state.exists = false;
            // A node that comes back under its name may be another machine.
            self.forget_reading(name);
            self.nodes_changed = true;
            self.epoch += 1;
            self.generation += 1;
            self.drop_soft_reservations_on(name);
            self.refresh(name);
            self.expire_reservations_on(name, |_, _| true);
            self.forget_empty_node_state(name);
        }
    }

    /// Brings the books to what the API server shows of a pod.
    pub(in crate::scheduling) fn see(&mut self, mut observation: PodObservation) -> PodWarning {
        if observation.demand.classified_by != self.policy.version {
            // The policy changed while the pod was read.
            let judgement = self.policy.classify(&observation.demand.traits);
            observation.demand.take(judgement);
        }
        let uid = observation.uid.clone();
        self.note_arrival(&uid, &observation.demand);
        let warning = match observation.state {
            ObservedPhase::Waiting(ObservedWaiting { reservation, gate, nominated }) => {
                let reservation = self.believed(&uid, reservation);
                let held_before =
                    self.pod_states.get(&uid).is_some_and(|pod_state| pod_state.reservation().is_some());
                self.observe_waiting(
                    observation.uid,
                    observation.key,
                    observation.demand,
                    reservation.clone(),
                );
                if !held_before {
                    self.look_for_victims(&uid);
                }
                self.observe_reservation(&uid, reservation.as_ref());
                self.observe_deadline(&uid, reservation.as_ref());
                self.observe_scheduling_gate(&uid, gate, nominated);
                PodWarning::Nothing
            }
            ObservedPhase::Bound { node, devices, starting, ran } => {
                let bound = BoundPod::new(node, devices, self.now);
                let warning =
                    self.observe_bound(observation.uid, observation.key, observation.demand, bound, starting);
                if let Some(ran) = ran {
                    self.has_run_since(&uid, self.now.before(ran));
                }
                let stamp = observation.observed.as_ref().map(|observed| observed.stamp).unwrap_or_default();
                if warning == PodWarning::Nothing { warning_of(stamp) } else { warning }
            }
        };
        if let Some(observed) = &observation.observed {
            self.take_disruption_info(&uid, observed);
        }
        warning
    }

    /// What a pod shows of its stake counts at once. No room depends on it, so no page changes.
    fn take_disruption_info(&mut self, uid: &PodUid, observed: &ObservedDisruptionInfo) {
        let now = self.now;
        let Some(pod_state) = self.pod_states.get(uid) else { return };
        let disruption_info = observed.at(now);
        if !disruption_info.is_like(&pod_state.disruption_info) {
            self.set_disruption_info(uid, disruption_info);
        }
        let Some(pod_state) = self.pod_states.get_mut(uid) else { return };
        if let (PodPhase::Bound(bound), Some(leaving)) = (&mut pod_state.phase, observed.leaving) {
            // A deletion is never taken back, and its grace only grows shorter.
            let by = leaving.by(now);
            bound.leaving = Some(bound.leaving.map_or(by, |known| known.min(by)));
        }
        self.note_disruption_info(uid);
    }

    /// The pod is gone or finished; what it held is free.
    pub(in crate::scheduling) fn release(&mut self, uid: &PodUid) -> Option<PodState> {
        let pod_state = self.pod_states.get(uid)?.clone();
        if let Some(node_state) = pod_state.node().and_then(|node| self.node_states.get_mut(node)) {
            node_state.note_departed(uid, self.now);
        }
        self.note_departure(&pod_state);
        self.leave_group(uid, &pod_state.disruption_info);
        self.change(uid, |pod_states| {
            pod_states.remove(uid);
        });
        Some(pod_state)
    }

    /// Brings the node's page to what the pod has at stake now.
    pub(super) fn note_disruption_info(&mut self, uid: &PodUid) {
        let Some(pod_state) = self.pod_states.get(uid) else { return };
        if let Some(node_state) = pod_state.node().and_then(|node| self.node_states.get_mut(node)) {
            node_state.note_disruption_info(uid, pod_state);
        }
    }

    /// A hold of before this process began may have victims that ended before it, too: nobody told it of their end, and their
    /// memory may be there still.
    fn look_for_victims(&mut self, preemptor: &PodUid) {
        let Some(reservation) = self.pod_states.get(preemptor).and_then(PodState::reservation) else {
            return;
        };
        if let Some(node_state) = self.node_states.get_mut(&reservation.node) {
            let unknown = reservation.victims.iter().filter(|victim| !self.pod_states.contains_key(victim));
            unknown.for_each(|victim| node_state.note_missed(victim, self.now));
        }
    }

    pub(super) fn expire_reservations_on(
        &mut self,
        name: &NodeName,
        is_broken: impl Fn(&NodeState, &Reservation) -> bool,
    ) {
        let Some(node_state) = self.node_states.get(name) else { return };
        let broken = |uid: &&PodUid| {
            let reservation =
                self.pod_states[*uid].reservation().filter(|reservation| reservation.node == *name);
            reservation.is_some_and(|reservation| is_broken(node_state, reservation))
        };
        let broken: Vec<PodUid> = node_state.pods.iter().filter(broken).cloned().collect();
        for uid in broken {
            let reservation = self.pod_states[&uid].reservation().cloned();
            self.set_reservation(
                &uid,
                reservation.map(|reservation| Reservation { deadline: Moment::default(), ..reservation }),
            );
        }
    }

    fn observe_waiting(
        &mut self,
        uid: PodUid,
        key: PodKey,
        demand: Demand,
        reservation: Option<Reservation>,
    ) {
        let (now, latest, leads) = (self.now, self.latest_deadline(), self.leader.is_some());
        match self.pod_states.get(&uid).map(|pod_state| (&pod_state.phase, &pod_state.demand)) {
            // Not bound yet in what is seen, which is older than what is known.
            Some((PodPhase::Assumed(_) | PodPhase::Bound(_), _)) => {}
            Some((PodPhase::Waiting(waiting), known))
                if *known == demand
                    && reservation.as_ref().is_none_or(|reservation| !is_news(reservation, waiting)) => {}
            _ => self.change(&uid.clone(), |pod_states| {
                let phase = PodPhase::Waiting(WaitingPod { since: now, ..WaitingPod::default() });
                let disruption_info = Arc::<DisruptionInfo>::default();
                let fresh = PodState { key, demand: demand.clone(), disruption_info, phase, starting: None };
                let pod_state = pod_states.get_or_insert(uid, fresh);
                pod_state.demand = demand;
                if let PodPhase::Waiting(waiting) = &mut pod_state.phase {
                    // What a leader knows of a hold is never older than what is shown; any other replica mirrors.
                    let reservation = reservation.filter(|reservation| is_news(reservation, waiting));
                    let bounded = reservation.map(|reservation| Reservation {
                        deadline: reservation.deadline.min(latest),
                        ..reservation
                    });
                    waiting.reservation = match leads {
                        true => waiting.reservation.take(),
                        false => bounded.or(waiting.reservation.take()),
                    };
                }
            }),
        }
    }

    /// The API server has the pod's hold.
    fn observe_reservation(&mut self, uid: &PodUid, observed: Option<&Reservation>) {
        let Some(observed) = observed else { return };
        if let Some(PodPhase::Waiting(waiting)) =
            self.pod_states.get_mut(uid).map(|pod_state| &mut pod_state.phase)
        {
            waiting.reservation_observed |= waiting.reservation.is_some() && !is_news(observed, waiting);
        }
    }

    fn observe_scheduling_gate(&mut self, uid: &PodUid, gate: SchedulingGate, nominated: Option<NodeName>) {
        let now = self.now;
        let Some(PodPhase::Waiting(waiting)) =
            self.pod_states.get_mut(uid).map(|pod_state| &mut pod_state.phase)
        else {
            return;
        };
        if waiting.gate != gate {
            (waiting.since, waiting.failed_attempt) = (now, None);
        }
        (waiting.gate, waiting.nominated) = (gate, nominated);
        self.requeue(uid);
    }

    fn observe_bound(
        &mut self,
        uid: PodUid,
        key: PodKey,
        demand: Demand,
        bound: BoundPod,
        is_starting: bool,
    ) -> PodWarning {
        let known = self.pod_states.get(&uid).filter(|pod_state| pod_state.node() == Some(&bound.node));
        if let Some(pod_state) = known.filter(|pod_state| !pod_state.is_assumed()) {
            // The record is written with the node: over an assume it is the truth, after that an edit.
            let warning = warning(pod_state, &bound, &demand);
            if pod_state.starting.is_some() && !is_starting {
                self.note_started(&uid);
            }
            return warning;
        }
        let is_unplaced = bound.devices.is_none() && !demand.asks_plugin();
        let warning = if is_unplaced { PodWarning::Unplaced } else { PodWarning::Nothing };
        let node = bound.node.clone();
        let node_state = self.node_states.open(&node);
        // Nobody knows since when an engine that was bound before this ledger began has been starting.
        let (starting, was_assumed) =
            match self.pod_states.get(&uid).filter(|pod_state| pod_state.node() == Some(&bound.node)) {
                Some(pod_state) => (pod_state.starting, true),
                None => {
                    (gate(&demand, &node_state.view, self.now, &self.policy).filter(|_| is_starting), false)
                }
            };
        let is_by_index = node_state.reported && !bound.is_recorded();
        self.change(&uid, |pod_states| {
            let disruption_info =
                pod_states.get(&uid).map(|known| known.disruption_info.clone()).unwrap_or_default();
            let pod_state =
                PodState { key, demand, disruption_info, phase: PodPhase::Bound(bound), starting };
            pod_states.insert(uid.clone(), pod_state);
        });
        // It was assumed here, and the watch is faster than the answer to its Binding.
        if was_assumed && starting.is_some() && !is_starting {
            self.note_started(&uid);
        }
        if is_by_index {
            self.pin_indices(&node);
        }
        warning
    }

    /// The pod's engine has started, or has failed to. Its gate opens, but not before its class says.
    fn note_started(&mut self, uid: &PodUid) {
        let Some(PodState { demand, phase: PodPhase::Bound(bound), .. }) = self.pod_states.get(uid) else {
            return;
        };
        let opens = bound.since + self.policy.class(demand.class).start_gate.min;
        if opens <= self.now {
            return self.open_start_gate(uid);
        }
        self.change(uid, |pod_states| {
            if let Some(starting) = pod_states.get_mut(uid).and_then(|pod_state| pod_state.starting.as_mut())
            {
                *starting = opens.min(*starting);
            }
        });
    }

    /// Others may start on the pod's GPUs.
    pub(super) fn open_start_gate(&mut self, uid: &PodUid) {
        self.change(uid, |pod_states| {
            if let Some(pod_state) = pod_states.get_mut(uid) {
                pod_state.starting = None;
            }
        });
    }
}

fn warning_of(stamp: CheckpointAge) -> PodWarning {
    match stamp {
        CheckpointAge::Unreadable => PodWarning::CheckpointUnreadable,
        stamp if stamp.is_ahead() => PodWarning::CheckpointInFuture,
        _ => PodWarning::Nothing,
    }
}

/// Whether a hold that is shown is another than the one that is known, or was given up.
pub(super) fn is_news(observed: &Reservation, waiting: &WaitingPod) -> bool {
    let is_it = |known: &Reservation| {
        (&known.node, &known.devices, &known.victims)
            == (&observed.node, &observed.devices, &observed.victims)
    };
    !waiting.reservation.as_ref().is_some_and(is_it) && !waiting.given_up.as_deref().is_some_and(is_it)
}

/// What is remarkable about a bound pod that is seen again.
fn warning(known: &PodState, observation: &BoundPod, demand: &Demand) -> PodWarning {
    match known.recorded_devices() {
        // The kubelet has counted it, whatever is edited since.
        _ if known.demand.asks_plugin() => PodWarning::Nothing,
        None => PodWarning::Unplaced,
        recorded if recorded != observation.devices.as_ref() => PodWarning::DevicesEdited,
        _ if known.demand != *demand => PodWarning::DemandEdited,
        _ => PodWarning::Nothing,
    }
}
