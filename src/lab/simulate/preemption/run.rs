//! One run: jobs that arrive on the stage of a fleet, load, work, save, are evicted, return and end. The stage checks every
//! placement and eviction against the hardware; which pod is placed where is the [`VictimScheduler`]'s.

use super::orders::VictimOrder;
use super::scheduler::{PreemptorAnswer, VictimScheduler};
use super::setup::{machines, pod};
use super::tally::{Counter, GpuTime, PreemptionTally};
use super::workload::{Job, JobRole, Workload};
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage, StagePod};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Millis, Moment};

#[derive(Debug, Clone)]
pub enum JobEvent {
    /// The job with this index in the workload.
    Comes(usize),
    Saves(PodUid),
    Ends(PodUid),
}

pub struct PreemptionRun<'w> {
    workload: &'w Workload,
    policy: Policy,
    pub scheduler: Rc<RefCell<VictimScheduler>>,
    pub stage: Stage<'w, JobEvent>,
    /// The job of each pod.
    jobs: BTreeMap<PodUid, usize>,
    /// Of each job, work that is saved, so that no eviction loses it.
    saved: Vec<Millis>,
    pods: u64,
    counter: Counter,
}

/// Runs the workload to its end.
pub fn play(workload: &Workload, order: VictimOrder) -> PreemptionTally {
    let mut run = PreemptionRun::new(workload, order);
    while run.step() {}
    run.tally()
}

impl<'w> PreemptionRun<'w> {
    pub fn new(workload: &'w Workload, order: VictimOrder) -> Self {
        let policy = Policy::default();
        let scheduler = Rc::new(RefCell::new(VictimScheduler::new(policy.clone(), order)));
        let machines = machines(workload, &policy);
        let mut stage = Stage::new(machines, Box::new(scheduler.clone()), workload.seed).with_exact_starts();
        for (job, Job { comes, .. }) in workload.jobs.iter().enumerate() {
            stage.at(on_stage(*comes), JobEvent::Comes(job));
        }
        Self {
            workload,
            policy,
            scheduler,
            stage,
            jobs: BTreeMap::new(),
            saved: vec![Millis::default(); workload.jobs.len()],
            pods: 0,
            counter: Counter::new(workload.extent),
        }
    }

    /// What happens next; false at the end.
    pub fn step(&mut self) -> bool {
        let ends = on_stage(self.workload.extent.ends());
        let Some(happened) = self.stage.next(ends.before(Millis(1))) else { return false };
        self.counter.until(in_workload(self.stage.now()));
        let answers = self.scheduler.borrow_mut().take_answers();
        answers.into_iter().for_each(|(when, answer)| self.note_answer(when, answer));
        match happened {
            ScenarioEvent::Timer(JobEvent::Comes(job)) => self.come(job),
            ScenarioEvent::Timer(JobEvent::Saves(uid)) => self.save(&uid),
            ScenarioEvent::Timer(JobEvent::Ends(uid)) => self.end(&uid),
            ScenarioEvent::Bound(uid) => self.begin(&uid),
            ScenarioEvent::Ready(uid) => self.begin_work(&uid),
            ScenarioEvent::Leaving(uid) => self.evict(&uid),
            ScenarioEvent::Gone(uid) => self.come_back(&uid),
        }
        true
    }

    pub fn tally(&mut self) -> PreemptionTally {
        self.counter.until(self.workload.extent.ends());
        PreemptionTally { broken_promises: self.stage.broken.len() as u64, ..self.counter.tally }
    }

    fn come(&mut self, job: usize) {
        let Job { role, comes, .. } = self.workload.jobs[job];
        if role == JobRole::Arrival {
            self.counter.note(comes, |tally| tally.arrivals += 1);
        }
        self.submit(job);
    }

    fn submit(&mut self, job: usize) {
        self.pods += 1;
        let uid = self.stage.submit(pod(job, &self.workload.jobs[job], self.pods, &self.policy));
        self.jobs.insert(uid, job);
    }

    fn note_answer(&mut self, when: Moment, answer: PreemptorAnswer) {
        match answer {
            PreemptorAnswer::Rejected(uid) => {
                self.jobs.remove(&uid);
                self.stage.finish(&uid);
            }
            PreemptorAnswer::Awaits { exact } => self.counter.note(in_workload(when), |tally| {
                tally.preempted_for += 1;
                tally.cut_short += u64::from(!exact);
            }),
        }
    }

    /// An arrival works from when it is bound.
    fn begin(&mut self, uid: &PodUid) {
        let Job { role, size, work, comes, .. } = self.workload.jobs[self.jobs[uid]];
        self.counter.begins(size);
        if role == JobRole::Arrival {
            self.counter.note(comes, |tally| tally.admitted += 1);
            self.stage.at(self.stage.now() + work, JobEvent::Ends(uid.clone()));
        }
    }

    /// A resident works from when it has loaded.
    fn begin_work(&mut self, uid: &PodUid) {
        let job = self.jobs[uid];
        let (Job { role, work, saves_every, .. }, now) = (self.workload.jobs[job], self.stage.now());
        if role != JobRole::Arrival {
            let left = Millis(work.0 - self.saved[job].0);
            self.stage.at(now + saves_every, JobEvent::Saves(uid.clone()));
            self.stage.at(now + left, JobEvent::Ends(uid.clone()));
        }
    }

    fn save(&mut self, uid: &PodUid) {
        let Some(unsaved) = self.at_work(uid).map(|pod| unsaved(pod, self.stage.now())) else { return };
        let job = self.jobs[uid];
        self.saved[job] = self.saved[job] + unsaved;
        self.stage.checkpoint(uid);
        let next = self.stage.now() + self.workload.jobs[job].saves_every;
        self.stage.at(next, JobEvent::Saves(uid.clone()));
    }

    /// Unsaved work is lost, and the time to load again.
    fn evict(&mut self, uid: &PodUid) {
        let Some(pod) = self.stage.pod(uid) else { return };
        let (size, now) = (self.workload.jobs[self.jobs[uid]].size, self.stage.now());
        let (lost, reload) = (unsaved(pod, now), pod.start.unwrap_or_default().load);
        self.counter.note(in_workload(now), |tally| {
            tally.victims += 1;
            tally.lost_work = tally.lost_work.plus(GpuTime::of(size, lost));
            tally.reload = tally.reload.plus(GpuTime::of(size, reload));
        });
    }

    /// The job of a pod that was evicted is pending again.
    fn come_back(&mut self, uid: &PodUid) {
        if let Some(job) = self.remove(uid) {
            self.submit(job);
        }
    }

    fn end(&mut self, uid: &PodUid) {
        if self.at_work(uid).is_some() {
            self.remove(uid);
            self.stage.finish(uid);
        }
    }

    fn remove(&mut self, uid: &PodUid) -> Option<usize> {
        let job = self.jobs.remove(uid)?;
        self.counter.ends(self.workload.jobs[job].size);
        Some(job)
    }

    /// A victim takes all of its grace period, and does no work in it.
    fn at_work(&self, uid: &PodUid) -> Option<&StagePod> {
        self.stage.pod(uid).filter(|pod| pod.leaving.is_none())
    }
}

/// Since the pod last saved its work, or began it.
fn unsaved(pod: &StagePod, now: Moment) -> Millis {
    pod.checkpoint.or(pod.ready).map_or(Millis::default(), |since| now.since(since))
}

fn on_stage(moment: Moment) -> Moment {
    START + moment.since(Moment::default())
}

fn in_workload(moment: Moment) -> Moment {
    Moment::default() + moment.since(START)
}
