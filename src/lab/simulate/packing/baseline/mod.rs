//! The policies that Stowage's is compared with, with the scores of their published runs (FGD's simulator, "Beware of
//! Fragmentation", USENIX ATC 2023): whole numbers from 0 to 100, higher is better, truncated and not rounded. A policy with
//! other rounding is another policy: which nodes tie decides its result.
//!
//! [`fit`] has the policies that score amounts, [`grouping`] those that score what is on the node, [`fgd`] the one that scores
//! what is left for other pods; [`scored`] runs any of them, and [`at_random`] is the one without a score.

pub(crate) mod at_random;
pub mod fgd;
pub mod fit;
pub(crate) mod grouping;
pub mod scored;

use super::cluster::SimulatedNode;
use super::trace::PodKind;
use stowage_scheduling::vocabulary::gpu::GpuSet;

/// The best score.
const MAX_SCORE: u32 = 100;
/// The largest node, to which scores are relative: thousandths of cores, and of GPUs.
const LARGEST_CPU: u32 = 128_000;
const LARGEST_GPU: u32 = 8000;

/// How good a node is for a pod that fits there.
pub(crate) trait BaselineScore {
    /// 0 to 100.
    fn score(&self, node: &SimulatedNode, kind: &PodKind) -> u32;

    /// The GPUs that the pod gets there.
    fn gpus(&self, node: &SimulatedNode, kind: &PodKind) -> GpuSet {
        node.tightest_gpus(kind)
    }
}
