//! One run: arrivals, one after the other, and their placements by a policy. Every placement is also entered into the flat
//! cluster, which checks each policy against the existing capacity.

use super::cluster::{SimulatedCluster, SimulatedPlacement};
use super::fragmentation::{ClusterFragmentation, TypicalPods};
use super::placer::{Placer, PodArrival};
use super::trace::WorkloadTrace;
use std::collections::BTreeMap;

pub(crate) struct PackingRun<'s> {
    setting: &'s WorkloadTrace,
    pub cluster: SimulatedCluster,
    /// Absent if fragmentation is not measured.
    fragments: Option<ClusterFragmentation<'s>>,
    /// Placements, by the pods' numbers.
    placements: BTreeMap<usize, (usize, SimulatedPlacement)>,
}

/// A placed pod, and its victims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ArrivalOutcome {
    /// The node's rank; `None` if it did not fit.
    pub node: Option<usize>,
    /// As indices of the setting's pods.
    pub evicted: Vec<usize>,
}

impl<'s> PackingRun<'s> {
    pub fn new(
        setting: &'s WorkloadTrace,
        ranks: &[usize],
        typical: Option<&'s TypicalPods>,
    ) -> Self {
        let cluster = SimulatedCluster::new(setting, ranks);
        let fragments = typical.map(|typical| ClusterFragmentation::new(typical, cluster.nodes()));
        Self {
            setting,
            cluster,
            fragments,
            placements: BTreeMap::new(),
        }
    }

    /// The pod arrives, and is placed or dropped.
    pub fn admit(&mut self, arrival: PodArrival, placer: &mut dyn Placer) -> ArrivalOutcome {
        let Some(placed) = placer.place(&self.cluster, arrival) else {
            return ArrivalOutcome::default();
        };
        let evicted = placed
            .victims
            .iter()
            .filter_map(|number| self.remove(*number))
            .collect();
        self.cluster
            .allocate(&self.setting.kinds[arrival.kind], placed.placement);
        self.placements
            .insert(arrival.number, (arrival.pod, placed.placement));
        self.update_fragments(placed.placement.node);
        ArrivalOutcome {
            node: Some(placed.placement.node),
            evicted,
        }
    }

    /// The pod has ended; no effect if it was never placed or was evicted.
    pub fn end(&mut self, number: usize, placer: &mut dyn Placer) {
        if self.remove(number).is_some() {
            placer.end(number);
        }
    }

    /// Fragmented free capacity, in GPUs.
    pub fn fragmented_gpus(&self) -> f64 {
        self.fragments
            .as_ref()
            .map_or(0.0, ClusterFragmentation::gpus)
    }

    fn remove(&mut self, number: usize) -> Option<usize> {
        let (pod, seat) = self.placements.remove(&number)?;
        self.cluster.release(self.setting.kind_of(pod), seat);
        self.update_fragments(seat.node);
        Some(pod)
    }

    fn update_fragments(&mut self, node: usize) {
        if let Some(fragments) = &mut self.fragments {
            fragments.update(node, &self.cluster.nodes()[node]);
        }
    }
}
