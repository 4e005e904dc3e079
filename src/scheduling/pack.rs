//! Which GPUs of one node a demand gets: the tightest that fit, so that the roomy ones stay roomy.

use super::device::{Gpu, GpuSet};
use super::fit::usable;
use super::request::{Demand, MAX_GPUS};
use crate::units::Bytes;

/// The GPUs for `demand` among the `allowed` ones, or `None` if too few have room. Least (GPUs that are hinted to
/// someone else, VRAM left over) wins; then the lowest places.
pub fn choose(gpus: &[Gpu], demand: &Demand, allowed: GpuSet) -> Option<GpuSet> {
    let seats = gpus.iter().enumerate().filter(|(place, gpu)| {
        allowed.contains(*place) && usable(gpu, demand) && gpu.has_room(demand.per_gpu, demand.sharing)
    });
    let preference =
        |(place, gpu): (usize, &Gpu)| (is_contended(gpu, demand), leftover(gpu, demand), place as u8);
    if demand.gpus == 1 {
        return seats.map(preference).min().map(|(.., place)| GpuSet::one(place.into()));
    }
    let mut preferences = [(false, Bytes::ZERO, 0u8); MAX_GPUS as usize];
    let mut found = 0;
    for seat in seats {
        preferences[found] = preference(seat);
        found += 1;
    }
    let wanted = demand.gpus as usize;
    if found < wanted {
        return None;
    }
    preferences[..found].sort_unstable();
    Some(preferences[..wanted].iter().map(|(.., place)| usize::from(*place)).collect())
}

/// Whether the GPU was just offered to someone else who would not fit beside this one.
pub fn is_contended(gpu: &Gpu, demand: &Demand) -> bool {
    !gpu.has_unhinted_room(demand.per_gpu, demand.sharing)
}

/// What would stay free on a GPU that has room.
pub fn leftover(gpu: &Gpu, demand: &Demand) -> Bytes {
    gpu.free().minus(demand.per_gpu)
}
