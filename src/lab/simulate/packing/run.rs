//! One run: arrivals, one after the other, and their placements by a policy. Every placement is also entered into the flat
//! cluster, which checks each policy against the existing capacity.

use super::cluster::{SimulatedCluster, SimulatedPlacement};
use super::fragmentation::{Fragments, Typical};
use super::placer::{Placer, PodArrival};
use super::trace::PlayedTrace;
use std::collections::BTreeMap;

pub struct PackingRun<'s> {
    setting: &'s PlayedTrace,
    pub cluster: SimulatedCluster,
    /// Absent where nobody asks how much is in fragments.
    fragments: Option<Fragments<'s>>,
    /// Who is where, by number.
    placed: BTreeMap<usize, (usize, SimulatedPlacement)>,
}

/// Who came in, and who had to leave for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ArrivalOutcome {
    /// By its rank; `None` if there was no room.
    pub node: Option<usize>,
    /// By their places in the setting's pods.
    pub evicted: Vec<usize>,
}

impl<'s> PackingRun<'s> {
    pub fn new(setting: &'s PlayedTrace, ranks: &[usize], typical: Option<&'s Typical>) -> Self {
        let cluster = SimulatedCluster::new(setting, ranks);
        let fragments = typical.map(|typical| Fragments::of(typical, cluster.nodes()));
        Self { setting, cluster, fragments, placed: BTreeMap::new() }
    }

    /// The pod comes, and is placed or dropped.
    pub fn admit(&mut self, arrival: PodArrival, placer: &mut dyn Placer) -> ArrivalOutcome {
        let Some(placed) = placer.place(&self.cluster, arrival) else { return ArrivalOutcome::default() };
        let evicted = placed.evicted.iter().filter_map(|number| self.remove(*number)).collect();
        self.cluster.take(&self.setting.kinds[arrival.kind], placed.seat);
        self.placed.insert(arrival.number, (arrival.pod, placed.seat));
        self.look_again(placed.seat.node);
        ArrivalOutcome { node: Some(placed.seat.node), evicted }
    }

    /// The pod has ended; nothing happens if it never was placed or had to leave.
    pub fn end(&mut self, number: usize, placer: &mut dyn Placer) {
        if self.remove(number).is_some() {
            placer.end(number);
        }
    }

    /// In GPUs.
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
