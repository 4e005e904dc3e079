//! A day of the three models: what of the GPUs' VRAM is asked for, and what company fraud detection has.

use super::app::App;
use super::{FRAUD, GPU, machines};
use crate::simulate::fleet::engines::ModelShape;
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::scenarios::Curve;
use crate::simulate::fleet::schedulers::FleetScheduler;
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use std::collections::BTreeMap;
use stowage_scheduling::ids::{ModelId, PodUid};
use stowage_scheduling::testkit::oracle::BrokenPromise;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis, Moment};

const MINUTE: Millis = Millis::seconds(60);
/// Hours in which credit scoring goes through the whole portfolio, and in which people chat.
const NIGHTLY: std::ops::Range<u64> = 1..5;
const CHATTING: std::ops::Range<u64> = 7..23;
/// Periods in which credit scoring needs a second replica, and how long each takes.
const BUSY: usize = 6;
const BUSY_FOR: (Millis, Millis) = (Millis::seconds(600), Millis::seconds(1800));

pub(crate) struct Day {
    /// Requested VRAM, in percent of all VRAM.
    pub utilization: f64,
    /// Time for which a replica of each app runs, in percent of the day.
    pub up: [f64; 3],
    /// Hours, by the number of pods beside fraud detection.
    pub company: BTreeMap<usize, f64>,
    pub curves: Vec<Curve>,
    pub broken: Vec<BrokenPromise>,
}

pub fn played(hours: u64, seed: u64, replica: Bytes, scheduler: Box<dyn FleetScheduler>) -> Day {
    let mut draws = Random::seeded(seed, 8);
    let busy: Vec<(Moment, Moment)> = (0..BUSY).map(|_| busy(&mut draws)).collect();
    let mut stage: Stage<'_, ()> = Stage::new(machines(), scheduler, seed);
    let mut day = Day {
        utilization: 0.0,
        up: [0.0; 3],
        company: BTreeMap::new(),
        curves: Vec::new(),
        broken: Vec::new(),
    };
    let (mut since, mut points) = (START, Vec::new());
    let mut standing = Standing::default();
    let end = START + Millis::seconds(hours * 3600);
    stage.submit(App::Fraud.pod(FRAUD));
    stage.at(START, ());
    while let Some(happened) = stage.next(end) {
        let now = stage.now();
        day.count(&standing, now.since(since));
        since = now;
        if let ScenarioEvent::Timer(()) = happened {
            reconcile(&mut stage, App::Credit, credit(now, &busy), replica);
            reconcile(&mut stage, App::Chatbot, chatbot(now), replica);
            stage.at(now + MINUTE, ());
            points.push((now.since(START).0 as f64 / 3.6e6, standing.utilization()));
        }
        standing = Standing::of(&stage);
    }
    day.count(&standing, end.since(since));
    let all = hours as f64 / 100.0;
    day.utilization /= hours as f64;
    day.up.iter_mut().for_each(|up| *up /= all);
    day.curves.push(Curve {
        name: "VRAM in use, %",
        x: "hours",
        points,
    });
    day.broken.append(&mut stage.broken);
    day
}

/// The GPUs' usage between two events.
#[derive(Debug, Clone, Copy, Default)]
struct Standing {
    asked: Bytes,
    up: [bool; 3],
    /// Pods beside fraud detection.
    company: usize,
}

impl Standing {
    fn of(stage: &Stage<'_, ()>) -> Self {
        let mut standing = Self::default();
        for gpu in stage.machines.iter().flat_map(|machine| &machine.gpus) {
            standing.asked += gpu.charged();
            let pods = gpu.pods.keys().filter_map(|uid| stage.pod(uid));
            let has_fraud = pods.clone().any(|pod| App::of(&pod.spec) == App::Fraud);
            standing.company += if has_fraud { gpu.pods.len() - 1 } else { 0 };
            for pod in pods.filter(|pod| pod.ready.is_some() && pod.leaving.is_none()) {
                standing.up[App::of(&pod.spec) as usize] = true;
            }
        }
        standing
    }

    fn utilization(&self) -> f64 {
        100.0 * self.asked.0 as f64 / (2 * GPU.0) as f64
    }
}

impl Day {
    fn count(&mut self, standing: &Standing, time: Millis) {
        let hours = time.0 as f64 / 3.6e6;
        self.utilization += hours * standing.utilization();
        for (sum, up) in self.up.iter_mut().zip(standing.up) {
            *sum += if up { hours } else { 0.0 };
        }
        *self.company.entry(standing.company).or_default() += hours;
    }
}

fn busy(draws: &mut Random) -> (Moment, Moment) {
    let begins = START + Millis(draws.below(86_400_000) as u64);
    (begins, begins + draws.log_uniform(BUSY_FOR.0, BUSY_FOR.1))
}

/// Replicas of credit scoring that are wanted.
fn credit(now: Moment, busy: &[(Moment, Moment)]) -> usize {
    let is_busy = busy.iter().any(|(from, to)| (*from..*to).contains(&now));
    if is_busy || NIGHTLY.contains(&hour(now)) {
        2
    } else {
        1
    }
}

fn chatbot(now: Moment) -> usize {
    if CHATTING.contains(&hour(now)) { 2 } else { 1 }
}

fn hour(now: Moment) -> u64 {
    now.since(START).0 / 3_600_000 % 24
}

/// As a ReplicaSet does: pods that are missing are created, and of those that are too many the pending ones go first.
fn reconcile(stage: &mut Stage<'_, ()>, app: App, wanted: usize, vram: Bytes) {
    let there = stage
        .pods()
        .filter(|(_, pod)| App::of(&pod.spec) == app && pod.leaving.is_none());
    let mut there: Vec<(bool, Moment, PodUid)> = there
        .map(|(uid, pod)| (pod.bound.is_some(), pod.submitted, uid.clone()))
        .collect();
    there.sort_unstable();
    for (.., uid) in there.iter().take(there.len().saturating_sub(wanted)) {
        stage.finish(uid);
    }
    for _ in there.len()..wanted {
        let (labels, priority) = (app.pod(vram).labels, app.priority());
        let model = ModelId::parse(ModelShape::LLAMA_8B.name).expect("it is a name");
        let engine = PodSpec::serving("bank", model, ModelShape::LLAMA_8B.weights, vram);
        stage.submit(PodSpec {
            labels,
            priority,
            ..engine
        });
    }
}
