//! Pods that join engines, placed by degrees and by three steps, in simulated time.
//!
//! 24 nodes with 192 engines of 16 to 48 GiB. The use of each KV cache drifts around a mean of its own that changes every ten
//! minutes or so; a reading is off by up to 6 points, and requests wait where it is above 90 %. Every second a pod of 4 to 16
//! GiB comes, two of three serving, and stays for ten minutes on average. Measured is the true use of the cache that it joins.

use super::fleet::{Fleet, GPUS};
use std::collections::BTreeMap;
use stowage_scheduling::placing::rank::{ScheduleAttempt, shortlist};
use stowage_scheduling::placing::snapshot::Snapshot;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Millis, Percent};
use stowage_scheduling::vocabulary::classification::ClassTerms;
use stowage_scheduling::vocabulary::gpu::Gpu;
use stowage_scheduling::vocabulary::node::Node;
use stowage_scheduling::vocabulary::node_reading::EngineLoad;

const NODES: usize = 24;
const SECONDS: u64 = 1800;
/// Seconds until the cluster has filled; not measured.
const WARM_UP_SECONDS: u64 = 600;

#[derive(Clone, Copy, PartialEq, Eq)]
enum LoadScoring {
    Degrees,
    /// Calm, unknown, or beyond three quarters of a limit, of each reading as it is.
    ThreeSteps,
}

#[derive(Default)]
struct Tally {
    /// KV-cache usage of the GPU of each placed pod, in per cent.
    kv_usage_met: Vec<f64>,
    refused: usize,
    /// Allocated share of the VRAM in thousandths, summed over seconds.
    allocated: f64,
    seconds: f64,
}

pub fn print(seeds: u64) {
    println!(
        "KV occupancy met at placement, true per cent of the cache that a pod joins; {seeds} seeds"
    );
    println!(
        "| counted | mean | p90 | above 80 % | refused | VRAM allocated |\n|---|---|---|---|---|---|"
    );
    let arms = [
        ("by degrees", LoadScoring::Degrees),
        ("in three steps", LoadScoring::ThreeSteps),
    ];
    let [degrees, steps] = arms.map(|(name, counting)| {
        let mut tally = Tally::default();
        (42..42 + seeds).for_each(|seed| run(seed, counting, &mut tally));
        tally.print(name)
    });
    assert!(degrees < steps, "{degrees} against {steps}");
}

impl Tally {
    fn print(&mut self, name: &str) -> f64 {
        self.kv_usage_met.sort_by(f64::total_cmp);
        let count = self.kv_usage_met.len() as f64;
        let mean = self.kv_usage_met.iter().sum::<f64>() / count;
        let p90 = self.kv_usage_met[self.kv_usage_met.len() * 9 / 10];
        let above =
            100.0 * self.kv_usage_met.iter().filter(|met| **met > 80.0).count() as f64 / count;
        let allocated = 100.0 * self.allocated / self.seconds;
        println!(
            "| {name} | {mean:.1} | {p90:.1} | {above:.2} % | {} | {allocated:.2} % |",
            self.refused
        );
        mean
    }
}

fn run(seed: u64, counting: LoadScoring, tally: &mut Tally) {
    let mut sizes = Random::seeded(seed, 0);
    let mut policy = Policy::default();
    if counting == LoadScoring::ThreeSteps {
        policy.telemetry.smoothing = Millis(0);
    }
    let mut fleet = Fleet::new(policy, NODES, |_, _| [16, 24, 32, 48][sizes.below(4)]);
    let mut engines = Engines::new(seed);
    let mut arrivals = Random::seeded(seed, 1);
    let mut leaving: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for second in 0..SECONDS {
        fleet.advance_to_second(second);
        let gone = leaving.remove(&second).unwrap_or_default();
        gone.iter().for_each(|name| fleet.release(name));
        engines.advance();
        for node in 0..NODES {
            fleet.report(node, &engines.readings(node));
        }
        let (gib, priority) = (
            4 + 4 * arrivals.below(4) as u64,
            if arrivals.below(3) == 0 { -10 } else { 0 },
        );
        let stays = 1 + arrivals.exponential(600_000.0).0 / 1000;
        let name = format!("pod-{second}");
        let met = place(&mut fleet, &engines, counting, &name, (gib, priority));
        match met {
            Some(met) => {
                leaving.entry(second + stays).or_default().push(name);
                tally
                    .kv_usage_met
                    .extend((second >= WARM_UP_SECONDS).then_some(met));
            }
            None => tally.refused += usize::from(second >= WARM_UP_SECONDS),
        }
        if second >= WARM_UP_SECONDS {
            tally.allocated += fleet.cluster.ledger().totals().charged.0 as f64
                / fleet.cluster.ledger().totals().capacity.0 as f64;
            tally.seconds += 1.0;
        }
    }
}

/// Binds the pod to the best GPU. Returns its KV-cache usage in per cent.
fn place(
    fleet: &mut Fleet,
    engines: &Engines,
    counting: LoadScoring,
    name: &str,
    (gib, priority): (u64, i32),
) -> Option<f64> {
    let demand = fleet.demand(gib, priority);
    let snapshot = fleet.cluster.snapshot();
    let policy = fleet.policy.clone();
    let names = || snapshot.nodes().iter().map(|node| node.name.as_str());
    let attempt = ScheduleAttempt::unreserved(&policy);
    let list = match counting {
        LoadScoring::Degrees => shortlist(&snapshot, &demand, names(), attempt),
        LoadScoring::ThreeSteps => {
            let nodes = snapshot
                .nodes()
                .iter()
                .map(|node| in_three_steps(node, demand.terms))
                .collect();
            let snapshot = Snapshot::new(
                snapshot.generation(),
                snapshot.node_list_generation(),
                nodes,
            );
            shortlist(&snapshot, &demand, names(), attempt)
        }
    };
    let best = list.best.first()?;
    let gpu = best.gpus.iter().next()?;
    fleet.bind(name, demand, best.node_index, &[gpu]);
    Some(engines.level(best.node_index, gpu))
}

/// The node as versions up to 0.2 saw it: the cost of its steps, of 1,000, was 0, 500 and 1,000, which are those of an idle GPU,
/// one of unknown load and one at its limit.
fn in_three_steps(node: &Node, terms: ClassTerms) -> Node {
    let gpu = |gpu: &Gpu| Gpu {
        engine_load: three_steps(gpu.engine_load, terms),
        ..*gpu
    };
    Node {
        gpus: node.gpus.iter().map(gpu).collect(),
        ..node.clone()
    }
}

fn three_steps(load: EngineLoad, terms: ClassTerms) -> EngineLoad {
    let (Some(kv), Some(queue)) = (load.kv_cache, load.queue) else {
        return EngineLoad::default();
    };
    let (Some(kv_limit), Some(queue_limit)) = (terms.kv_cache_limit, terms.queue_limit) else {
        return EngineLoad::NONE;
    };
    if terms.is_exceeded_by(load) {
        return load;
    }
    let is_near = |measured: u32, limit: u32| measured * 4 > limit * 3;
    let is_busy = is_near(kv.get().into(), kv_limit.get().into()) || is_near(queue, queue_limit);
    if is_busy {
        EngineLoad::new(Some(kv_limit), Some(0))
    } else {
        EngineLoad::NONE
    }
}

/// True usage of the KV caches.
struct Engines {
    dice: Random,
    /// Current and mean usage of each cache, in per cent.
    caches: Vec<(f64, f64)>,
}

impl Engines {
    fn new(seed: u64) -> Self {
        let mut dice = Random::seeded(seed, 2);
        let caches = (0..NODES * GPUS)
            .map(|_| {
                let mean = Self::mean(&mut dice);
                (mean, mean)
            })
            .collect();
        Self { dice, caches }
    }

    /// A third nearly idle, half at work, the rest nearly full.
    fn mean(dice: &mut Random) -> f64 {
        match dice.below(6) {
            0 | 1 => 10.0 * dice.unit_interval(),
            5 => 75.0 + 23.0 * dice.unit_interval(),
            _ => 10.0 + 65.0 * dice.unit_interval(),
        }
    }

    fn advance(&mut self) {
        for place in 0..self.caches.len() {
            let (level, mut mean) = self.caches[place];
            if self.dice.below(600) == 0 {
                mean = Self::mean(&mut self.dice);
            }
            let level = level + (mean - level) / 20.0 + 3.0 * (self.dice.unit_interval() - 0.5);
            self.caches[place] = (level.clamp(0.0, 100.0), mean);
        }
    }

    fn level(&self, node: usize, gpu: usize) -> f64 {
        self.caches[node * GPUS + gpu].0
    }

    fn readings(&mut self, node: usize) -> [EngineLoad; GPUS] {
        std::array::from_fn(|gpu| {
            let read = (self.level(node, gpu) + 12.0 * (self.dice.unit_interval() - 0.5))
                .clamp(0.0, 100.0);
            let queue = if read > 90.0 {
                self.dice.below(40) as u32
            } else {
                0
            };
            EngineLoad::new(Percent::from_share(read / 100.0), Some(queue))
        })
    }
}
