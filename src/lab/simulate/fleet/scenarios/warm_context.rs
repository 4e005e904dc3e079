//! S4, warm context on opportunistic GPUs: 150,000 short inferences with a model of 1.7B parameters, on GPUs that others leave idle
//! and take back.
//!
//! Stowage places pods, not tasks: a *worker* is a pod that loads its context once and then takes batches from a queue. So a gain
//! has three parts, and the variants tell them apart: that workers keep their context (a pod for each batch loads it each time),
//! where workers run (Stowage against kube-scheduler), and more GPUs (twenty against the pool).
//!
//! # The workload
//!
//! As published for this kind of pool: an A10 takes 0.273 s an inference and a TITAN X 0.645 s; the context takes 105 s where a
//! node has nothing and 40 s where it has the files. *Same GPUs*: ten of each, in batches of 100; *spread* is the difference
//! between batches of 1, 10 and 100. *Pool*: 93 of each; twenty are idle at first, and one more every two seconds, because the pods
//! of higher priority that have the others end. *Drain*: twenty GPUs with workers that are ready; each minute a pod of higher
//! priority takes one, and the batch in progress there is lost. Half of the nodes have the files.

use super::{Bound, Curve, Figure, Played, Scenario, ScenarioInput, Target, shipped};
use crate::ids::{GpuModel, ModelId, NodeName, PodUid};
use crate::lab::simulate::fleet::machines::{MachineSpec, Machines};
use crate::lab::simulate::fleet::pods::PodSpec;
use crate::lab::simulate::fleet::schedulers::{FleetScheduler, Placing, Preempting, StockScheduler, Stowage};
use crate::lab::simulate::fleet::stage::{Happening, START, Stage};
use crate::lab::simulate::random::Random;
use crate::scheduling::vocabulary::model_tier::LoadingSpeeds;
use crate::units::{Bytes, Millis, Moment};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

pub static WARM_CONTEXT: Scenario = Scenario {
    name: "warm-context",
    claim: "Workers on idle GPUs keep their context: the same inferences in a fraction of the time.",
    variants: &[
        "stowage",
        "workers, kube-scheduler",
        "a pod per batch, files on disk",
        "a pod per batch, cold",
    ],
    figures: &[
        Figure {
            name: "same GPUs",
            decimals: 0,
            help: "seconds for all inferences on ten A10 and ten TITAN X, in batches of 100",
        },
        Figure {
            name: "spread",
            decimals: 1,
            help: "how much that differs between batches of 1, 10 and 100, in hundredths",
        },
        Figure { name: "pool", decimals: 0, help: "seconds on a pool that grows from 20 to 186 GPUs" },
        Figure {
            name: "drain",
            decimals: 0,
            help: "inferences done while twenty GPUs are taken back, one a minute; of the batch sizes the best",
        },
    ],
    targets: &[
        Target {
            name: "time saved on the same GPUs, %",
            bound: Bound::AtLeast(75.0),
            value: |means| {
                saved(means.of("stowage", "same GPUs"), means.of("a pod per batch, cold", "same GPUs"))
            },
            limit: Some(|means| {
                saved(INFERENCES as f64 / rate(10, 10), means.of("a pod per batch, cold", "same GPUs"))
            }),
        },
        Target {
            name: "time saved on the pool against one A10, %",
            bound: Bound::AtLeast(98.3),
            value: |means| saved(means.of("stowage", "pool"), INFERENCES as f64 * A10),
            limit: None,
        },
        Target {
            name: "difference between batch sizes, %",
            bound: Bound::AtMost(3.0),
            value: |means| means.of("stowage", "spread"),
            limit: None,
        },
        Target {
            name: "inferences in the drain: Stowage ÷ the best pod per batch",
            bound: Bound::AtLeast(1.4),
            value: |means| {
                let cold = means
                    .of("a pod per batch, cold", "drain")
                    .max(means.of("a pod per batch, files on disk", "drain"));
                means.of("stowage", "drain") / cold
            },
            limit: None,
        },
    ],
    traces: &[],
    check: None,
    play,
};

const INFERENCES: u64 = 150_000;
/// Seconds an inference.
const A10: f64 = 0.273;
const TITAN_X: f64 = 0.645;
/// Seconds of context: from nothing, and from the node's files.
const COLD: f64 = 105.0;
const FROM_DISK: f64 = 40.0;
const BATCHES: [u64; 3] = [1, 10, 100];
const WEIGHTS: Bytes = Bytes(3_400_000_000);

/// A GPU's time for inferences, in seconds since the beginning.
#[derive(Debug, Clone, Copy)]
struct Slot {
    from: f64,
    until: f64,
    each: f64,
    /// Before each batch.
    context: f64,
}

fn saved(took: f64, instead_of: f64) -> f64 {
    100.0 * (1.0 - took / instead_of)
}

/// Inferences a second.
fn rate(a10: u32, titan_x: u32) -> f64 {
    f64::from(a10) / A10 + f64::from(titan_x) / TITAN_X
}

fn play(input: &ScenarioInput, variant: usize, seed: u64) -> Played {
    let total = if input.is_short { INFERENCES / 10 } else { INFERENCES };
    let mut broken = Vec::new();
    let (same, pool, drain) = match variant {
        0 | 1 => {
            let mut slots = |gpus, idle, way| {
                let mut run = WorkerRun::new(variant, gpus, idle, way, seed);
                run.play();
                broken.append(&mut run.stage.broken);
                run.slots
            };
            (slots(20, 20, Way::Keeps), slots(186, 20, Way::Grows), slots(20, 20, Way::Drains))
        }
        _ => {
            let context = if variant == 2 { FROM_DISK } else { COLD };
            let slot = |n: u64, from, until| Slot { from, until, each: seconds_on(n), context };
            let same = (0..20).map(|n| slot(n, 0.0, f64::INFINITY)).collect();
            let pool = (0..186).map(|n| slot(n, 2.0 * n.saturating_sub(19) as f64, f64::INFINITY)).collect();
            (same, pool, (0..20).map(|n| slot(n, 0.0, 60.0 * (n + 1) as f64)).collect())
        }
    };
    let took: Vec<f64> = BATCHES.iter().map(|batch| work(&same, *batch, total).0).collect();
    let (least, most) = took.iter().fold((f64::INFINITY, 0.0f64), |(a, b), one| (a.min(*one), b.max(*one)));
    let (pool_took, progress) = work(&pool, 100, total);
    let drained =
        BATCHES.iter().map(|batch| work(&drain, *batch, u64::MAX).1.len() as u64 * batch).max().unwrap_or(0);
    let points =
        progress.iter().enumerate().step_by(10).map(|(n, at)| (*at, 100.0 * (n * 100) as f64 / total as f64));
    Played {
        figures: vec![took[2], 100.0 * (most - least) / least, pool_took, drained as f64],
        curves: vec![Curve {
            name: "inferences done on the pool, %",
            x: "seconds",
            points: points.collect(),
        }],
        broken,
        notes: Vec::new(),
    }
}

/// Batches taken from one queue. When the last of them is done, and when each was; what is in progress at a slot's end is lost, and
/// another slot does it again.
fn work(slots: &[Slot], batch: u64, total: u64) -> (f64, Vec<f64>) {
    // In microseconds, so that times have an order.
    let micros = |seconds: f64| (seconds * 1e6).round() as u64;
    let mut free: BinaryHeap<Reverse<(u64, usize)>> =
        slots.iter().enumerate().map(|(n, slot)| Reverse((micros(slot.from), n))).collect();
    let (mut done, mut left) = (Vec::new(), total.div_ceil(batch));
    while left > 0
        && let Some(Reverse((from, n))) = free.pop()
    {
        let slot = &slots[n];
        let end = from + micros(slot.context + slot.each * batch as f64);
        if end as f64 <= slot.until * 1e6 {
            left -= 1;
            done.push(end as f64 / 1e6);
            free.push(Reverse((end, n)));
        }
    }
    done.sort_by(f64::total_cmp);
    (done.last().copied().unwrap_or(0.0), done)
}

fn seconds_on(n: u64) -> f64 {
    if n.is_multiple_of(2) { A10 } else { TITAN_X }
}

/// What becomes of the GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Keeps,
    /// One more is idle every two seconds.
    Grows,
    /// One is taken every minute, once the workers are ready.
    Drains,
}

/// Workers on the stage, which says from when until when each has a GPU.
struct WorkerRun {
    stage: Stage<'static, ()>,
    way: Way,
    /// Pods of higher priority that will end.
    others: Vec<PodUid>,
    gpus: u64,
    ready: BTreeMap<PodUid, Slot>,
    slots: Vec<Slot>,
}

/// The drain begins when all contexts are there.
const DRAIN: Moment = Moment(START.0 + 600_000);

impl WorkerRun {
    fn new(variant: usize, gpus: u64, idle: u64, way: Way, seed: u64) -> Self {
        let policy = include_str!("../../../../../policies/night-harvest/policy.yaml");
        let scheduler: Box<dyn FleetScheduler> = match variant {
            0 => Box::new(Stowage::new(shipped("night-harvest", policy))),
            _ => Box::new(StockScheduler::new(Placing::LeastAllocated, Preempting::LowerPriority, seed)),
        };
        let mut stage = Stage::new(machines(gpus, seed), scheduler, seed);
        let others = (idle..gpus).map(|_| stage.submit(other())).collect();
        (0..gpus).for_each(|_| drop(stage.submit(worker())));
        let first = if way == Way::Drains { DRAIN + Millis::seconds(60) } else { START + Millis::seconds(2) };
        stage.at(first, ());
        Self { stage, way, others, gpus, ready: BTreeMap::new(), slots: Vec::new() }
    }

    fn play(&mut self) {
        let end = START + Millis::seconds(1800);
        while let Some(happened) = self.stage.next(end) {
            let now = self.stage.now();
            match happened {
                Happening::Ready(uid) => self.note_ready(uid),
                Happening::Leaving(uid) => self.end(&uid, now),
                Happening::Timer(()) => self.change(now),
                Happening::Bound(_) | Happening::Gone(_) => {}
            }
        }
        // A drain ends for all.
        let last = if self.way == Way::Drains { end.since(DRAIN).0 as f64 / 1000.0 } else { f64::INFINITY };
        let left = std::mem::take(&mut self.ready).into_values();
        self.slots.extend(left.map(|slot| Slot { until: last, ..slot }));
    }

    fn change(&mut self, now: Moment) {
        match self.way {
            Way::Keeps => {}
            Way::Grows => {
                let Some(ends) = self.others.pop() else { return };
                self.stage.finish(&ends);
                self.stage.at(now + Millis::seconds(2), ());
            }
            Way::Drains if self.others.len() < self.gpus as usize => {
                self.others.push(self.stage.submit(other()));
                self.stage.at(now + Millis::seconds(60), ());
            }
            Way::Drains => {}
        }
    }

    fn note_ready(&mut self, uid: PodUid) {
        let pod = self.stage.pod(&uid).expect("it is ready");
        let Some(bound) = pod.bound.as_ref().filter(|_| pod.spec.model.is_some()) else { return };
        let gpu = self.stage.machines.get(&bound.node).map(|machine| machine.spec.gpu.as_str() == "A10");
        let since = if self.way == Way::Drains { DRAIN } else { START };
        let from = self.stage.now().since(since).0 as f64 / 1000.0;
        let each = if gpu == Some(true) { A10 } else { TITAN_X };
        self.ready.insert(uid, Slot { from, until: f64::INFINITY, each, context: 0.0 });
    }

    fn end(&mut self, uid: &PodUid, now: Moment) {
        let Some(slot) = self.ready.remove(uid) else { return };
        self.slots.push(Slot { until: now.since(DRAIN).0 as f64 / 1000.0, ..slot });
        // Its Job makes another.
        self.stage.submit(worker());
    }
}

fn worker() -> PodSpec {
    let labels = BTreeMap::from([("stowage.dev/checkpoints".to_owned(), "true".to_owned())]);
    let model = ModelId::parse("smollm2-1.7b").expect("it is a name");
    let pod = PodSpec::serving("harvest", model, WEIGHTS, Bytes::gib(9));
    PodSpec { labels, priority: -10, exclusive: true, ..pod }
}

/// Another team's pod, for which workers leave.
fn other() -> PodSpec {
    PodSpec {
        priority: 1000,
        exclusive: true,
        grace: Millis::seconds(30),
        ..PodSpec::plain("serving", Bytes::gib(9))
    }
}

fn machines(gpus: u64, seed: u64) -> Machines {
    let mut draws = Random::seeded(seed, 4);
    let spec = |n: u64| MachineSpec {
        name: NodeName::parse(&format!("node-{n:03}")).expect("digits are a name"),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse(if seconds_on(n) == A10 { "A10" } else { "TITAN-X" })
            .expect("it is a plain word"),
        gpus: 1,
        vram: Bytes::gib(if seconds_on(n) == A10 { 24 } else { 12 }),
        page_cache: Bytes::gib(32),
    };
    // So that a context takes 40 s from files and 105 s without.
    let disk = Bytes(3_000_000_000);
    let init = Millis((FROM_DISK * 1000.0) as u64 - WEIGHTS.over(disk).0);
    let network = Bytes((WEIGHTS.0 as f64 / (COLD - FROM_DISK)) as u64);
    let speeds = LoadingSpeeds { network, disk, page_cache: disk, init, ..LoadingSpeeds::default() };
    let mut machines = Machines::new((0..gpus).map(spec), speeds);
    for n in 0..gpus {
        if draws.below(2) == 0 {
            let model = ModelId::parse("smollm2-1.7b").expect("it is a name");
            machines.get_mut(&spec(n).name).expect("it was just made").disk.insert(model, WEIGHTS);
        }
    }
    machines
}
