//! The policies that Stowage's is held against, with the scores of their published runs (FGD's simulator, "Beware of
//! Fragmentation", USENIX ATC 2023): whole numbers from 0 to 100, the higher the better, cut off and not rounded. Whatever
//! rounds differently is another policy: which nodes tie decides what a policy comes to.
//!
//! [`fit`] has those that look at amounts, [`grouping`] those that look at what is there already, [`fgd`] the one that looks
//! at what is left for others; [`scored`] plays any of them, and [`at_random`] is the one without a score.

pub mod at_random;
pub mod fgd;
pub mod fit;
pub mod grouping;
pub mod scored;

use super::cluster::SimulatedNode;
use super::trace::PodKind;
use crate::scheduling::vocabulary::gpu::GpuSet;

/// The best score.
const TOP: u32 = 100;
/// The largest node that scores are taken against: thousandths of cores, and of GPUs.
const LARGEST_CPU: u32 = 128_000;
const LARGEST_GPU: u32 = 8000;

/// How good a node is for a pod that fits there.
pub trait BaselineScore {
    /// 0 to 100.
    fn score(&self, node: &SimulatedNode, kind: &PodKind) -> u32;

    /// The GPUs that the pod gets there.
    fn gpus(&self, node: &SimulatedNode, kind: &PodKind) -> GpuSet {
        node.tightest(kind)
    }
}
