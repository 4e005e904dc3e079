//! What is served: models with their engines, grants and traffic; and nodes to serve them on.

use super::{GPU_VRAM, MODELS, NODE_GPUS, REQUESTS_PER_S};
use crate::simulate::fleet::engines::requests::kv_tokens;
use crate::simulate::fleet::engines::{EngineSpec, GpuSpeed, steady_state};
use crate::simulate::fleet::machines::{MachineSpec, Machines};
use crate::simulate::fleet::traffic::{CatalogModel, DayOfTraffic, Minute, ZipfCatalog};
use std::collections::BTreeMap;
use stowage_scheduling::contention::Contention;
use stowage_scheduling::ids::{GpuModel, ModelId, NodeName};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;

/// A model in a busy stretch is asked for so many times its mean, and in a quiet one so much of it. A sixth of the time is busy.
const BUSY_FACTOR: f64 = 4.0;
const QUIET_FACTOR: f64 = 0.4;
/// Mean lengths of stretches, in minutes.
const BUSY_MINUTES: f64 = 6.0;
const QUIET_MINUTES: f64 = 30.0;
/// What a team sizes an engine for: its busy stretches, with so much of the GPUs' compute, and KV cache to spare. Half is what a
/// team reckons with; beside one neighbor that always works it is 0.44.
const SIZING_COMPUTE_SHARE: f64 = 0.5;
const KV_HEADROOM_FACTOR: f64 = 1.25;
/// Tokens that the KV cache holds at least: the longest request that engines are told to take.
pub const MIN_KV_TOKENS: f64 = 8192.0;

/// A model as it is served.
#[derive(Debug, Clone)]
pub(crate) struct ServedModel {
    pub id: ModelId,
    pub weights: Bytes,
    pub gpus: u32,
    /// VRAM of one engine on each of its GPUs.
    pub grant: Bytes,
    /// Engines that keep up with its busy stretches.
    pub engines: u32,
    pub engine: EngineSpec,
    pub traffic: DayOfTraffic,
}

/// Whether engines share GPUs or have them to themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GrantSizing {
    RightSized,
    WholeGpus,
}

/// So many models for so many minutes, each asked as the service of one of `days` from a minute of its own on; without days, in busy
/// stretches and quiet ones.
pub fn catalog(
    seed: u64,
    models: usize,
    minutes: usize,
    days: &[DayOfTraffic],
    grants: GrantSizing,
) -> Vec<ServedModel> {
    let per_s = REQUESTS_PER_S * models as f64 / MODELS as f64;
    let models = ZipfCatalog::generate(seed, models, per_s, 1.0).models;
    let served = |(rank, model): (usize, CatalogModel)| {
        let mut draws = Random::seeded(seed, 1000 + rank as u64);
        let gpus = gpus_of(&model);
        let (model, traffic, busy_factor) = if days.is_empty() {
            let traffic = draw_traffic(&mut draws, &model, minutes);
            (model, traffic, BUSY_FACTOR)
        } else {
            let day = &days[draws.below(days.len())];
            traced(&mut draws, model, day, minutes)
        };
        let model = &model;
        let (engines, grant) = match grants {
            GrantSizing::WholeGpus => {
                let (engines, _) = engines_needed(model, busy_factor, gpus, 1.0);
                (engines, allocatable_vram())
            }
            GrantSizing::RightSized => right_sized(model, busy_factor, gpus),
        };
        ServedModel {
            id: model.id.clone(),
            weights: model.shape.weights,
            gpus,
            grant,
            engines,
            engine: engine(model, gpus, grant),
            traffic,
        }
    };
    models.into_iter().enumerate().map(served).collect()
}

/// The fewest GPUs that hold the weights beside the headroom.
fn gpus_of(model: &CatalogModel) -> u32 {
    if model.shape.weights > Bytes::gib(64) {
        2
    } else {
        1
    }
}

/// What the policy's headroom leaves of a GPU.
pub fn allocatable_vram() -> Bytes {
    Bytes(GPU_VRAM.0 / 10 * 9)
}

fn engine(model: &CatalogModel, gpus: u32, grant: Bytes) -> EngineSpec {
    EngineSpec::new(&model.shape, &GpuSpeed::H100, gpus, grant).expect("its grant has KV cache")
}

/// The fewest engines that keep up with the model's busy stretches, each with so much of its GPUs' compute; and the requests
/// inside of each.
fn engines_needed(model: &CatalogModel, busy_factor: f64, gpus: u32, compute: f64) -> (u32, f64) {
    let whole = engine(model, gpus, allocatable_vram());
    let (prompt, output) = (model.size.prompt, model.size.output);
    let per_s = KV_HEADROOM_FACTOR * busy_factor * model.per_s / compute;
    let running = |engines: u32| {
        let per_s = per_s / f64::from(engines);
        steady_state(&whole, per_s, prompt, output, &Contention::ALONE).map(|state| state.running)
    };
    let fewest = (1..).find_map(|engines| Some((engines, running(engines)?)));
    fewest.expect("some number keeps up")
}

/// The engines, and the grant of each: weights, the profile run, and a KV cache for its part of the busy stretches, in whole GiB.
fn right_sized(model: &CatalogModel, busy_factor: f64, gpus: u32) -> (u32, Bytes) {
    let (engines, running) = engines_needed(model, busy_factor, gpus, SIZING_COMPUTE_SHARE);
    let tokens = (running * kv_tokens(model.size.prompt, model.size.output)).max(MIN_KV_TOKENS);
    let kv = Bytes((tokens * model.shape.kv_per_token.0 as f64) as u64);
    let profile_run = engine(model, gpus, allocatable_vram()).profile_run_bytes;
    let gib = ((model.shape.weights + kv).split(gpus) + profile_run)
        .0
        .div_ceil(Bytes::gib(1).0);
    (engines, Bytes::gib(gib).min(allocatable_vram()))
}

/// The model, asked as a service on this day: with its requests, and its busiest minute as the busy stretch that it is sized for.
/// Over the whole day it is asked as often as before.
fn traced(
    draws: &mut Random,
    model: CatalogModel,
    day: &DayOfTraffic,
    minutes: usize,
) -> (CatalogModel, DayOfTraffic, f64) {
    let size = day.mean_size().expect("the trace was checked");
    let busy_factor = day.peak_per_s() / day.mean_per_s();
    let first = draws.below(day.minutes().len());
    let all = day.minutes().iter().cycle();
    let part = DayOfTraffic::new(all.skip(first).take(minutes).copied().collect());
    let traffic = part
        .expect("it has minutes")
        .scaled(model.per_s / day.mean_per_s());
    (CatalogModel { size, ..model }, traffic, busy_factor)
}

/// Busy stretches and quiet ones, each of a random length.
fn draw_traffic(draws: &mut Random, model: &CatalogModel, minutes: usize) -> DayOfTraffic {
    let mut is_busy = draws.unit_interval() < BUSY_MINUTES / (BUSY_MINUTES + QUIET_MINUTES);
    let length = |is_busy, draws: &mut Random| {
        draws
            .exponential(60_000.0 * if is_busy { BUSY_MINUTES } else { QUIET_MINUTES })
            .0
            / 60_000
    };
    let mut left = length(is_busy, draws);
    let minute = |_| {
        if left == 0 {
            is_busy = !is_busy;
            left = length(is_busy, draws).max(1);
        }
        left -= 1;
        let requests = 60.0 * model.per_s * if is_busy { BUSY_FACTOR } else { QUIET_FACTOR };
        Minute {
            requests,
            prompt: model.size.prompt,
            output: model.size.output,
        }
    };
    DayOfTraffic::new((0..minutes).map(minute).collect()).expect("it has minutes")
}

/// So many H100, in nodes of eight; the last may have fewer. Every node has the catalog's files on its disk.
pub fn machines(gpus: usize, models: &[ServedModel]) -> Machines {
    let spec = |n: usize| MachineSpec {
        name: NodeName::parse(&format!("node-{n:02}")).expect("digits are a name"),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse(GpuSpeed::H100.product).expect("it is a plain word"),
        gpus: (gpus - n * NODE_GPUS).min(NODE_GPUS) as u32,
        vram: GPU_VRAM,
        page_cache: Bytes::gib(1000),
    };
    let nodes = gpus.div_ceil(NODE_GPUS);
    let mut machines = Machines::new((0..nodes).map(spec), LoadingSpeeds::default());
    for n in 0..nodes {
        let disk = &mut machines
            .get_mut(&spec(n).name)
            .expect("it was just made")
            .disk;
        disk.extend(models.iter().map(|model| (model.id.clone(), model.weights)));
    }
    machines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_a_trace_is_asked_as_often_as_without_and_sized_for_the_busiest_minute() {
        let minute = |requests, prompt| Minute {
            requests,
            prompt,
            output: 10.0,
        };
        let minutes = [minute(0.0, 0.0), minute(30.0, 100.0), minute(90.0, 200.0)];
        let day = DayOfTraffic::new(minutes.to_vec()).unwrap();
        let [model] = ZipfCatalog::generate(1, 1, 2.0, 1.0)
            .models
            .try_into()
            .ok()
            .unwrap();
        let (model, traffic, busy_factor) = traced(&mut Random::seeded(1, 1), model, &day, 30);
        assert_eq!((model.size.prompt, model.size.output), (175.0, 10.0));
        assert_eq!((traffic.mean_per_s(), traffic.peak_per_s()), (2.0, 4.5));
        assert_eq!((busy_factor, traffic.minutes().len()), (2.25, 30));
    }
}
