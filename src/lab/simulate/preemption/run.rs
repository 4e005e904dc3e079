//! One run: a ledger as the extender has it, and jobs that arrive, load, work, save, are evicted, return and end.
//!
//! Every pod is treated as in a cluster: observed, placed by the rank's shortlist, assumed and confirmed; or a reservation is
//! made for it, its victims are evicted, and it is bound when the last of them is gone. Only the choice of victims is not
//! always Stowage's ([`VictimOrder`]).

use super::backlog::{Backlog, JobKind};
use super::orders::{VictimChoice, VictimOrder};
use super::setup::{add_node, demands};
use super::tally::{Counter, GpuTime, PreemptionTally};
use super::workload::{Job, JobRole, Workload};
use crate::ids::{GpuUuid, NodeName, OwnerUid, PodKey, PodUid};
use crate::lab::simulate::events::EventQueue;
use crate::lab::simulate::random::mixed;
use crate::scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation};
use crate::scheduling::placing::fit::fit;
use crate::scheduling::placing::rank;
use crate::scheduling::placing::rank::ScheduleAttempt;
use crate::scheduling::policy::Policy;
use crate::scheduling::verbs::Cluster;
use crate::scheduling::verbs::bind::{BindAnswer, BindAsked, BindDecision};
use crate::scheduling::verbs::binding::BindingWritten;
use crate::scheduling::verbs::observe::{BudgetsVisible, PodObserved, PodReleased};
use crate::scheduling::verbs::tick::Tick;
use crate::scheduling::verbs::wait::{PodEvicted, Reserve};
use crate::scheduling::vocabulary::demand::{DEFAULT_GRACE, Demand};
use crate::scheduling::vocabulary::disruption_budget::BudgetVisibility;
use crate::scheduling::vocabulary::disruption_info::{
    CheckpointAge, DisruptionInfo, ObservedDisruptionInfo, PodDeletion,
};
use crate::scheduling::vocabulary::model_tier::time_to_ready;
use crate::scheduling::vocabulary::placement::Reservation;
use crate::units::{Millis, Moment};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

enum JobEvent {
    /// The job with this index in the workload.
    Comes(usize),
    /// Its engine answers.
    Ready(PodUid),
    Saves(PodUid),
    Ends(PodUid),
    /// An evicted pod is gone.
    Leaves(PodUid),
}

pub struct PreemptionRun<'w> {
    workload: &'w Workload,
    order: VictimOrder,
    pub ledger: Cluster,
    policy: Arc<Policy>,
    events: EventQueue<JobEvent>,
    pods: BTreeMap<PodUid, SimulatedPod>,
    backlog: Backlog,
    progress: Vec<JobProgress>,
    demands: BTreeMap<JobKind, Demand>,
    counter: Counter,
}

/// A job's progress.
#[derive(Debug, Clone, Copy, Default)]
struct JobProgress {
    /// How many pods it has had.
    pods: u32,
    /// Work that is saved, so that no eviction loses it.
    saved: Millis,
}

struct SimulatedPod {
    job: usize,
    run: Option<RunningPod>,
}

/// A pod on its node.
#[derive(Clone)]
struct RunningPod {
    node: NodeName,
    devices: Option<Arc<[GpuUuid]>>,
    /// When it last saved, or began to work.
    saved_at: Moment,
    is_leaving: bool,
}

/// Runs the workload to its end.
pub fn play(workload: &Workload, order: VictimOrder) -> PreemptionTally {
    let mut world = PreemptionRun::new(workload, order);
    while world.step() {}
    world.tally()
}

impl<'w> PreemptionRun<'w> {
    pub fn new(workload: &'w Workload, order: VictimOrder) -> Self {
        let policy = Arc::new(Policy::default());
        let mut ledger = Cluster::new(policy.clone());
        // There are no budgets, and the ledger knows it.
        ledger.apply(BudgetsVisible(BudgetVisibility::Complete));
        workload.nodes.iter().for_each(|(name, gpus)| add_node(&mut ledger, name, *gpus));
        let mut events = EventQueue::default();
        for (job, Job { comes, .. }) in workload.jobs.iter().enumerate() {
            events.at(*comes, JobEvent::Comes(job));
        }
        Self {
            workload,
            order,
            ledger,
            demands: demands(workload, &policy),
            policy,
            events,
            pods: BTreeMap::new(),
            backlog: Backlog::default(),
            progress: vec![JobProgress::default(); workload.jobs.len()],
            counter: Counter::new(workload.extent),
        }
    }

    /// Handles the next event; false at the end.
    pub fn step(&mut self) -> bool {
        let event = self.events.take();
        let now = self.events.now();
        self.counter.until(now);
        let Some(event) = event.filter(|_| now < self.workload.extent.ends()) else { return false };
        let given_up = self.ledger.apply(Tick { now, is_leading: true });
        given_up.iter().for_each(|uid| self.turn_away(uid));
        match event {
            JobEvent::Comes(job) if self.workload.jobs[job].role == JobRole::Arrival => self.admit(job),
            JobEvent::Comes(job) => self.take_in(job),
            JobEvent::Ready(uid) => self.note_ready(&uid),
            JobEvent::Saves(uid) => self.save(&uid),
            JobEvent::Ends(uid) => self.end(&uid),
            JobEvent::Leaves(uid) => self.leave(&uid),
        }
        true
    }

    pub fn tally(&mut self) -> PreemptionTally {
        self.counter.until(self.workload.extent.ends());
        self.counter.tally
    }

    /// A pod of higher priority arrives: it is placed, preempts, or is rejected.
    fn admit(&mut self, job: usize) {
        self.counter.note(self.workload.jobs[job].comes, |tally| tally.arrivals += 1);
        let uid = self.enter(job);
        let is_placed = match self.free_node(self.kind(job)) {
            Some(node) => self.start(&uid, &node),
            None => self.make_room(&uid, job),
        };
        if !is_placed {
            self.turn_away(&uid);
        }
    }

    /// A resident arrives: it is pending, behind earlier ones of its kind.
    fn take_in(&mut self, job: usize) {
        let kind = self.kind(job);
        let free = if self.backlog.has(kind) { None } else { self.free_node(kind) };
        let Some(node) = free else { return self.backlog.put(kind, job) };
        let uid = self.enter(job);
        self.start(&uid, &node);
    }

    /// A pod of the job is observed, and is pending.
    fn enter(&mut self, job: usize) -> PodUid {
        let number = (job as u64) << 32 | u64::from(self.progress[job].pods);
        self.progress[job].pods += 1;
        // As random as real UIDs, so that ties by UID are broken at random; and the same in all orders.
        let uid = PodUid::parse(&format!("{:016x}", mixed(number))).expect("digits are a name");
        self.pods.insert(uid.clone(), SimulatedPod { job, run: None });
        self.see(&uid, ObservedPhase::Waiting(ObservedWaiting::default()), CheckpointAge::None, None);
        uid
    }

    /// The best node on which it fits now.
    fn free_node(&mut self, kind: JobKind) -> Option<NodeName> {
        let (snapshot, demand) = (self.ledger.snapshot(), &self.demands[&kind]);
        let names = self.workload.nodes.iter().map(|(name, _)| name.as_str());
        let attempt = ScheduleAttempt { limit: 1, ..ScheduleAttempt::unreserved(&self.policy) };
        let list = rank::shortlist(&snapshot, demand, names, attempt);
        list.best.first().map(|best| snapshot.nodes()[best.node].name.clone())
    }

    /// Binds the pod; false if it does not fit on the node.
    fn start(&mut self, uid: &PodUid, node: &NodeName) -> bool {
        let Some(asked) = BindAsked::of(&self.ledger, uid, node) else { return false };
        let Ok(BindAnswer::Write(BindDecision { placement, .. })) = self.ledger.apply(asked) else {
            return false;
        };
        let devices = placement.recorded();
        self.ledger.apply(BindingWritten { uid: uid.clone(), node: node.clone(), devices: devices.clone() });
        let job = self.pods[uid].job;
        let Job { role, size, work, saves_every, comes } = self.workload.jobs[job];
        let (now, ready) = (self.events.now(), self.events.now() + self.time_to_load(job));
        self.counter.begins(size);
        if role == JobRole::Arrival {
            self.counter.note(comes, |tally| tally.admitted += 1);
            self.events.at(ready, JobEvent::Ready(uid.clone()));
            self.events.at(now + work, JobEvent::Ends(uid.clone()));
        } else {
            let left = Millis(work.0 - self.progress[job].saved.0);
            self.events.at(ready + saves_every, JobEvent::Saves(uid.clone()));
            self.events.at(ready + left, JobEvent::Ends(uid.clone()));
        }
        let run = RunningPod { node: node.clone(), devices, saved_at: ready, is_leaving: false };
        self.pods.insert(uid.clone(), SimulatedPod { job, run: Some(run) });
        true
    }

    /// Makes a reservation for the pod, and evicts the pods in its way; false if no set of evictions would be enough.
    fn make_room(&mut self, uid: &PodUid, job: usize) -> bool {
        let preemptor = self.ledger.preemptor(uid);
        let rooms = self.ledger.candidates_for(&preemptor, self.workload.nodes.iter().map(|(name, _)| name));
        let demand = &self.demands[&self.kind(job)];
        let Some(choice) = self.order.choose(&self.ledger, &rooms, demand) else { return false };
        let Some(reservation) = self.reservation(&choice) else { return false };
        if self.ledger.apply(Reserve { uid: uid.clone(), reservation }).is_err() {
            return false;
        }
        self.counter.note(self.events.now(), |tally| {
            tally.preempted_for += 1;
            tally.cut_short += u64::from(!choice.exact);
        });
        choice.evicted.iter().for_each(|victim| self.evict(victim));
        true
    }

    fn reservation(&self, choice: &VictimChoice) -> Option<Reservation> {
        let node = self.ledger.node(&choice.node)?;
        Some(Reservation {
            node: choice.node.clone(),
            devices: choice.gpus.iter().map(|place| node.devices[place].uuid.clone()).collect(),
            victims: choice.awaited.clone().into(),
            deadline: self.events.now() + choice.grace + self.policy.preemption.reservation_slack,
        })
    }

    /// Evicts the pod: unsaved work is lost.
    fn evict(&mut self, uid: &PodUid) {
        let now = self.events.now();
        let Some(SimulatedPod { job, run: Some(run) }) = self.pods.get_mut(uid) else { return };
        run.is_leaving = true;
        let (job, lost) = (*job, now.since(run.saved_at));
        let (size, reload) = (self.workload.jobs[job].size, self.time_to_load(job));
        self.counter.note(now, |tally| {
            tally.victims += 1;
            tally.lost_work = tally.lost_work.plus(GpuTime::of(size, lost));
            tally.reload = tally.reload.plus(GpuTime::of(size, reload));
        });
        self.ledger.apply(PodEvicted(uid.clone()));
        // Victims take all of it.
        let leaving = PodDeletion { asked_ago: Millis::default(), grace: DEFAULT_GRACE };
        self.see_running(uid, CheckpointAge::None, Some(leaving));
        self.events.at(now + DEFAULT_GRACE, JobEvent::Leaves(uid.clone()));
    }

    /// An evicted pod is gone, and its job is pending again; a pod whose last victim this was is bound.
    fn leave(&mut self, uid: &PodUid) {
        let Some((job, node)) = self.remove(uid) else { return };
        self.backlog.put(self.kind(job), job);
        for held in self.ledger.reservation_status().into_iter().filter(|held| held.is_free) {
            if !self.start(&held.uid, &held.reservation.node) {
                self.turn_away(&held.uid);
            }
        }
        self.fill(&node);
    }

    fn end(&mut self, uid: &PodUid) {
        if self.run_of(uid).is_some_and(|run| !run.is_leaving)
            && let Some((_, node)) = self.remove(uid)
        {
            self.fill(&node);
        }
    }

    fn remove(&mut self, uid: &PodUid) -> Option<(usize, NodeName)> {
        let SimulatedPod { job, run } = self.pods.remove(uid)?;
        self.ledger.apply(PodReleased(uid.clone()));
        self.counter.ends(self.workload.jobs[job].size);
        run.map(|run| (job, run.node))
    }

    /// The pod does not fit, and no pod is pending.
    fn turn_away(&mut self, uid: &PodUid) {
        self.ledger.apply(PodReleased(uid.clone()));
        self.pods.remove(uid);
    }

    /// Places pending residents that fit now. Only this node has changed.
    fn fill(&mut self, node: &NodeName) {
        let mut refused = BTreeSet::new();
        while let Some((kind, job)) = self.backlog.first_but(&refused) {
            let view = self.ledger.node(node);
            if view.is_some_and(|view| fit(view, &self.demands[&kind]).is_ok()) {
                self.backlog.take(kind, job);
                let uid = self.enter(job);
                self.start(&uid, node);
            } else {
                refused.insert(kind);
            }
        }
    }

    fn save(&mut self, uid: &PodUid) {
        let now = self.events.now();
        let Some(SimulatedPod { job, run: Some(run) }) =
            self.pods.get_mut(uid).filter(|pod| pod.is_at_work())
        else {
            return;
        };
        let job = *job;
        let done = now.since(run.saved_at);
        run.saved_at = now;
        self.progress[job].saved = self.progress[job].saved + done;
        self.events.at(now + self.workload.jobs[job].saves_every, JobEvent::Saves(uid.clone()));
        self.see_running(uid, CheckpointAge::Ago(Millis::default()), None);
    }

    fn note_ready(&mut self, uid: &PodUid) {
        self.see_running(uid, CheckpointAge::None, None);
    }

    fn see_running(&mut self, uid: &PodUid, stamp: CheckpointAge, leaving: Option<PodDeletion>) {
        let Some(RunningPod { node, devices, .. }) = self.run_of(uid).cloned() else { return };
        let state = ObservedPhase::Bound { node, devices, starting: false, ran: None };
        self.see(uid, state, stamp, leaving);
    }

    /// The pod as the API server would show it.
    fn see(
        &mut self,
        uid: &PodUid,
        state: ObservedPhase,
        stamp: CheckpointAge,
        leaving: Option<PodDeletion>,
    ) {
        let job = self.pods[uid].job;
        let owner = OwnerUid::parse(&format!("job-{job}")).expect("digits are a name");
        let disruption_info = DisruptionInfo { owner: Some(owner), ..DisruptionInfo::default() };
        let key = PodKey::parse("sim", uid.as_str()).expect("a UID is a name");
        let demand = self.demands[&self.kind(job)].clone();
        let shown =
            Some(ObservedDisruptionInfo { disruption_info, stamp, leaving, loan: Default::default() });
        self.ledger.apply(PodObserved(PodObservation {
            uid: uid.clone(),
            key,
            demand,
            state,
            observed: shown,
        }));
    }

    fn run_of(&self, uid: &PodUid) -> Option<&RunningPod> {
        self.pods.get(uid)?.run.as_ref()
    }

    fn kind(&self, job: usize) -> JobKind {
        let Job { role, size, .. } = self.workload.jobs[job];
        JobKind { role, size }
    }

    fn time_to_load(&self, job: usize) -> Millis {
        time_to_ready(None, self.demands[&self.kind(job)].weights(), &self.policy.loading)
    }
}

impl SimulatedPod {
    fn is_at_work(&self) -> bool {
        self.run.as_ref().is_some_and(|run| !run.is_leaving)
    }
}
