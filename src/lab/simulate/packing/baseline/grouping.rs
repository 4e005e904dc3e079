//! Policies that score what is on a node already: its pods, or the GPUs in use.

use super::{BaselineScore, LARGEST_GPU, MAX_SCORE};
use crate::simulate::openb::WHOLE_GPU;
use crate::simulate::packing::cluster::{PodSort, SimulatedNode};
use crate::simulate::packing::trace::PodKind;
use stowage_scheduling::vocabulary::gpu::GpuSet;

/// Groups pods of one sort: first nodes with that sort alone, then nodes that have it too, then empty ones, then those of other
/// sorts; within each quarter of the scale the fuller node.
pub struct Clustering;

/// GPUs in use before idle ones, nodes in use before idle ones.
pub(crate) struct PackingBaseline;

impl BaselineScore for Clustering {
    fn score(&self, node: &SimulatedNode, kind: &PodKind) -> u32 {
        let Some(sort) = PodSort::from_kind(kind) else {
            return 0;
        };
        let quarter = MAX_SCORE / 4;
        let used = LARGEST_GPU.saturating_sub(node.free_milli() as u32);
        let base = match (node.sorts.contains_key(&sort), node.sorts.len()) {
            (true, 1) => 3 * quarter,
            (true, _) => 2 * quarter,
            (false, 0) => quarter,
            (false, _) => 0,
        };
        base + quarter * used / LARGEST_GPU
    }
}

impl BaselineScore for PackingBaseline {
    fn score(&self, node: &SimulatedNode, kind: &PodKind) -> u32 {
        if kind.gpus == 0 {
            return 0;
        }
        let untouched = node.unused_gpus();
        if untouched == node.gpus.len() as u32 {
            return (MAX_SCORE / 3).saturating_sub(untouched).max(untouched);
        }
        let chosen = fullest(node, kind);
        let unused_chosen = chosen
            .iter()
            .filter(|gpu_index| node.gpus[*gpu_index] == WHOLE_GPU)
            .count() as u32;
        if unused_chosen > 0 {
            return (MAX_SCORE / 2)
                .saturating_sub(unused_chosen)
                .max(MAX_SCORE / 3);
        }
        let free: u32 = chosen
            .iter()
            .map(|gpu_index| node.gpus[gpu_index] * 100 / WHOLE_GPU)
            .sum();
        MAX_SCORE.saturating_sub(free / 10).max(MAX_SCORE / 2)
    }
}

/// As many GPUs as the pod requests, the fullest on which it fits.
fn fullest(node: &SimulatedNode, kind: &PodKind) -> GpuSet {
    let mut indices: Vec<usize> = node.gpus_with_room(kind).collect();
    indices.sort_by_key(|gpu_index| node.gpus[*gpu_index]);
    indices.into_iter().take(kind.gpus as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::packing::cluster::{SimulatedCluster, SimulatedPlacement};
    use crate::simulate::packing::testing::{kind, setting};

    /// A node of four GPUs with these pods on it, by GPU.
    fn node(pods: &[(PodKind, &[usize])]) -> SimulatedNode {
        let mut cluster = SimulatedCluster::new(&setting(&[(64_000, 4)], &[]), &[0]);
        for (kind, gpus) in pods {
            cluster.allocate(
                kind,
                SimulatedPlacement {
                    node: 0,
                    gpus: gpus.iter().copied().collect(),
                },
            );
        }
        cluster.nodes()[0].clone()
    }

    #[test]
    fn clustering_has_a_quarter_of_the_scale_for_each_way_to_be_together() {
        let (part, whole, on_cpus) = (kind(0, 1, 500), kind(0, 1, 1000), kind(1000, 0, 0));
        let idle = node(&[]);
        // 25 × (8,000 − 4,000) / 8,000 = 12.
        assert_eq!(Clustering.score(&idle, &part), 25 + 12);
        let parts = node(&[(part.clone(), &[0])]);
        // 25 × 4,500 / 8,000 = 14.06.
        assert_eq!(Clustering.score(&parts, &part), 75 + 14);
        assert_eq!(Clustering.score(&parts, &whole), 14);
        let both = node(&[(part.clone(), &[0]), (whole.clone(), &[1])]);
        assert_eq!(Clustering.score(&both, &whole), 50 + 17);
        // Whole GPUs of another number are another sort.
        assert_eq!(Clustering.score(&both, &kind(0, 2, 1000)), 17);
        assert_eq!(Clustering.score(&both, &on_cpus), 0);
    }

    #[test]
    fn packing_prefers_gpus_in_use_then_nodes_in_use() {
        let (part, pair) = (kind(0, 1, 300), kind(0, 2, 1000));
        assert_eq!(PackingBaseline.score(&node(&[]), &part), 33 - 4);
        let used = node(&[(kind(0, 1, 450), &[2])]);
        // 55 % of the chosen GPU is free: 100 − 55 / 10.
        assert_eq!(PackingBaseline.score(&used, &part), 95);
        assert_eq!(PackingBaseline.score(&used, &pair), 50 - 2);
        assert_eq!(PackingBaseline.score(&used, &kind(0, 1, 600)), 50 - 1);
        assert_eq!(PackingBaseline.score(&used, &kind(1000, 0, 0)), 0);
    }

    #[test]
    fn packing_counts_the_fullest_gpus_that_have_room() {
        let used = node(&[
            (kind(0, 1, 900), &[0]),
            (kind(0, 1, 200), &[1]),
            (kind(0, 1, 500), &[3]),
        ]);
        assert_eq!(fullest(&used, &kind(0, 1, 300)), GpuSet::single(3));
        assert_eq!(PackingBaseline.score(&used, &kind(0, 1, 300)), 100 - 5);
        assert_eq!(PackingBaseline.score(&used, &kind(0, 1, 100)), 100 - 1);
    }
}
