//! The stage of every scenario: one virtual clock, the fleet's hardware, and pods from their submission to their end. A scheduler
//! places them; what it does is checked against the hardware, not against its own ledger.
//!
//! ```text
//!  scenario ── submit, finish, checkpoint, report ──► Stage ── messages ──► scheduler
//!     ▲                                                 │  ▲                    │
//!     └── Bound, Ready, Leaving, Gone, Timer ───────────┘  └─── Bind, Evict ────┘
//! ```
//!
//! A pod that is bound starts for as long as its image and weights take on that node. A pod that is evicted has its grace period
//! and is gone after it; what it does in that time is the scenario's. Messages and actions may be delayed or repeated ([`Delivery`]).

use super::machines::{Machine, Machines, Start};
use super::messages::{Act, Envelope, Fate, Fates, Message, PodBound, PodShown, Reliable};
use super::pods::PodSpec;
use super::schedulers::FleetScheduler;
use crate::simulate::events::EventQueue;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::ledger::StartProgress;
use stowage_scheduling::testkit::oracle::{BrokenPromise, VictimFacts};
use stowage_scheduling::testkit::random::{Random, mixed};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::vocabulary::node_reading::{EngineLoad, NodeReading};

/// Between two reports of each agent. Of those in which nothing has changed, as many are left out as leave what they say fresh.
const REPORT: Millis = Millis::seconds(1);
const REPORTS: Millis = Millis::seconds(4);
/// Between two rounds of the scheduler while pods are pending; after rounds in which it did nothing, longer.
const ROUND: Millis = Millis::seconds(1);
const LONGEST_ROUND: Millis = Millis::seconds(5);
/// Simulations begin here, far enough from 0 that ages can be subtracted.
pub const START: Moment = Moment(1_000_000_000);

/// An event that the stage reports to its scenario. `T` are the scenario's timers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScenarioEvent<T> {
    Bound(PodUid),
    /// Its engine answers; how long that took is in [`StagePod`].
    Ready(PodUid),
    /// It was asked to leave, and is gone when its grace period ends.
    Leaving(PodUid),
    Gone(PodUid),
    Timer(T),
}

enum StageEvent<T> {
    Message(Message),
    Act(Act),
    /// Its images are there, and its containers run.
    Pulled(PodUid),
    Ready(PodUid),
    Gone(PodUid),
    Round,
    /// All agents report.
    Reports,
    /// The agent of a node reports what has changed there.
    Report(NodeName),
    Timer(T),
}

/// A pod on the stage.
#[derive(Debug, Clone)]
pub struct StagePod {
    pub spec: Arc<PodSpec>,
    pub submitted: Moment,
    pub bound: Option<PodBound>,
    /// How it started.
    pub start: Option<Start>,
    /// When its engine answered.
    pub ready: Option<Moment>,
    pub checkpoint: Option<Moment>,
    pub leaving: Option<Moment>,
    /// The pod that it was asked to leave for.
    pub evicted_for: Option<PodUid>,
}

pub struct Stage<'s, T> {
    events: EventQueue<StageEvent<T>>,
    happened: VecDeque<ScenarioEvent<T>>,
    pub machines: Machines,
    pods: BTreeMap<PodUid, StagePod>,
    /// How busy the engines of pods are, for the next reports.
    loads: BTreeMap<PodUid, EngineLoad>,
    /// Nodes on which something has changed since their agents' last reports.
    changed: BTreeSet<NodeName>,
    scheduler: Box<dyn FleetScheduler + 's>,
    fates: Box<dyn Fates + 's>,
    submitted: u64,
    /// How start times differ from what they should be.
    starts: Random,
    round_at: Option<Moment>,
    /// Time until the next round.
    pause: Millis,
    /// Invariants that the scheduler violated.
    pub broken: Vec<BrokenPromise>,
    pub evictions: u64,
}

impl<'s, T> Stage<'s, T> {
    pub fn new(machines: Machines, scheduler: Box<dyn FleetScheduler + 's>, seed: u64) -> Self {
        Self::with_fates(machines, scheduler, Box::new(Reliable), seed)
    }

    pub(crate) fn with_fates(
        machines: Machines,
        mut scheduler: Box<dyn FleetScheduler + 's>,
        fates: Box<dyn Fates + 's>,
        seed: u64,
    ) -> Self {
        scheduler.meet(START, &machines);
        for machine in machines.iter().filter(|machine| !machine.images.is_empty()) {
            let (node, images) = (
                machine.spec.name.clone(),
                machine.images.iter().cloned().collect(),
            );
            scheduler.observe(START, &Message::Images { node, images });
        }
        let mut events = EventQueue::default();
        if scheduler.reads_reports() {
            events.at(START, StageEvent::Reports);
        }
        events.at(START, StageEvent::Round);
        Self {
            events,
            happened: VecDeque::new(),
            machines,
            pods: BTreeMap::new(),
            loads: BTreeMap::new(),
            changed: BTreeSet::new(),
            scheduler,
            fates,
            submitted: 0,
            starts: Random::seeded(seed, 0x57a6e),
            round_at: Some(START),
            pause: Millis::default(),
            broken: Vec::new(),
            evictions: 0,
        }
    }

    pub fn now(&self) -> Moment {
        self.events.now().max(START)
    }

    pub fn pod(&self, uid: &PodUid) -> Option<&StagePod> {
        self.pods.get(uid)
    }

    pub fn pods(&self) -> impl Iterator<Item = (&PodUid, &StagePod)> {
        self.pods.iter()
    }

    /// Schedules the scenario's timer `what` for that time.
    pub fn at(&mut self, when: Moment, what: T) {
        self.events.at(when, StageEvent::Timer(what));
    }

    /// A pod is created.
    pub fn submit(&mut self, spec: PodSpec) -> PodUid {
        self.submitted += 1;
        // As random as real UIDs, so that ties by UID are broken at random; and the same under all schedulers.
        let uid =
            PodUid::parse(&format!("{:016x}", mixed(self.submitted))).expect("digits are a name");
        let pod = StagePod {
            spec: Arc::new(spec),
            submitted: self.now(),
            bound: None,
            start: None,
            ready: None,
            checkpoint: None,
            leaving: None,
            evicted_for: None,
        };
        self.pods.insert(uid.clone(), pod);
        self.show(&uid);
        self.round_by(self.now());
        uid
    }

    /// The pod has ended, or its owner deletes it, and it is gone at once.
    pub fn finish(&mut self, uid: &PodUid) {
        self.remove(uid);
    }

    /// The pod has saved its work.
    pub fn checkpoint(&mut self, uid: &PodUid) {
        let now = self.now();
        if let Some(pod) = self.pods.get_mut(uid) {
            pod.checkpoint = Some(now);
            self.show(uid);
        }
    }

    /// How busy the pod's engine is, from the next report on.
    pub(crate) fn set_load(&mut self, uid: &PodUid, load: EngineLoad) {
        let bound = self.pods.get(uid).and_then(|pod| pod.bound.as_ref());
        let node = bound.map(|bound| bound.node.clone());
        if self.loads.insert(uid.clone(), load) != Some(load) {
            // What a step of the engines comes to has grown since the last one, and was reported as it grew.
            node.iter()
                .for_each(|node| self.report_within(node, Millis::default()));
        }
    }

    /// What happens next, up to `end`; `None` at the end.
    pub fn next(&mut self, end: Moment) -> Option<ScenarioEvent<T>> {
        loop {
            if let Some(happened) = self.happened.pop_front() {
                return Some(happened);
            }
            let event = self.events.take()?;
            if self.events.now() > end {
                return None;
            }
            match event {
                StageEvent::Message(message) => self.deliver(&message),
                StageEvent::Act(act) => self.act(act),
                StageEvent::Pulled(uid) => self.send(Message::Start {
                    uid,
                    progress: StartProgress::Running,
                }),
                StageEvent::Ready(uid) => self.ready(&uid),
                StageEvent::Gone(uid) => self.gone(&uid),
                StageEvent::Timer(what) => return Some(ScenarioEvent::Timer(what)),
                StageEvent::Round => self.round(),
                StageEvent::Reports => {
                    self.report_all();
                    self.events.at(self.now() + REPORTS, StageEvent::Reports);
                }
                StageEvent::Report(node) => self.report_change(node),
            }
        }
    }

    /// Every agent reports what its node has: GPUs, files and engines.
    fn report_all(&mut self) {
        let now = self.now();
        let reading =
            |machine: &Machine| (machine.spec.name.clone(), machine.reading(now, &self.loads));
        let readings: Vec<(NodeName, NodeReading)> = self.machines.iter().map(reading).collect();
        readings.into_iter().for_each(|(node, reading)| {
            self.send(Message::Reading {
                node,
                reading: reading.into(),
            })
        });
    }

    fn note_change(&mut self, node: &NodeName) {
        self.report_within(node, REPORT);
    }

    fn report_within(&mut self, node: &NodeName, time: Millis) {
        if self.scheduler.reads_reports() && self.changed.insert(node.clone()) {
            self.events
                .at(self.now() + time, StageEvent::Report(node.clone()));
        }
    }

    fn report_change(&mut self, node: NodeName) {
        let now = self.now();
        self.changed.remove(&node);
        let Some(reading) = self
            .machines
            .get(&node)
            .map(|machine| machine.reading(now, &self.loads))
        else {
            return;
        };
        self.send(Message::Reading {
            node,
            reading: reading.into(),
        });
        // What it freed is of use to a pod that waits.
        if self.scheduler.has_pending() {
            self.pause = Millis::default();
            self.round_by(now);
        }
    }

    fn round(&mut self) {
        let now = self.now();
        // An earlier round took the place of this one.
        if self.round_at != Some(now) {
            return;
        }
        self.round_at = None;
        let acts = self.scheduler.round(now, &self.machines);
        self.pause = if acts.is_empty() {
            (self.pause + ROUND).min(LONGEST_ROUND)
        } else {
            ROUND
        };
        acts.into_iter().for_each(|act| self.carry(act));
        if self.scheduler.has_pending() {
            self.round_by(now + self.pause);
        }
    }

    /// There is a round at `when` at the latest.
    fn round_by(&mut self, when: Moment) {
        if self.round_at.is_none_or(|next| when < next) {
            self.round_at = Some(when);
            self.events.at(when, StageEvent::Round);
        }
    }

    fn send(&mut self, message: Message) {
        let now = self.now();
        match self.fates.fate_of(now, Envelope::ToScheduler(&message)) {
            Fate::Arrives { after: Millis(0) } => self.deliver(&message),
            Fate::Arrives { after } => self.events.at(now + after, StageEvent::Message(message)),
            Fate::Twice { after, again_after } => {
                self.events
                    .at(now + after, StageEvent::Message(message.clone()));
                self.events
                    .at(now + again_after, StageEvent::Message(message));
            }
        }
    }

    fn deliver(&mut self, message: &Message) {
        let now = self.now();
        self.scheduler.observe(now, message);
        // A reading wakes no scheduler: the next round sees it.
        if !matches!(message, Message::Reading { .. }) && self.scheduler.has_pending() {
            self.pause = Millis::default();
            self.round_by(now);
        }
    }

    fn carry(&mut self, act: Act) {
        let now = self.now();
        match self.fates.fate_of(now, Envelope::FromScheduler) {
            Fate::Arrives { after: Millis(0) } => self.act(act),
            Fate::Arrives { after } => self.events.at(now + after, StageEvent::Act(act)),
            Fate::Twice { after, again_after } => {
                self.events.at(now + after, StageEvent::Act(act.clone()));
                self.events.at(now + again_after, StageEvent::Act(act));
            }
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Bind { uid, node, devices } => self.bind(uid, node, devices),
            Act::Evict { uid, preemptor } => self.evict(&uid, preemptor.as_ref()),
        }
    }

    /// The API server's part of a bind: a pod is bound once.
    fn bind(&mut self, uid: PodUid, node: NodeName, devices: Arc<[GpuUuid]>) {
        let now = self.now();
        let Some(pod) = self
            .pods
            .get_mut(&uid)
            .filter(|pod| pod.bound.is_none() && pod.leaving.is_none())
        else {
            return self.send(Message::NotBound(uid));
        };
        let spec = pod.spec.clone();
        pod.bound = Some(PodBound {
            node: node.clone(),
            devices: devices.clone(),
            starting: true,
            since: now,
        });
        self.broken
            .extend(self.machines.place(&uid, &spec, &node, &devices));
        let start = self.machines.start(&spec, &node, &devices);
        pod.start = Some(start);
        // No two starts take exactly as long.
        let factor = 0.95 + 0.1 * self.starts.share();
        let takes = Millis((start.load.0 as f64 * factor).round() as u64);
        self.events
            .at(now + start.pull, StageEvent::Pulled(uid.clone()));
        self.events
            .at(now + start.pull + takes, StageEvent::Ready(uid.clone()));
        self.send(Message::Bound {
            uid: uid.clone(),
            node: node.clone(),
            devices,
        });
        self.show(&uid);
        self.note_change(&node);
        if spec.image.is_some() {
            self.show_images(&node);
        }
        self.happened.push_back(ScenarioEvent::Bound(uid));
    }

    fn evict(&mut self, uid: &PodUid, preemptor: Option<&PodUid>) {
        let now = self.now();
        let above = preemptor
            .and_then(|uid| self.pods.get(uid))
            .map(|pod| pod.spec.priority);
        let Some(pod) = self.pods.get_mut(uid).filter(|pod| pod.leaving.is_none()) else {
            return;
        };
        // Any class may be evicted here: the policies of scenarios say which is.
        let facts = VictimFacts {
            priority: pod.spec.priority,
            is_preemptible: true,
            is_protected: false,
        };
        if let Some((preemptor, above)) = preemptor.zip(above) {
            self.broken.extend(facts.check(uid, preemptor, above).err());
        }
        pod.leaving = Some(now);
        pod.evicted_for = preemptor.cloned();
        let grace = pod.spec.grace;
        self.evictions += 1;
        self.events.at(now + grace, StageEvent::Gone(uid.clone()));
        self.show(uid);
        self.happened.push_back(ScenarioEvent::Leaving(uid.clone()));
    }

    fn ready(&mut self, uid: &PodUid) {
        let now = self.now();
        let Some(pod) = self.pods.get_mut(uid).filter(|pod| pod.leaving.is_none()) else {
            return;
        };
        pod.ready = Some(now);
        pod.bound
            .iter_mut()
            .for_each(|bound| bound.starting = false);
        let node = pod.bound.as_ref().map(|bound| bound.node.clone());
        self.send(Message::Start {
            uid: uid.clone(),
            progress: StartProgress::Ready,
        });
        self.show(uid);
        node.iter().for_each(|node| self.note_change(node));
        self.happened.push_back(ScenarioEvent::Ready(uid.clone()));
    }

    fn gone(&mut self, uid: &PodUid) {
        if self.remove(uid) {
            self.happened.push_back(ScenarioEvent::Gone(uid.clone()));
        }
    }

    fn remove(&mut self, uid: &PodUid) -> bool {
        let Some(pod) = self.pods.remove(uid) else {
            return false;
        };
        self.loads.remove(uid);
        if let Some(bound) = &pod.bound {
            self.machines.remove(uid, &bound.node);
            self.note_change(&bound.node);
        }
        self.send(Message::PodGone(uid.clone()));
        true
    }

    fn show_images(&mut self, node: &NodeName) {
        let Some(machine) = self.machines.get(node) else {
            return;
        };
        let images = machine.images.iter().cloned().collect();
        self.send(Message::Images {
            node: node.clone(),
            images,
        });
    }

    fn show(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get(uid) else {
            return;
        };
        let shown = PodShown {
            uid: uid.clone(),
            spec: pod.spec.clone(),
            bound: pod.bound.clone(),
            checkpoint: pod.checkpoint,
            leaving: pod.leaving,
        };
        self.send(Message::Pod(shown));
    }
}
