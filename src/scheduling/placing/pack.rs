//! Which GPUs of one node a demand gets.
//!
//! A pod goes to the very GPUs on which an engine of its model sleeps that it may wake, if there is free VRAM, and is ready after the
//! wake ([`choose`]). Otherwise, of those that fit, it gets the ones with the least packing cost, so that free VRAM stays useful for
//! later pods ([`choose_by_cost`]): by the trait [`Packing`], of which [`learned`](super::learned) is one implementation, and best
//! fit, which needs no model, the other. [`NodeEvaluation::by_model`] alone decides which of the two counts.

use super::fit::is_usable;
use super::learned::{GpuGroup, LearnedPacking, NodeGpus, NodeSummary, PackingModel};
use super::rank::EngineLoadCost;
use super::start_model::{StartModel, estimate_start};
use crate::units::{Bytes, Millis};
use crate::vocabulary::demand::{Demand, MAX_GPUS};
use crate::vocabulary::engine_model::{ReusableEngine, ReusableEngineSet, SleepLevel};
use crate::vocabulary::gpu::{Gpu, GpuSet};
use crate::vocabulary::model_tier::{LoadingSpeeds, time_to_wake};
use crate::vocabulary::node::Node;
use serde::Serialize;

/// What speaks against one GPU; less is better, and the first field that differs decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Preference {
    /// It is softly reserved for another pod.
    contended: bool,
    /// [`EngineLoadCost::step`]
    load_step: u8,
    /// The packing cost of this GPU as if the demand requested only one.
    packing_cost: PackingCost,
    engine_load: EngineLoadCost,
    index: u8,
    island: Option<u8>,
}

/// GPUs for a demand, and what they are compared by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuChoice {
    pub gpus: GpuSet,
    pub packing_cost: PackingCost,
    /// One of them is softly reserved for another pod that would not fit beside this demand.
    pub contended: bool,
    /// The load of the busiest of these GPUs.
    pub engine_load: EngineLoadCost,
    /// For how much of the time the pods of the busiest of these GPUs have work, added up, in per cent.
    pub busy: u16,
    /// Whether they do not all reach each other over NVLink, as far as is known.
    pub crosses_islands: bool,
}

impl GpuChoice {
    /// The choice of these GPUs of an evaluated node, with their packing cost.
    pub fn for_gpus(evaluation: &NodeEvaluation<'_>, gpus: GpuSet) -> Self {
        Self::with_cost(evaluation, gpus, evaluation.packing_cost(gpus))
    }

    fn with_cost(evaluation: &NodeEvaluation<'_>, gpus: GpuSet, packing_cost: PackingCost) -> Self {
        let chosen = || gpus.iter().map(|index| evaluation.gpus().gpu(index));
        let first = chosen().next().and_then(|gpu| gpu.island);
        let demand = evaluation.demand();
        Self {
            gpus,
            packing_cost,
            contended: chosen().any(|gpu| is_contended(gpu, demand)),
            engine_load: chosen()
                .map(|gpu| EngineLoadCost::for_gpu(gpu, demand))
                .max()
                .unwrap_or_default(),
            busy: chosen()
                .map(|gpu| gpu.neighbors.busy)
                .max()
                .unwrap_or_default(),
            crosses_islands: gpus.len() > 1
                && !chosen().all(|gpu| gpu.island.is_some() && gpu.island == first),
        }
    }
}

/// The GPUs for a demand among the `allowed` ones, or `None` if too few have enough free VRAM. Of several GPUs, the fewest that
/// are softly reserved for another pod, then such as reach each other over NVLink; then the load of engines in steps, the packing
/// cost, the exact load, and the lowest indices.
pub(crate) fn choose_by_cost(
    evaluation: &NodeEvaluation<'_>,
    allowed: GpuSet,
) -> Option<GpuChoice> {
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
        EvaluatedGpus::Individual(gpus) => {
            let each = gpus.iter().enumerate().map(EqualGpus::single);
            choose_among(
                packing,
                evaluation,
                each.map(|equal| equal.restricted_to(allowed)),
            )
        }
        EvaluatedGpus::Grouped(node_summary) => {
            let groups = node_summary.gpu_groups().iter().map(EqualGpus::from_group);
            choose_among(
                packing,
                evaluation,
                groups.map(|equal| equal.restricted_to(allowed)),
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
        for index in equal.indices.iter() {
            preferences[found] = Preference {
                packing_cost,
                index: index as u8,
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
    let gpus = prefer_one_island(&preferences[..found], wanted);
    Some(GpuChoice::with_cost(
        evaluation,
        gpus,
        packing.cost(&base?, demand, gpus),
    ))
}

/// The best GPU for a demand on one GPU. The packing cost is computed once for equal GPUs, and not for GPUs that lose before it counts.
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
        gpus: equal.indices.lowest(),
        packing_cost: preference.packing_cost,
        contended: preference.contended,
        engine_load: preference.engine_load,
        busy: equal.gpu.neighbors.busy,
        crosses_islands: false,
    })
}

/// The preference for the lowest-indexed of these equal GPUs, without its packing cost; `None` if the demand does not fit.
#[inline]
fn preference(
    EqualGpus {
        gpu,
        indices: gpu_indices,
        ..
    }: EqualGpus<'_>,
    demand: &Demand,
) -> Option<Preference> {
    let can_take = !gpu_indices.is_empty() && fits_on_gpu(gpu, demand);
    can_take.then(|| {
        let engine_load = EngineLoadCost::for_gpu(gpu, demand);
        Preference {
            contended: is_contended(gpu, demand),
            load_step: engine_load.step(),
            packing_cost: PackingCost::default(),
            engine_load,
            index: gpu_indices.iter().next().unwrap_or_default() as u8,
            island: gpu.island,
        }
    })
}

/// Whether a demand fits on a GPU now.
#[inline]
pub fn fits_on_gpu(gpu: &Gpu, demand: &Demand) -> bool {
    is_usable(gpu, demand) && gpu.can_take(demand)
}

/// The first `wanted` of the candidates, which are in order; or those of one NVLink island, if that has enough and no more of
/// them are softly reserved for another pod.
fn prefer_one_island(gpu_candidates: &[Preference], wanted: usize) -> GpuSet {
    let on_island = |island: u8| {
        gpu_candidates
            .iter()
            .filter(move |gpu_candidate| gpu_candidate.island == Some(island))
            .take(wanted)
    };
    let contended = gpu_candidates[..wanted]
        .iter()
        .filter(|gpu_candidate| gpu_candidate.contended)
        .count();
    let is_enough = |island: &u8| {
        on_island(*island).count() == wanted
            && on_island(*island)
                .filter(|gpu_candidate| gpu_candidate.contended)
                .count()
                == contended
    };
    let index_of = |gpu_candidate: &Preference| usize::from(gpu_candidate.index);
    // Candidates of one island name it again; that changes nothing.
    match gpu_candidates
        .iter()
        .filter_map(|gpu_candidate| gpu_candidate.island)
        .filter(is_enough)
        .min_by(|first, second| on_island(*first).cmp(on_island(*second)))
    {
        Some(island) => on_island(island).map(index_of).collect(),
        None => gpu_candidates[..wanted].iter().map(index_of).collect(),
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
        .map(|index| gpus[index].free().minus(demand.per_gpu))
        .sum()
}

/// The packing cost of a choice, less is better: billionths of a GPU, or, by best fit, bytes left over. Comparable under one
/// [`PackingModel`] for one demand only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct PackingCost(pub i64);

/// The packing cost of every choice of GPUs on one node.
pub trait Packing {
    /// The part of the cost that all choices of a demand share. It is computed once, and only for a node that has a choice: many have none.
    type Base;

    fn base(&self, demand: &Demand) -> Self::Base;

    /// The cost if the demand gets these GPUs.
    fn cost(&self, base: &Self::Base, demand: &Demand, chosen: GpuSet) -> PackingCost;

    /// The cost if the demand gets any one of these.
    fn cost_of_one(&self, base: &Self::Base, demand: &Demand, equal: EqualGpus<'_>) -> PackingCost;

    /// The cost of these GPUs on a scale from 0 to 1,000.
    fn scaled_cost(&self, chosen: GpuSet, packing_cost: PackingCost) -> u32;

    /// The VRAM that the demand leaves on these GPUs and that recent pods cannot use; `None` if nothing was learned.
    fn unusable_leftover(&self, demand: &Demand, chosen: GpuSet) -> Option<Bytes>;
}

/// One node, evaluated for one demand.
#[derive(Debug, Clone, Copy)]
pub struct NodeEvaluation<'a> {
    demand: &'a Demand,
    gpus: EvaluatedGpus<'a>,
    packing: NodePacking<'a>,
}

/// The two ways to pack a node. A match on it, once for each node, leaves the comparison of its GPUs without dynamic calls.
#[derive(Debug, Clone, Copy)]
pub(super) enum NodePacking<'a> {
    BestFit(BestFitPacking<'a>),
    Learned(LearnedPacking<'a>),
}

/// A node's GPUs: each alone, or in groups of equal ones.
#[derive(Debug, Clone, Copy)]
pub enum EvaluatedGpus<'a> {
    Individual(&'a [Gpu]),
    Grouped(&'a NodeSummary),
}

/// GPUs of a node that are interchangeable.
#[derive(Debug, Clone, Copy)]
pub struct EqualGpus<'a> {
    pub gpu: &'a Gpu,
    pub indices: GpuSet,
    /// `None` for one GPU without a known group.
    pub(super) gpu_group: Option<&'a GpuGroup>,
}

impl<'a> NodeEvaluation<'a> {
    /// A node that the model has summarized: by what the model has learned, or by best fit if that is nothing. (A policy of best
    /// fit leaves the ledger an empty model.) Of a device plugin's GPUs Stowage chooses none: there is nothing to learn.
    #[inline]
    pub fn by_model(
        packing_model: &'a PackingModel,
        node_summary: &'a NodeSummary,
        demand: &'a Demand,
    ) -> Self {
        let gpus = EvaluatedGpus::Grouped(node_summary);
        let learned = packing_model
            .learned_packing(node_summary)
            .filter(|_| !demand.is_allocated_externally());
        let packing = learned.map_or(
            NodePacking::BestFit(BestFitPacking(gpus)),
            NodePacking::Learned,
        );
        Self {
            demand,
            gpus,
            packing,
        }
    }

    /// The evaluation of GPUs without a packing model.
    pub(crate) fn by_best_fit(gpus: &'a [Gpu], demand: &'a Demand) -> Self {
        let gpus = EvaluatedGpus::Individual(gpus);
        Self {
            demand,
            gpus,
            packing: NodePacking::BestFit(BestFitPacking(gpus)),
        }
    }

    pub fn demand(&self) -> &'a Demand {
        self.demand
    }

    /// The GPUs to choose from.
    pub fn gpus(&self) -> EvaluatedGpus<'a> {
        self.gpus
    }

    pub(super) fn packing(&self) -> &NodePacking<'a> {
        &self.packing
    }

    /// The packing cost if the demand gets the `chosen` GPUs.
    pub(crate) fn packing_cost(&self, chosen: GpuSet) -> PackingCost {
        fn recompute(packing: &impl Packing, demand: &Demand, chosen: GpuSet) -> PackingCost {
            packing.cost(&packing.base(demand), demand, chosen)
        }
        match &self.packing {
            NodePacking::BestFit(packing) => recompute(packing, self.demand, chosen),
            NodePacking::Learned(packing) => recompute(packing, self.demand, chosen),
        }
    }

    /// [`Packing::scaled_cost`]
    pub fn scaled_cost(&self, chosen: GpuSet, packing_cost: PackingCost) -> u32 {
        match &self.packing {
            NodePacking::BestFit(packing) => packing.scaled_cost(chosen, packing_cost),
            NodePacking::Learned(packing) => packing.scaled_cost(chosen, packing_cost),
        }
    }

    /// [`Packing::unusable_leftover`]
    pub fn unusable_leftover(&self, chosen: GpuSet) -> Option<Bytes> {
        match &self.packing {
            NodePacking::BestFit(packing) => packing.unusable_leftover(self.demand, chosen),
            NodePacking::Learned(packing) => packing.unusable_leftover(self.demand, chosen),
        }
    }
}

impl<'a> EvaluatedGpus<'a> {
    /// The GPU at this index.
    pub fn gpu(&self, index: usize) -> &'a Gpu {
        match self {
            Self::Individual(gpus) => &gpus[index],
            Self::Grouped(node_summary) => &node_summary.gpu_group_of(index).gpu,
        }
    }

    /// Free VRAM over all of them.
    pub fn free(&self) -> Bytes {
        match self {
            Self::Individual(gpus) => gpus.iter().map(Gpu::free).sum(),
            Self::Grouped(node_summary) => node_summary.free(),
        }
    }
}

impl<'a> EqualGpus<'a> {
    pub fn single((index, gpu): (usize, &'a Gpu)) -> Self {
        Self {
            gpu,
            indices: GpuSet::single(index),
            gpu_group: None,
        }
    }

    pub fn from_group(gpu_group: &'a GpuGroup) -> Self {
        Self {
            gpu: &gpu_group.gpu,
            indices: gpu_group.indices,
            gpu_group: Some(gpu_group),
        }
    }

    /// The GPUs at these indices only.
    pub fn restricted_to(self, indices: GpuSet) -> Self {
        Self {
            indices: self.indices.intersection(indices),
            ..self
        }
    }
}

/// Best fit: the cost is the VRAM left over, so that GPUs with much free VRAM keep it.
#[derive(Debug, Clone, Copy)]
pub(super) struct BestFitPacking<'a>(EvaluatedGpus<'a>);

impl Packing for BestFitPacking<'_> {
    type Base = ();

    fn base(&self, _: &Demand) -> Self::Base {}

    fn cost(&self, (): &(), demand: &Demand, chosen: GpuSet) -> PackingCost {
        cost_of_leftover(
            chosen
                .iter()
                .map(|index| self.0.gpu(index).free().minus(demand.per_gpu))
                .sum(),
        )
    }

    fn cost_of_one(&self, (): &(), demand: &Demand, equal: EqualGpus<'_>) -> PackingCost {
        cost_of_leftover(equal.gpu.free().minus(demand.per_gpu))
    }

    /// The part of the chosen GPUs that stays free.
    fn scaled_cost(&self, chosen: GpuSet, packing_cost: PackingCost) -> u32 {
        let whole: Bytes = chosen.iter().map(|index| self.0.gpu(index).capacity).sum();
        (packing_cost.0.unsigned_abs().saturating_mul(1000) / whole.0.max(1)) as u32
    }

    fn unusable_leftover(&self, _: &Demand, _: GpuSet) -> Option<Bytes> {
        None
    }
}

fn cost_of_leftover(bytes: Bytes) -> PackingCost {
    PackingCost(i64::try_from(bytes.0).unwrap_or(i64::MAX))
}

/// The GPUs for a demand among the `allowed` ones, or `None` if too few have enough free VRAM. GPUs that are softly reserved for
/// another pod come last; then the engine that sleeps least deep; then what [`choose_by_cost`] compares by.
pub fn choose(
    evaluation: &NodeEvaluation<'_>,
    reusable: &ReusableEngineSet,
    allowed: GpuSet,
) -> Option<GpuChoice> {
    let demand = evaluation.demand();
    let fits_all = |engine: &&ReusableEngine| {
        let fits = |index| fits_on_gpu(evaluation.gpus().gpu(index), demand);
        engine.gpus.difference(allowed).is_empty() && engine.gpus.iter().all(fits)
    };
    let candidates = reusable.usable_by(demand).filter(fits_all);
    let warm = candidates
        .map(|engine| (engine.level, GpuChoice::for_gpus(evaluation, engine.gpus)))
        .min_by_key(|(level, choice)| {
            (
                choice.contended,
                *level,
                choice.engine_load,
                choice.packing_cost,
                choice.gpus,
            )
        });
    match warm {
        Some((_, warm)) if !warm.contended => Some(warm),
        Some((_, warm)) => choose_by_cost(evaluation, allowed)
            .filter(|other| !other.contended)
            .or(Some(warm)),
        None => choose_by_cost(evaluation, allowed),
    }
}

/// The GPUs that [`choose`] takes on a node that the packing model has not summarized yet.
pub(crate) fn choose_unsummarized(
    packing_model: &PackingModel,
    node_gpus: NodeGpus<'_>,
    demand: &Demand,
    reusable: &ReusableEngineSet,
    allowed: GpuSet,
) -> Option<GpuSet> {
    let node_summary = packing_model.node_summary(node_gpus);
    choose(
        &NodeEvaluation::by_model(packing_model, &node_summary, demand),
        reusable,
        allowed,
    )
    .map(|choice| choice.gpus)
}

/// Time until a pod answers with a sleeping engine that is woken, and with a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WakeEstimate {
    /// Time until the woken engine answers.
    pub wake_time: Millis,
    /// Time until a new engine would answer.
    pub start_time: Millis,
}

/// The time that a pod with this demand gains by a wake on these GPUs; `None` if no engine sleeps there that it may wake, or a start
/// takes no longer. Either way the pod's own images come first.
pub(crate) fn estimate_wake(
    node: &Node,
    gpus: GpuSet,
    demand: &Demand,
    starts: &StartModel,
    speeds: &LoadingSpeeds,
) -> Option<WakeEstimate> {
    let engine = node.reusable.best_on(gpus, demand)?;
    let start = estimate_start(node, demand, starts, speeds)?;
    let awake = match engine.level {
        SleepLevel::WeightsOffloaded => time_to_wake(
            engine.level,
            node.holding(&engine.model),
            demand.weights(),
            speeds,
        ),
        // As long as engines have taken to read them.
        SleepLevel::WeightsDiscarded => start.time.fetch + start.time.load + speeds.wake_init,
    };
    let (wake_time, start_time) = (start.time.pull + awake, start.total());
    (wake_time < start_time).then_some(WakeEstimate {
        wake_time,
        start_time,
    })
}
