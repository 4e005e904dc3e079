//! Stowage with a choice of victims that is not always its own: pods are observed, asked about and bound as by the shipped
//! scheduler, and who leaves for a pod of higher priority is the [`VictimOrder`]'s to say, not the planner's.

use super::backlog::{Backlog, PodKind};
use super::orders::{VictimChoice, VictimOrder};
use super::setup::may_preempt;
use crate::simulate::fleet::machines::Machines;
use crate::simulate::fleet::messages::{Act, Message};
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::schedulers::{FleetScheduler, Stowage};
use crate::simulate::shown;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::ids::{NodeName, OwnerUid, PodUid};
use stowage_scheduling::ledger::StartProgress;
use stowage_scheduling::placing::fit::fit;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::tick::Tick;
use stowage_scheduling::verbs::wait::Reserve;

pub struct VictimScheduler {
    pub shipped: Stowage,
    order: VictimOrder,
    nodes: Vec<NodeName>,
    /// Pods that no round has seen yet.
    new: BTreeMap<PodUid, Arc<PodSpec>>,
    /// Pending residents.
    backlog: Backlog,
    /// When the first pod of each owner came: one that returns is as old as that.
    ages: BTreeMap<OwnerUid, u64>,
    /// Nodes on which more may fit than in the last round.
    changed: BTreeSet<NodeName>,
    answers: Vec<(Moment, PreemptorAnswer)>,
    is_due: bool,
}

/// What became of a pod of higher priority that did not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PreemptorAnswer {
    /// No set of evictions would be enough.
    Rejected(PodUid),
    /// Pods leave for it. Unless `exact`, the search for them reached its limit before it was complete.
    Awaits { exact: bool },
}

impl VictimScheduler {
    pub fn new(policy: Policy, order: VictimOrder) -> Self {
        Self {
            shipped: Stowage::new(policy),
            order,
            nodes: Vec::new(),
            new: BTreeMap::new(),
            backlog: Backlog::default(),
            ages: BTreeMap::new(),
            changed: BTreeSet::new(),
            answers: Vec::new(),
            is_due: false,
        }
    }

    pub fn take_answers(&mut self) -> Vec<(Moment, PreemptorAnswer)> {
        std::mem::take(&mut self.answers)
    }

    fn reject(&mut self, now: Moment, uid: PodUid) {
        self.answers.push((now, PreemptorAnswer::Rejected(uid)));
    }

    /// Pods whose victims are gone are bound.
    fn bind_reserved(&mut self, now: Moment, acts: &mut Vec<Act>) {
        let reserved = self.shipped.cluster.reservation_status();
        for held in reserved.into_iter().filter(|held| held.is_free) {
            if !self.shipped.bind(&held.uid, &held.reservation.node, acts) {
                self.reject(now, held.uid);
            }
        }
    }

    /// Places a pod of higher priority, evicts for it, or rejects it.
    fn admit(&mut self, now: Moment, uid: PodUid, acts: &mut Vec<Act>) {
        let is_placed = match self.shipped.best(&uid) {
            Some(node) => self.shipped.bind(&uid, &node, acts),
            None => self.preempt_for(now, &uid, acts).is_some(),
        };
        if !is_placed {
            self.reject(now, uid);
        }
    }

    /// Makes a reservation for the pod, and evicts the pods in its way; `None` if no set of evictions would be enough.
    fn preempt_for(&mut self, now: Moment, uid: &PodUid, acts: &mut Vec<Act>) -> Option<()> {
        let ledger = &self.shipped.cluster;
        let preemptor = ledger.preemptor(uid);
        let candidates = ledger.candidates_for(&preemptor, &self.nodes);
        let choice = self.order.choose(ledger, &candidates, &ledger.pod_state(uid)?.demand)?;
        let VictimChoice { node, gpus, evicted, awaited, grace, exact } = choice;
        let reservation = shown::reservation(ledger, &node, gpus, awaited, grace)?;
        self.shipped.cluster.apply(Reserve { uid: uid.clone(), reservation }).ok()?;
        self.answers.push((now, PreemptorAnswer::Awaits { exact }));
        evicted.iter().for_each(|victim| self.shipped.evict(victim, uid, acts));
        Some(())
    }

    /// A resident is pending. Answers its kind if no other of that kind is, so that any node may fit it.
    fn wait(&mut self, uid: PodUid, spec: &PodSpec) -> Option<PodKind> {
        let (kind, next) = (PodKind::of(spec), self.ages.len() as u64);
        let age = spec.owner.clone().map_or(next, |owner| *self.ages.entry(owner).or_insert(next));
        let is_first = !self.backlog.has(kind);
        self.backlog.put(kind, age, uid);
        is_first.then_some(kind)
    }

    /// Places pending residents that fit now: those of `untried` kinds on any node, the others on nodes that have changed.
    fn fill(&mut self, untried: &BTreeSet<PodKind>, acts: &mut Vec<Act>) {
        let changed = std::mem::take(&mut self.changed);
        let mut refused = BTreeSet::new();
        while let Some((kind, age, uid)) = self.backlog.first_but(&refused) {
            let node = match untried.contains(&kind) {
                true => self.shipped.best(&uid),
                false => changed.iter().find(|node| self.fits(&uid, node)).cloned(),
            };
            if node.is_some_and(|node| self.shipped.bind(&uid, &node, acts)) {
                self.backlog.take(kind, age, &uid);
            } else {
                refused.insert(kind);
            }
        }
    }

    fn fits(&self, uid: &PodUid, node: &NodeName) -> bool {
        let ledger = &self.shipped.cluster;
        let (pod, node) = (ledger.pod_state(uid), ledger.node(node));
        pod.zip(node).is_some_and(|(pod, node)| fit(node, &pod.demand).is_ok())
    }

    /// More may fit where the pod is, or would have been.
    fn note_freed_by(&mut self, uid: &PodUid) {
        let Some(pod) = self.shipped.cluster.pod_state(uid) else { return };
        let nodes = pod.node().into_iter().chain(pod.reservation().map(|reserved| &reserved.node));
        self.changed.extend(nodes.cloned());
        self.is_due = true;
    }
}

impl FleetScheduler for VictimScheduler {
    fn meet(&mut self, now: Moment, machines: &Machines) {
        self.shipped.meet(now, machines);
        self.nodes = machines.iter().map(|machine| machine.spec.name.clone()).collect();
    }

    fn observe(&mut self, now: Moment, message: &Message) {
        match message {
            Message::Pod(shown) if shown.bound.is_none() && shown.leaving.is_none() => {
                self.new.insert(shown.uid.clone(), shown.spec.clone());
                self.is_due = true;
            }
            Message::PodGone(uid) => self.note_freed_by(uid),
            // Until then its engine keeps others from starting on its GPUs.
            Message::Start { uid, progress: StartProgress::Ready } => self.note_freed_by(uid),
            _ => {}
        }
        self.shipped.observe(now, message);
    }

    fn round(&mut self, now: Moment, _: &Machines) -> Vec<Act> {
        self.is_due = false;
        let mut acts = Vec::new();
        let given_up = self.shipped.cluster.apply(Tick { now, is_leading: true });
        given_up.into_iter().for_each(|uid| self.reject(now, uid));
        self.bind_reserved(now, &mut acts);
        let mut untried = BTreeSet::new();
        for uid in self.shipped.take_unasked() {
            let Some(spec) = self.new.remove(&uid) else { continue };
            match may_preempt(spec.priority) {
                true => self.admit(now, uid, &mut acts),
                false => untried.extend(self.wait(uid, &spec)),
            }
        }
        self.fill(&untried, &mut acts);
        acts
    }

    /// Readings would say what the ledger knows: pods use what they were granted.
    fn reads_reports(&self) -> bool {
        false
    }

    fn has_pending(&self) -> bool {
        self.is_due
    }
}
