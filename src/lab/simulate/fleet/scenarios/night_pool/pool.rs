//! The pool of the night: replicas by the autoscaler's word, jobs in what is left, and the sums.

use super::jobs::Jobs;
use super::{DRAIN, GPUS, HEADROOM, NODES, STEP, Timer};
use crate::ids::{ModelId, PodUid};
use crate::lab::simulate::fleet::engines::Engine;
use crate::lab::simulate::fleet::pods::PodSpec;
use crate::lab::simulate::fleet::replicas::{Replica, ReplicaId, ReplicaState, Replicas, Scaler, ServingDay};
use crate::lab::simulate::fleet::scenarios::{Curve, Played, quantile};
use crate::lab::simulate::fleet::stage::{Happening, START, Stage};
use crate::units::{Bytes, Millis, Moment};
use std::collections::BTreeMap;

/// How long one more replica takes, by what replicas have taken.
const READY_IN: Millis = Millis::seconds(90);
const FIRST_REPLICAS: u32 = 6;

pub struct Pool<S> {
    pub stage: Stage<'static, Timer>,
    pub jobs: Jobs,
    pub day: ServingDay<S>,
    /// The time of day at the beginning.
    pub begins: Moment,
    replicas: BTreeMap<PodUid, ReplicaPod>,
    came: ReplicaId,
    waits: Vec<f64>,
    /// GPU-hours without a replica, and with one.
    idle: f64,
    serving: f64,
    curves: [Vec<(f64, f64)>; 2],
}

struct ReplicaPod {
    id: ReplicaId,
    /// When it is gone at the latest, if it is let go.
    let_go: Option<Moment>,
}

impl<S: Scaler> Pool<S> {
    pub fn new(stage: Stage<'static, Timer>, jobs: Jobs, day: ServingDay<S>, begins: Moment) -> Self {
        let (replicas, waits, curves) = (BTreeMap::new(), Vec::new(), Default::default());
        Self { stage, jobs, day, begins, replicas, came: 0, waits, idle: 0.0, serving: 0.0, curves }
    }

    pub fn play(mut self, hours: u64) -> Played {
        (0..FIRST_REPLICAS).for_each(|_| self.create());
        self.jobs.fill(&mut self.stage);
        self.stage.at(START, Timer::Step);
        let end = START + Millis::seconds(hours * 3600);
        while let Some(happened) = self.stage.next(end) {
            let now = self.stage.now();
            match happened {
                Happening::Timer(Timer::Step) => self.step(now),
                Happening::Timer(Timer::Job(timer)) => {
                    self.jobs.running.tell(timer, &mut self.stage);
                }
                Happening::Bound(uid) if self.replicas.contains_key(&uid) => self.note_bound(&uid),
                Happening::Ready(uid) => self.jobs.begin(&uid, &mut self.stage),
                Happening::Leaving(uid) => self.jobs.evict(&uid, now),
                Happening::Bound(_) | Happening::Gone(_) => {}
            }
            self.jobs.fill(&mut self.stage);
        }
        self.jobs.running.close(end);
        self.played(hours as f64)
    }

    fn step(&mut self, now: Moment) {
        self.count(now);
        let there: Vec<Replica> = self.up();
        let starting = self.starting().len() as u32;
        let replicas = Replicas { up: &there, starting, ready_in: READY_IN };
        let wanted = self.day.tick(self.begins + now.since(START), &replicas).replicas;
        let serving = there.iter().filter(|replica| replica.state == ReplicaState::Ready).count() as u32;
        (serving + starting..wanted).for_each(|_| self.create());
        self.let_go((serving + starting).saturating_sub(wanted) as usize, now);
        self.remove_drained(now);
        self.stage.at(now + STEP, Timer::Step);
    }

    fn create(&mut self) {
        let model = ModelId::parse(super::MODEL).expect("it is a name");
        let vram = Bytes::gib(72).times(u64::from(GPUS));
        let pod = PodSpec {
            gpus: GPUS,
            exclusive: true,
            ..PodSpec::serving("serving", model, super::weights(), vram)
        };
        let uid = self.stage.submit(pod);
        self.replicas.insert(uid, ReplicaPod { id: self.came, let_go: None });
        self.came += 1;
    }

    fn note_bound(&mut self, uid: &PodUid) {
        let pod = self.stage.pod(uid).expect("it was just bound");
        self.waits.push(self.stage.now().since(pod.submitted).0 as f64 / 1000.0);
    }

    /// Replicas whose engines answer.
    fn up(&self) -> Vec<Replica> {
        let is_ready = |uid: &PodUid| self.stage.pod(uid).is_some_and(|pod| pod.ready.is_some());
        let up = self.replicas.iter().filter(|(uid, _)| is_ready(uid));
        up.map(|(_, pod)| {
            let state = if pod.let_go.is_some() { ReplicaState::Terminating } else { ReplicaState::Ready };
            Replica { id: pod.id, state, share: 1.0 }
        })
        .collect()
    }

    /// Those that are pending or load, the youngest first.
    fn starting(&self) -> Vec<PodUid> {
        let starts = |uid: &PodUid| self.stage.pod(uid).is_some_and(|pod| pod.ready.is_none());
        let mut all: Vec<(&PodUid, ReplicaId)> =
            self.replicas.iter().filter(|(uid, _)| starts(uid)).map(|(uid, pod)| (uid, pod.id)).collect();
        all.sort_by_key(|(_, id)| std::cmp::Reverse(*id));
        all.into_iter().map(|(uid, _)| uid.clone()).collect()
    }

    /// As a ReplicaSet does: those that do not answer yet go first, then those with the fewest requests.
    fn let_go(&mut self, count: usize, now: Moment) {
        let mut left = count;
        for uid in self.starting().into_iter().take(count) {
            self.replicas.remove(&uid);
            self.stage.finish(&uid);
            left -= 1;
        }
        for id in self.day.idlest().into_iter().take(left) {
            let pod = self.replicas.values_mut().find(|pod| pod.id == id && pod.let_go.is_none());
            pod.into_iter().for_each(|pod| pod.let_go = Some(now + DRAIN));
        }
    }

    fn remove_drained(&mut self, now: Moment) {
        let is_over = |pod: &ReplicaPod| {
            let is_idle = self.day.engine(pod.id).is_none_or(Engine::is_idle);
            pod.let_go.is_some_and(|by| is_idle || by <= now)
        };
        let over: Vec<PodUid> =
            self.replicas.iter().filter(|(_, pod)| is_over(pod)).map(|(uid, _)| uid.clone()).collect();
        for uid in over {
            self.replicas.remove(&uid);
            self.stage.finish(&uid);
        }
    }

    /// The time since the last step, by what had the GPUs.
    fn count(&mut self, now: Moment) {
        let all = (NODES as u32 * GPUS) as f64;
        let is_bound = |uid: &&PodUid| self.stage.pod(uid).is_some_and(|pod| pod.bound.is_some());
        let held = (self.replicas.keys().filter(is_bound).count() as u32 * GPUS) as f64;
        let hours = STEP.0 as f64 / 3.6e6;
        self.serving += held * hours;
        self.idle += (all - held) * hours;
        let at = now.since(START).0 as f64 / 3.6e6;
        if (now.since(START).0 / STEP.0).is_multiple_of(24) {
            let free: usize = self.stage.machines.iter().map(|machine| machine.free_gpus().count()).sum();
            self.curves[0].push((at, held));
            self.curves[1].push((at, all - held - free as f64));
        }
    }

    fn played(self, hours: f64) -> Played {
        let Self { stage, jobs, day, mut waits, idle, serving, curves, .. } = self;
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
                .map(|(name, points)| Curve { name, x: "hours", points })
                .collect(),
            broken: stage.broken,
            notes: Vec::new(),
        }
    }
}
