//! Jobs that never run out: some are pending at any time, and one that is evicted is submitted again.

use super::running_jobs::{Job, JobTimer, RunningJobs};
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::stage::Stage;
use std::collections::BTreeMap;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::Moment;

/// What the jobs are like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct JobKind {
    /// Jobs that are pending at any time.
    pub pending: usize,
    pub draw: fn(&mut Random) -> Job,
    pub pod: fn(&Job) -> PodSpec,
}

pub(crate) struct EndlessJobs {
    /// `None` if there are no jobs.
    kind: Option<JobKind>,
    draws: Random,
    pending: BTreeMap<PodUid, Job>,
    pub running: RunningJobs,
    /// Evicted ones, to be submitted again.
    backlog: Vec<Job>,
}

impl EndlessJobs {
    pub fn new(kind: Option<JobKind>, seed: u64) -> Self {
        let (pending, running, backlog) = (BTreeMap::new(), RunningJobs::default(), Vec::new());
        Self {
            kind,
            draws: Random::seeded(seed, 6),
            pending,
            running,
            backlog,
        }
    }

    /// Submits jobs until enough are pending.
    pub fn fill<T>(&mut self, stage: &mut Stage<'_, T>) {
        let Some(kind) = self.kind else { return };
        while self.pending.len() < kind.pending {
            let job = self
                .backlog
                .pop()
                .unwrap_or_else(|| (kind.draw)(&mut self.draws));
            self.pending.insert(stage.submit((kind.pod)(&job)), job);
        }
    }

    /// The pod runs, if it is a job's.
    pub fn start_job<T: From<JobTimer>>(&mut self, uid: &PodUid, stage: &mut Stage<'_, T>) {
        if let Some(job) = self.pending.remove(uid) {
            self.running.start_job(uid, job, stage);
        }
    }

    pub fn handle_eviction(&mut self, uid: &PodUid, now: Moment) {
        self.backlog.extend(self.running.handle_eviction(uid, now));
    }

    /// The pod was ended without a warning, before or after its job began.
    pub fn handle_crash(&mut self, uid: &PodUid, now: Moment) {
        let job = self
            .pending
            .remove(uid)
            .or_else(|| self.running.handle_crash(uid, now));
        self.backlog.extend(job);
    }
}
