//! Jobs that run on the stage: what each has done, saved and lost.

use crate::simulate::fleet::stage::Stage;
use std::collections::BTreeMap;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::units::{Millis, Moment};

const CHECKPOINT_INTERVAL: Millis = Millis::seconds(600);

/// A timer of a job's pod; it means nothing once the pod has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum JobTimer {
    /// The work is done.
    Ends(PodUid),
    Checkpoint(PodUid),
}

/// When a job saves its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checkpointing {
    Never,
    /// Every ten minutes.
    Regularly,
    /// Every ten minutes, and once more when it is asked to leave.
    RegularlyAndOnEviction,
}

#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub gpus: u32,
    /// Work that is not done, or not saved yet.
    pub remaining_work: Millis,
    pub checkpointing: Checkpointing,
    /// Since when it works on what is not saved.
    unsaved_since: Moment,
}

#[derive(Debug, Default)]
pub(crate) struct RunningJobs {
    running: BTreeMap<PodUid, Job>,
    /// GPU-hours of work that is done and saved, and of work that was lost.
    pub saved_gpu_hours: f64,
    pub lost_gpu_hours: f64,
    pub evictions: u64,
    pub crashes: u64,
}

impl RunningJobs {
    /// The job's pod runs.
    pub fn start_job<T: From<JobTimer>>(
        &mut self,
        uid: &PodUid,
        job: Job,
        stage: &mut Stage<'_, T>,
    ) {
        let now = stage.now();
        stage.schedule_timer(now + job.remaining_work, JobTimer::Ends(uid.clone()).into());
        if job.checkpointing != Checkpointing::Never {
            stage.schedule_timer(
                now + CHECKPOINT_INTERVAL,
                JobTimer::Checkpoint(uid.clone()).into(),
            );
        }
        self.running.insert(
            uid.clone(),
            Job {
                unsaved_since: now,
                ..job
            },
        );
    }

    /// Handles a job's timer. Returns the pod if its job has ended; it is gone from the stage.
    pub fn handle_timer<T: From<JobTimer>>(
        &mut self,
        timer: JobTimer,
        stage: &mut Stage<'_, T>,
    ) -> Option<PodUid> {
        match timer {
            JobTimer::Checkpoint(uid) => {
                let job = self.running.get_mut(&uid)?;
                self.saved_gpu_hours += job.save(stage.now());
                stage.checkpoint(&uid);
                stage.schedule_timer(
                    stage.now() + CHECKPOINT_INTERVAL,
                    JobTimer::Checkpoint(uid).into(),
                );
                None
            }
            JobTimer::Ends(uid) => {
                self.saved_gpu_hours += self.running.remove(&uid)?.save(stage.now());
                stage.finish(&uid);
                Some(uid)
            }
        }
    }

    /// The pod is asked to leave: its job saves what it can and answers what is left, which is done again.
    pub fn handle_eviction(&mut self, uid: &PodUid, now: Moment) -> Option<Job> {
        let mut job = self.running.remove(uid)?;
        self.evictions += 1;
        match job.checkpointing {
            Checkpointing::RegularlyAndOnEviction => self.saved_gpu_hours += job.save(now),
            Checkpointing::Never | Checkpointing::Regularly => {
                self.lost_gpu_hours += job.gpu_hours(now)
            }
        }
        Some(job)
    }

    /// The pod was ended without a warning: answers its job, which does again what it had not saved.
    pub fn handle_crash(&mut self, uid: &PodUid, now: Moment) -> Option<Job> {
        let job = self.running.remove(uid)?;
        self.crashes += 1;
        self.lost_gpu_hours += job.gpu_hours(now);
        Some(job)
    }

    /// The pods of jobs that run.
    pub fn uids(&self) -> impl Iterator<Item = &PodUid> {
        self.running.keys()
    }

    /// Work of those that run at the end counts as far as it is done.
    pub fn count_unfinished(&mut self, now: Moment) {
        self.saved_gpu_hours += self
            .running
            .values()
            .map(|job| job.gpu_hours(now))
            .sum::<f64>();
    }
}

impl Job {
    pub fn new(gpus: u32, work: Millis, saving: Checkpointing) -> Self {
        Self {
            gpus,
            remaining_work: work,
            checkpointing: saving,
            unsaved_since: Moment::default(),
        }
    }

    /// What it has done since it saved last, in GPU-hours; that is saved now.
    fn save(&mut self, now: Moment) -> f64 {
        let done = self.gpu_hours(now);
        self.remaining_work = Millis(
            self.remaining_work
                .0
                .saturating_sub(now.since(self.unsaved_since).0),
        );
        self.unsaved_since = now;
        done
    }

    fn gpu_hours(&self, now: Moment) -> f64 {
        f64::from(self.gpus) * now.since(self.unsaved_since).0 as f64 / 3.6e6
    }
}
