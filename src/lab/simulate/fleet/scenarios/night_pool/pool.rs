//! The pool of the night: replicas by the autoscaler's word, jobs in what is left, and the sums.

use super::{DRAIN, GPUS, HEADROOM, NODES, STEP, Timer};
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::replicas::{ReplicaSet, ReplicaTiming, Scaler, ServingDay, devices};
use crate::simulate::fleet::scenarios::endless_jobs::EndlessJobs;
use crate::simulate::fleet::scenarios::{Curve, Played, quantile};
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use stowage_scheduling::ids::{ModelId, PodUid};
use stowage_scheduling::units::{Bytes, Millis, Moment};

const TIMING: ReplicaTiming = ReplicaTiming {
    ready_in: Millis::seconds(90),
    drain: DRAIN,
};
const FIRST_REPLICAS: u32 = 6;

pub struct Pool<S> {
    pub stage: Stage<'static, Timer>,
    pub jobs: EndlessJobs,
    pub day: ServingDay<S>,
    /// The time of day at the beginning.
    pub begins: Moment,
    replicas: ReplicaSet,
    waits: Vec<f64>,
    /// GPU-hours without a replica, and with one.
    idle: f64,
    serving: f64,
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
        let replicas = ReplicaSet::new(template(), TIMING);
        Self {
            stage,
            jobs,
            day,
            begins,
            replicas,
            waits,
            idle: 0.0,
            serving: 0.0,
            curves,
        }
    }

    pub fn play(mut self, hours: u64) -> Played {
        self.replicas.create(&mut self.stage, FIRST_REPLICAS);
        self.jobs.fill(&mut self.stage);
        self.stage.at(START, Timer::Step);
        let end = START + Millis::seconds(hours * 3600);
        while let Some(happened) = self.stage.next(end) {
            let now = self.stage.now();
            match happened {
                ScenarioEvent::Timer(Timer::Step) => self.step(now),
                ScenarioEvent::Timer(Timer::Job(timer)) => {
                    self.jobs.running.tell(timer, &mut self.stage);
                }
                ScenarioEvent::Bound(uid) if self.replicas.contains(&uid) => self.note_bound(&uid),
                ScenarioEvent::Ready(uid) => self.jobs.begin(&uid, &mut self.stage),
                ScenarioEvent::Leaving(uid) => self.jobs.evict(&uid, now),
                ScenarioEvent::Bound(_) | ScenarioEvent::Gone(_) => {}
            }
            self.jobs.fill(&mut self.stage);
        }
        self.jobs.running.close(end);
        self.played(hours as f64)
    }

    fn step(&mut self, now: Moment) {
        self.count(now);
        let at = self.begins + now.since(START);
        self.replicas
            .follow(&mut self.stage, &mut self.day, at, |_, _, _| 1.0);
        self.stage.at(now + STEP, Timer::Step);
    }

    fn note_bound(&mut self, uid: &PodUid) {
        let pod = self.stage.pod(uid).expect("it was just bound");
        self.waits
            .push(self.stage.now().since(pod.submitted).0 as f64 / 1000.0);
    }

    /// The time since the last step, by what had the GPUs.
    fn count(&mut self, now: Moment) {
        let all = (NODES as u32 * GPUS) as f64;
        let held: usize = self
            .replicas
            .pods()
            .map(|(uid, _)| devices(&self.stage, uid).len())
            .sum();
        let held = held as f64;
        let hours = STEP.0 as f64 / 3.6e6;
        self.serving += held * hours;
        self.idle += (all - held) * hours;
        let at = now.since(START).0 as f64 / 3.6e6;
        if (now.since(START).0 / STEP.0).is_multiple_of(24) {
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

    fn played(self, hours: f64) -> Played {
        let Self {
            stage,
            jobs,
            day,
            mut waits,
            idle,
            serving,
            curves,
            ..
        } = self;
        let headroom = HEADROOM * (NODES as u32 * GPUS) as f64 * hours;
        let jobs = jobs.running;
        let latencies = &day.tally.latencies;
        let names = ["GPUs of replicas", "GPUs of jobs"];
        Played {
            figures: vec![
                idle,
                jobs.kept,
                100.0 * jobs.kept / (idle - headroom),
                100.0 * jobs.lost / jobs.kept.max(f64::MIN_POSITIVE),
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
                    x: "hours",
                    points,
                })
                .collect(),
            broken: stage.broken,
            notes: Vec::new(),
        }
    }
}

fn template() -> PodSpec {
    let model = ModelId::parse(super::MODEL).expect("it is a name");
    let vram = Bytes::gib(72).times(u64::from(GPUS));
    let pod = PodSpec::serving("serving", model, super::weights(), vram);
    PodSpec {
        gpus: GPUS,
        exclusive: true,
        ..pod
    }
}
