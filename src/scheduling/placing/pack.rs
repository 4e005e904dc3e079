//! Which GPUs of one node a demand gets: those whose loss costs least, by what free VRAM is worth; the tightest that fit where that
//! is not known, so that the roomy ones stay roomy.

use super::fit::usable;
use super::learned::{
    ChoiceCosts, EqualGpus, EvaluatedGpus, NodeEvaluation, NodeGpus, PackingCost, PackingModel,
};
use super::rank::WHOLE_PART;
use crate::scheduling::vocabulary::classification::ClassTerms;
use crate::scheduling::vocabulary::demand::{Demand, MAX_GPUS};
use crate::scheduling::vocabulary::gpu::{Gpu, GpuSet};
use crate::units::Bytes;
use serde::Serialize;

/// What speaks against one GPU: hinted to someone else, busy engines, what is lost by it; then its place, and its NVLink island.
type Preference = (bool, EngineLoadLevel, PackingCost, u8, Option<u8>);

/// GPUs for a demand, and what is to be said of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuChoice {
    pub gpus: GpuSet,
    pub packing_cost: PackingCost,
    /// One of them was just offered to someone else who would not fit beside this demand.
    pub contended: bool,
    /// Of the busiest.
    pub engine_load_level: EngineLoadLevel,
    /// On the fullest.
    pub tenants: u16,
    /// They do not all reach each other over NVLink, as far as anybody says.
    pub apart: bool,
}

impl GpuChoice {
    /// These, of GPUs that were looked at for a demand.
    pub fn of(comparison: &ChoiceCosts<'_>, gpus: GpuSet) -> Self {
        let evaluation = comparison.evaluation();
        let chosen = || gpus.iter().map(|place| evaluation.gpu(place));
        let first = chosen().next().and_then(|gpu| gpu.island);
        Self {
            gpus,
            packing_cost: comparison.of(gpus),
            contended: chosen().any(|gpu| is_contended(gpu, evaluation.demand())),
            engine_load_level: chosen()
                .map(|gpu| engine_load_level(gpu, evaluation.demand()))
                .max()
                .unwrap_or_default(),
            tenants: chosen().map(|gpu| gpu.tenants).max().unwrap_or_default(),
            apart: gpus.len() > 1 && !chosen().all(|gpu| gpu.island.is_some() && gpu.island == first),
        }
    }
}

/// The GPUs for `demand` among the `allowed` ones by best fit, or `None` if too few have room.
pub fn choose(gpus: &[Gpu], demand: &Demand, allowed: GpuSet) -> Option<GpuSet> {
    choose_by(&NodeEvaluation::by_best_fit(gpus, demand), allowed).map(|choice| choice.gpus)
}

/// The same by what free VRAM is worth, on a node that is not summed up yet.
pub fn choose_at(
    packing_model: &PackingModel,
    node_gpus: NodeGpus<'_>,
    demand: &Demand,
    allowed: GpuSet,
) -> Option<GpuSet> {
    if !packing_model.is_learned() {
        return choose(node_gpus.gpus, demand, allowed);
    }
    choose_by(&packing_model.evaluate(&packing_model.node_summary(node_gpus), demand), allowed)
        .map(|choice| choice.gpus)
}

/// The GPUs for a demand among the `allowed` ones, or `None` if too few have room. Of several GPUs, fewest that are hinted to
/// someone else, then such as reach each other over NVLink; then busy engines, what is lost, and the lowest places.
pub fn choose_by(evaluation: &NodeEvaluation<'_>, allowed: GpuSet) -> Option<GpuChoice> {
    match evaluation.gpus() {
        EvaluatedGpus::Alone(gpus) => {
            choose_among(evaluation, gpus.iter().enumerate().map(EqualGpus::alone), allowed)
        }
        EvaluatedGpus::Alike(node_summary) => {
            choose_among(evaluation, node_summary.gpu_groups().iter().map(EqualGpus::of), allowed)
        }
    }
}

/// Of GPUs that are alike, and where those are.
fn choose_among<'a>(
    evaluation: &NodeEvaluation<'_>,
    gpu_groups: impl Iterator<Item = EqualGpus<'a>>,
    allowed: GpuSet,
) -> Option<GpuChoice> {
    let demand = evaluation.demand();
    let gpu_groups = gpu_groups.map(|alike| alike.among(allowed));
    if demand.gpus == 1 {
        return best_one(evaluation, gpu_groups);
    }
    let mut comparison = None;
    let mut preferences: [Preference; MAX_GPUS as usize] =
        [(false, EngineLoadLevel::Calm, PackingCost(0), 0, None); _];
    let mut found = 0;
    for alike in gpu_groups {
        let Some((contended, engine_load_level)) = standing(alike, demand) else { continue };
        // Alone, whatever the others are.
        let packing_cost = comparison.get_or_insert_with(|| evaluation.compare()).of_one(alike);
        for place in alike.places.iter() {
            preferences[found] = (contended, engine_load_level, packing_cost, place as u8, alike.gpu.island);
            found += 1;
        }
    }
    let wanted = demand.gpus as usize;
    if found < wanted {
        return None;
    }
    preferences[..found].sort_unstable();
    Some(GpuChoice::of(&comparison?, together(&preferences[..found], wanted)))
}

/// Of those that are alike one is appraised, and none that all else speaks against.
fn best_one<'a>(
    evaluation: &NodeEvaluation<'_>,
    gpu_groups: impl Iterator<Item = EqualGpus<'a>>,
) -> Option<GpuChoice> {
    let mut comparison = None;
    let mut best: Option<GpuChoice> = None;
    for alike in gpu_groups {
        let Some((contended, engine_load_level)) = standing(alike, evaluation.demand()) else { continue };
        if best.is_some_and(|best| (contended, engine_load_level) > (best.contended, best.engine_load_level))
        {
            continue;
        }
        let comparison = comparison.get_or_insert_with(|| evaluation.compare());
        let (gpus, packing_cost) = (alike.places.lowest(), comparison.of_one(alike));
        let is_better = best.is_none_or(|best| {
            (contended, engine_load_level, packing_cost, gpus)
                < (best.contended, best.engine_load_level, best.packing_cost, best.gpus)
        });
        if is_better {
            best = Some(GpuChoice {
                gpus,
                packing_cost,
                contended,
                engine_load_level,
                tenants: alike.gpu.tenants,
                apart: false,
            });
        }
    }
    best
}

/// What is to be said of GPUs that are alike but what is lost by one of them; `None` if they have no room.
#[inline]
fn standing(
    EqualGpus { gpu, places, .. }: EqualGpus<'_>,
    demand: &Demand,
) -> Option<(bool, EngineLoadLevel)> {
    let can_take = !places.is_empty() && usable(gpu, demand) && gpu.can_take(demand);
    can_take.then(|| (is_contended(gpu, demand), engine_load_level(gpu, demand)))
}

/// The first `wanted` of the seats, which are in order; or those of one NVLink island, if that has enough and no more of them
/// are hinted to someone else.
fn together(gpu_candidates: &[Preference], wanted: usize) -> GpuSet {
    let of = |one: u8| {
        gpu_candidates.iter().filter(move |gpu_candidate| gpu_candidate.4 == Some(one)).take(wanted)
    };
    let contended = gpu_candidates[..wanted].iter().filter(|gpu_candidate| gpu_candidate.0).count();
    let is_enough = |one: &u8| {
        of(*one).count() == wanted && of(*one).filter(|gpu_candidate| gpu_candidate.0).count() == contended
    };
    let places = |gpu_candidate: &Preference| usize::from(gpu_candidate.3);
    // Seats of one island name it again; that changes nothing.
    match gpu_candidates
        .iter()
        .filter_map(|gpu_candidate| gpu_candidate.4)
        .filter(is_enough)
        .min_by(|a, b| of(*a).cmp(of(*b)))
    {
        Some(one) => of(one).map(places).collect(),
        None => gpu_candidates[..wanted].iter().map(places).collect(),
    }
}

/// Whether the GPU was just offered to someone else who would not fit beside this one.
pub fn is_contended(gpu: &Gpu, demand: &Demand) -> bool {
    !gpu.fits_beside_soft_reservations(demand)
}

/// How near the engines of a GPU are to what a demand's class allows. In steps: a few per cent of KV cache more or less
/// say nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineLoadLevel {
    #[default]
    Calm,
    /// Neither good nor bad.
    Unknown,
    /// Beyond three quarters of a limit: what joins will be felt.
    Busy,
}

impl EngineLoadLevel {
    /// What is to be said against it, up to [`WHOLE_PART`].
    pub fn weight(self) -> u32 {
        match self {
            Self::Calm => 0,
            Self::Unknown => WHOLE_PART / 2,
            Self::Busy => WHOLE_PART,
        }
    }
}

#[inline]
pub fn engine_load_level(gpu: &Gpu, demand: &Demand) -> EngineLoadLevel {
    let ClassTerms { kv_cache_limit, queue_limit, .. } = demand.terms;
    if kv_cache_limit.is_none() && queue_limit.is_none() {
        return EngineLoadLevel::Calm;
    }
    let near = |measured: u32, limit: u32| u64::from(measured) * 4 > u64::from(limit) * 3;
    let full = gpu.engine_load.kv_cache.zip(kv_cache_limit);
    let long = gpu.engine_load.queue.zip(queue_limit);
    if full.is_some_and(|(kv, limit)| near(kv.get().into(), limit.get().into()))
        || long.is_some_and(|(queue, limit)| near(queue, limit))
    {
        return EngineLoadLevel::Busy;
    }
    let is_silent = full.is_none() && kv_cache_limit.is_some() || long.is_none() && queue_limit.is_some();
    if is_silent || gpu.engine_load.partial { EngineLoadLevel::Unknown } else { EngineLoadLevel::Calm }
}

/// What would stay free on GPUs that have room.
pub fn leftover(gpus: &[Gpu], chosen: GpuSet, demand: &Demand) -> Bytes {
    chosen.iter().map(|place| gpus[place].free().minus(demand.per_gpu)).sum()
}
