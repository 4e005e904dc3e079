//! What excludes a pod from one GPU, by how much, and which pods cause it. A GPU has no obstacle exactly if the pod fits on it.

use super::facts::GpuOccupants;
use super::units::length;
use crate::scheduling::ledger::OccupantPhase;
use crate::scheduling::vocabulary::demand::{Demand, Sharing};
use crate::scheduling::vocabulary::gpu::{Gpu, Health};
use crate::units::{self, Bytes, Millis, Percent, plural};
use serde::{Deserialize, Serialize};
use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "code")]
pub enum Obstacle {
    /// The GPU accepts no pods.
    Unhealthy { health: Health },
    /// A process cannot span MIG slices, and the pod wants several GPUs.
    Slice,
    /// Too small even if it were empty.
    TooSmall { needs_bytes: Bytes, allocatable_bytes: Bytes, short_bytes: Bytes },
    /// Too little is free.
    InsufficientVram { needs_bytes: Bytes, free_bytes: Bytes, short_bytes: Bytes },
    /// A resident pod has the GPU exclusively.
    Exclusive { by: Vec<String> },
    /// The pod wants the GPU exclusively, and other pods are on it.
    NotEmpty { by: Vec<String> },
    /// Two engines that start at once break each other.
    EngineStarting { by: Vec<String>, opens_in_millis: Option<Millis> },
    /// The resident pods' classes share no GPU with the pod's class, or the pod's class with theirs.
    ClassExcluded { by: Vec<String> },
    /// The engines' KV cache is fuller than the pod's class allows.
    KvCacheFull { percent: Percent, limit_percent: Percent, above_points: u8 },
    /// One of the last free GPUs, which the policy keeps from the pod's class.
    KeptSpare,
    /// More requests wait than the pod's class allows.
    QueueLong { queue: u32, limit: u32, above: u32 },
}

/// Everything that excludes `demand` from this GPU.
pub fn obstacles(gpu: &Gpu, demand: &Demand, gpu_occupants: GpuOccupants<'_>) -> Vec<Obstacle> {
    let unhealthy = (gpu.health != Health::Healthy).then_some(Obstacle::Unhealthy { health: gpu.health });
    let slice = (gpu.slice && demand.gpus > 1).then_some(Obstacle::Slice);
    let taken_whole = gpu.exclusive.then(|| Obstacle::Exclusive { by: gpu_occupants.alone() });
    // An exclusive GPU has nothing free: a shortage would say nothing more.
    let missing = if gpu.exclusive && demand.per_gpu <= gpu.capacity { None } else { shortage(gpu, demand) };
    let starting = demand.terms.engine && gpu.starting;
    let starting = starting.then(|| {
        let (by, opens_in_millis) = gpu_occupants.starting();
        Obstacle::EngineStarting { by, opens_in_millis }
    });
    let excluded_classes = gpu
        .excluded_classes
        .contains(demand.class)
        .then(|| Obstacle::ClassExcluded { by: gpu_occupants.excluding(demand) });
    let all = [
        unhealthy,
        slice,
        missing,
        taken_whole,
        not_empty(gpu, demand, gpu_occupants),
        starting,
        excluded_classes,
        gpu.is_kept_from(demand).then_some(Obstacle::KeptSpare),
    ];
    all.into_iter().chain(too_busy(gpu, demand)).flatten().collect()
}

fn shortage(gpu: &Gpu, demand: &Demand) -> Option<Obstacle> {
    let (needs_bytes, free_bytes, allocatable_bytes) = (demand.per_gpu, gpu.free_for(demand), gpu.capacity);
    if needs_bytes > allocatable_bytes {
        let short_bytes = needs_bytes.minus(allocatable_bytes);
        return Some(Obstacle::TooSmall { needs_bytes, allocatable_bytes, short_bytes });
    }
    let short_bytes = needs_bytes.minus(free_bytes);
    (needs_bytes > free_bytes).then_some(Obstacle::InsufficientVram { needs_bytes, free_bytes, short_bytes })
}

fn not_empty(gpu: &Gpu, demand: &Demand, gpu_occupants: GpuOccupants<'_>) -> Option<Obstacle> {
    let is_wanted_empty = demand.sharing == Sharing::Exclusive && gpu.tenants > 0 && !gpu.exclusive;
    let names = || gpu_occupants.named(|gpu_occupant| gpu_occupant.presence != OccupantPhase::SoftlyReserved);
    is_wanted_empty.then(|| Obstacle::NotEmpty { by: names() })
}

fn too_busy(gpu: &Gpu, demand: &Demand) -> [Option<Obstacle>; 2] {
    let full = gpu.engine_load.occupancy().zip(demand.terms.kv_cache_limit);
    let full = full.filter(|(percent, limit)| percent > limit).map(|(percent, limit_percent)| {
        let above_points = percent.get() - limit_percent.get();
        Obstacle::KvCacheFull { percent, limit_percent, above_points }
    });
    let long = gpu.engine_load.queue.zip(demand.terms.queue_limit);
    let long = long.filter(|(queue, limit)| queue > limit).map(|(queue, limit)| Obstacle::QueueLong {
        queue,
        limit,
        above: queue - limit,
    });
    [full, long]
}

impl Obstacle {
    /// How far the obstacle is from going away, to distinguish near misses: what passes by itself first.
    pub fn weight(&self) -> u8 {
        match self {
            Self::EngineStarting { .. } => 1,
            Self::QueueLong { .. } => 2,
            Self::KvCacheFull { .. } => 3,
            Self::InsufficientVram { .. } | Self::KeptSpare => 4,
            Self::NotEmpty { .. } | Self::Exclusive { .. } => 5,
            Self::ClassExcluded { .. } => 6,
            Self::Unhealthy { .. } => 7,
            Self::TooSmall { .. } | Self::Slice => 8,
        }
    }

    pub fn short(&self) -> Bytes {
        match self {
            Self::TooSmall { short_bytes, .. } | Self::InsufficientVram { short_bytes, .. } => *short_bytes,
            _ => Bytes::ZERO,
        }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unhealthy { health: Health::Lost } => write!(f, "it is lost"),
            Self::Unhealthy { .. } => write!(f, "it is draining and takes no more pods"),
            Self::KeptSpare => {
                write!(
                    f,
                    "it is one of the last free GPUs, which planning.spare keeps from preemptible classes"
                )
            }
            Self::Slice => write!(f, "it is a MIG slice, and a pod over several GPUs gets whole ones"),
            Self::TooSmall { needs_bytes, allocatable_bytes, short_bytes } => write!(
                f,
                "needs {needs_bytes}, and it has {allocatable_bytes} allocatable even if it is empty: {short_bytes} too small"
            ),
            Self::InsufficientVram { needs_bytes, free_bytes, short_bytes } => {
                write!(f, "needs {needs_bytes}, {free_bytes} free: {short_bytes} short")
            }
            Self::Exclusive { by } => write!(f, "{} it exclusively", have(by)),
            Self::NotEmpty { by } => {
                write!(f, "the pod requests it exclusively, and {} VRAM on it", have(by))
            }
            Self::EngineStarting { by, opens_in_millis } => {
                write!(f, "{} an engine that is starting there", have(by))?;
                match opens_in_millis {
                    Some(opens_in) => write!(f, "; its start gate opens in at most {}", length(*opens_in)),
                    None => Ok(()),
                }
            }
            Self::ClassExcluded { by } => write!(f, "{} a class that shares no GPU with the pod's", have(by)),
            Self::KvCacheFull { percent, limit_percent, above_points } => write!(
                f,
                "its engines' KV cache is at {percent}, {above_points} points above the class's limit of {limit_percent}"
            ),
            Self::QueueLong { queue, limit, above } => {
                let (queued, wait) = (plural(*queue, "request"), if *queue == 1 { "waits" } else { "wait" });
                write!(f, "{queued} {wait} for its engines, {above} above the class's limit of {limit}")
            }
        }
    }
}

/// The greatest number of pods that a sentence names.
const NAMED: usize = 3;

/// `a, b and 2 more have`; "another pod", if the ledger does not know the pods.
fn have(names: &[String]) -> String {
    format!("{} {}", list(names), units::have(names.len().max(1)))
}

pub fn list(names: &[String]) -> String {
    match names {
        [] => "another pod".into(),
        [one] => one.clone(),
        _ if names.len() > NAMED => {
            format!("{} and {} more", names[..NAMED].join(", "), names.len() - NAMED)
        }
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}
