//! S2, mixed models on one pool: a catalogue of a hundred models, most of which are hardly asked for. A GPU for each stands idle
//! most of the time and a pool is full before all have a place; Stowage packs them by VRAM, with KV caches and queues in view.
//!
//! # The workload
//!
//! A hundred models of 1B to 70B, of which rank r is asked for 1/r as often as rank 1; 30 requests a second together. Each has
//! stretches of six minutes with four times its mean and of half an hour with two fifths of it. H100 in nodes of eight, every node with all files on its disk.
//! Teams size an engine's grant for its busy stretches: weights, profile run, and a KV cache for the requests inside if it has half
//! of a GPU's compute, and a quarter more; at least 8,192 tokens. The policy's autoscaler drives one to eight replicas of each model,
//! and in the two hours a new version of every model is rolled out, one after the other: a new pod for each old one, which leaves
//! when the new one is ready and it has finished its requests. Engines with something to do take turns on their GPU: one beside two
//! busy neighbours is three times as slow. A request is in time with a first token within 5 s and 0.2 s for each further one.
//!
//! *GPUs* is the smallest pool with a place for every model and 99 % of the requests in time, by bisection. The other figures are of
//! one pool for all variants: a fourth more than the grants of one replica of each model take without any gap.
//!
//! The variants: Stowage; Stowage whose agents report no KV caches and queues, so that it packs by VRAM alone; and kube-scheduler
//! with whole GPUs for every engine, which then have all of its memory for their KV cache.

mod catalogue;
mod pool;
mod sums;

use super::{Bound, Curve, Figure, Played, Scenario, ScenarioInput, Target, shipped};
use crate::lab::simulate::fleet::engines::{LatencyHistogram, Slo};
use crate::lab::simulate::fleet::schedulers::{FleetScheduler, Placing, Preempting, StockScheduler, Stowage};
use crate::lab::simulate::fleet::stage::Stage;
use crate::lab::simulate::random::Random;
use crate::scheduling::policy::AutoscalingRules;
use crate::units::{Bytes, Millis};
use catalogue::{Grants, ServedModel, catalogue, machines, most};
use pool::Pool;

pub static MIXED_MODELS: Scenario = Scenario {
    name: "mixed-models",
    claim: "A catalogue of models shares a fraction of the GPUs that one model per GPU takes, and requests stay in time.",
    variants: &["stowage", "KV-blind", "one model per GPU"],
    figures: &[
        Figure {
            name: "GPUs",
            decimals: 1,
            help: "the smallest pool with a place for every model and 99 % of requests in time",
        },
        Figure {
            name: "least",
            decimals: 1,
            help: "GPUs that one replica of each model takes if no VRAM is left over between them",
        },
        Figure {
            name: "in time",
            decimals: 2,
            help: "requests within the bounds on the pool, in hundredths",
        },
        Figure {
            name: "TTFT p99",
            decimals: 2,
            help: "seconds to the first token on the pool, 99th percentile of requests that an engine took",
        },
        Figure { name: "placements", decimals: 0, help: "pods placed on the pool while it serves" },
        Figure {
            name: "onto full",
            decimals: 2,
            help: "of these onto a GPU with an engine above 90 % of its KV cache, in hundredths",
        },
        Figure { name: "models", decimals: 1, help: "models with a place on the pool" },
        Figure {
            name: "stranded",
            decimals: 2,
            help: "free VRAM that no model fits, in hundredths of that of GPUs in use",
        },
        Figure {
            name: "busy",
            decimals: 1,
            help: "time for which a GPU in use has a request, in hundredths",
        },
    ],
    targets: &[
        Target {
            name: "GPUs saved against one model per GPU, %",
            bound: Bound::AtLeast(60.0),
            value: |means| saved(means.of("stowage", "GPUs"), means.of("one model per GPU", "GPUs")),
            limit: Some(|means| saved(means.of("stowage", "least"), means.of("one model per GPU", "GPUs"))),
        },
        Target {
            name: "placements onto a GPU above 90 % KV, %",
            bound: Bound::AtMost(0.0),
            value: |means| means.of("stowage", "onto full"),
            limit: None,
        },
        Target {
            name: "TTFT p99: KV-blind ÷ Stowage",
            bound: Bound::AtLeast(2.0),
            value: |means| means.of("KV-blind", "TTFT p99") / means.of("stowage", "TTFT p99"),
            limit: None,
        },
    ],
    traces: &[],
    check: None,
    play,
};

const MODELS: usize = 100;
/// Requests a second, for so many models.
const PER_S: f64 = 30.0;
const VRAM: Bytes = Bytes::gib(80);
const NODE_GPUS: usize = 8;
const SLO: Slo = Slo { ttft_s: 5.0, tpot_s: 0.2 };
/// Of the requests.
const MOST_LATE: f64 = 0.01;
const MOST_REPLICAS: u32 = 8;
/// Between two steps of the engines.
const STEP: Millis = Millis::seconds(5);
/// For how long a replica that is let go finishes its requests.
const DRAIN: Millis = Millis::seconds(120);
/// Until the first replicas serve, and traffic begins.
const WARM_UP: Millis = Millis::seconds(900);
/// GPUs of the pool, of the least.
const POOL: f64 = 1.25;

#[derive(Debug, PartialEq, Eq)]
enum Timer {
    Step,
    /// A new version of this model is there.
    Rollout(usize),
}

fn saved(gpus: f64, instead_of: f64) -> f64 {
    100.0 * (1.0 - gpus / instead_of)
}

/// A workload and who places it.
struct Play {
    variant: usize,
    seed: u64,
    minutes: usize,
    models: Vec<ServedModel>,
    /// Of rollouts.
    order: Vec<usize>,
}

fn play(input: &ScenarioInput, variant: usize, seed: u64) -> Played {
    let (models, minutes) = if input.is_short { (20, 15) } else { (MODELS, 120) };
    let shared = catalogue(seed, models, minutes, Grants::RightSized);
    let least = least(&shared);
    let models = if variant == 2 { catalogue(seed, models, minutes, Grants::WholeGpus) } else { shared };
    let mut order: Vec<usize> = (0..models.len()).collect();
    Random::seeded(seed, 7).shuffle(&mut order);
    let play = Play { variant, seed, minutes, models, order };
    let gpus = if env("NEED", 1.0) > 0.0 { play.gpus_needed() } else { 0 };
    let mut pool = play.pool((env("POOL", POOL) * least as f64).ceil() as usize);
    pool.play(minutes, &play.order, None);
    let mut ttft = LatencyHistogram::default();
    pool.served.iter().for_each(|served| ttft.merge(&served.day.tally.latencies.ttft));
    let seconds = |share: f64| ttft.quantile_s(share).unwrap_or(0.0);
    let point = |thousandth: u32| (seconds(f64::from(thousandth) / 1000.0), f64::from(thousandth) / 10.0);
    let sums = &pool.sums;
    Played {
        figures: vec![
            gpus as f64,
            least as f64,
            100.0 * (1.0 - (pool.late() + pool.waiting()) / play.requests()),
            seconds(0.99),
            sums.placements,
            sums.onto_full(),
            sums.placed as f64,
            sums.stranded(),
            sums.busy(),
        ],
        curves: vec![
            Curve { name: "GPUs in use", x: "hours", points: sums.curve.clone() },
            Curve {
                name: "requests with a first token, %, from 90",
                x: "seconds",
                points: (900..1000).map(point).collect(),
            },
        ],
        broken: std::mem::take(&mut pool.stage.broken),
        notes: Vec::new(),
    }
}

/// GPUs whose VRAM one replica of each takes, less the headroom.
fn least(models: &[ServedModel]) -> usize {
    let granted: Bytes = models.iter().map(|model| model.grant.times(model.gpus.into())).sum();
    granted.0.div_ceil(most().0) as usize
}

impl Play {
    fn requests(&self) -> f64 {
        self.models.iter().map(|model| model.traffic.requests()).sum()
    }

    fn pool(&self, gpus: usize) -> Pool<'_> {
        let mut policy = shipped("default", include_str!("../../../../../policies/default/policy.yaml"));
        if env("LATENCY", 0.0) > 0.0 {
            policy =
                shipped("latency-first", include_str!("../../../../../policies/latency-first/policy.yaml"));
        }
        let rules = |model: &ServedModel| AutoscalingRules {
            max_replicas: MOST_REPLICAS,
            kv_cache: crate::units::Percent::new(env("KVT", 70.0) as u8).unwrap(),
            ..policy.autoscaling.of(&model.id)
        };
        let scheduler: Box<dyn FleetScheduler> = match self.variant {
            2 => Box::new(StockScheduler::new(Placing::MostAllocated, Preempting::Never, self.seed)),
            _ => Box::new(Stowage::new(policy.clone())),
        };
        let stage = Stage::new(machines(gpus, &self.models), scheduler, self.seed);
        Pool::new(stage, &self.models, rules, self.variant == 0, self.variant == 2)
    }

    /// The fewest GPUs on which all models have a place and enough requests are in time.
    fn gpus_needed(&self) -> usize {
        let most_late = MOST_LATE * self.requests();
        let suffices = |gpus| self.pool(gpus).play(self.minutes, &self.order, Some(most_late));
        let (mut too_few, mut enough) = (least(&self.models) - 1, 2 * least(&self.models));
        while enough - too_few > 1 {
            let middle = (too_few + enough) / 2;
            if suffices(middle) { enough = middle } else { too_few = middle }
        }
        enough
    }
}

fn env(name: &str, default: f64) -> f64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[cfg(test)]
mod scaffold {
    use super::*;

    #[test]
    #[ignore = "measures"]
    fn measure() {
        let seeds = std::env::var("SEEDS").unwrap_or("42".into());
        let variants = std::env::var("VARIANTS").unwrap_or("0,1,2".into());
        let input = ScenarioInput { is_short: env("SHORT", 0.0) > 0.0, ..ScenarioInput::default() };
        for seed in seeds.split(',').map(|seed| seed.parse::<u64>().unwrap()) {
            for variant in variants.split(',').map(|variant| variant.parse::<usize>().unwrap()) {
                let began = std::time::Instant::now();
                let played = play(&input, variant, seed);
                let figures: Vec<String> = MIXED_MODELS
                    .figures
                    .iter()
                    .zip(&played.figures)
                    .map(|(figure, value)| format!("{} {value:.2}", figure.name))
                    .collect();
                println!(
                    "{seed} {} | {} | {:.1} s, broken {} {:?}",
                    MIXED_MODELS.variants[variant],
                    figures.join(", "),
                    began.elapsed().as_secs_f64(),
                    played.broken.len(),
                    played.broken.first(),
                );
                let tail = &played.curves[1].points;
                println!("   tail {:?}", [0, 50, 80, 90, 95, 99].map(|n| tail[n]));
            }
        }
    }
}
