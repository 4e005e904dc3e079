//! A day of the three models: what of the GPUs' VRAM is asked for, and how long fraud detection takes in the company that it has.

use super::app::App;
use super::latency::FraudGpu;
use super::{GPU_VRAM, Sizes, machines};
use crate::simulate::fleet::engines::ModelShape;
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::scenarios::Curve;
use crate::simulate::fleet::schedulers::FleetScheduler;
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use stowage_scheduling::ids::{ModelId, PodUid};
use stowage_scheduling::testkit::oracle::BrokenInvariant;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Micros, Millis, Moment, Percent};
use stowage_scheduling::vocabulary::latency::EngineLatency;

/// Hours in which credit scoring goes through the whole portfolio, and in which people chat.
const NIGHT_HOURS: std::ops::Range<u64> = 1..5;
const CHAT_HOURS: std::ops::Range<u64> = 7..23;
/// Periods in which credit scoring needs a second replica, and how long each takes.
const BUSY_PERIODS: usize = 6;
const BUSY_PERIOD_LENGTH: (Millis, Millis) = (Millis::seconds(600), Millis::seconds(1800));

pub(crate) struct Day {
    /// Requested VRAM, in percent of all VRAM.
    pub utilization: f64,
    /// Time for which a replica of each app runs, in percent of the day.
    pub availability: [f64; 3],
    /// Milliseconds of an inference of fraud detection: the median, and the 99th percentile.
    pub fraud_ms: [f64; 2],
    /// Minutes for which fraud detection served beside others.
    pub company_minutes: f64,
    pub evictions: u64,
    pub curves: Vec<Curve>,
    pub broken: Vec<BrokenInvariant>,
}

/// Between two timers: agents' latencies are means over so long.
const WINDOW: Millis = Millis::seconds(30);

pub fn play_day(hours: u64, seed: u64, sizes: Sizes, scheduler: Box<dyn FleetScheduler>) -> Day {
    let mut draws = Random::seeded(seed, 8);
    let busy: Vec<(Moment, Moment)> = (0..BUSY_PERIODS)
        .map(|_| draw_busy_period(&mut draws))
        .collect();
    let mut stage: Stage<'_, ()> = Stage::new(machines(), scheduler, seed);
    let mut day = Day {
        utilization: 0.0,
        availability: [0.0; 3],
        fraud_ms: [0.0; 2],
        company_minutes: 0.0,
        evictions: 0,
        curves: Vec::new(),
        broken: Vec::new(),
    };
    let (mut since, mut points) = (START, Vec::new());
    let mut snapshot = UsageSnapshot::default();
    let end = START + Millis::seconds(hours * 3600);
    let fraud = stage.submit(App::Fraud.pod(sizes.fraud));
    let mut fraud_gpu = FraudGpu::new(seed);
    stage.schedule_timer(START, ());
    while let Some(happened) = stage.next(end) {
        let now = stage.now();
        day.record(&snapshot, now.since(since));
        since = now;
        if let ScenarioEvent::Timer(()) = happened {
            reconcile(
                &mut stage,
                App::Credit,
                credit_replicas(now, &busy),
                sizes.replica,
            );
            let chatbots = chatbot_replicas(now);
            reconcile(&mut stage, App::Chatbot, chatbots, sizes.replica);
            if serve(&mut stage, &fraud, &mut fraud_gpu) > 0 {
                day.company_minutes += WINDOW.0 as f64 / 6e4;
            }
            stage.schedule_timer(now + WINDOW, ());
            points.push((now.since(START).0 as f64 / 3.6e6, snapshot.utilization()));
        }
        snapshot = UsageSnapshot::from_stage(&stage);
    }
    day.record(&snapshot, end.since(since));
    let all = hours as f64 / 100.0;
    day.utilization /= hours as f64;
    day.availability.iter_mut().for_each(|up| *up /= all);
    day.fraud_ms = fraud_gpu.quantiles();
    day.evictions = stage.evictions;
    day.curves.push(Curve {
        name: "VRAM in use, %",
        x_label: "hours",
        points,
    });
    day.broken.append(&mut stage.violations);
    day
}

/// Fraud detection serves for a window beside the engines that are ready there, and agents report what its requests took. How many
/// those were.
fn serve(stage: &mut Stage<'_, ()>, fraud: &PodUid, gpu: &mut FraudGpu) -> usize {
    let is_ready = |uid: &&PodUid| stage.pod(uid).is_some_and(|pod| pod.ready_at.is_some());
    if !is_ready(&fraud) {
        return 0;
    }
    let gpus = stage.machines.iter().flat_map(|machine| &machine.gpus);
    let here = gpus.filter(|gpu| gpu.pods.contains_key(fraud));
    let beside = here.flat_map(|gpu| gpu.pods.keys().filter(|uid| *uid != fraud));
    let beside: Vec<PodUid> = beside.filter(is_ready).cloned().collect();
    let count = beside.len();
    let served = gpu.serve(WINDOW.0 as f64, count);
    let took = served.mean_ms.and_then(|ms| Micros::from_seconds(ms / 1e3));
    let fraud = (fraud.clone(), took, served.fraud_busy);
    let engines = beside.into_iter().zip(served.busy);
    let engines = engines.map(|(uid, busy)| (uid, None, busy));
    for (pod, time_to_first_token, busy) in std::iter::once(fraud).chain(engines) {
        stage.set_latency(EngineLatency {
            pod,
            time_per_token: None,
            time_to_first_token,
            busy: Percent::from_share(busy),
        });
    }
    count
}

/// The GPUs' usage between two events.
#[derive(Debug, Clone, Copy, Default)]
struct UsageSnapshot {
    requested: Bytes,
    is_up: [bool; 3],
}

impl UsageSnapshot {
    fn from_stage(stage: &Stage<'_, ()>) -> Self {
        let mut snapshot = Self::default();
        for gpu in stage.machines.iter().flat_map(|machine| &machine.gpus) {
            snapshot.requested += gpu.granted_bytes();
            let pods = gpu.pods.keys().filter_map(|uid| stage.pod(uid));
            for pod in pods.filter(|pod| pod.ready_at.is_some() && pod.terminating_since.is_none())
            {
                snapshot.is_up[App::from_pod(&pod.spec) as usize] = true;
            }
        }
        snapshot
    }

    fn utilization(&self) -> f64 {
        100.0 * self.requested.0 as f64 / (2 * GPU_VRAM.0) as f64
    }
}

impl Day {
    fn record(&mut self, snapshot: &UsageSnapshot, time: Millis) {
        let hours = time.0 as f64 / 3.6e6;
        self.utilization += hours * snapshot.utilization();
        for (sum, up) in self.availability.iter_mut().zip(snapshot.is_up) {
            *sum += if up { hours } else { 0.0 };
        }
    }
}

fn draw_busy_period(draws: &mut Random) -> (Moment, Moment) {
    let begins = START + Millis(draws.below(86_400_000) as u64);
    (
        begins,
        begins + draws.log_uniform(BUSY_PERIOD_LENGTH.0, BUSY_PERIOD_LENGTH.1),
    )
}

/// Replicas of credit scoring that are wanted.
fn credit_replicas(now: Moment, busy: &[(Moment, Moment)]) -> usize {
    let is_busy = busy.iter().any(|(from, to)| (*from..*to).contains(&now));
    if is_busy || NIGHT_HOURS.contains(&hour(now)) {
        2
    } else {
        1
    }
}

fn chatbot_replicas(now: Moment) -> usize {
    if CHAT_HOURS.contains(&hour(now)) {
        2
    } else {
        1
    }
}

fn hour(now: Moment) -> u64 {
    now.since(START).0 / 3_600_000 % 24
}

/// As a ReplicaSet does: pods that are missing are created, and of those that are too many the pending ones go first.
fn reconcile(stage: &mut Stage<'_, ()>, app: App, wanted: usize, vram: Bytes) {
    let there = stage
        .pods()
        .filter(|(_, pod)| App::from_pod(&pod.spec) == app && pod.terminating_since.is_none());
    let mut there: Vec<(bool, Moment, PodUid)> = there
        .map(|(uid, pod)| (pod.binding.is_some(), pod.submitted_at, uid.clone()))
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
