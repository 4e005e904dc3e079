//! What free VRAM is worth: the packing policy, learned from the demand seen lately.
//!
//! A GPU with 6 GiB free is not worth 6 GiB if nobody asks for so little. [`demand_history`] remembers what pods asked for, [`cutting`] finds
//! what each free part could still be cut into, [`node_summary`] sums a node up by that, and [`potential`] says how much of a cluster's
//! free GPU is *not* worth anything: the place that adds least to it is the best.
//!
//! ```text
//! φ(node) = Σ_g (r_g − U(r_g)) + κ·wasted(ΣU(r_g), free CPU and memory) + f·Σ_g r_g·(1 − the share of pods g could serve)
//! loss    = φ(after) − φ(before) + t·(what is left) + gpu·σ(model) + Σ_k P_k·(blocks of k broken up)       in GPUs
//! ```
//!
//! U is [`cutting`]'s, `wasted` [`host_resources`]'s, the share [`kind`]'s (after FGD, USENIX ATC 2023), P_k [`blocks`]' and
//! κ, f, t [`setting`]'s, by how many pods end and how many are turned away. σ(model) = min(1, Σ_s R·d_s ÷ free(s)) over the sets of
//! models s with it that pods insist on: R GPUs are free, d_s of the demand insists on s, and on free(s) of the free ones it could run.
//!
//! A [`PackingModel`] is immutable and made off the request path. It never looks ahead; and as long as too little was seen, it knows
//! nothing, and places are judged by best fit. Nothing here counts what is promised: that is the ledger's, in whole bytes.

pub mod cutting_stock;
pub mod demand_history;
pub mod gpu_blocks;
pub mod gpu_kind;
pub mod host_demand;
mod learn;
pub mod node_summary;
pub mod packing_cost;
pub mod potential_weights;

pub use demand_history::{DemandHistory, DemandShape, EVERY};
pub use node_summary::NodeSummary;
pub use packing_cost::{ChoiceCosts, EqualGpus, EvaluatedGpus, NodeEvaluation, NodeGpus, PackingCost};

use gpu_blocks::GpuBlock;
use gpu_kind::{CpuLevels, GpuKind};
use host_demand::HostDemand;
use potential_weights::PotentialWeights;

/// What the demand seen lately says about free GPUs. By default nothing.
#[derive(Debug, Clone, Default)]
pub struct PackingModel {
    generation: u64,
    /// After how many arrivals.
    learned_at: u64,
    learned: Option<LearnedDemand>,
}

#[derive(Debug, Clone)]
struct LearnedDemand {
    setting: PotentialWeights,
    /// In order of model and capacity; never empty.
    kinds: Vec<GpuKind>,
    levels: CpuLevels,
    cpu: Option<HostDemand>,
    memory: Option<HostDemand>,
    /// With the price of each.
    blocks: Vec<(GpuBlock, f64)>,
}

impl PackingModel {
    /// Which one it is; those that a ledger was given rise.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    pub fn with_generation(self, generation: u64) -> Self {
        Self { generation, ..self }
    }

    /// After how many arrivals it was made.
    pub fn learned_at(&self) -> u64 {
        self.learned_at
    }

    /// Whether anything was learned; places are judged by best fit otherwise.
    pub fn is_learned(&self) -> bool {
        self.learned.is_some()
    }
}

/// Two are the same if they are of the same generation: a ledger gives each its own.
impl PartialEq for PackingModel {
    fn eq(&self, other: &Self) -> bool {
        self.generation == other.generation && self.is_learned() == other.is_learned()
    }
}

impl Eq for PackingModel {}

#[cfg(test)]
mod tests;
