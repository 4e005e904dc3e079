//! What is seen of the world, brought into the books: nodes, their devices, and pods as the API server shows them.

use super::Ledger;
use super::book::NodeState;
use super::entry::{BoundPod, PodPhase, PodState, SchedulingGate, WaitingPod};
use super::promise::gate;
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::scheduling::decision::Reservation;
use crate::scheduling::device::Device;
use crate::scheduling::node::NodeKind;
use crate::scheduling::reading::NodeReading;
use crate::scheduling::request::Demand;
use crate::scheduling::stake::{CheckpointAge, DisruptionInfo, ObservedDisruptionInfo};
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
    pub shown: Option<ObservedDisruptionInfo>,
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
    pub hold: Option<Reservation>,
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
    CheckpointAhead,
}

impl Ledger {
    /// The node exists. What its labels say of its devices counts until an agent reports.
    pub fn set_node(&mut self, name: &NodeName, kind: NodeKind, labelled: Option<Vec<Device>>) {
        let book = self.books.open(name);
        if !book.exists || book.kind != kind {
            book.exists = true;
            book.kind = kind;
            // A pool may take every node, those without labels too.
            book.admission = self.policy.admission(&book.labels);
            self.nodes_changed = true;
            self.epoch += 1;
            self.refresh(name);
        }
        if let Some(devices) = labelled.filter(|_| !self.books[name].reported) {
            self.set_labelled_devices(name, devices);
        }
    }

    /// What was measured on a node. Its devices were reported before; a reading of others says nothing of these.
    pub fn read(&mut self, name: &NodeName, reading: NodeReading) {
        let Some(book) = self.books.get_mut(name).filter(|book| book.exists) else { return };
        if let Some(due) = book.ages_at(&self.policy.telemetry) {
            self.aging.remove(&(due, name.clone()));
        }
        let found = book.read(reading, &self.policy);
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
        let Some(book) = self.books.get_mut(name) else { return };
        book.freshness = book.freshness_at(self.now, rules);
        if let Some(due) = book.ages_at(rules) {
            self.aging.insert((due, name.clone()));
        }
    }

    pub(super) fn forget_reading(&mut self, name: &NodeName) {
        let Some(book) = self.books.get_mut(name) else { return };
        if let Some(due) = book.forget_reading(&self.policy.telemetry) {
            self.aging.remove(&(due, name.clone()));
        }
    }

    pub(super) fn locate(&mut self, uid: &PodUid, gpus: Arc<[GpuUuid]>) {
        self.change(uid, |entries| {
            if let Some(PodPhase::Bound(bound)) = entries.get_mut(uid).map(|entry| &mut entry.phase) {
                bound.located = Some(gpus);
            }
        });
    }

    /// The node is gone. Its pods keep their charge until they are gone too.
    pub fn remove_node(&mut self, name: &NodeName) {
        if let Some(book) = self.books.get_mut(name).filter(|book| book.exists) {
            book.exists = false;
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
    pub fn see(&mut self, mut seen: PodObservation) -> PodWarning {
        if seen.demand.judged_by != self.policy.version {
            // The policy changed while the pod was read.
            let judgement = self.policy.judge(&seen.demand.traits);
            seen.demand.take(judgement);
        }
        let uid = seen.uid.clone();
        self.note_arrival(&uid, &seen.demand);
        let remark = match seen.state {
            ObservedPhase::Waiting(ObservedWaiting { hold, gate, nominated }) => {
                let hold = self.believed(&uid, hold);
                let held_before = self.entries.get(&uid).is_some_and(|entry| entry.hold().is_some());
                self.observe_waiting(seen.uid, seen.key, seen.demand, hold.clone());
                if !held_before {
                    self.look_for_victims(&uid);
                }
                self.observe_reservation(&uid, hold.as_ref());
                self.observe_deadline(&uid, hold.as_ref());
                self.observe_scheduling_gate(&uid, gate, nominated);
                PodWarning::Nothing
            }
            ObservedPhase::Bound { node, devices, starting, ran } => {
                let bound = BoundPod::new(node, devices, self.now);
                let remark = self.observe_bound(seen.uid, seen.key, seen.demand, bound, starting);
                if let Some(ran) = ran {
                    self.has_run_since(&uid, self.now.before(ran));
                }
                let stamp = seen.shown.as_ref().map(|shown| shown.stamp).unwrap_or_default();
                if remark == PodWarning::Nothing { warning_of(stamp) } else { remark }
            }
        };
        if let Some(shown) = &seen.shown {
            self.take_disruption_info(&uid, shown);
        }
        remark
    }

    /// What a pod shows of its stake counts at once. No room depends on it, so no page changes.
    fn take_disruption_info(&mut self, uid: &PodUid, shown: &ObservedDisruptionInfo) {
        let now = self.now;
        let Some(entry) = self.entries.get(uid) else { return };
        let stake = shown.at(now);
        if !stake.is_like(&entry.stake) {
            self.set_disruption_info(uid, stake);
        }
        let Some(entry) = self.entries.get_mut(uid) else { return };
        if let (PodPhase::Bound(bound), Some(leaving)) = (&mut entry.phase, shown.leaving) {
            // A deletion is never taken back, and its grace only grows shorter.
            let by = leaving.by(now);
            bound.leaving = Some(bound.leaving.map_or(by, |known| known.min(by)));
        }
        self.note_disruption_info(uid);
    }

    /// The pod is gone or finished; what it held is free.
    pub fn release(&mut self, uid: &PodUid) -> Option<PodState> {
        let entry = self.entries.get(uid)?.clone();
        if let Some(book) = entry.node().and_then(|node| self.books.get_mut(node)) {
            book.note_departed(uid, self.now);
        }
        self.note_departure(&entry);
        self.leave_group(uid, &entry.stake);
        self.change(uid, |entries| {
            entries.remove(uid);
        });
        Some(entry)
    }

    /// Brings the node's page to what the pod has at stake now.
    pub(super) fn note_disruption_info(&mut self, uid: &PodUid) {
        let Some(entry) = self.entries.get(uid) else { return };
        if let Some(book) = entry.node().and_then(|node| self.books.get_mut(node)) {
            book.note_disruption_info(uid, entry);
        }
    }

    /// A hold of before this process began may have victims that ended before it, too: nobody told it of their end, and their
    /// memory may be there still.
    fn look_for_victims(&mut self, holder: &PodUid) {
        let Some(hold) = self.entries.get(holder).and_then(PodState::hold) else { return };
        if let Some(book) = self.books.get_mut(&hold.node) {
            let unknown = hold.victims.iter().filter(|victim| !self.entries.contains_key(victim));
            unknown.for_each(|victim| book.note_missed(victim, self.now));
        }
    }

    pub(super) fn expire_reservations_on(
        &mut self,
        name: &NodeName,
        is_broken: impl Fn(&NodeState, &Reservation) -> bool,
    ) {
        let Some(book) = self.books.get(name) else { return };
        let broken = |uid: &&PodUid| {
            let hold = self.entries[*uid].hold().filter(|hold| hold.node == *name);
            hold.is_some_and(|hold| is_broken(book, hold))
        };
        let broken: Vec<PodUid> = book.pods.iter().filter(broken).cloned().collect();
        for uid in broken {
            let hold = self.entries[&uid].hold().cloned();
            self.set_reservation(&uid, hold.map(|hold| Reservation { deadline: Moment::default(), ..hold }));
        }
    }

    fn observe_waiting(&mut self, uid: PodUid, key: PodKey, demand: Demand, hold: Option<Reservation>) {
        let (now, latest, leads) = (self.now, self.latest_deadline(), self.leader.is_some());
        match self.entries.get(&uid).map(|entry| (&entry.phase, &entry.demand)) {
            // Not bound yet in what is seen, which is older than what is known.
            Some((PodPhase::Assumed(_) | PodPhase::Bound(_), _)) => {}
            Some((PodPhase::Waiting(waiting), known))
                if *known == demand && hold.as_ref().is_none_or(|hold| !is_news(hold, waiting)) => {}
            _ => self.change(&uid.clone(), |entries| {
                let phase = PodPhase::Waiting(WaitingPod { since: now, ..WaitingPod::default() });
                let stake = Arc::<DisruptionInfo>::default();
                let fresh = PodState { key, demand: demand.clone(), stake, phase, starting: None };
                let entry = entries.get_or_insert(uid, fresh);
                entry.demand = demand;
                if let PodPhase::Waiting(waiting) = &mut entry.phase {
                    // What a leader knows of a hold is never older than what is shown; any other replica mirrors.
                    let hold = hold.filter(|hold| is_news(hold, waiting));
                    let bounded =
                        hold.map(|hold| Reservation { deadline: hold.deadline.min(latest), ..hold });
                    waiting.hold = match leads {
                        true => waiting.hold.take(),
                        false => bounded.or(waiting.hold.take()),
                    };
                }
            }),
        }
    }

    /// The API server has the pod's hold.
    fn observe_reservation(&mut self, uid: &PodUid, shown: Option<&Reservation>) {
        let Some(shown) = shown else { return };
        if let Some(PodPhase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase) {
            waiting.hold_shown |= waiting.hold.is_some() && !is_news(shown, waiting);
        }
    }

    fn observe_scheduling_gate(&mut self, uid: &PodUid, gate: SchedulingGate, nominated: Option<NodeName>) {
        let now = self.now;
        let Some(PodPhase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase) else {
            return;
        };
        if waiting.gate != gate {
            (waiting.since, waiting.sought) = (now, None);
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
        let known = self.entries.get(&uid).filter(|entry| entry.node() == Some(&bound.node));
        if let Some(entry) = known.filter(|entry| !entry.is_assumed()) {
            // The record is written with the node: over an assume it is the truth, after that an edit.
            let remark = remark(entry, &bound, &demand);
            if entry.starting.is_some() && !is_starting {
                self.note_started(&uid);
            }
            return remark;
        }
        let is_unplaced = bound.devices.is_none() && !demand.asks_plugin();
        let remark = if is_unplaced { PodWarning::Unplaced } else { PodWarning::Nothing };
        let node = bound.node.clone();
        let book = self.books.open(&node);
        // Nobody knows since when an engine that was bound before this ledger began has been starting.
        let (starting, was_assumed) =
            match self.entries.get(&uid).filter(|entry| entry.node() == Some(&bound.node)) {
                Some(entry) => (entry.starting, true),
                None => (gate(&demand, &book.view, self.now, &self.policy).filter(|_| is_starting), false),
            };
        let is_by_index = book.reported && !bound.is_recorded();
        self.change(&uid, |entries| {
            let stake = entries.get(&uid).map(|known| known.stake.clone()).unwrap_or_default();
            let entry = PodState { key, demand, stake, phase: PodPhase::Bound(bound), starting };
            entries.insert(uid.clone(), entry);
        });
        // It was assumed here, and the watch is faster than the answer to its Binding.
        if was_assumed && starting.is_some() && !is_starting {
            self.note_started(&uid);
        }
        if is_by_index {
            self.pin_indices(&node);
        }
        remark
    }

    /// The pod's engine has started, or has failed to. Its gate opens, but not before its class says.
    fn note_started(&mut self, uid: &PodUid) {
        let Some(PodState { demand, phase: PodPhase::Bound(bound), .. }) = self.entries.get(uid) else {
            return;
        };
        let opens = bound.since + self.policy.class(demand.class).start_gate.at_least;
        if opens <= self.now {
            return self.open_start_gate(uid);
        }
        self.change(uid, |entries| {
            if let Some(starting) = entries.get_mut(uid).and_then(|entry| entry.starting.as_mut()) {
                *starting = opens.min(*starting);
            }
        });
    }

    /// Others may start on the pod's GPUs.
    pub(super) fn open_start_gate(&mut self, uid: &PodUid) {
        self.change(uid, |entries| {
            if let Some(entry) = entries.get_mut(uid) {
                entry.starting = None;
            }
        });
    }
}

fn warning_of(stamp: CheckpointAge) -> PodWarning {
    match stamp {
        CheckpointAge::Unreadable => PodWarning::CheckpointUnreadable,
        stamp if stamp.is_ahead() => PodWarning::CheckpointAhead,
        _ => PodWarning::Nothing,
    }
}

/// Whether a hold that is shown is another than the one that is known, or was given up.
pub(super) fn is_news(shown: &Reservation, waiting: &WaitingPod) -> bool {
    let is_it = |known: &Reservation| {
        (&known.node, &known.devices, &known.victims) == (&shown.node, &shown.devices, &shown.victims)
    };
    !waiting.hold.as_ref().is_some_and(is_it) && !waiting.given_up.as_deref().is_some_and(is_it)
}

/// What is remarkable about a bound pod that is seen again.
fn remark(known: &PodState, seen: &BoundPod, demand: &Demand) -> PodWarning {
    match known.recorded_devices() {
        // The kubelet has counted it, whatever is edited since.
        _ if known.demand.asks_plugin() => PodWarning::Nothing,
        None => PodWarning::Unplaced,
        recorded if recorded != seen.devices.as_ref() => PodWarning::DevicesEdited,
        _ if known.demand != *demand => PodWarning::DemandEdited,
        _ => PodWarning::Nothing,
    }
}
