//! Jobs that never run out: what each has done, saved and lost.

use super::Timer;
use crate::ids::PodUid;
use crate::lab::simulate::fleet::pods::PodSpec;
use crate::lab::simulate::fleet::stage::Stage;
use crate::lab::simulate::random::Random;
use crate::units::{Bytes, Millis, Moment};
use std::collections::BTreeMap;

/// Jobs that are pending at any time.
const PENDING: usize = 8;
const SAVES_EVERY: Millis = Millis::seconds(600);
const LEAST_WORK: Millis = Millis::seconds(600);
const MOST_WORK: Millis = Millis::seconds(7200);

pub struct Jobs {
    draws: Random,
    are_there: bool,
    pending: BTreeMap<PodUid, Job>,
    running: BTreeMap<PodUid, Job>,
    /// Evicted ones, to be submitted again.
    backlog: Vec<Job>,
    /// GPU time of work that is done and saved, and of work that was lost.
    pub kept: f64,
    pub lost: f64,
    pub evictions: u64,
}

#[derive(Debug, Clone, Copy)]
struct Job {
    gpus: u32,
    /// Work that is not saved yet.
    left: Millis,
    saves: bool,
    /// Since when it works on what is not saved.
    since: Moment,
}

impl Jobs {
    pub fn new(seed: u64, are_there: bool) -> Self {
        Self {
            draws: Random::seeded(seed, 6),
            are_there,
            pending: BTreeMap::new(),
            running: BTreeMap::new(),
            backlog: Vec::new(),
            kept: 0.0,
            lost: 0.0,
            evictions: 0,
        }
    }

    /// Submits jobs until enough are pending.
    pub fn fill(&mut self, stage: &mut Stage<'_, Timer>) {
        while self.are_there && self.pending.len() < PENDING {
            let job = self.backlog.pop().unwrap_or_else(|| self.draw());
            let uid = stage.submit(job.pod());
            self.pending.insert(uid, job);
        }
    }

    /// The pod runs, if it is a job's.
    pub fn begin(&mut self, uid: &PodUid, stage: &mut Stage<'_, Timer>) {
        let Some(job) = self.pending.remove(uid) else { return };
        let now = stage.now();
        stage.at(now + job.left, Timer::JobEnds(uid.clone()));
        if job.saves {
            stage.at(now + SAVES_EVERY, Timer::JobSaves(uid.clone()));
        }
        self.running.insert(uid.clone(), Job { since: now, ..job });
    }

    pub fn save(&mut self, uid: &PodUid, stage: &mut Stage<'_, Timer>) {
        let Some(job) = self.running.get_mut(uid) else { return };
        self.kept += job.save(stage.now());
        stage.checkpoint(uid);
        stage.at(stage.now() + SAVES_EVERY, Timer::JobSaves(uid.clone()));
    }

    pub fn end(&mut self, uid: &PodUid, stage: &mut Stage<'_, Timer>) {
        let Some(mut job) = self.running.remove(uid) else { return };
        self.kept += job.save(stage.now());
        stage.finish(uid);
    }

    /// It is asked to leave: it saves what it can, and the rest is done again.
    pub fn evict(&mut self, uid: &PodUid, now: Moment) {
        let Some(mut job) = self.running.remove(uid) else { return };
        self.evictions += 1;
        match job.saves {
            true => self.kept += job.save(now),
            false => self.lost += job.gpu_time(now),
        }
        self.backlog.push(job);
    }

    /// Work of those that run at the end counts as far as it is done.
    pub fn close(&mut self, now: Moment) {
        self.kept += self.running.values().map(|job| job.gpu_time(now)).sum::<f64>();
    }

    fn draw(&mut self) -> Job {
        Job {
            gpus: [1, 1, 1, 1, 1, 1, 1, 2, 2, 4][self.draws.below(10)],
            left: self.draws.log_uniform(LEAST_WORK, MOST_WORK),
            saves: self.draws.below(5) > 0,
            since: Moment::default(),
        }
    }
}

impl Job {
    /// What it has done since it saved last, in GPU hours; that is saved now.
    fn save(&mut self, now: Moment) -> f64 {
        let done = self.gpu_time(now);
        self.left = Millis(self.left.0.saturating_sub(now.since(self.since).0));
        self.since = now;
        done
    }

    fn gpu_time(&self, now: Moment) -> f64 {
        f64::from(self.gpus) * now.since(self.since).0 as f64 / 3.6e6
    }

    fn pod(&self) -> PodSpec {
        let checkpoints = [("stowage.dev/checkpoints".to_owned(), "true".to_owned())];
        PodSpec {
            labels: checkpoints.into_iter().filter(|_| self.saves).collect(),
            priority: -10,
            gpus: self.gpus,
            exclusive: true,
            ..PodSpec::plain("harvest", Bytes::gib(70).times(u64::from(self.gpus)))
        }
    }
}
