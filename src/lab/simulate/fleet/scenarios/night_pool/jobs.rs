//! Jobs that never run out: some are pending at any time.

use super::Timer;
use crate::ids::PodUid;
use crate::lab::simulate::fleet::pods::PodSpec;
use crate::lab::simulate::fleet::scenarios::running_jobs::{Job, RunningJobs, Saving};
use crate::lab::simulate::fleet::stage::Stage;
use crate::lab::simulate::random::Random;
use crate::units::{Bytes, Millis, Moment};
use std::collections::BTreeMap;

/// Jobs that are pending at any time.
const PENDING: usize = 8;
const LEAST_WORK: Millis = Millis::seconds(600);
const MOST_WORK: Millis = Millis::seconds(7200);

pub struct Jobs {
    draws: Random,
    are_there: bool,
    pending: BTreeMap<PodUid, Job>,
    pub running: RunningJobs,
    /// Evicted ones, to be submitted again.
    backlog: Vec<Job>,
}

impl Jobs {
    pub fn new(seed: u64, are_there: bool) -> Self {
        let (pending, running, backlog) = (BTreeMap::new(), RunningJobs::default(), Vec::new());
        Self { draws: Random::seeded(seed, 6), are_there, pending, running, backlog }
    }

    /// Submits jobs until enough are pending.
    pub fn fill(&mut self, stage: &mut Stage<'_, Timer>) {
        while self.are_there && self.pending.len() < PENDING {
            let job = self.backlog.pop().unwrap_or_else(|| self.draw());
            let uid = stage.submit(pod(&job));
            self.pending.insert(uid, job);
        }
    }

    /// The pod runs, if it is a job's.
    pub fn begin(&mut self, uid: &PodUid, stage: &mut Stage<'_, Timer>) {
        if let Some(job) = self.pending.remove(uid) {
            self.running.begin(uid, job, stage);
        }
    }

    pub fn evict(&mut self, uid: &PodUid, now: Moment) {
        self.backlog.extend(self.running.evict(uid, now));
    }

    fn draw(&mut self) -> Job {
        let gpus = [1, 1, 1, 1, 1, 1, 1, 2, 2, 4][self.draws.below(10)];
        let work = self.draws.log_uniform(LEAST_WORK, MOST_WORK);
        Job::new(gpus, work, if self.draws.below(5) > 0 { Saving::AndWhenAsked } else { Saving::Never })
    }
}

fn pod(job: &Job) -> PodSpec {
    let checkpoints = [("stowage.dev/checkpoints".to_owned(), "true".to_owned())];
    PodSpec {
        labels: checkpoints.into_iter().filter(|_| job.saving != Saving::Never).collect(),
        priority: -10,
        gpus: job.gpus,
        exclusive: true,
        ..PodSpec::plain("harvest", Bytes::gib(70).times(u64::from(job.gpus)))
    }
}
