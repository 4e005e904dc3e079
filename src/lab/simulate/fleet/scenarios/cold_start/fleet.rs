//! The fleet of the cold starts: nodes that have something, or nothing, of each model, and the models.

use crate::simulate::fleet::machines::{MachineSpec, Machines, SleepingEngine};
use crate::simulate::fleet::pods::{Image, PodSpec};
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::ids::{GpuModel, ModelId, NodeName, PodUid};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;

const NODES: usize = 40;
const DRAWN_NODES: usize = 100;
const GPUS_PER_NODE: u32 = 8;
const GPU_VRAM: Bytes = Bytes(80_000_000_000);
/// Gigabytes of the weights of models, the most popular first; then the same sizes again.
const WEIGHTS_GB: [u64; 12] = [16, 16, 28, 140, 16, 64, 24, 16, 140, 56, 32, 64];
const MODELS: usize = 36;
const IMAGE_BYTES: Bytes = Bytes(20_000_000_000);

/// A fleet of which each node has something else of one model, and of which the GPUs that are busy are left out.
pub fn drawn_fleet(index: usize, draws: &mut Random) -> Machines {
    let states: Vec<(u32, usize)> = (0..DRAWN_NODES)
        .map(|_| {
            (
                (0..GPUS_PER_NODE).filter(|_| draws.below(5) >= 3).count() as u32,
                draws.below(5),
            )
        })
        .collect();
    let mut machines = Machines::new(
        states
            .iter()
            .enumerate()
            .map(|(n, (free, _))| spec(n, *free)),
        speeds(),
    );
    for (n, (free, state)) in states.into_iter().enumerate() {
        let machine = machines
            .get_mut(&spec(n, free).name)
            .expect("it was just made");
        machine.images.insert(pause_image());
        if state > 0 {
            machine.images.insert(engine_image());
        }
        if state > 1 {
            machine.disk.insert(model(index), weights(index));
        }
        if state > 2 {
            machine.read_files(&model(index), weights(index));
        }
        // It sleeps on GPUs that others may use by now.
        let wanted = gpus_of(index);
        let are_free = (0..wanted).all(|_| draws.below(5) >= 3);
        if state > 3 && are_free && free >= wanted {
            let first = draws.below((free - wanted + 1) as usize);
            machine
                .sleeping_engines
                .push(sleeper(&format!("asleep-{n}"), index, first));
        }
    }
    machines
}

fn sleeper(pod: &str, index: usize, first: usize) -> SleepingEngine {
    SleepingEngine {
        pod: PodUid::parse(pod).expect("digits and letters are a name"),
        model: model(index),
        weights: weights(index),
        gpus: (first..first + gpus_of(index) as usize).collect(),
        namespace: "models".into(),
    }
}

fn spec(n: usize, gpus: u32) -> MachineSpec {
    MachineSpec {
        name: NodeName::parse(&format!("node-{n:02}")).expect("digits are a name"),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse("H100-80GB").expect("it is a plain word"),
        gpus,
        vram: GPU_VRAM,
        page_cache: Bytes(400_000_000_000),
    }
}

/// Slower than the policy's default for images: those of engines are large, and many nodes pull at once.
fn speeds() -> LoadingSpeeds {
    LoadingSpeeds {
        image_pull: Bytes(100_000_000),
        ..LoadingSpeeds::default()
    }
}

/// A kubelet lists what it has, and every node has something.
fn pause_image() -> Image {
    Image {
        name: "pause:3.10".into(),
        size: Bytes(700_000),
    }
}

/// The fleet at the beginning of the six hours.
pub fn machines(seed: u64) -> Machines {
    let mut draws = Random::seeded(seed, 3);
    let mut machines = Machines::new((0..NODES).map(|n| spec(n, GPUS_PER_NODE)), speeds());
    for n in 0..NODES {
        let machine = machines
            .get_mut(&spec(n, GPUS_PER_NODE).name)
            .expect("it was just made");
        for index in 0..MODELS {
            if draws.below(4) == 0 {
                machine.disk.insert(model(index), weights(index));
            }
        }
        machine.images.insert(pause_image());
        // An engine that sleeps was pulled once.
        if draws.below(2) == 0 {
            continue;
        }
        machine.images.insert(engine_image());
        let mut gpu = 0;
        for index in (0..6).map(|_| draw_by_popularity(&mut draws)) {
            let first = gpu;
            gpu += gpus_of(index) as usize;
            if gpu <= GPUS_PER_NODE as usize {
                machine.disk.insert(model(index), weights(index));
                machine.sleeping_engines.push(sleeper(
                    &format!("asleep-{n}-{first}"),
                    index,
                    first,
                ));
            }
        }
    }
    machines
}

pub fn pod(index: usize) -> PodSpec {
    let gpus = gpus_of(index);
    let vram = Bytes(70_000_000_000).times(u64::from(gpus));
    PodSpec {
        gpus,
        is_exclusive: true,
        image: Some(engine_image()),
        ..PodSpec::serving("models", model(index), weights(index), vram)
    }
}

fn engine_image() -> Image {
    Image {
        name: "engine:v1".into(),
        size: IMAGE_BYTES,
    }
}

fn model(index: usize) -> ModelId {
    ModelId::parse(&format!("model-{index}")).expect("digits are a name")
}

fn weights(index: usize) -> Bytes {
    Bytes(WEIGHTS_GB[index % WEIGHTS_GB.len()] * 1_000_000_000)
}

/// How many GPUs the weights need with KV cache beside them.
fn gpus_of(index: usize) -> u32 {
    match WEIGHTS_GB[index % WEIGHTS_GB.len()] {
        ..=40 => 1,
        41..=80 => 2,
        _ => 4,
    }
}

/// Draws a model's index by popularity: Zipf's law with exponent 1.
pub(crate) fn draw_by_popularity(draws: &mut Random) -> usize {
    let weight = |index: usize| 1.0 / (index + 1) as f64;
    let mut left = draws.unit_interval() * (0..MODELS).map(weight).sum::<f64>();
    (0..MODELS)
        .find(|index| {
            left -= weight(*index);
            left < 0.0
        })
        .unwrap_or(0)
}

/// The most that placement can gain without pulls and without engines that sleep, by the price of loading: a node that has
/// nothing of the model against one that has it in memory.
pub fn placement_limits() -> Vec<String> {
    let speeds = LoadingSpeeds::default();
    let sizes: BTreeSet<u64> = WEIGHTS_GB.into_iter().collect();
    let limit = |gigabytes: u64| {
        let weights = Bytes(gigabytes * 1_000_000_000);
        let init = speeds.init.0 as f64;
        let cold = (weights.transfer_time(speeds.network) + weights.transfer_time(speeds.disk)).0
            as f64
            + init;
        let warm = weights.transfer_time(speeds.page_cache).0 as f64 + init;
        format!("{gigabytes} GB {:.1}", cold / warm)
    };
    let sizes: Vec<String> = sizes.into_iter().map(limit).collect();
    vec![format!(
        "the most that placement gains without image pulls and without waking, by size of the weights: {}",
        sizes.join(", ")
    )]
}
