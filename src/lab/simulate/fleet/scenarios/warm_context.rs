//! S4, warm context on opportunistic GPUs: 150,000 short inferences with a model of 1.7B parameters, on GPUs that others leave
//! idle and take back.
//!
//! Stowage places pods, not tasks: a *worker* is a pod that loads its context once and then takes batches from a queue. So a gain
//! has three parts, and the variants tell them apart: that workers keep their context (a pod for each batch loads it each time),
//! where workers run (Stowage against kube-scheduler), and more GPUs (twenty against the pool).
//!
//! # The workload
//!
//! As published for this kind of pool: an A10 takes 0.273 s an inference and a TITAN X 0.645 s; the context takes 105 s where a
//! node has nothing and 40 s where it has the files. *Same GPUs*: ten of each, in batches of 100; *spread* is the difference
//! between batches of 1, 10 and 100. *Pool*: 93 of each; twenty are idle at first, and one more every two seconds, because the
//! pods of higher priority that have the others end. *Drain*: twenty GPUs with workers that are ready; each minute a pod of
//! higher priority takes one, and the batch in progress there is lost. Half of the nodes have the files.

mod queue;
mod workers;

use super::{Curve, Figure, Scenario, ScenarioInput, Target, TargetBound, VariantRun};
use queue::{Slot, process_batches};
use stowage_scheduling::units::Bytes;
use workers::{GpuSupply, WorkerRun};

pub(crate) static WARM_CONTEXT: Scenario = Scenario {
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
        Figure {
            name: "pool",
            decimals: 0,
            help: "seconds on a pool that grows from 20 to 186 GPUs",
        },
        Figure {
            name: "drain",
            decimals: 0,
            help: "inferences done while twenty GPUs are taken back, one a minute; of the batch sizes the best",
        },
    ],
    targets: &[
        Target {
            name: "time saved on the same GPUs, %",
            bound: TargetBound::AtLeast(75.0),
            value: |means| {
                percent_saved(
                    means.mean_of("stowage", "same GPUs"),
                    means.mean_of("a pod per batch, cold", "same GPUs"),
                )
            },
            limit: Some(|means| {
                percent_saved(
                    INFERENCES as f64 / inferences_per_s(10, 10),
                    means.mean_of("a pod per batch, cold", "same GPUs"),
                )
            }),
        },
        Target {
            name: "time saved on the pool against one A10, %",
            bound: TargetBound::AtLeast(98.3),
            value: |means| {
                percent_saved(
                    means.mean_of("stowage", "pool"),
                    INFERENCES as f64 * A10_INFERENCE_S,
                )
            },
            limit: None,
        },
        Target {
            name: "difference between batch sizes, %",
            bound: TargetBound::AtMost(3.0),
            value: |means| means.mean_of("stowage", "spread"),
            limit: None,
        },
        Target {
            name: "inferences in the drain: Stowage ÷ the best pod per batch",
            bound: TargetBound::AtLeast(1.4),
            value: |means| {
                let cold = means
                    .mean_of("a pod per batch, cold", "drain")
                    .max(means.mean_of("a pod per batch, files on disk", "drain"));
                means.mean_of("stowage", "drain") / cold
            },
            limit: None,
        },
    ],
    traces: &[],
    check: None,
    play,
};

const INFERENCES: u64 = 150_000;
/// Seconds that one inference takes, by GPU.
const A10_INFERENCE_S: f64 = 0.273;
const TITAN_X_INFERENCE_S: f64 = 0.645;
/// Seconds of context: from nothing, and from the node's files.
const COLD_CONTEXT_S: f64 = 105.0;
const DISK_CONTEXT_S: f64 = 40.0;
const BATCHES: [u64; 3] = [1, 10, 100];
const WEIGHTS: Bytes = Bytes(3_400_000_000);

fn percent_saved(took: f64, instead_of: f64) -> f64 {
    100.0 * (1.0 - took / instead_of)
}

/// Inferences a second.
fn inferences_per_s(a10: u32, titan_x: u32) -> f64 {
    f64::from(a10) / A10_INFERENCE_S + f64::from(titan_x) / TITAN_X_INFERENCE_S
}

fn play(input: &ScenarioInput, variant: usize, seed: u64) -> VariantRun {
    let total = if input.is_short {
        INFERENCES / 10
    } else {
        INFERENCES
    };
    let mut broken = Vec::new();
    let (same, pool, drain) = match variant {
        0 | 1 => {
            let mut slots = |gpus, idle, way| {
                let mut run = WorkerRun::new(variant, gpus, idle, way, seed);
                run.play();
                broken.append(&mut run.stage.violations);
                run.slots
            };
            (
                slots(20, 20, GpuSupply::Constant),
                slots(186, 20, GpuSupply::Growing),
                slots(20, 20, GpuSupply::Draining),
            )
        }
        _ => {
            let context = if variant == 2 {
                DISK_CONTEXT_S
            } else {
                COLD_CONTEXT_S
            };
            let slot = |n: u64, from, until| Slot {
                from_s: from,
                until_s: until,
                inference_s: inference_seconds_on(n),
                context_s: context,
            };
            let same = (0..20).map(|n| slot(n, 0.0, f64::INFINITY)).collect();
            let pool = (0..186)
                .map(|n| slot(n, 2.0 * n.saturating_sub(19) as f64, f64::INFINITY))
                .collect();
            (
                same,
                pool,
                (0..20)
                    .map(|n| slot(n, 0.0, 60.0 * (n + 1) as f64))
                    .collect(),
            )
        }
    };
    let took: Vec<f64> = BATCHES
        .iter()
        .map(|batch| process_batches(&same, *batch, total).0)
        .collect();
    let (least, most) = took.iter().fold((f64::INFINITY, 0.0f64), |(a, b), one| {
        (a.min(*one), b.max(*one))
    });
    let (pool_took, progress) = process_batches(&pool, 100, total);
    let drained = BATCHES
        .iter()
        .map(|batch| process_batches(&drain, *batch, u64::MAX).1.len() as u64 * batch)
        .max()
        .unwrap_or(0);
    let points = progress
        .iter()
        .enumerate()
        .step_by(10)
        .map(|(n, at)| (*at, 100.0 * (n * 100) as f64 / total as f64));
    VariantRun {
        figures: vec![
            took[2],
            100.0 * (most - least) / least,
            pool_took,
            drained as f64,
        ],
        curves: vec![Curve {
            name: "inferences done on the pool, %",
            x_label: "seconds",
            points: points.collect(),
        }],
        violations: broken,
        notes: Vec::new(),
    }
}

fn inference_seconds_on(n: u64) -> f64 {
    if n.is_multiple_of(2) {
        A10_INFERENCE_S
    } else {
        TITAN_X_INFERENCE_S
    }
}
