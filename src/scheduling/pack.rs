//! Which GPUs of one node a demand gets: those whose loss costs least, by what free VRAM is worth; the tightest that fit where that
//! is not known, so that the roomy ones stay roomy.

use super::device::{Gpu, GpuSet};
use super::fit::usable;
use super::policy::Terms;
use super::rank::WHOLE_PART;
use super::request::{Demand, MAX_GPUS};
use super::worth::{Appraisal, Loss, Lots};
use crate::units::Bytes;
use serde::Serialize;

/// What speaks against one GPU: hinted to someone else, busy engines, what is lost by it; then its place, and its NVLink island.
type Preference = (bool, Bustle, Loss, u8, Option<u8>);

/// GPUs for a demand, and what is lost if it gets them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Choice {
    pub gpus: GpuSet,
    pub loss: Loss,
}

/// The GPUs for `demand` among the `allowed` ones by best fit, or `None` if too few have room.
pub fn choose(gpus: &[Gpu], demand: &Demand, allowed: GpuSet) -> Option<GpuSet> {
    choose_by(&Appraisal::by_best_fit(gpus, demand), allowed).map(|choice| choice.gpus)
}

/// The GPUs for a demand among the `allowed` ones, or `None` if too few have room. Of several GPUs, fewest that are hinted to
/// someone else, then such as reach each other over NVLink; then busy engines, what is lost, and the lowest places.
pub fn choose_by(appraisal: &Appraisal<'_>, allowed: GpuSet) -> Option<Choice> {
    match appraisal.lots() {
        Lots::Alone(gpus) => {
            let alone = |(place, gpu)| (gpu, GpuSet::one(place));
            choose_among(appraisal, gpus.iter().enumerate().map(alone), allowed)
        }
        Lots::Alike(lots) => choose_among(appraisal, lots.iter().map(|lot| (&lot.gpu, lot.places)), allowed),
    }
}

/// Of GPUs that are alike, and where those are.
fn choose_among<'a>(
    appraisal: &Appraisal<'_>,
    lots: impl Iterator<Item = (&'a Gpu, GpuSet)>,
    allowed: GpuSet,
) -> Option<Choice> {
    let demand = appraisal.demand();
    let seats = lots
        .map(|(gpu, places)| (gpu, places.and(allowed)))
        .filter(|(gpu, places)| !places.is_empty() && usable(gpu, demand) && gpu.has_room(demand));
    if demand.gpus == 1 {
        return best_one(appraisal, seats);
    }
    let mut preferences: [Preference; MAX_GPUS as usize] = [(false, Bustle::Calm, Loss(0), 0, None); _];
    let mut found = 0;
    for (gpu, places) in seats {
        let (contended, bustle) = standing(gpu, demand);
        // Alone, whatever the others are.
        let loss = appraisal.of(places.lowest().map_or(places, GpuSet::one));
        for place in places.iter() {
            preferences[found] = (contended, bustle, loss, place as u8, gpu.island);
            found += 1;
        }
    }
    let wanted = demand.gpus as usize;
    if found < wanted {
        return None;
    }
    preferences[..found].sort_unstable();
    let gpus = together(&preferences[..found], wanted);
    Some(Choice { gpus, loss: appraisal.of(gpus) })
}

/// Of those that are alike one is appraised, and none that all else speaks against.
fn best_one<'a>(appraisal: &Appraisal<'_>, seats: impl Iterator<Item = (&'a Gpu, GpuSet)>) -> Option<Choice> {
    let mut best: Option<(Preference, Choice)> = None;
    for (gpu, places) in seats {
        let (contended, bustle) = standing(gpu, appraisal.demand());
        if best.is_some_and(|((hinted, calm, ..), _)| (contended, bustle) > (hinted, calm)) {
            continue;
        }
        let Some(place) = places.lowest() else { continue };
        let gpus = GpuSet::one(place);
        let loss = appraisal.of(gpus);
        let found = (contended, bustle, loss, place as u8, gpu.island);
        if best.is_none_or(|(best, _)| found < best) {
            best = Some((found, Choice { gpus, loss }));
        }
    }
    best.map(|(_, choice)| choice)
}

fn standing(gpu: &Gpu, demand: &Demand) -> (bool, Bustle) {
    (is_contended(gpu, demand), bustle(gpu, demand))
}

/// The first `wanted` of the seats, which are in order; or those of one NVLink island, if that has enough and no more of them
/// are hinted to someone else.
fn together(seats: &[Preference], wanted: usize) -> GpuSet {
    let of = |one: u8| seats.iter().filter(move |seat| seat.4 == Some(one)).take(wanted);
    let contended = seats[..wanted].iter().filter(|seat| seat.0).count();
    let is_enough =
        |one: &u8| of(*one).count() == wanted && of(*one).filter(|seat| seat.0).count() == contended;
    let places = |seat: &Preference| usize::from(seat.3);
    // Seats of one island name it again; that changes nothing.
    match seats.iter().filter_map(|seat| seat.4).filter(is_enough).min_by(|a, b| of(*a).cmp(of(*b))) {
        Some(one) => of(one).map(places).collect(),
        None => seats[..wanted].iter().map(places).collect(),
    }
}

/// Whether the GPU was just offered to someone else who would not fit beside this one.
pub fn is_contended(gpu: &Gpu, demand: &Demand) -> bool {
    !gpu.has_unhinted_room(demand)
}

/// How near the engines of a GPU are to what a demand's class allows. In steps: a few per cent of KV cache more or less
/// say nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bustle {
    #[default]
    Calm,
    /// Neither good nor bad.
    Unknown,
    /// Beyond three quarters of a limit: what joins will be felt.
    Busy,
}

impl Bustle {
    /// What is to be said against it, up to [`WHOLE_PART`].
    pub fn weight(self) -> u32 {
        match self {
            Self::Calm => 0,
            Self::Unknown => WHOLE_PART / 2,
            Self::Busy => WHOLE_PART,
        }
    }
}

pub fn bustle(gpu: &Gpu, demand: &Demand) -> Bustle {
    let Terms { kv_cache_limit, queue_limit, .. } = demand.terms;
    let near = |measured: u32, limit: u32| u64::from(measured) * 4 > u64::from(limit) * 3;
    let full = gpu.pressure.kv_cache.zip(kv_cache_limit);
    let long = gpu.pressure.queue.zip(queue_limit);
    if full.is_some_and(|(kv, limit)| near(kv.get().into(), limit.get().into()))
        || long.is_some_and(|(queue, limit)| near(queue, limit))
    {
        return Bustle::Busy;
    }
    let is_limited = kv_cache_limit.is_some() || queue_limit.is_some();
    let is_silent = full.is_none() && kv_cache_limit.is_some() || long.is_none() && queue_limit.is_some();
    let unknown = is_silent || is_limited && gpu.pressure.partial;
    if unknown { Bustle::Unknown } else { Bustle::Calm }
}

/// What would stay free on GPUs that have room.
pub fn leftover(gpus: &[Gpu], chosen: GpuSet, demand: &Demand) -> Bytes {
    chosen.iter().map(|place| gpus[place].free().minus(demand.per_gpu)).sum()
}
