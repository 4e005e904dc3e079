//! The pool of the night: replicas by the autoscaler's word, jobs in what is left, and the sums.

use super::{DRAIN_TIME, ENGINE_STEP, GPUS_PER_NODE, HEADROOM_SHARE, NODES, Timer};
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::replicas::{ReplicaSet, ReplicaTiming, Scaler, ServingDay, devices};
use crate::simulate::fleet::scenarios::endless_jobs::EndlessJobs;
use crate::simulate::fleet::scenarios::{Curve, VariantRun, quantile};
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use stowage_scheduling::contention::Contention;
use stowage_scheduling::ids::{ModelId, PodUid};
use stowage_scheduling::units::{Bytes, Millis, Moment};

const REPLICA_TIMING: ReplicaTiming = ReplicaTiming {
    ready_in: Millis::seconds(90),
    drain_time: DRAIN_TIME,
};
const FIRST_REPLICAS: u32 = 6;

pub struct Pool<S> {
    pub stage: Stage<'static, Timer>,
    pub jobs: EndlessJobs,
    pub day: ServingDay<S>,
    /// The time of day at the beginning.
    pub time_of_day: Moment,
    replicas: ReplicaSet,
    waits_s: Vec<f64>,
    /// GPU-hours without a replica, and with one.
    idle_gpu_hours: f64,
    serving_gpu_hours: f64,
    curves: [Vec<(f64, f64)>; 2],
}

impl<S: Scaler> Pool<S> {
    pub fn new(
        stage: Stage<'static, Timer>,
        jobs: EndlessJobs,
        day: ServingDay<S>,
        begins: Moment,
    ) -> Self {
        let (waits, curves) = (Vec::new(), Default::default());
        let replicas = ReplicaSet::new(template(), REPLICA_TIMING);
        Self {
            stage,
            jobs,
            day,
            time_of_day: begins,
            replicas,
            waits_s: waits,
            idle_gpu_hours: 0.0,
            serving_gpu_hours: 0.0,
            curves,
        }
    }

    pub fn play(mut self, hours: u64) -> VariantRun {
        self.replicas.create(&mut self.stage, FIRST_REPLICAS);
        self.jobs.fill(&mut self.stage);
        self.stage.schedule_timer(START, Timer::Step);
        let end = START + Millis::seconds(hours * 3600);
        while let Some(happened) = self.stage.next(end) {
            let now = self.stage.now();
            match happened {
                ScenarioEvent::Timer(Timer::Step) => self.step(now),
                ScenarioEvent::Timer(Timer::Job(timer)) => {
                    self.jobs.running.handle_timer(timer, &mut self.stage);
                }
                ScenarioEvent::Bound(uid) if self.replicas.contains(&uid) => self.record_wait(&uid),
                ScenarioEvent::Ready(uid) => self.jobs.start_job(&uid, &mut self.stage),
                ScenarioEvent::Terminating(uid) => self.jobs.handle_eviction(&uid, now),
                ScenarioEvent::Bound(_) | ScenarioEvent::Deleted(_) => {}
            }
            self.jobs.fill(&mut self.stage);
        }
        self.jobs.running.count_unfinished(end);
        self.into_run(hours as f64)
    }

    fn step(&mut self, now: Moment) {
        self.record_usage(now);
        let at = self.time_of_day + now.since(START);
        self.replicas
            .reconcile(&mut self.stage, &mut self.day, at, |_| Contention::ALONE);
        self.stage.schedule_timer(now + ENGINE_STEP, Timer::Step);
    }

    fn record_wait(&mut self, uid: &PodUid) {
        let pod = self.stage.pod(uid).expect("it was just bound");
        self.waits_s
            .push(self.stage.now().since(pod.submitted_at).0 as f64 / 1000.0);
    }

    /// The time since the last step, by what had the GPUs.
    fn record_usage(&mut self, now: Moment) {
        let all = (NODES as u32 * GPUS_PER_NODE) as f64;
        let held: usize = self
            .replicas
            .pods()
            .map(|(uid, _)| devices(&self.stage, uid).len())
            .sum();
        let held = held as f64;
        let hours = ENGINE_STEP.0 as f64 / 3.6e6;
        self.serving_gpu_hours += held * hours;
        self.idle_gpu_hours += (all - held) * hours;
        let at = now.since(START).0 as f64 / 3.6e6;
        if (now.since(START).0 / ENGINE_STEP.0).is_multiple_of(24) {
            let free: usize = self
                .stage
                .machines
                .iter()
                .map(|machine| machine.free_gpus().count())
                .sum();
            self.curves[0].push((at, held));
            self.curves[1].push((at, all - held - free as f64));
        }
    }

    fn into_run(self, hours: f64) -> VariantRun {
        let Self {
            stage,
            jobs,
            day,
            waits_s: mut waits,
            idle_gpu_hours: idle,
            serving_gpu_hours: serving,
            curves,
            ..
        } = self;
        let headroom = HEADROOM_SHARE * (NODES as u32 * GPUS_PER_NODE) as f64 * hours;
        let jobs = jobs.running;
        let latencies = &day.tally.latencies;
        let names = ["GPUs of replicas", "GPUs of jobs"];
        VariantRun {
            figures: vec![
                idle,
                jobs.saved_gpu_hours,
                100.0 * jobs.saved_gpu_hours / (idle - headroom),
                100.0 * jobs.lost_gpu_hours / jobs.saved_gpu_hours.max(f64::MIN_POSITIVE),
                jobs.evictions as f64,
                quantile(&mut waits, 0.5),
                quantile(&mut waits, 0.99),
                100.0 * (latencies.ttft_violations + day.waiting()) / day.tally.arrived.max(1.0),
                serving,
            ],
            curves: names
                .into_iter()
                .zip(curves)
                .map(|(name, points)| Curve {
                    name,
                    x_label: "hours",
                    points,
                })
                .collect(),
            violations: stage.violations,
            notes: Vec::new(),
        }
    }
}

fn template() -> PodSpec {
    let model = ModelId::parse(super::MODEL).expect("it is a name");
    let vram = Bytes::gib(72).times(u64::from(GPUS_PER_NODE));
    let pod = PodSpec::serving("serving", model, super::weights(), vram);
    PodSpec {
        gpus: GPUS_PER_NODE,
        is_exclusive: true,
        ..pod
    }
}
