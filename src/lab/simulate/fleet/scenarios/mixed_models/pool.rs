//! The pool that serves a catalog: models whose engines share their GPUs' compute, one rollout after the other, and the sums.

use super::neighbors::{GpuUse, contention_by_pod};
use super::served::PooledModel;
use super::sizing::Placer;
use super::sums::PoolStatistics;
use super::{ENGINE_STEP, MODEL_ARRIVAL_INTERVAL, Timer, WARM_UP_TIME};
use crate::simulate::fleet::engines::{Engine, LatencyHistogram};
use crate::simulate::fleet::replicas::devices;
use crate::simulate::fleet::scenarios::endless_jobs::EndlessJobs;
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::contention::ComputeSharing;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::units::{Millis, Moment, Percent};
use stowage_scheduling::vocabulary::latency::EngineLatency;

pub struct Pool<'m> {
    pub stage: Stage<'static, Timer>,
    pub served: Vec<PooledModel<'m>>,
    pub jobs: EndlessJobs,
    /// By preemptor: the KV occupancy of the fullest engine on its GPUs when its placement was decided.
    fullest_when_decided: BTreeMap<PodUid, f64>,
    /// Whether agents report KV caches and queues.
    reports_load: bool,
    placer: Placer,
    sharing: ComputeSharing,
    /// When traffic begins: after the last model has come, and had time to start.
    traffic_start: Moment,
    pub sums: PoolStatistics,
}

/// What an engine says of itself that has had no request yet.
fn idle(pod: &PodUid) -> EngineLatency {
    EngineLatency {
        pod: pod.clone(),
        time_per_token: None,
        time_to_first_token: None,
        busy: Some(Percent::default()),
    }
}

impl<'m> Pool<'m> {
    pub fn new(
        stage: Stage<'static, Timer>,
        served: Vec<PooledModel<'m>>,
        jobs: EndlessJobs,
        sums: PoolStatistics,
        (reports_load, placer): (bool, Placer),
        sharing: ComputeSharing,
    ) -> Self {
        let begins = START + MODEL_ARRIVAL_INTERVAL.times(served.len() as u64) + WARM_UP_TIME;
        Self {
            stage,
            served,
            jobs,
            fullest_when_decided: BTreeMap::new(),
            reports_load,
            placer,
            sharing,
            traffic_start: begins,
            sums,
        }
    }

    /// Plays so many minutes of traffic, with the rollouts in this order spread over them. Whether all models had a place when
    /// traffic began and no more than `most_late` requests were late; where there is a bound, it ends as soon as they are not.
    pub fn play(&mut self, minutes: usize, rollouts: &[usize], most_late: Option<f64>) -> bool {
        for model in 0..self.served.len() {
            self.stage.schedule_timer(
                START + MODEL_ARRIVAL_INTERVAL.times(model as u64),
                Timer::ModelArrives(model),
            );
        }
        let begins = self.traffic_start;
        self.stage.schedule_timer(begins, Timer::Step);
        let length = Millis::seconds(60 * minutes as u64);
        for (n, model) in rollouts.iter().enumerate() {
            let at = length.0 * (n as u64 + 1) / (rollouts.len() as u64 + 1);
            self.stage
                .schedule_timer(begins + Millis(at), Timer::Rollout(*model));
        }
        let is_too_late = |pool: &Self, late| {
            most_late.is_some_and(|most| late > most || !pool.are_all_models_placed())
        };
        while let Some(happened) = self.stage.next(begins + length) {
            let now = self.stage.now();
            match happened {
                ScenarioEvent::Timer(Timer::Step) => {
                    self.step(now);
                    if is_too_late(self, self.late()) {
                        return false;
                    }
                }
                ScenarioEvent::Timer(Timer::ModelArrives(model)) => {
                    self.served[model].create(&mut self.stage)
                }
                ScenarioEvent::Timer(Timer::Rollout(model)) => {
                    self.served[model].replicas.start_rollout()
                }
                ScenarioEvent::Timer(Timer::Job(timer)) => {
                    drop(self.jobs.running.handle_timer(timer, &mut self.stage))
                }
                ScenarioEvent::Bound(uid) if now >= begins => self.record_placement(&uid),
                ScenarioEvent::Ready(uid) => {
                    let reports = self.placer == Placer::Limited;
                    for served in &mut self.served {
                        served.replicas.handle_ready(&uid, now);
                        if reports && served.has_replica(&uid) {
                            self.stage.set_latency(idle(&uid));
                        }
                    }
                    self.jobs.start_job(&uid, &mut self.stage);
                }
                ScenarioEvent::Terminating(uid) => {
                    self.record_decision(&uid);
                    self.jobs.handle_eviction(&uid, now);
                }
                ScenarioEvent::Bound(_) | ScenarioEvent::Deleted(_) => {}
            }
            // They come once all models have a place.
            if now >= begins {
                self.jobs.fill(&mut self.stage);
            }
        }
        !is_too_late(self, self.late() + self.waiting())
    }

    /// Requests that broke a bound, or are too long for their engine.
    pub fn late(&self) -> f64 {
        self.served.iter().map(PooledModel::late).sum()
    }

    /// The share of completed requests that took at most twice as long for a token as beside no neighbor, in hundredths.
    pub fn within_twice(&self) -> f64 {
        let tallies = || self.served.iter().map(|served| &served.day.tally);
        let completed: f64 = tallies().map(|tally| tally.completed).sum();
        100.0 * (1.0 - tallies().map(|tally| tally.slowed).sum::<f64>() / completed)
    }

    /// Times per token of all models' requests.
    pub(crate) fn tpot(&self) -> LatencyHistogram {
        let mut all = LatencyHistogram::default();
        self.served
            .iter()
            .for_each(|served| all.merge(&served.day.tally.latencies.tpot));
        all
    }

    /// Requests that have no first token yet.
    pub fn waiting(&self) -> f64 {
        self.served.iter().map(|served| served.day.waiting()).sum()
    }

    /// Times to first token of all models' requests that an engine took.
    pub(crate) fn ttft(&self) -> LatencyHistogram {
        let mut all = LatencyHistogram::default();
        self.served
            .iter()
            .for_each(|served| all.merge(&served.day.tally.latencies.ttft));
        all
    }

    fn are_all_models_placed(&self) -> bool {
        self.sums.placed_models == self.served.len()
    }

    fn step(&mut self, now: Moment) {
        let used = self.use_by_gpu();
        self.sums
            .record(now.since(self.traffic_start), &self.stage, &used);
        let contention = contention_by_pod(&used, self.sharing);
        let at = Moment(now.since(self.traffic_start).0);
        self.served
            .iter_mut()
            .for_each(|served| served.follow_traffic(&mut self.stage, at, &contention));
        if self.reports_load {
            self.served
                .iter()
                .for_each(|served| served.report_load(&mut self.stage));
        }
        if self.placer == Placer::Limited {
            for served in &mut self.served {
                served.report_latencies(&mut self.stage);
            }
        }
        // They allocate their KV caches as they fill, and not when they start.
        if self.placer == Placer::Borrowing {
            let mut ended = Vec::new();
            for served in &self.served {
                ended.extend(served.report_held(&mut self.stage));
            }
            ended
                .iter()
                .for_each(|uid| self.jobs.handle_crash(uid, now));
        }
        if now == self.traffic_start {
            self.sums.placed_models = self
                .served
                .iter()
                .filter(|served| served.is_placed(&self.stage))
                .count();
        }
        self.stage.schedule_timer(now + ENGINE_STEP, Timer::Step);
    }

    /// What the engines and the jobs on each GPU do, in the order of its pods.
    fn use_by_gpu(&self) -> Vec<GpuUse> {
        let engines: BTreeMap<&PodUid, &Engine> =
            self.served.iter().flat_map(PooledModel::engines).collect();
        let jobs: BTreeSet<&PodUid> = self.jobs.running.uids().collect();
        let gpus = self.stage.machines.iter().flat_map(|machine| &machine.gpus);
        gpus.map(|gpu| GpuUse::new(gpu, &engines, &jobs)).collect()
    }

    /// The pod leaves for another: where that goes was decided now.
    fn record_decision(&mut self, victim: &PodUid) {
        let Some(preemptor) = self
            .stage
            .pod(victim)
            .and_then(|pod| pod.evicted_for.clone())
        else {
            return;
        };
        let fullest = self.fullest_beside(victim);
        let decided = self.fullest_when_decided.entry(preemptor).or_insert(0.0);
        *decided = decided.max(fullest);
    }

    fn record_placement(&mut self, uid: &PodUid) {
        let fullest = self
            .fullest_when_decided
            .remove(uid)
            .unwrap_or_else(|| self.fullest_beside(uid));
        self.sums.record_placement(fullest);
    }

    /// How full the fullest engine of other pods is on the GPUs of this one.
    fn fullest_beside(&self, uid: &PodUid) -> f64 {
        let bound = devices(&self.stage, uid);
        let is_there = |other: &PodUid| {
            other != uid
                && devices(&self.stage, other)
                    .iter()
                    .any(|device| bound.contains(device))
        };
        let there = self
            .served
            .iter()
            .flat_map(PooledModel::engines)
            .filter(|(other, _)| is_there(other));
        there
            .map(|(_, engine)| engine.kv_occupancy())
            .fold(0.0, f64::max)
    }
}
