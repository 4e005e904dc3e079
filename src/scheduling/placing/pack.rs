//! Which GPUs of one node a demand gets: of those that fit, the ones with the least packing cost, so that free VRAM stays useful
//! for later pods.

use super::engine_load_cost::EngineLoadCost;
use super::fit::usable;
use super::packing::{EqualGpus, EvaluatedGpus, NodeEvaluation, NodePacking, Packing, PackingCost};
use crate::units::Bytes;
use crate::vocabulary::demand::{Demand, MAX_GPUS};
use crate::vocabulary::gpu::{Gpu, GpuSet};

/// What speaks against one GPU; less is better, and the first field that differs decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Preference {
    /// It is softly reserved for another pod.
    contended: bool,
    /// [`EngineLoadCost::step`]
    load_step: u8,
    /// As if it were the only one.
    packing_cost: PackingCost,
    engine_load: EngineLoadCost,
    place: u8,
    island: Option<u8>,
}

/// GPUs for a demand, and what they are compared by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuChoice {
    pub gpus: GpuSet,
    pub packing_cost: PackingCost,
    /// One of them is softly reserved for another pod that would not fit beside this demand.
    pub contended: bool,
    /// Of the busiest.
    pub engine_load: EngineLoadCost,
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
            engine_load: chosen()
                .map(|gpu| EngineLoadCost::of(gpu, demand))
                .max()
                .unwrap_or_default(),
            tenants: chosen().map(|gpu| gpu.tenants).max().unwrap_or_default(),
            apart: gpus.len() > 1
                && !chosen().all(|gpu| gpu.island.is_some() && gpu.island == first),
        }
    }
}

/// The GPUs for a demand among the `allowed` ones, or `None` if too few have enough free VRAM. Of several GPUs, the fewest that
/// are softly reserved for another pod, then such as reach each other over NVLink; then the load of engines in steps, the packing
/// cost, the exact load, and the lowest indices.
pub(crate) fn choose_by(evaluation: &NodeEvaluation<'_>, allowed: GpuSet) -> Option<GpuChoice> {
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
            choose_among(
                packing,
                evaluation,
                groups.map(|equal| equal.among(allowed)),
            )
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
    let mut preferences = [Preference::default(); MAX_GPUS as usize];
    let mut found = 0;
    for equal in gpu_groups {
        let Some(preference) = preference(equal, demand) else {
            continue;
        };
        let base = base.get_or_insert_with(|| packing.base(demand));
        let packing_cost = packing.cost_of_one(base, demand, equal);
        for place in equal.places.iter() {
            preferences[found] = Preference {
                packing_cost,
                place: place as u8,
                ..preference
            };
            found += 1;
        }
    }
    let wanted = demand.gpus as usize;
    if found < wanted {
        return None;
    }
    preferences[..found].sort_unstable();
    let gpus = together(&preferences[..found], wanted);
    Some(GpuChoice::at_cost(
        evaluation,
        gpus,
        packing.cost(&base?, demand, gpus),
    ))
}

/// Of equal GPUs the cost of one is computed; of such as are worse anyway, none.
fn best_one<'a>(
    packing: &impl Packing,
    demand: &Demand,
    gpu_groups: impl Iterator<Item = EqualGpus<'a>>,
) -> Option<GpuChoice> {
    let mut base = None;
    let mut best: Option<(Preference, EqualGpus<'_>)> = None;
    for equal in gpu_groups {
        let Some(preference) = preference(equal, demand) else {
            continue;
        };
        let is_worse = |best: &Preference| {
            (preference.contended, preference.load_step) > (best.contended, best.load_step)
        };
        if best.as_ref().is_some_and(|(best, _)| is_worse(best)) {
            continue;
        }
        let base = base.get_or_insert_with(|| packing.base(demand));
        let preference = Preference {
            packing_cost: packing.cost_of_one(base, demand, equal),
            ..preference
        };
        if best.as_ref().is_none_or(|(best, _)| preference < *best) {
            best = Some((preference, equal));
        }
    }
    best.map(|(preference, equal)| GpuChoice {
        gpus: equal.places.lowest(),
        packing_cost: preference.packing_cost,
        contended: preference.contended,
        engine_load: preference.engine_load,
        tenants: equal.gpu.tenants,
        apart: false,
    })
}

/// What counts of equal GPUs beside their packing cost, with the lowest index; `None` if the demand does not fit.
#[inline]
fn preference(EqualGpus { gpu, places, .. }: EqualGpus<'_>, demand: &Demand) -> Option<Preference> {
    let can_take = !places.is_empty() && takes(gpu, demand);
    can_take.then(|| {
        let engine_load = EngineLoadCost::of(gpu, demand);
        Preference {
            contended: is_contended(gpu, demand),
            load_step: engine_load.step(),
            packing_cost: PackingCost::default(),
            engine_load,
            place: places.iter().next().unwrap_or_default() as u8,
            island: gpu.island,
        }
    })
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
        gpu_candidates
            .iter()
            .filter(move |gpu_candidate| gpu_candidate.island == Some(one))
            .take(wanted)
    };
    let contended = gpu_candidates[..wanted]
        .iter()
        .filter(|gpu_candidate| gpu_candidate.contended)
        .count();
    let is_enough = |one: &u8| {
        of(*one).count() == wanted
            && of(*one)
                .filter(|gpu_candidate| gpu_candidate.contended)
                .count()
                == contended
    };
    let places = |gpu_candidate: &Preference| usize::from(gpu_candidate.place);
    // Candidates of one island name it again; that changes nothing.
    match gpu_candidates
        .iter()
        .filter_map(|gpu_candidate| gpu_candidate.island)
        .filter(is_enough)
        .min_by(|a, b| of(*a).cmp(of(*b)))
    {
        Some(one) => of(one).map(places).collect(),
        None => gpu_candidates[..wanted].iter().map(places).collect(),
    }
}

/// Whether the GPU is softly reserved for another pod that would not fit beside this demand.
pub(crate) fn is_contended(gpu: &Gpu, demand: &Demand) -> bool {
    !gpu.fits_beside_soft_reservations(demand)
}

/// VRAM that would stay free on GPUs that fit.
pub fn leftover(gpus: &[Gpu], chosen: GpuSet, demand: &Demand) -> Bytes {
    chosen
        .iter()
        .map(|place| gpus[place].free().minus(demand.per_gpu))
        .sum()
}
