//! What it costs to give GPUs of one node to a demand: the trait [`Packing`], by which [`pack`](super::pack) compares choices,
//! and best fit, which needs no model. [`learned`](super::learned) is its other implementation. [`NodeEvaluation::of`] alone
//! decides which of the two counts.

use super::learned::{GpuGroup, LearnedPacking, NodeSummary, PackingModel};
use crate::units::Bytes;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::gpu::{Gpu, GpuSet};
use serde::Serialize;

/// The packing cost of a choice, less is better: billionths of a GPU, or, by best fit, bytes left over. Comparable under one
/// [`PackingModel`] for one demand only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct PackingCost(pub i64);

/// The packing cost of every choice of GPUs on one node.
pub trait Packing {
    /// What all choices of a demand have in common. It is computed once, and only for a node that has a choice: many have none.
    type Base;

    fn base(&self, demand: &Demand) -> Self::Base;

    /// The cost if the demand gets these GPUs.
    fn cost(&self, base: &Self::Base, demand: &Demand, chosen: GpuSet) -> PackingCost;

    /// The cost if the demand gets any one of these.
    fn cost_of_one(&self, base: &Self::Base, demand: &Demand, equal: EqualGpus<'_>) -> PackingCost;

    /// The cost of these GPUs on a scale from 0 to 1,000.
    fn part(&self, chosen: GpuSet, packing_cost: PackingCost) -> u32;

    /// The part of what the demand leaves of these GPUs that recent pods cannot use; `None` if nothing was learned.
    fn useless(&self, demand: &Demand, chosen: GpuSet) -> Option<Bytes>;
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
    Alone(&'a [Gpu]),
    Alike(&'a NodeSummary),
}

/// GPUs of a node that are interchangeable.
#[derive(Debug, Clone, Copy)]
pub struct EqualGpus<'a> {
    pub gpu: &'a Gpu,
    pub places: GpuSet,
    /// `None` for one GPU without a known group.
    pub(super) gpu_group: Option<&'a GpuGroup>,
}

impl<'a> NodeEvaluation<'a> {
    /// A node that the model has summarized: by what the model has learned, or by best fit if that is nothing. (A policy of best
    /// fit leaves the ledger an empty model.) Of a device plugin's GPUs Stowage chooses none: there is nothing to learn.
    #[inline]
    pub fn of(
        packing_model: &'a PackingModel,
        node_summary: &'a NodeSummary,
        demand: &'a Demand,
    ) -> Self {
        let gpus = EvaluatedGpus::Alike(node_summary);
        let learned = packing_model
            .learned_packing(node_summary)
            .filter(|_| !demand.asks_plugin());
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

    /// GPUs without a model.
    pub(crate) fn by_best_fit(gpus: &'a [Gpu], demand: &'a Demand) -> Self {
        let gpus = EvaluatedGpus::Alone(gpus);
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

    /// The packing cost if the demand gets these GPUs.
    pub(crate) fn packing_cost(&self, chosen: GpuSet) -> PackingCost {
        fn again(packing: &impl Packing, demand: &Demand, chosen: GpuSet) -> PackingCost {
            packing.cost(&packing.base(demand), demand, chosen)
        }
        match &self.packing {
            NodePacking::BestFit(packing) => again(packing, self.demand, chosen),
            NodePacking::Learned(packing) => again(packing, self.demand, chosen),
        }
    }

    /// [`Packing::part`]
    pub fn part(&self, chosen: GpuSet, packing_cost: PackingCost) -> u32 {
        match &self.packing {
            NodePacking::BestFit(packing) => packing.part(chosen, packing_cost),
            NodePacking::Learned(packing) => packing.part(chosen, packing_cost),
        }
    }

    /// [`Packing::useless`]
    pub fn useless(&self, chosen: GpuSet) -> Option<Bytes> {
        match &self.packing {
            NodePacking::BestFit(packing) => packing.useless(self.demand, chosen),
            NodePacking::Learned(packing) => packing.useless(self.demand, chosen),
        }
    }
}

impl<'a> EvaluatedGpus<'a> {
    /// The GPU at this index.
    pub fn gpu(&self, place: usize) -> &'a Gpu {
        match self {
            Self::Alone(gpus) => &gpus[place],
            Self::Alike(node_summary) => &node_summary.gpu_group_of(place).gpu,
        }
    }

    /// Free VRAM over all of them.
    pub fn free(&self) -> Bytes {
        match self {
            Self::Alone(gpus) => gpus.iter().map(Gpu::free).sum(),
            Self::Alike(node_summary) => node_summary.free(),
        }
    }
}

impl<'a> EqualGpus<'a> {
    pub fn alone((place, gpu): (usize, &'a Gpu)) -> Self {
        Self {
            gpu,
            places: GpuSet::one(place),
            gpu_group: None,
        }
    }

    pub fn of(gpu_group: &'a GpuGroup) -> Self {
        Self {
            gpu: &gpu_group.gpu,
            places: gpu_group.places,
            gpu_group: Some(gpu_group),
        }
    }

    /// The GPUs at these indices only.
    pub fn among(self, places: GpuSet) -> Self {
        Self {
            places: self.places.and(places),
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
        left_over(
            chosen
                .iter()
                .map(|place| self.0.gpu(place).free().minus(demand.per_gpu))
                .sum(),
        )
    }

    fn cost_of_one(&self, (): &(), demand: &Demand, equal: EqualGpus<'_>) -> PackingCost {
        left_over(equal.gpu.free().minus(demand.per_gpu))
    }

    /// The part of the chosen GPUs that stays free.
    fn part(&self, chosen: GpuSet, packing_cost: PackingCost) -> u32 {
        let whole: Bytes = chosen.iter().map(|place| self.0.gpu(place).capacity).sum();
        (packing_cost.0.unsigned_abs().saturating_mul(1000) / whole.0.max(1)) as u32
    }

    fn useless(&self, _: &Demand, _: GpuSet) -> Option<Bytes> {
        None
    }
}

fn left_over(bytes: Bytes) -> PackingCost {
    PackingCost(i64::try_from(bytes.0).unwrap_or(i64::MAX))
}
