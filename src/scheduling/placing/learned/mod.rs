//! The packing model: the value of free VRAM, learned from recent demand.
//!
//! A GPU with 6 GiB free has no value of 6 GiB if no pod requests that little. [`demand_history`] remembers what pods requested,
//! [`cutting_stock`] computes what each free part could still be cut into, [`NodeSummary`] summarizes a node by that, and
//! [`packing_cost`] says how much of a cluster's free GPU capacity has *no* value: the place that adds least to it is the best.
//!
//! ```text
//! φ(node) = Σ_g (r_g − U(r_g)) + κ·wasted(ΣU(r_g), free CPU and memory) + f·Σ_g r_g·(1 − the share of pods g could serve)
//! loss    = φ(after) − φ(before) + t·(what is left) + gpu·σ(model) + Σ_k P_k·(blocks of k broken up)       in GPUs
//! ```
//!
//! U comes from [`cutting_stock`], `wasted`, P_k and the share (after FGD, USENIX ATC 2023) from [`values`], and κ, f, t from
//! [`PotentialWeights`], by how many pods end and how many are refused. σ(model) = min(1,
//! Σ_s R·d_s ÷ free(s)) over the sets s of models that include it and that pods require: R GPUs are free, d_s of the demand
//! requires s, and could run on free(s) of the free ones.
//!
//! A [`PackingModel`] is immutable and made off the request path. It never looks ahead; and as long as too few pods were seen, it
//! is empty, and places are scored by best fit. Nothing here counts allocations: that is the ledger's task, in whole bytes.

pub(crate) mod cutting_stock;
pub mod demand_history;
mod exact;
mod learn;
pub(crate) mod packing_cost;
mod values;

pub use demand_history::{DemandHistory, DemandShape, LEARN_INTERVAL};
pub(super) use packing_cost::LearnedPacking;
pub(crate) use packing_cost::{GpuGroup, NodeGpus, NodeSummary};

use learn::PotentialWeights;
use serde::{Deserialize, Serialize};
use values::{CpuLevels, GpuBlock, GpuKind, HostDemand};

/// The value of free GPUs by recent demand. Empty by default.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct PackingModel {
    generation: u64,
    /// The number of arrivals when it was learned.
    learned_at: u64,
    learned: Option<LearnedDemand>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct LearnedDemand {
    setting: PotentialWeights,
    /// In order of model and capacity; never empty.
    kinds: Vec<GpuKind>,
    levels: CpuLevels,
    cpu: Option<HostDemand>,
    memory: Option<HostDemand>,
    /// Each with its price.
    #[serde(with = "exact")]
    blocks: Vec<(GpuBlock, f64)>,
}

impl PackingModel {
    /// The generation; it rises with each model that a ledger is given.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn with_generation(self, generation: u64) -> Self {
        Self { generation, ..self }
    }

    /// The number of arrivals when it was learned.
    pub(crate) fn learned_at(&self) -> u64 {
        self.learned_at
    }

    /// Whether anything was learned; otherwise places are scored by best fit.
    pub fn is_learned(&self) -> bool {
        self.learned.is_some()
    }
}

/// Two models are equal if they have the same generation: a ledger gives each its own.
impl PartialEq for PackingModel {
    fn eq(&self, other: &Self) -> bool {
        self.generation == other.generation && self.is_learned() == other.is_learned()
    }
}

impl Eq for PackingModel {}

#[cfg(test)]
mod tests;
