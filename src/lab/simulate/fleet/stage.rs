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

use super::machines::{Machine, Machines, PodStartTimes};
use super::messages::{
    BindingLoan, Delivery, DeliveryOutcome, Message, MessageDirection, PodBinding, PodSnapshot,
    ReliableDelivery, SchedulerAction,
};
use super::pods::PodSpec;
use super::schedulers::FleetScheduler;
use crate::simulate::events::EventQueue;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::ledger::StartProgress;
use stowage_scheduling::testkit::oracle::{BrokenInvariant, VictimFacts};
use stowage_scheduling::testkit::random::{Random, mix};
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::vocabulary::latency::EngineLatency;
use stowage_scheduling::vocabulary::node_reading::{EngineLoad, NodeReading};

/// Between two reports of each agent. Of those in which nothing has changed, as many are left out as leave what they say fresh.
const CHANGE_REPORT_DELAY: Millis = Millis::seconds(1);
const REPORT_INTERVAL: Millis = Millis::seconds(4);
/// Between two rounds of the scheduler while pods are pending; after rounds in which it did nothing, longer.
const ROUND_INTERVAL: Millis = Millis::seconds(1);
const MAX_ROUND_INTERVAL: Millis = Millis::seconds(5);
/// Simulations begin here, far enough from 0 that ages can be subtracted.
pub const START: Moment = Moment(1_000_000_000);

/// An event that the stage reports to its scenario. `T` are the scenario's timers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScenarioEvent<T> {
    Bound(PodUid),
    /// Its engine answers; how long that took is in [`StagePod`].
    Ready(PodUid),
    /// It was asked to leave, and is gone when its grace period ends.
    Terminating(PodUid),
    Deleted(PodUid),
    Timer(T),
}

enum StageEvent<T> {
    Message(Message),
    Act(SchedulerAction),
    /// Its images are there, and its containers run.
    Pulled(PodUid),
    Ready(PodUid),
    Deleted(PodUid),
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
    pub submitted_at: Moment,
    pub binding: Option<PodBinding>,
    /// How it started.
    pub start: Option<PodStartTimes>,
    /// When its engine answered.
    pub ready_at: Option<Moment>,
    pub checkpoint: Option<Moment>,
    pub terminating_since: Option<Moment>,
    /// The pod that it was asked to leave for.
    pub evicted_for: Option<PodUid>,
}

pub struct Stage<'s, T> {
    events: EventQueue<StageEvent<T>>,
    scenario_events: VecDeque<ScenarioEvent<T>>,
    pub machines: Machines,
    pods: BTreeMap<PodUid, StagePod>,
    /// How busy the engines of pods are, for the next reports.
    loads: BTreeMap<PodUid, EngineLoad>,
    /// How long the requests of pods' engines take, for the next reports.
    latencies: BTreeMap<PodUid, EngineLatency>,
    /// What engines that do not use all they were granted have of each of their GPUs.
    held: BTreeMap<PodUid, Bytes>,
    /// Nodes on which something has changed since their agents' last reports.
    changed: BTreeSet<NodeName>,
    scheduler: Box<dyn FleetScheduler + 's>,
    delivery: Box<dyn Delivery + 's>,
    pods_submitted: u64,
    /// How start times differ from what they should be.
    start_noise: Random,
    round_at: Option<Moment>,
    /// Time until the next round.
    round_pause: Millis,
    /// Invariants that the scheduler violated.
    pub violations: Vec<BrokenInvariant>,
    pub evictions: u64,
}

impl<'s, T> Stage<'s, T> {
    pub fn new(machines: Machines, scheduler: Box<dyn FleetScheduler + 's>, seed: u64) -> Self {
        Self::with_delivery(machines, scheduler, Box::new(ReliableDelivery), seed)
    }

    pub(crate) fn with_delivery(
        machines: Machines,
        mut scheduler: Box<dyn FleetScheduler + 's>,
        fates: Box<dyn Delivery + 's>,
        seed: u64,
    ) -> Self {
        scheduler.initialize(START, &machines);
        for machine in machines.iter().filter(|machine| !machine.images.is_empty()) {
            let (node, images) = (
                machine.spec.name.clone(),
                machine.images.iter().cloned().collect(),
            );
            scheduler.observe(START, &Message::Images { node, images });
        }
        let mut events = EventQueue::default();
        if scheduler.reads_reports() {
            events.schedule(START, StageEvent::Reports);
        }
        events.schedule(START, StageEvent::Round);
        Self {
            events,
            scenario_events: VecDeque::new(),
            machines,
            pods: BTreeMap::new(),
            loads: BTreeMap::new(),
            latencies: BTreeMap::new(),
            held: BTreeMap::new(),
            changed: BTreeSet::new(),
            scheduler,
            delivery: fates,
            pods_submitted: 0,
            start_noise: Random::seeded(seed, 0x57a6e),
            round_at: Some(START),
            round_pause: Millis::default(),
            violations: Vec::new(),
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
    pub fn schedule_timer(&mut self, when: Moment, what: T) {
        self.events.schedule(when, StageEvent::Timer(what));
    }

    /// A pod is created.
    pub fn submit(&mut self, spec: PodSpec) -> PodUid {
        self.pods_submitted += 1;
        // As random as real UIDs, so that ties by UID are broken at random; and the same under all schedulers.
        let uid = PodUid::parse(&format!("{:016x}", mix(self.pods_submitted)))
            .expect("digits are a name");
        let pod = StagePod {
            spec: Arc::new(spec),
            submitted_at: self.now(),
            binding: None,
            start: None,
            ready_at: None,
            checkpoint: None,
            terminating_since: None,
            evicted_for: None,
        };
        self.pods.insert(uid.clone(), pod);
        self.send_pod(&uid);
        self.schedule_round(self.now());
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
            self.send_pod(uid);
        }
    }

    /// How busy the pod's engine is, from the next report on.
    pub(crate) fn set_load(&mut self, uid: &PodUid, load: EngineLoad) {
        let bound = self.pods.get(uid).and_then(|pod| pod.binding.as_ref());
        let node = bound.map(|bound| bound.node.clone());
        if self.loads.insert(uid.clone(), load) != Some(load) {
            // What a step of the engines comes to has grown since the last one, and was reported as it grew.
            node.iter()
                .for_each(|node| self.report_within(node, Millis::default()));
        }
    }

    /// How long the requests of the pod's engine take, from the next report on.
    pub(crate) fn set_latency(&mut self, latency: EngineLatency) {
        let bound = self.pods.get(&latency.pod);
        let bound = bound.and_then(|pod| pod.binding.as_ref());
        let node = bound.map(|bound| bound.node.clone());
        if self.latencies.get(&latency.pod) != Some(&latency) {
            self.latencies.insert(latency.pod.clone(), latency);
            node.iter()
                .for_each(|node| self.report_within(node, Millis::default()));
        }
    }

    /// What the pod's engine, which is awake, has of each of its GPUs, from the next report on. Beyond what a GPU has, the driver ends
    /// pods that borrow there and returns them; they are gone at once.
    pub(crate) fn set_held(&mut self, uid: &PodUid, held: Bytes) -> Vec<PodUid> {
        self.held.insert(uid.clone(), held);
        let Some(bound) = self.pods.get(uid).and_then(|pod| pod.binding.clone()) else {
            return Vec::new();
        };
        let mut ended = Vec::new();
        for device in bound.devices.iter() {
            while let Some(borrower) = self.borrower_beyond_memory(&bound.node, device) {
                self.remove(&borrower);
                ended.push(borrower);
            }
        }
        ended
    }

    /// A pod that borrows on this GPU, if its pods have more than it has.
    fn borrower_beyond_memory(&self, node: &NodeName, device: &GpuUuid) -> Option<PodUid> {
        let machine = self.machines.get(node)?;
        let gpu = machine.gpus.iter().find(|gpu| gpu.uuid == *device)?;
        let held = |(pod, granted): (&PodUid, &Bytes)| *self.held.get(pod).unwrap_or(granted);
        if gpu.pods.iter().map(held).sum::<Bytes>() <= machine.spec.vram {
            return None;
        }
        let borrows = |pod: &&PodUid| {
            let binding = self.pods.get(*pod).and_then(|pod| pod.binding.as_ref());
            binding.is_some_and(|bound| bound.loan.borrows && bound.loan.has_vram_limits)
        };
        gpu.pods.keys().find(borrows).cloned()
    }

    /// What happens next, up to `end`; `None` at the end.
    pub fn next(&mut self, end: Moment) -> Option<ScenarioEvent<T>> {
        loop {
            if let Some(happened) = self.scenario_events.pop_front() {
                return Some(happened);
            }
            let event = self.events.pop()?;
            if self.events.now() > end {
                return None;
            }
            match event {
                StageEvent::Message(message) => self.deliver(&message),
                StageEvent::Act(act) => self.apply_action(act),
                StageEvent::Pulled(uid) => self.send(Message::Start {
                    uid,
                    progress: StartProgress::Running,
                }),
                StageEvent::Ready(uid) => self.handle_ready(&uid),
                StageEvent::Deleted(uid) => self.handle_deleted(&uid),
                StageEvent::Timer(what) => return Some(ScenarioEvent::Timer(what)),
                StageEvent::Round => self.round(),
                StageEvent::Reports => {
                    self.report_all();
                    self.events
                        .schedule(self.now() + REPORT_INTERVAL, StageEvent::Reports);
                }
                StageEvent::Report(node) => self.report_change(node),
            }
        }
    }

    /// Every agent reports what its node has: GPUs, files and engines.
    fn report_all(&mut self) {
        let now = self.now();
        let reading = |machine: &Machine| {
            (
                machine.spec.name.clone(),
                machine.reading(now, &self.loads, &self.latencies, &self.held),
            )
        };
        let readings: Vec<(NodeName, NodeReading)> = self.machines.iter().map(reading).collect();
        readings.into_iter().for_each(|(node, reading)| {
            self.send(Message::Reading {
                node,
                reading: reading.into(),
            })
        });
    }

    fn record_change(&mut self, node: &NodeName) {
        self.report_within(node, CHANGE_REPORT_DELAY);
    }

    fn report_within(&mut self, node: &NodeName, time: Millis) {
        if self.scheduler.reads_reports() && self.changed.insert(node.clone()) {
            self.events
                .schedule(self.now() + time, StageEvent::Report(node.clone()));
        }
    }

    fn report_change(&mut self, node: NodeName) {
        let now = self.now();
        self.changed.remove(&node);
        let Some(reading) = self
            .machines
            .get(&node)
            .map(|machine| machine.reading(now, &self.loads, &self.latencies, &self.held))
        else {
            return;
        };
        self.send(Message::Reading {
            node,
            reading: reading.into(),
        });
        // What it freed is of use to a pod that waits.
        if self.scheduler.has_pending() {
            self.round_pause = Millis::default();
            self.schedule_round(now);
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
        self.round_pause = if acts.is_empty() {
            (self.round_pause + ROUND_INTERVAL).min(MAX_ROUND_INTERVAL)
        } else {
            ROUND_INTERVAL
        };
        acts.into_iter().for_each(|act| self.send_action(act));
        if self.scheduler.has_pending() {
            self.schedule_round(now + self.round_pause);
        }
    }

    /// There is a round at `when` at the latest.
    fn schedule_round(&mut self, when: Moment) {
        if self.round_at.is_none_or(|next| when < next) {
            self.round_at = Some(when);
            self.events.schedule(when, StageEvent::Round);
        }
    }

    fn send(&mut self, message: Message) {
        let now = self.now();
        match self
            .delivery
            .outcome_of(now, MessageDirection::ToScheduler(&message))
        {
            DeliveryOutcome::Arrives { after: Millis(0) } => self.deliver(&message),
            DeliveryOutcome::Arrives { after } => self
                .events
                .schedule(now + after, StageEvent::Message(message)),
            DeliveryOutcome::Twice { after, again_after } => {
                self.events
                    .schedule(now + after, StageEvent::Message(message.clone()));
                self.events
                    .schedule(now + again_after, StageEvent::Message(message));
            }
        }
    }

    fn deliver(&mut self, message: &Message) {
        let now = self.now();
        self.scheduler.observe(now, message);
        // A reading wakes no scheduler: the next round sees it.
        if !matches!(message, Message::Reading { .. }) && self.scheduler.has_pending() {
            self.round_pause = Millis::default();
            self.schedule_round(now);
        }
    }

    fn send_action(&mut self, act: SchedulerAction) {
        let now = self.now();
        match self
            .delivery
            .outcome_of(now, MessageDirection::FromScheduler)
        {
            DeliveryOutcome::Arrives { after: Millis(0) } => self.apply_action(act),
            DeliveryOutcome::Arrives { after } => {
                self.events.schedule(now + after, StageEvent::Act(act))
            }
            DeliveryOutcome::Twice { after, again_after } => {
                self.events
                    .schedule(now + after, StageEvent::Act(act.clone()));
                self.events
                    .schedule(now + again_after, StageEvent::Act(act));
            }
        }
    }

    fn apply_action(&mut self, act: SchedulerAction) {
        match act {
            SchedulerAction::Bind {
                uid,
                node,
                devices,
                loan,
            } => self.bind(uid, node, devices, loan),
            SchedulerAction::Evict { uid, preemptor } => self.evict(&uid, preemptor.as_ref()),
        }
    }

    /// The API server's part of a bind: a pod is bound once.
    fn bind(&mut self, uid: PodUid, node: NodeName, devices: Arc<[GpuUuid]>, loan: BindingLoan) {
        let now = self.now();
        let Some(pod) = self
            .pods
            .get_mut(&uid)
            .filter(|pod| pod.binding.is_none() && pod.terminating_since.is_none())
        else {
            return self.send(Message::BindingRefused(uid));
        };
        let spec = pod.spec.clone();
        pod.binding = Some(PodBinding {
            node: node.clone(),
            devices: devices.clone(),
            is_starting: true,
            since: now,
            loan,
        });
        self.violations.extend(
            self.machines
                .bind(&uid, &spec, &node, &devices, loan.borrows),
        );
        let start = self.machines.start(&spec, &node, &devices);
        pod.start = Some(start);
        // No two starts take exactly as long.
        let factor = 0.95 + 0.1 * self.start_noise.unit_interval();
        let takes = Millis((start.load.0 as f64 * factor).round() as u64);
        self.events
            .schedule(now + start.pull, StageEvent::Pulled(uid.clone()));
        self.events
            .schedule(now + start.pull + takes, StageEvent::Ready(uid.clone()));
        self.send(Message::Bound {
            uid: uid.clone(),
            node: node.clone(),
            devices,
        });
        self.send_pod(&uid);
        self.record_change(&node);
        if spec.image.is_some() {
            self.send_images(&node);
        }
        self.scenario_events.push_back(ScenarioEvent::Bound(uid));
    }

    fn evict(&mut self, uid: &PodUid, preemptor: Option<&PodUid>) {
        let now = self.now();
        let preemptor_priority = preemptor
            .and_then(|uid| self.pods.get(uid))
            .map(|pod| pod.spec.priority);
        let Some(pod) = self
            .pods
            .get_mut(uid)
            .filter(|pod| pod.terminating_since.is_none())
        else {
            return;
        };
        // Any class may be evicted here: the policies of scenarios say which is.
        let facts = VictimFacts {
            priority: pod.spec.priority,
            is_preemptible: true,
            is_protected: false,
        };
        if let Some((preemptor, above)) = preemptor.zip(preemptor_priority) {
            self.violations
                .extend(facts.check(uid, preemptor, above).err());
        }
        pod.terminating_since = Some(now);
        pod.evicted_for = preemptor.cloned();
        let grace = pod.spec.grace;
        self.evictions += 1;
        self.events
            .schedule(now + grace, StageEvent::Deleted(uid.clone()));
        self.send_pod(uid);
        self.scenario_events
            .push_back(ScenarioEvent::Terminating(uid.clone()));
    }

    fn handle_ready(&mut self, uid: &PodUid) {
        let now = self.now();
        let Some(pod) = self
            .pods
            .get_mut(uid)
            .filter(|pod| pod.terminating_since.is_none())
        else {
            return;
        };
        pod.ready_at = Some(now);
        pod.binding
            .iter_mut()
            .for_each(|bound| bound.is_starting = false);
        let node = pod.binding.as_ref().map(|bound| bound.node.clone());
        self.send(Message::Start {
            uid: uid.clone(),
            progress: StartProgress::Ready,
        });
        self.send_pod(uid);
        node.iter().for_each(|node| self.record_change(node));
        self.scenario_events
            .push_back(ScenarioEvent::Ready(uid.clone()));
    }

    fn handle_deleted(&mut self, uid: &PodUid) {
        if self.remove(uid) {
            self.scenario_events
                .push_back(ScenarioEvent::Deleted(uid.clone()));
        }
    }

    fn remove(&mut self, uid: &PodUid) -> bool {
        let Some(pod) = self.pods.remove(uid) else {
            return false;
        };
        self.loads.remove(uid);
        self.held.remove(uid);
        if let Some(bound) = &pod.binding {
            self.machines.remove(uid, &bound.node);
            self.record_change(&bound.node);
        }
        self.send(Message::PodDeleted(uid.clone()));
        true
    }

    fn send_images(&mut self, node: &NodeName) {
        let Some(machine) = self.machines.get(node) else {
            return;
        };
        let images = machine.images.iter().cloned().collect();
        self.send(Message::Images {
            node: node.clone(),
            images,
        });
    }

    fn send_pod(&mut self, uid: &PodUid) {
        let Some(pod) = self.pods.get(uid) else {
            return;
        };
        let shown = PodSnapshot {
            uid: uid.clone(),
            spec: pod.spec.clone(),
            bound: pod.binding.clone(),
            checkpoint: pod.checkpoint,
            terminating_since: pod.terminating_since,
        };
        self.send(Message::Pod(shown));
    }
}
