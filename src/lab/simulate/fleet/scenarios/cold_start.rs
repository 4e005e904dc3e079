//! S3, cold start is time, not a flag: nodes have nothing, the image, the weights on disk or in memory, or an engine that sleeps on
//! one of their GPUs, and each pod starts as long as what its node and GPU have makes it.
//!
//! # The workload
//!
//! Fixed before any of it was run. Forty nodes of eight GPUs with 80 GB; twelve models of 16 to 140 GB, asked for by Zipf's law
//! (exponent 1). Half of the nodes have the engine's image (20 GB), a quarter of the nodes each model's weights on disk, and on
//! each node three engines sleep, drawn by popularity. Pods come at random, one every 20 s for six hours, serve for 40 minutes and
//! end; then the engine sleeps on its GPUs until another engine needs one of them, and 600 GB of host memory hold sleepers.
//! Weights come at 1 GB/s from the network, 3 GB/s from disk, 5 GB/s from the page cache, 20 GB/s from an engine that sleeps; an
//! image at 100 MB/s; a start takes 20 s besides.

use super::{Bound, Curve, Figure, Played, Scenario, ScenarioInput, Target, mean, quantile, shipped};
use crate::ids::{GpuModel, ModelId, NodeName, PodUid};
use crate::lab::simulate::fleet::machines::{MachineSpec, Machines, Sleeper};
use crate::lab::simulate::fleet::pods::{Image, PodSpec};
use crate::lab::simulate::fleet::schedulers::{FleetScheduler, Placing, Preempting, StockScheduler, Stowage};
use crate::lab::simulate::fleet::stage::{Happening, START, Stage};
use crate::lab::simulate::random::Random;
use crate::scheduling::vocabulary::model_tier::LoadingSpeeds;
use crate::units::{Bytes, Millis};
use std::collections::{BTreeMap, BTreeSet};

pub static COLD_START: Scenario = Scenario {
    name: "cold-start",
    claim: "Pods start where their model answers soonest: in seconds rather than minutes.",
    variants: &["stowage", "kube-scheduler", "kube-scheduler, MostAllocated"],
    figures: &[
        Figure {
            name: "mean",
            decimals: 1,
            help: "seconds from the pod's creation until its engine answers, mean",
        },
        Figure { name: "p50", decimals: 1, help: "the same, median" },
        Figure { name: "p99", decimals: 1, help: "the same, 99th percentile" },
        Figure { name: "woken", decimals: 1, help: "starts that woke a sleeping engine, in hundredths" },
        Figure { name: "pulled", decimals: 1, help: "starts that pulled the image, in hundredths" },
        Figure {
            name: "best",
            decimals: 1,
            help: "mean of the shortest start that any free GPU offered at that moment",
        },
    ],
    targets: &[
        Target {
            name: "mean start: kube-scheduler ÷ Stowage",
            bound: Bound::AtLeast(5.0),
            value: |means| means.of("kube-scheduler", "mean") / means.of("stowage", "mean"),
        },
        Target {
            name: "p99 start: kube-scheduler ÷ Stowage",
            bound: Bound::AtLeast(10.0),
            value: |means| means.of("kube-scheduler", "p99") / means.of("stowage", "p99"),
        },
    ],
    traces: &[],
    play,
};

const NODES: usize = 40;
const GPUS: u32 = 8;
const GPU: Bytes = Bytes(80_000_000_000);
/// Gigabytes of the weights of each model, the most popular first.
const CATALOGUE: [u64; 12] = [16, 16, 28, 140, 16, 64, 24, 16, 140, 56, 32, 64];
const IMAGE: Bytes = Bytes(20_000_000_000);
const HOST_MEMORY: Bytes = Bytes(600_000_000_000);
const MEAN_GAP_MS: f64 = 20_000.0;
const SERVES: Millis = Millis::seconds(2400);
const HOURS: u64 = 6;
/// Nothing is counted in the first half hour.
const WARM_UP: Millis = Millis::seconds(1800);
/// Between two reports of each agent.
const REPORTS: Millis = Millis::seconds(5);

enum Timer {
    Comes,
    Ends(PodUid),
    Reports,
}

fn play(input: &ScenarioInput, variant: usize, seed: u64) -> Played {
    let policy = include_str!("../../../../../policies/default/policy.yaml");
    let scheduler: Box<dyn FleetScheduler> = match variant {
        0 => Box::new(Stowage::new(shipped("default", policy))),
        1 => Box::new(StockScheduler::new(Placing::LeastAllocated, Preempting::Never, seed)),
        _ => Box::new(StockScheduler::new(Placing::MostAllocated, Preempting::Never, seed)),
    };
    let mut stage = Stage::new(machines(seed), scheduler, seed);
    let (mut gaps, mut draws) = (Random::seeded(seed, 1), Random::seeded(seed, 2));
    let end = START + Millis::seconds(if input.is_short { 2 } else { HOURS } * 3600);
    stage.at(START, Timer::Reports);
    stage.at(START + gaps.gap(MEAN_GAP_MS), Timer::Comes);
    // Of each pod, the shortest start that was to be had when it came.
    let mut shortest: BTreeMap<PodUid, Millis> = BTreeMap::new();
    let mut starts: Vec<CountedStart> = Vec::new();
    while let Some(happened) = stage.next(end) {
        let now = stage.now();
        match happened {
            Happening::Timer(Timer::Reports) => {
                stage.report_all();
                stage.at(now + REPORTS, Timer::Reports);
            }
            Happening::Timer(Timer::Comes) => {
                let spec = pod(by_popularity(&mut draws));
                let least = stage.machines.shortest_start(&spec);
                let uid = stage.submit(spec);
                shortest.extend(least.map(|least| (uid, least)));
                stage.at(now + gaps.gap(MEAN_GAP_MS), Timer::Comes);
            }
            Happening::Ready(uid) => {
                let pod = stage.pod(&uid).expect("it is ready");
                if pod.submitted >= START + WARM_UP {
                    let start = pod.start.unwrap_or_default();
                    let shortest = shortest.get(&uid).map_or(0.0, |least| least.0 as f64 / 1000.0);
                    let seconds = now.since(pod.submitted).0 as f64 / 1000.0;
                    starts.push(CountedStart { seconds, shortest, woken: start.woken, pulled: start.pulled });
                }
                stage.at(now + SERVES, Timer::Ends(uid));
            }
            Happening::Timer(Timer::Ends(uid)) => end_asleep(&mut stage, &uid),
            Happening::Bound(_) | Happening::Leaving(_) | Happening::Gone(_) => {}
        }
    }
    let mut seconds: Vec<f64> = starts.iter().map(|start| start.seconds).collect();
    let percent = |is: fn(&CountedStart) -> bool| {
        100.0 * starts.iter().filter(|start| is(start)).count() as f64 / starts.len().max(1) as f64
    };
    let shortest: Vec<f64> = starts.iter().map(|start| start.shortest).collect();
    let mut at = |share| quantile(&mut seconds, share);
    let points = (1..=100).map(|percent| (at(f64::from(percent) / 100.0), f64::from(percent))).collect();
    let figures =
        vec![at(0.5), at(0.99), percent(|start| start.woken), percent(|start| start.pulled), mean(&shortest)];
    Played {
        figures: [vec![mean(&seconds)], figures].concat(),
        curves: vec![Curve {
            name: "engines that answer, %",
            x: "seconds since the pod was created",
            points,
        }],
        broken: stage.broken,
        notes: if variant == 0 { limits() } else { Vec::new() },
    }
}

struct CountedStart {
    seconds: f64,
    shortest: f64,
    woken: bool,
    pulled: bool,
}

fn machines(seed: u64) -> Machines {
    let mut draws = Random::seeded(seed, 3);
    let spec = |n: usize| MachineSpec {
        name: NodeName::parse(&format!("node-{n:02}")).expect("digits are a name"),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse("H100-80GB").expect("it is a plain word"),
        gpus: GPUS,
        vram: GPU,
        page_cache: Bytes(400_000_000_000),
    };
    // Slower than the policy's default for images: those of engines are large, and many nodes pull at once.
    let speeds = LoadingSpeeds { image_pull: Bytes(100_000_000), ..LoadingSpeeds::default() };
    let mut machines = Machines::new((0..NODES).map(spec), speeds);
    for n in 0..NODES {
        let machine = machines.get_mut(&spec(n).name).expect("it was just made");
        if draws.below(2) == 0 {
            machine.images.insert(image());
        }
        for index in 0..CATALOGUE.len() {
            if draws.below(4) == 0 {
                machine.disk.insert(model(index), weights(index));
            }
        }
        let mut gpu = 0;
        for index in (0..3).map(|_| by_popularity(&mut draws)) {
            let gpus: Vec<usize> = (gpu..gpu + gpus_of(index) as usize).collect();
            gpu += gpus.len();
            if gpu <= GPUS as usize {
                machine.disk.insert(model(index), weights(index));
                machine.sleepers.push(Sleeper {
                    model: model(index),
                    weights: weights(index),
                    gpus,
                    namespace: "models".into(),
                });
            }
        }
    }
    machines
}

/// The pod ends, and its engine sleeps on.
fn end_asleep(stage: &mut Stage<'_, Timer>, uid: &PodUid) {
    let Some(pod) = stage.pod(uid).cloned() else { return };
    stage.finish(uid);
    let (Some(bound), Some(model)) = (pod.bound, pod.spec.model.clone()) else { return };
    let Some(machine) = stage.machines.get_mut(&bound.node) else { return };
    let mut gpus: Vec<usize> = bound.devices.iter().filter_map(|device| machine.place_of(device)).collect();
    gpus.sort_unstable();
    let namespace = pod.spec.namespace.as_str().into();
    machine.put_to_sleep(Sleeper { model, weights: pod.spec.weights, gpus, namespace }, HOST_MEMORY);
}

fn pod(index: usize) -> PodSpec {
    let gpus = gpus_of(index);
    let vram = Bytes(70_000_000_000).times(u64::from(gpus));
    PodSpec {
        gpus,
        exclusive: true,
        image: Some(image()),
        ..PodSpec::serving("models", model(index), weights(index), vram)
    }
}

fn image() -> Image {
    Image { name: "engine:v1".into(), size: IMAGE }
}

fn model(index: usize) -> ModelId {
    ModelId::parse(&format!("model-{index}")).expect("digits are a name")
}

fn weights(index: usize) -> Bytes {
    Bytes(CATALOGUE[index] * 1_000_000_000)
}

/// As many as the weights need with KV cache beside them.
fn gpus_of(index: usize) -> u32 {
    match CATALOGUE[index] {
        ..=40 => 1,
        ..=80 => 2,
        _ => 4,
    }
}

/// Zipf's law.
fn by_popularity(draws: &mut Random) -> usize {
    let weight = |index: usize| 1.0 / (index + 1) as f64;
    let mut left = draws.share() * (0..CATALOGUE.len()).map(weight).sum::<f64>();
    (0..CATALOGUE.len())
        .find(|index| {
            left -= weight(*index);
            left < 0.0
        })
        .unwrap_or(0)
}

/// The most that placement can gain without pulls and without engines that sleep, by the price of loading: a node that has
/// nothing of the model against one that has it in memory.
fn limits() -> Vec<String> {
    let speeds = LoadingSpeeds::default();
    let sizes: BTreeSet<u64> = CATALOGUE.into_iter().collect();
    let limit = |gigabytes: u64| {
        let weights = Bytes(gigabytes * 1_000_000_000);
        let init = speeds.init.0 as f64;
        let cold = (weights.over(speeds.network) + weights.over(speeds.disk)).0 as f64 + init;
        let warm = weights.over(speeds.page_cache).0 as f64 + init;
        format!("{gigabytes} GB {:.1}", cold / warm)
    };
    let sizes: Vec<String> = sizes.into_iter().map(limit).collect();
    vec![format!(
        "the most that placement gains without image pulls and without waking, by size of the weights: {}",
        sizes.join(", ")
    )]
}
