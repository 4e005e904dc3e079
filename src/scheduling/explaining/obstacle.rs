//! What excludes a pod from one GPU, by how much, and which pods cause it. A GPU has no obstacle exactly if the pod fits on it.

use super::facts::GpuOccupants;
use crate::ledger::OccupantPhase;
pub use crate::reasons::{Obstacle, list_names};
use crate::units::Bytes;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::gpu::{Gpu, Health};
use serde::{Serialize, Serializer};

/// Everything that excludes `demand` from this GPU.
pub fn obstacles(gpu: &Gpu, demand: &Demand, gpu_occupants: GpuOccupants<'_>) -> Vec<Obstacle> {
    let starting = || {
        let (by, opens_in_millis) = gpu_occupants.starting_pods();
        Obstacle::EngineStarting {
            by,
            opens_in_millis,
        }
    };
    let excluding = || Obstacle::ClassExcluded {
        by: gpu_occupants.pods_excluding(demand),
    };
    let all = [
        (gpu.health != Health::Healthy).then_some(Obstacle::Unhealthy { health: gpu.health }),
        (!gpu.compute_mode_allows(demand.sharing)).then_some(Obstacle::ExclusiveProcess),
        (gpu.slice && demand.gpus > 1).then_some(Obstacle::Slice),
        (!gpu.matches_selector_of(demand)).then_some(Obstacle::OtherGpus),
        // An exclusive GPU has nothing free: a shortage would say nothing more.
        shortage(gpu, demand).filter(|_| !gpu.exclusive || demand.per_gpu > gpu.capacity),
        gpu.exclusive.then(|| Obstacle::Exclusive {
            by: gpu_occupants.exclusive_pods(),
        }),
        not_empty(gpu, demand, gpu_occupants),
        (demand.terms.engine && gpu.starting).then(starting),
        gpu.excluded_classes.contains(demand.class).then(excluding),
        gpu.is_kept_spare_from(demand)
            .then_some(Obstacle::KeptSpare),
    ];
    all.into_iter()
        .chain(engine_load_obstacles(gpu, demand))
        .chain(latency_obstacles(gpu, demand))
        .flatten()
        .collect()
}

fn shortage(gpu: &Gpu, demand: &Demand) -> Option<Obstacle> {
    let (needs_bytes, free_bytes, allocatable_bytes) =
        (demand.per_gpu, gpu.free_for(demand), gpu.capacity);
    if needs_bytes > allocatable_bytes {
        let short_bytes = needs_bytes.minus(allocatable_bytes);
        return Some(Obstacle::TooSmall {
            needs_bytes,
            allocatable_bytes,
            short_bytes,
        });
    }
    let short_bytes = needs_bytes.minus(free_bytes);
    (needs_bytes > free_bytes).then_some(Obstacle::InsufficientVram {
        needs_bytes,
        free_bytes,
        short_bytes,
    })
}

fn not_empty(gpu: &Gpu, demand: &Demand, gpu_occupants: GpuOccupants<'_>) -> Option<Obstacle> {
    let is_wanted_empty =
        demand.sharing == Sharing::Exclusive && gpu.residents > 0 && !gpu.exclusive;
    let names = || {
        gpu_occupants
            .names_where(|gpu_occupant| gpu_occupant.phase != OccupantPhase::SoftlyReserved)
    };
    is_wanted_empty.then(|| Obstacle::NotEmpty { by: names() })
}

fn engine_load_obstacles(gpu: &Gpu, demand: &Demand) -> [Option<Obstacle>; 3] {
    let full = gpu.engine_load.occupancy().zip(demand.terms.kv_cache_limit);
    let full = full
        .filter(|(percent, limit)| percent > limit)
        .map(|(percent, limit_percent)| {
            let above_points = percent.get() - limit_percent.get();
            Obstacle::KvCacheFull {
                percent,
                limit_percent,
                above_points,
            }
        });
    let long = gpu.engine_load.queue.zip(demand.terms.queue_limit);
    let long = long
        .filter(|(queue, limit)| queue > limit)
        .map(|(queue, limit)| Obstacle::QueueLong {
            queue,
            limit,
            above: queue - limit,
        });
    let unknown = demand
        .terms
        .rejects_unknown(gpu.engine_load)
        .then_some(Obstacle::UnknownLoad);
    [full, long, unknown]
}

fn latency_obstacles(gpu: &Gpu, demand: &Demand) -> [Option<Obstacle>; 2] {
    let (room, limit) = (gpu.neighbors.room, demand.terms.max_time_per_token);
    let is_closed = !gpu.neighbors.leaves_room_to(demand.expected);
    let own = gpu.beyond_limit_of(demand).zip(limit);
    [
        is_closed.then_some(Obstacle::LatencyLimit {
            busy: demand.expected.busy,
            room,
        }),
        own.map(|(expected, limit)| Obstacle::OwnLatencyLimit { expected, limit }),
    ]
}

/// The VRAM that the GPU lacks; none if that is no obstacle there.
pub fn missing_vram(obstacle: &Obstacle) -> Option<Bytes> {
    use Obstacle::{InsufficientVram, TooSmall};
    let (TooSmall { short_bytes, .. } | InsufficientVram { short_bytes, .. }) = obstacle else {
        return None;
    };
    Some(*short_bytes)
}

/// Obstacles with their sentences, for readers who know fewer of them.
pub(super) fn with_texts<S: Serializer>(
    obstacles: &[Obstacle],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct WithText<'a> {
        #[serde(flatten)]
        obstacle: &'a Obstacle,
        text: String,
    }
    serializer.collect_seq(obstacles.iter().map(|obstacle| WithText {
        obstacle,
        text: obstacle.to_string(),
    }))
}
