//! Random placement: any node and any GPU that fit. No policy should be worse.

use crate::simulate::packing::cluster::{SimulatedCluster, SimulatedNode, SimulatedPlacement};
use crate::simulate::packing::placer::{PlacedPod, Placer, PodArrival};
use crate::simulate::packing::trace::{PodKind, WorkloadTrace};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::vocabulary::gpu::GpuSet;

pub(crate) struct RandomPlacer<'s> {
    setting: &'s WorkloadTrace,
    dice: Random,
    /// By rank; kept for the next pod.
    fitting: Vec<usize>,
}

impl<'s> RandomPlacer<'s> {
    pub fn new(setting: &'s WorkloadTrace, dice: Random) -> Self {
        Self {
            setting,
            dice,
            fitting: Vec::new(),
        }
    }

    fn gpus(&mut self, node: &SimulatedNode, kind: &PodKind) -> GpuSet {
        if !kind.is_shared() {
            return node.tightest_gpus(kind);
        }
        let roomy: Vec<usize> = node.gpus_with_room(kind).collect();
        GpuSet::single(roomy[self.dice.below(roomy.len())])
    }
}

impl Placer for RandomPlacer<'_> {
    fn place(&mut self, cluster: &SimulatedCluster, arrival: PodArrival) -> Option<PlacedPod> {
        let kind = &self.setting.kinds[arrival.kind];
        let fitting = cluster
            .nodes()
            .iter()
            .enumerate()
            .filter(|(_, node)| node.fits(kind));
        self.fitting.clear();
        self.fitting.extend(fitting.map(|(rank, _)| rank));
        let node = *self.fitting.get(self.dice.below(self.fitting.len()))?;
        let gpus = self.gpus(&cluster.nodes()[node], kind);
        Some(PlacedPod::without_victims(SimulatedPlacement {
            node,
            gpus,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::packing::testing::{kind, setting};
    use std::collections::BTreeSet;

    #[test]
    fn every_fitting_node_and_gpu_is_drawn_and_no_other() {
        let setting = setting(&[(64_000, 2), (500, 2), (64_000, 2)], &[kind(1000, 1, 600)]);
        let cluster = SimulatedCluster::new(&setting, &[0, 1, 2]);
        let mut random = RandomPlacer::new(&setting, Random::seeded(42, 0));
        let seat = |random: &mut RandomPlacer<'_>| {
            let seat = random
                .place(
                    &cluster,
                    PodArrival {
                        number: 0,
                        pod: 0,
                        kind: 0,
                    },
                )
                .unwrap()
                .placement;
            (seat.node, seat.gpus.iter().next().unwrap())
        };
        let met: BTreeSet<(usize, usize)> = (0..100).map(|_| seat(&mut random)).collect();
        assert_eq!(met, BTreeSet::from([(0, 0), (0, 1), (2, 0), (2, 1)]));
    }
}
