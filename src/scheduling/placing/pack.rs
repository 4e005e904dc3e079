//! Which GPUs of one node a demand gets: of those that fit, the ones with the least packing cost, so that free VRAM stays useful
//! for later pods.

use super::fit::usable;
use super::learned::{NodeGpus, PackingModel};
use super::packing::{EqualGpus, EvaluatedGpus, NodeEvaluation, NodePacking, Packing, PackingCost};
use super::rank::WHOLE_PART;
use crate::scheduling::vocabulary::classification::ClassTerms;
use crate::scheduling::vocabulary::demand::{Demand, MAX_GPUS};
use crate::scheduling::vocabulary::gpu::{Gpu, GpuSet};
use crate::units::Bytes;
use serde::Serialize;

/// What speaks against one GPU: softly reserved for another pod, busy engines, its packing cost; then its index, and its NVLink
/// island.
type Preference = (bool, EngineLoadLevel, PackingCost, u8, Option<u8>);

/// GPUs for a demand, and what they are compared by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuChoice {
    pub gpus: GpuSet,
    pub packing_cost: PackingCost,
    /// One of them is softly reserved for another pod that would not fit beside this demand.
    pub contended: bool,
    /// Of the busiest.
    pub engine_load_level: EngineLoadLevel,
    /// On the fullest.
    pub tenants: u16,
    /// They do not all reach each other over NVLink, as far as is known.
    pub apart: bool,
}

impl GpuChoice {
    /// These GPUs of an evaluated node.
    pub fn of(evaluation: &NodeEvaluation<'_>, gpus: GpuSet) -> Self {
        Self::at_cost(evaluation, gpus, evaluation.packing_cost(gpus))
    }

    fn at_cost(evaluation: &NodeEvaluation<'_>, gpus: GpuSet, packing_cost: PackingCost) -> Self {
        let chosen = || gpus.iter().map(|place| evaluation.gpus().gpu(place));
        let first = chosen().next().and_then(|gpu| gpu.island);
        let demand = evaluation.demand();
        Self {
            gpus,
            packing_cost,
            contended: chosen().any(|gpu| is_contended(gpu, demand)),
            engine_load_level: chosen().map(|gpu| engine_load_level(gpu, demand)).max().unwrap_or_default(),
            tenants: chosen().map(|gpu| gpu.tenants).max().unwrap_or_default(),
            apart: gpus.len() > 1 && !chosen().all(|gpu| gpu.island.is_some() && gpu.island == first),
        }
    }
}

/// The GPUs for `demand` among the `allowed` ones by best fit, or `None` if too few have enough free VRAM.
pub fn choose(gpus: &[Gpu], demand: &Demand, allowed: GpuSet) -> Option<GpuSet> {
    choose_by(&NodeEvaluation::by_best_fit(gpus, demand), allowed).map(|choice| choice.gpus)
}

/// The same with a packing model, on a node that it has not summarized yet.
pub fn choose_at(
    packing_model: &PackingModel,
    node_gpus: NodeGpus<'_>,
    demand: &Demand,
    allowed: GpuSet,
) -> Option<GpuSet> {
    let node_summary = packing_model.node_summary(node_gpus);
    choose_by(&NodeEvaluation::of(packing_model, &node_summary, demand), allowed).map(|choice| choice.gpus)
}

/// The GPUs for a demand among the `allowed` ones, or `None` if too few have enough free VRAM. Of several GPUs, the fewest that
/// are softly reserved for another pod, then such as reach each other over NVLink; then busy engines, the packing cost, and the
/// lowest indices.
pub fn choose_by(evaluation: &NodeEvaluation<'_>, allowed: GpuSet) -> Option<GpuChoice> {
    match evaluation.packing() {
        NodePacking::BestFit(packing) => choose_with(packing, evaluation, allowed),
        NodePacking::Learned(packing) => choose_with(packing, evaluation, allowed),
    }
}

fn choose_with(
    packing: &impl Packing,
    evaluation: &NodeEvaluation<'_>,
    allowed: GpuSet,
) -> Option<GpuChoice> {
    match evaluation.gpus() {
        EvaluatedGpus::Alone(gpus) => {
            let each = gpus.iter().enumerate().map(EqualGpus::alone);
            choose_among(packing, evaluation, each.map(|equal| equal.among(allowed)))
        }
        EvaluatedGpus::Alike(node_summary) => {
            let groups = node_summary.gpu_groups().iter().map(EqualGpus::of);
            choose_among(packing, evaluation, groups.map(|equal| equal.among(allowed)))
        }
    }
}

fn choose_among<'a>(
    packing: &impl Packing,
    evaluation: &NodeEvaluation<'_>,
    gpu_groups: impl Iterator<Item = EqualGpus<'a>>,
) -> Option<GpuChoice> {
    let demand = evaluation.demand();
    if demand.gpus == 1 {
        return best_one(packing, demand, gpu_groups);
    }
    let mut base = None;
    let mut preferences: [Preference; MAX_GPUS as usize] =
        [(false, EngineLoadLevel::Calm, PackingCost(0), 0, None); _];
    let mut found = 0;
    for equal in gpu_groups {
        let Some((contended, engine_load_level)) = preference(equal, demand) else { continue };
        // As if it were the only one.
        let base = base.get_or_insert_with(|| packing.base(demand));
        let packing_cost = packing.cost_of_one(base, demand, equal);
        for place in equal.places.iter() {
            preferences[found] = (contended, engine_load_level, packing_cost, place as u8, equal.gpu.island);
            found += 1;
        }
    }
    let wanted = demand.gpus as usize;
    if found < wanted {
        return None;
    }
    preferences[..found].sort_unstable();
    let gpus = together(&preferences[..found], wanted);
    Some(GpuChoice::at_cost(evaluation, gpus, packing.cost(&base?, demand, gpus)))
}

/// Of equal GPUs the cost of one is computed; of such as are worse anyway, none.
fn best_one<'a>(
    packing: &impl Packing,
    demand: &Demand,
    gpu_groups: impl Iterator<Item = EqualGpus<'a>>,
) -> Option<GpuChoice> {
    let mut base = None;
    let mut best: Option<GpuChoice> = None;
    for equal in gpu_groups {
        let Some((contended, engine_load_level)) = preference(equal, demand) else { continue };
        if best.is_some_and(|best| (contended, engine_load_level) > (best.contended, best.engine_load_level))
        {
            continue;
        }
        let base = base.get_or_insert_with(|| packing.base(demand));
        let (gpus, packing_cost) = (equal.places.lowest(), packing.cost_of_one(base, demand, equal));
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
                tenants: equal.gpu.tenants,
                apart: false,
            });
        }
    }
    best
}

/// What counts of equal GPUs before their packing cost; `None` if the demand does not fit.
#[inline]
fn preference(
    EqualGpus { gpu, places, .. }: EqualGpus<'_>,
    demand: &Demand,
) -> Option<(bool, EngineLoadLevel)> {
    let can_take = !places.is_empty() && takes(gpu, demand);
    can_take.then(|| (is_contended(gpu, demand), engine_load_level(gpu, demand)))
}

/// Whether a demand fits on a GPU now.
#[inline]
pub fn takes(gpu: &Gpu, demand: &Demand) -> bool {
    usable(gpu, demand) && gpu.can_take(demand)
}

/// The first `wanted` of the candidates, which are in order; or those of one NVLink island, if that has enough and no more of
/// them are softly reserved for another pod.
fn together(gpu_candidates: &[Preference], wanted: usize) -> GpuSet {
    let of = |one: u8| {
        gpu_candidates.iter().filter(move |gpu_candidate| gpu_candidate.4 == Some(one)).take(wanted)
    };
    let contended = gpu_candidates[..wanted].iter().filter(|gpu_candidate| gpu_candidate.0).count();
    let is_enough = |one: &u8| {
        of(*one).count() == wanted && of(*one).filter(|gpu_candidate| gpu_candidate.0).count() == contended
    };
    let places = |gpu_candidate: &Preference| usize::from(gpu_candidate.3);
    // Candidates of one island name it again; that changes nothing.
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

/// Whether the GPU is softly reserved for another pod that would not fit beside this demand.
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

/// VRAM that would stay free on GPUs that fit.
pub fn leftover(gpus: &[Gpu], chosen: GpuSet, demand: &Demand) -> Bytes {
    chosen.iter().map(|place| gpus[place].free().minus(demand.per_gpu)).sum()
}
