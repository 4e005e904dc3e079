//! A day of the three models: what of the GPUs' VRAM is asked for, and how long fraud detection takes in the company that it has.

use super::app::App;
use super::latency::GpuQueue;
use super::{GPU_VRAM, Sizes, machines};
use crate::simulate::fleet::engines::ModelShape;
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::scenarios::Curve;
use crate::simulate::fleet::schedulers::FleetScheduler;
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use std::collections::BTreeMap;
use stowage_scheduling::ids::{ModelId, PodUid};
use stowage_scheduling::testkit::oracle::BrokenInvariant;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Micros, Millis, Moment, Percent};
use stowage_scheduling::vocabulary::latency::EngineLatency;

/// Hours in which credit scoring goes through the whole portfolio, and in which people chat.
const NIGHT_HOURS: std::ops::Range<u64> = 1..5;
const CHAT_HOURS: std::ops::Range<u64> = 7..23;
/// Mean milliseconds between two requests of a replica, in other hours and in these.
const REQUEST_GAPS_MS: [f64; 2] = [60_000.0, 1000.0];
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
    // The GPU of fraud detection, and the other.
    let mut queues = [true, false].map(|has_fraud| GpuQueue::new(seed, has_fraud));
    stage.schedule_timer(START, ());
    while let Some(happened) = stage.next(end) {
        let now = stage.now();
        day.record(&snapshot, now.since(since));
        since = now;
        if let ScenarioEvent::Timer(()) = happened {
            for app in [App::Credit, App::Chatbot] {
                let replicas = 1 + usize::from(is_busy(app, now, &busy));
                reconcile(&mut stage, app, replicas, sizes.replica);
            }
            if serve(&mut stage, &fraud, &mut queues, &busy) > 0 {
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
    day.fraud_ms = queues[0].quantiles();
    day.evictions = stage.evictions;
    day.curves.push(Curve {
        name: "VRAM in use, %",
        x_label: "hours",
        points,
    });
    day.broken.append(&mut stage.violations);
    day
}

/// The pods that are ready serve for a window, and agents report what their requests took. Answers how many engines are beside fraud
/// detection.
fn serve(
    stage: &mut Stage<'_, ()>,
    fraud: &PodUid,
    queues: &mut [GpuQueue; 2],
    busy: &[(Moment, Moment)],
) -> usize {
    let now = stage.now();
    let is_ready = |uid: &PodUid| stage.pod(uid).is_some_and(|pod| pod.ready_at.is_some());
    if !is_ready(fraud) {
        return 0;
    }
    let (mut measured, mut company) = (Vec::new(), 0);
    for gpu in stage.machines.iter().flat_map(|machine| &machine.gpus) {
        let engines = gpu.pods.keys().filter(|uid| *uid != fraud && is_ready(uid));
        let gap_ms = |uid| {
            Some(mean_request_gap_ms(
                App::from_pod(&stage.pod(uid)?.spec),
                now,
                busy,
            ))
        };
        let gaps_ms = engines.filter_map(|uid| Some((uid.clone(), gap_ms(uid)?)));
        let gaps_ms: BTreeMap<PodUid, f64> = gaps_ms.collect();
        let has_fraud = gpu.pods.contains_key(fraud);
        let served = queues[usize::from(!has_fraud)].serve(WINDOW.0 as f64, &gaps_ms);
        if has_fraud {
            company = gaps_ms.len();
            let took = served.mean_ms.and_then(|ms| Micros::from_seconds(ms / 1e3));
            measured.push((fraud.clone(), took, served.fraud_busy));
        }
        let engines = served.busy.into_iter();
        measured.extend(engines.map(|(uid, busy)| (uid, None, busy)));
    }
    for (pod, time_to_first_token, busy) in measured {
        stage.set_latency(EngineLatency {
            pod,
            time_per_token: None,
            time_to_first_token,
            busy: Percent::from_share(busy),
        });
    }
    company
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

/// Whether an app has much to do: it has two replicas then, and otherwise one.
fn is_busy(app: App, now: Moment, busy: &[(Moment, Moment)]) -> bool {
    match app {
        App::Chatbot => CHAT_HOURS.contains(&hour(now)),
        _ => {
            let is_busy = busy.iter().any(|(from, to)| (*from..*to).contains(&now));
            is_busy || NIGHT_HOURS.contains(&hour(now))
        }
    }
}

fn mean_request_gap_ms(app: App, now: Moment, busy: &[(Moment, Moment)]) -> f64 {
    REQUEST_GAPS_MS[usize::from(is_busy(app, now, busy))]
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
