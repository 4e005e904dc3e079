//! Fragmentation gradient descent (Weng, Yang et al., USENIX ATC 2023): the node, and on it the GPU, where the pod makes the
//! least free capacity useless to typical pods.

use super::{BaselineScore, MAX_SCORE};
use crate::simulate::openb::WHOLE_GPU;
use crate::simulate::packing::cluster::SimulatedNode;
use crate::simulate::packing::fragmentation::{FreeCapacity, TypicalPods};
use crate::simulate::packing::trace::PodKind;
use stowage_scheduling::vocabulary::gpu::GpuSet;

pub struct Fgd<'t>(pub &'t TypicalPods);

impl BaselineScore for Fgd<'_> {
    fn score(&self, node: &SimulatedNode, kind: &PodKind) -> u32 {
        self.best_gpus(node, kind).0
    }

    fn gpus(&self, node: &SimulatedNode, kind: &PodKind) -> GpuSet {
        self.best_gpus(node, kind).1
    }
}

impl Fgd<'_> {
    /// The best score and the GPUs for it. A part of a GPU tries each; of equal ones the lowest.
    fn best_gpus(&self, node: &SimulatedNode, kind: &PodKind) -> (u32, GpuSet) {
        let before = self.0.fragments(node.into());
        let mut gpus = node.gpus.clone();
        let mut score_on = |chosen: GpuSet| {
            chosen
                .iter()
                .for_each(|gpu_index| gpus[gpu_index] -= kind.milli_per_gpu);
            let remaining = FreeCapacity {
                model: node.model,
                cpu: node.cpu.saturating_sub(kind.cpu),
                gpus: &gpus,
            };
            let after = self.0.fragments(remaining);
            chosen
                .iter()
                .for_each(|gpu_index| gpus[gpu_index] += kind.milli_per_gpu);
            self.sigmoid_score(before, after)
        };
        if !kind.is_shared() {
            let chosen = node.tightest_gpus(kind);
            return (score_on(chosen), chosen);
        }
        let mut best: Option<(u32, GpuSet)> = None;
        for gpu_index in node.gpus_with_room(kind) {
            let score = score_on(GpuSet::single(gpu_index));
            if best.is_none_or(|(highest, _)| score > highest) {
                best = Some((score, GpuSet::single(gpu_index)));
            }
        }
        best.unwrap_or_default()
    }

    /// What fragmentation falls by, in GPUs, through a sigmoid.
    fn sigmoid_score(&self, before: u64, after: u64) -> u32 {
        let fall = before as f64 - after as f64;
        let gpus = fall / self.0.count().max(1) as f64 / f64::from(WHOLE_GPU);
        (f64::from(MAX_SCORE) / (1.0 + (-gpus).exp())) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::packing::cluster::{SimulatedCluster, SimulatedPlacement};
    use crate::simulate::packing::testing::{kind, setting};

    #[test]
    fn fgd_adds_the_least_fragmentation() {
        // Typical: a half and a whole GPU, as often.
        let setting = setting(&[(64_000, 2)], &[kind(1000, 1, 500), kind(1000, 1, 1000)]);
        let typical = TypicalPods::from_trace(&setting);
        let mut cluster = SimulatedCluster::new(&setting, &[0]);
        cluster.allocate(
            &setting.kinds[0],
            SimulatedPlacement {
                node: 0,
                gpus: GpuSet::single(1),
            },
        );
        let node = &cluster.nodes()[0];
        // Before, the second GPU's half is of no use to a whole one: 500 of two. On the second GPU nothing of that is left; on
        // the first, two halves are lost to it.
        assert_eq!(typical.fragments(node.into()), 500);
        let fgd = Fgd(&typical);
        assert_eq!(fgd.gpus(node, &setting.kinds[0]), GpuSet::single(1));
        // It falls by a quarter of a GPU: 100 / (1 + e^−0.25) = 56.2.
        assert_eq!(fgd.score(node, &setting.kinds[0]), 56);
        // A whole one takes the first; the half that is left is all of no use to such pods and half of it to all: no change.
        assert_eq!(fgd.score(node, &setting.kinds[1]), 50);
    }

    #[test]
    fn of_equal_gpus_the_lowest_is_taken() {
        let setting = setting(&[(64_000, 3)], &[kind(1000, 1, 500)]);
        let typical = TypicalPods::from_trace(&setting);
        let cluster = SimulatedCluster::new(&setting, &[0]);
        assert_eq!(
            Fgd(&typical).gpus(&cluster.nodes()[0], &setting.kinds[0]),
            GpuSet::single(0)
        );
    }
}
