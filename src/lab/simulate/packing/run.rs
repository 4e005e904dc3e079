//! One run: arrivals, one after the other, and their placements by a policy. Every placement is also entered into the flat
//! cluster, which checks each policy against the existing capacity.

use super::cluster::{SimulatedCluster, SimulatedPlacement};
use super::fragmentation::{Fragments, Typical};
use super::placer::{Placer, PodArrival};
use super::trace::PlayedTrace;
use std::collections::BTreeMap;

pub(crate) struct PackingRun<'s> {
    setting: &'s PlayedTrace,
    pub cluster: SimulatedCluster,
    /// Absent if fragmentation is not measured.
    fragments: Option<Fragments<'s>>,
    /// Placements, by the pods' numbers.
    placed: BTreeMap<usize, (usize, SimulatedPlacement)>,
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
    pub fn new(setting: &'s PlayedTrace, ranks: &[usize], typical: Option<&'s Typical>) -> Self {
        let cluster = SimulatedCluster::new(setting, ranks);
        let fragments = typical.map(|typical| Fragments::of(typical, cluster.nodes()));
        Self {
            setting,
            cluster,
            fragments,
            placed: BTreeMap::new(),
        }
    }

    /// The pod arrives, and is placed or dropped.
    pub fn admit(&mut self, arrival: PodArrival, placer: &mut dyn Placer) -> ArrivalOutcome {
        let Some(placed) = placer.place(&self.cluster, arrival) else {
            return ArrivalOutcome::default();
        };
        let evicted = placed
            .evicted
            .iter()
            .filter_map(|number| self.remove(*number))
            .collect();
        self.cluster
            .take(&self.setting.kinds[arrival.kind], placed.seat);
        self.placed
            .insert(arrival.number, (arrival.pod, placed.seat));
        self.look_again(placed.seat.node);
        ArrivalOutcome {
            node: Some(placed.seat.node),
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
    pub fn fragmented(&self) -> f64 {
        self.fragments.as_ref().map_or(0.0, Fragments::gpus)
    }

    fn remove(&mut self, number: usize) -> Option<usize> {
        let (pod, seat) = self.placed.remove(&number)?;
        self.cluster.give_back(self.setting.kind_of(pod), seat);
        self.look_again(seat.node);
        Some(pod)
    }

    fn look_again(&mut self, node: usize) {
        if let Some(fragments) = &mut self.fragments {
            fragments.update(node, &self.cluster.nodes()[node]);
        }
    }
}
