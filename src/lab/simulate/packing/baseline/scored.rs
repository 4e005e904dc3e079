//! Runs a score as a policy: the node with the highest score gets the pod, of equal ones the lowest rank. Scores are cached by
//! kind of pod, and only nodes that have changed since are scored again.

use super::BaselineScore;
use crate::simulate::packing::cluster::{SimulatedCluster, SimulatedPlacement};
use crate::simulate::packing::placer::{PlacedPod, Placer, PodArrival};
use crate::simulate::packing::trace::{PodKind, WorkloadTrace};

pub(crate) struct ScoredPlacer<'s, S> {
    setting: &'s WorkloadTrace,
    score: S,
    /// By kind; empty for kinds that have not arrived yet.
    caches: Vec<Option<CachedScores>>,
}

/// The cached scores of one kind, by rank of node.
struct CachedScores {
    /// The node's version for which the score was computed.
    versions: Box<[u32]>,
    /// `None` if such a pod does not fit.
    scores: Box<[Option<u32>]>,
}

impl<'s, S: BaselineScore> ScoredPlacer<'s, S> {
    pub fn new(setting: &'s WorkloadTrace, score: S) -> Self {
        Self {
            setting,
            score,
            caches: setting.kinds.iter().map(|_| None).collect(),
        }
    }
}

impl<S: BaselineScore> Placer for ScoredPlacer<'_, S> {
    fn place(&mut self, cluster: &SimulatedCluster, arrival: PodArrival) -> Option<PlacedPod> {
        let kind = &self.setting.kinds[arrival.kind];
        let cache = self.caches[arrival.kind]
            .get_or_insert_with(|| CachedScores::new(cluster.nodes().len()));
        let node = cache.best_rank(cluster, kind, &self.score)?;
        let gpus = self.score.gpus(&cluster.nodes()[node], kind);
        Some(PlacedPod::without_victims(SimulatedPlacement {
            node,
            gpus,
        }))
    }
}

impl CachedScores {
    fn new(nodes: usize) -> Self {
        // No node has version 0.
        Self {
            versions: vec![0; nodes].into(),
            scores: vec![None; nodes].into(),
        }
    }

    fn best_rank(
        &mut self,
        cluster: &SimulatedCluster,
        kind: &PodKind,
        score: &impl BaselineScore,
    ) -> Option<usize> {
        let mut best: Option<(u32, usize)> = None;
        for (rank, node) in cluster.nodes().iter().enumerate() {
            if self.versions[rank] != node.version {
                self.versions[rank] = node.version;
                self.scores[rank] = node.fits(kind).then(|| score.score(node, kind));
            }
            if let Some(score) = self.scores[rank]
                && best.is_none_or(|(highest, _)| score > highest)
            {
                best = Some((score, rank));
            }
        }
        best.map(|(_, rank)| rank)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fit::BestFit;
    use super::*;
    use crate::simulate::packing::testing::{kind, setting};

    fn arrival(number: usize) -> PodArrival {
        PodArrival {
            number,
            pod: 0,
            kind: 0,
        }
    }

    #[test]
    fn of_equal_nodes_the_lowest_rank_is_taken_until_it_is_full() {
        let setting = setting(&[(64_000, 1), (64_000, 1)], &[kind(1000, 1, 600)]);
        let mut cluster = SimulatedCluster::new(&setting, &[1, 0]);
        let mut best_fit = ScoredPlacer::new(&setting, BestFit);
        for expected in [Some(0), Some(1), None] {
            let placed = best_fit.place(&cluster, arrival(0));
            assert_eq!(
                placed.as_ref().map(|placed| placed.placement.node),
                expected
            );
            if let Some(placed) = placed {
                cluster.allocate(&setting.kinds[0], placed.placement);
            }
        }
    }

    #[test]
    fn cached_scores_of_a_changed_node_are_not_used() {
        let setting = setting(&[(64_000, 1), (32_000, 1)], &[kind(1000, 1, 600)]);
        let mut cluster = SimulatedCluster::new(&setting, &[0, 1]);
        let mut best_fit = ScoredPlacer::new(&setting, BestFit);
        let seat = best_fit.place(&cluster, arrival(0)).unwrap().placement;
        assert_eq!(seat.node, 1);
        cluster.allocate(&setting.kinds[0], seat);
        assert_eq!(
            best_fit.place(&cluster, arrival(1)).unwrap().placement.node,
            0
        );
        cluster.release(&setting.kinds[0], seat);
        assert_eq!(
            best_fit.place(&cluster, arrival(2)).unwrap().placement.node,
            1
        );
    }
}
