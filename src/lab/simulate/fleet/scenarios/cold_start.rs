//! S3, cold start is time, not a flag: nodes have nothing, the image, the weights on disk or in memory, or an engine that sleeps
//! on one of their GPUs, and each pod starts as long as what its node and GPU have makes it.
//!
//! # The workloads
//!
//! *Drawn fleets*: 600 pods, each of which comes to a hundred nodes that are drawn for it. A node has nothing of its model, not
//! even the engine's image (20 GB); the image; the weights on disk; the weights in memory; or an engine that sleeps on one set of
//! its GPUs: each as likely as any other. Three fifths of all GPUs are busy, and an engine may sleep on those. What counts is what
//! one placement is worth.
//!
//! *Six hours*: forty nodes of eight GPUs with 80 GB, on which files spread. Half of the nodes have the image, and on each of
//! these up to six engines sleep; a quarter of the nodes have each model's weights on disk. Pods come at random, one every 20 s,
//! serve for 40 minutes and end; then the engine sleeps on its GPUs, and can be woken there while they are free; 600 GB of host
//! memory hold sleepers. All starts count, from the first.
//!
//! In both, 36 models of 16 to 140 GB are asked for by Zipf's law (exponent 1). Weights come at 1 GB/s from the network, 3 GB/s
//! from disk, 5 GB/s from the page cache, 20 GB/s from an engine that sleeps; an image at 100 MB/s; a start takes 20 s besides.

mod fleet;
mod starts;

use super::{
    Curve, Figure, Scenario, ScenarioInput, Target, TargetBound, VariantRun, mean, quantile,
    shipped_policy,
};
use crate::simulate::fleet::schedulers::{
    FleetScheduler, KubeSchedulerBaseline, PreemptionMode, ScoringStrategy, Stowage,
};
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use fleet::{draw_by_popularity, drawn_fleet, machines, placement_limits, pod};
use starts::{CountedStart, finish_and_sleep};
use std::collections::BTreeMap;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::testkit::oracle::BrokenInvariant;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis};

pub(crate) static COLD_START: Scenario = Scenario {
    name: "cold-start",
    claim: "Pods start where their model answers soonest: in seconds rather than minutes.",
    variants: &["stowage", "kube-scheduler", "kube-scheduler, MostAllocated"],
    figures: &[
        Figure {
            name: "mean",
            decimals: 1,
            help: "seconds from a pod's creation until its engine answers, on drawn fleets",
        },
        Figure {
            name: "p50",
            decimals: 1,
            help: "the same, median",
        },
        Figure {
            name: "p99",
            decimals: 1,
            help: "the same, 99th percentile",
        },
        Figure {
            name: "best",
            decimals: 1,
            help: "mean of the shortest start that any free GPU offered",
        },
        Figure {
            name: "best p99",
            decimals: 1,
            help: "the same, 99th percentile",
        },
        Figure {
            name: "6 h mean",
            decimals: 1,
            help: "seconds until engines answer, over six hours in which files spread",
        },
        Figure {
            name: "6 h p99",
            decimals: 1,
            help: "the same, 99th percentile",
        },
        Figure {
            name: "6 h best",
            decimals: 1,
            help: "mean of the shortest start that was to be had, given the placements before",
        },
        Figure {
            name: "6 h woken",
            decimals: 1,
            help: "starts that woke a sleeping engine, in hundredths",
        },
    ],
    targets: &[
        Target {
            name: "mean start: kube-scheduler ÷ Stowage",
            bound: TargetBound::AtLeast(5.0),
            value: |means| {
                means.mean_of("kube-scheduler", "mean") / means.mean_of("stowage", "mean")
            },
            limit: Some(|means| {
                means.mean_of("kube-scheduler", "mean") / means.mean_of("stowage", "best")
            }),
        },
        Target {
            name: "p99 start: kube-scheduler ÷ Stowage",
            bound: TargetBound::AtLeast(10.0),
            value: |means| means.mean_of("kube-scheduler", "p99") / means.mean_of("stowage", "p99"),
            limit: Some(|means| {
                means.mean_of("kube-scheduler", "p99") / means.mean_of("stowage", "best p99")
            }),
        },
        Target {
            name: "six hours, mean start: Stowage ÷ the shortest to be had",
            bound: TargetBound::AtMost(1.15),
            value: |means| {
                means.mean_of("stowage", "6 h mean") / means.mean_of("stowage", "6 h best")
            },
            limit: None,
        },
    ],
    traces: &[],
    check: None,
    play,
};

const HOST_MEMORY: Bytes = Bytes(600_000_000_000);
const MEAN_ARRIVAL_GAP_MS: f64 = 20_000.0;
const SERVING_TIME: Millis = Millis::seconds(2400);

#[derive(Debug, PartialEq, Eq)]
enum Timer {
    Arrives,
    Ends(PodUid),
}

fn play(input: &ScenarioInput, variant: usize, seed: u64) -> VariantRun {
    let (drawn, mut broken) = drawn_fleets(variant, seed, if input.is_short { 60 } else { 600 });
    let (hours, broken_later) = over_hours(variant, seed, if input.is_short { 1 } else { 6 });
    broken.extend(broken_later);
    let (mut took, mut best) = actual_and_shortest(&drawn);
    let (mut later, best_later) = actual_and_shortest(&hours);
    let wake_count = hours.iter().filter(|start| start.woke_engine).count() as f64;
    let figures = vec![
        mean(&took),
        quantile(&mut took, 0.5),
        quantile(&mut took, 0.99),
        mean(&best),
        quantile(&mut best, 0.99),
        mean(&later),
        quantile(&mut later, 0.99),
        mean(&best_later),
        100.0 * wake_count / hours.len().max(1) as f64,
    ];
    let curve = |name, took: &mut [f64]| {
        let point = |percent: u32| {
            (
                quantile(took, f64::from(percent) / 100.0),
                f64::from(percent),
            )
        };
        Curve {
            name,
            x_label: "seconds since the pod was created",
            points: (1..=100).map(point).collect(),
        }
    };
    let curves = vec![
        curve("engines that answer, %, on drawn fleets", &mut took),
        curve("engines that answer, %, over six hours", &mut later),
    ];
    VariantRun {
        figures,
        curves,
        violations: broken,
        notes: if variant == 0 {
            placement_limits()
        } else {
            Vec::new()
        },
    }
}

/// How long starts took, and the shortest that each might have taken.
fn actual_and_shortest(starts: &[CountedStart]) -> (Vec<f64>, Vec<f64>) {
    starts
        .iter()
        .map(|start| (start.seconds, start.shortest))
        .unzip()
}

fn new_scheduler(variant: usize, seed: u64) -> Box<dyn FleetScheduler> {
    let policy = include_str!("../../../../../policies/default/policy.yaml");
    match variant {
        0 => Box::new(Stowage::new(shipped_policy("default", policy))),
        1 => Box::new(KubeSchedulerBaseline::new(
            ScoringStrategy::LeastAllocated,
            PreemptionMode::Never,
            seed,
        )),
        _ => Box::new(KubeSchedulerBaseline::new(
            ScoringStrategy::MostAllocated,
            PreemptionMode::Never,
            seed,
        )),
    }
}

fn drawn_fleets(
    variant: usize,
    seed: u64,
    pods: usize,
) -> (Vec<CountedStart>, Vec<BrokenInvariant>) {
    let mut draws = Random::seeded(seed, 5);
    let (mut starts, mut broken) = (Vec::new(), Vec::new());
    for n in 0..pods {
        let index = draw_by_popularity(&mut draws);
        let machines = drawn_fleet(index, &mut draws);
        let mut stage: Stage<'_, Timer> = Stage::new(
            machines,
            new_scheduler(variant, seed + n as u64),
            seed ^ n as u64,
        );
        let spec = pod(index);
        let least = stage.machines.shortest_start(&spec).unwrap_or_default();
        let uid = stage.submit(spec);
        while let Some(happened) = stage.next(START + Millis::seconds(1800)) {
            if happened == ScenarioEvent::Ready(uid.clone()) {
                starts.push(CountedStart::from_ready_pod(&stage, &uid, least));
                break;
            }
        }
        broken.append(&mut stage.violations);
    }
    (starts, broken)
}

fn over_hours(variant: usize, seed: u64, hours: u64) -> (Vec<CountedStart>, Vec<BrokenInvariant>) {
    let mut stage = Stage::new(machines(seed), new_scheduler(variant, seed), seed);
    let (mut gaps, mut draws) = (Random::seeded(seed, 1), Random::seeded(seed, 2));
    stage.schedule_timer(
        START + gaps.exponential(MEAN_ARRIVAL_GAP_MS),
        Timer::Arrives,
    );
    // Of each pod, the shortest start that was to be had when it came.
    let mut shortest: BTreeMap<PodUid, Millis> = BTreeMap::new();
    let mut starts = Vec::new();
    while let Some(happened) = stage.next(START + Millis::seconds(hours * 3600)) {
        let now = stage.now();
        match happened {
            ScenarioEvent::Timer(Timer::Arrives) => {
                let spec = pod(draw_by_popularity(&mut draws));
                let least = stage.machines.shortest_start(&spec);
                let uid = stage.submit(spec);
                shortest.extend(least.map(|least| (uid, least)));
                stage.schedule_timer(now + gaps.exponential(MEAN_ARRIVAL_GAP_MS), Timer::Arrives);
            }
            ScenarioEvent::Ready(uid) => {
                starts.extend(
                    shortest
                        .remove(&uid)
                        .map(|least| CountedStart::from_ready_pod(&stage, &uid, least)),
                );
                stage.schedule_timer(now + SERVING_TIME, Timer::Ends(uid));
            }
            ScenarioEvent::Timer(Timer::Ends(uid)) => finish_and_sleep(&mut stage, &uid),
            ScenarioEvent::Bound(_) | ScenarioEvent::Terminating(_) | ScenarioEvent::Deleted(_) => {
            }
        }
    }
    (starts, stage.violations)
}
