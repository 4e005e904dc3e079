//! Jobs that run on the stage: what each has done, saved and lost.

use crate::simulate::fleet::stage::Stage;
use std::collections::BTreeMap;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::units::{Millis, Moment};

const SAVES_EVERY: Millis = Millis::seconds(600);

/// A timer of a job's pod; it means nothing once the pod has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JobTimer {
    /// The work is done.
    Ends(PodUid),
    Saves(PodUid),
}

/// When a job saves its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Saving {
    Never,
    /// Every ten minutes.
    Regularly,
    /// Every ten minutes, and once more when it is asked to leave.
    AndWhenAsked,
}

#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub gpus: u32,
    /// Work that is not done, or not saved yet.
    pub left: Millis,
    pub saving: Saving,
    /// Since when it works on what is not saved.
    since: Moment,
}

#[derive(Debug, Default)]
pub(crate) struct RunningJobs {
    running: BTreeMap<PodUid, Job>,
    /// GPU-hours of work that is done and saved, and of work that was lost.
    pub kept: f64,
    pub lost: f64,
    pub evictions: u64,
}

impl RunningJobs {
    /// The job's pod runs.
    pub fn begin<T: From<JobTimer>>(&mut self, uid: &PodUid, job: Job, stage: &mut Stage<'_, T>) {
        let now = stage.now();
        stage.at(now + job.left, JobTimer::Ends(uid.clone()).into());
        if job.saving != Saving::Never {
            stage.at(now + SAVES_EVERY, JobTimer::Saves(uid.clone()).into());
        }
        self.running.insert(uid.clone(), Job { since: now, ..job });
    }

    /// Handles a job's timer. Returns the pod if its job has ended; it is gone from the stage.
    pub fn tell<T: From<JobTimer>>(
        &mut self,
        timer: JobTimer,
        stage: &mut Stage<'_, T>,
    ) -> Option<PodUid> {
        match timer {
            JobTimer::Saves(uid) => {
                let job = self.running.get_mut(&uid)?;
                self.kept += job.save(stage.now());
                stage.checkpoint(&uid);
                stage.at(stage.now() + SAVES_EVERY, JobTimer::Saves(uid).into());
                None
            }
            JobTimer::Ends(uid) => {
                self.kept += self.running.remove(&uid)?.save(stage.now());
                stage.finish(&uid);
                Some(uid)
            }
        }
    }

    /// The pod is asked to leave: its job saves what it can and answers what is left, which is done again.
    pub fn evict(&mut self, uid: &PodUid, now: Moment) -> Option<Job> {
        let mut job = self.running.remove(uid)?;
        self.evictions += 1;
        match job.saving {
            Saving::AndWhenAsked => self.kept += job.save(now),
            Saving::Never | Saving::Regularly => self.lost += job.gpu_hours(now),
        }
        Some(job)
    }

    /// The pods of jobs that run.
    pub fn uids(&self) -> impl Iterator<Item = &PodUid> {
        self.running.keys()
    }

    /// Work of those that run at the end counts as far as it is done.
    pub fn close(&mut self, now: Moment) {
        self.kept += self
            .running
            .values()
            .map(|job| job.gpu_hours(now))
            .sum::<f64>();
    }
}

impl Job {
    pub fn new(gpus: u32, work: Millis, saving: Saving) -> Self {
        Self {
            gpus,
            left: work,
            saving,
            since: Moment::default(),
        }
    }

    /// What it has done since it saved last, in GPU-hours; that is saved now.
    fn save(&mut self, now: Moment) -> f64 {
        let done = self.gpu_hours(now);
        self.left = Millis(self.left.0.saturating_sub(now.since(self.since).0));
        self.since = now;
        done
    }

    fn gpu_hours(&self, now: Moment) -> f64 {
        f64::from(self.gpus) * now.since(self.since).0 as f64 / 3.6e6
    }
}
