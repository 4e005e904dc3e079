//! Policies that score how much of a node's free capacity a pod takes.

use super::{BaselineScore, LARGEST_CPU, LARGEST_GPU, MAX_SCORE};
use crate::simulate::packing::cluster::SimulatedNode;
use crate::simulate::packing::trace::PodKind;

/// The least that is left over, of CPU and GPUs with equal weights.
pub struct BestFit;

/// The least product of free and requested amounts (Tetris, SIGCOMM 2014, reversed as in the published runs).
pub struct DotProduct;

impl BaselineScore for BestFit {
    fn score(&self, node: &SimulatedNode, kind: &PodKind) -> u32 {
        let part = |free: u64, requested: u64, largest: u32| {
            free.saturating_sub(requested) as f64 / f64::from(largest) * 0.5
        };
        let left = part(node.cpu, kind.cpu, LARGEST_CPU)
            + part(node.free_milli(), kind.milli_gpus(), LARGEST_GPU);
        ((1.0 - left) * f64::from(MAX_SCORE)) as u32
    }
}

impl BaselineScore for DotProduct {
    fn score(&self, node: &SimulatedNode, kind: &PodKind) -> u32 {
        let part = |free: u64, requested: u64, largest: u32| {
            (free as f64 / f64::from(largest)) * (requested as f64 / f64::from(largest))
        };
        let product = part(node.cpu, kind.cpu, LARGEST_CPU)
            + part(node.free_milli(), kind.milli_gpus(), LARGEST_GPU);
        (f64::from(MAX_SCORE) * (1.0 - product / 2.0)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::packing::cluster::{SimulatedCluster, SimulatedPlacement};
    use crate::simulate::packing::testing::{kind, setting};
    use stowage_scheduling::vocabulary::gpu::GpuSet;

    /// A node of 64 cores and two GPUs, of which the first has 400 thousandths left.
    fn node() -> SimulatedNode {
        let setting = setting(&[(64_000, 2)], &[]);
        let mut cluster = SimulatedCluster::new(&setting, &[0]);
        cluster.allocate(
            &kind(0, 1, 600),
            SimulatedPlacement {
                node: 0,
                gpus: GpuSet::single(0),
            },
        );
        cluster.nodes()[0].clone()
    }

    #[test]
    fn best_fit_counts_what_is_left_and_cuts_off() {
        // CPU left: 56,000 / 128,000 ÷ 2 = 0.21875. GPUs left: 1,000 / 8,000 ÷ 2 = 0.0625. 100 × 0.71875.
        assert_eq!(BestFit.score(&node(), &kind(8000, 1, 400)), 71);
        // 32,000 / 128,000 ÷ 2 = 0.125 and 400 / 8,000 ÷ 2 = 0.025: 85 exactly.
        assert_eq!(BestFit.score(&node(), &kind(32_000, 1, 1000)), 85);
    }

    #[test]
    fn the_dot_product_prefers_where_less_is_free() {
        // 0.5 × 0.5 + 0.175 × 0.125 = 0.271875, halved 0.1359375.
        assert_eq!(DotProduct.score(&node(), &kind(64_000, 1, 1000)), 86);
        let empty = SimulatedCluster::new(&setting(&[(128_000, 8)], &[]), &[0]).nodes()[0].clone();
        assert_eq!(DotProduct.score(&empty, &kind(128_000, 8, 1000)), 0);
    }
}
