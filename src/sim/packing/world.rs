//! One run: arrivals, one after the other, and where a policy puts them. Every placement is entered into the flat cluster, which
//! holds each policy to what there is.

use super::cluster::{Cluster, Seat};
use super::fragmentation::{Fragments, Typical};
use super::kinds::Setting;
use super::placer::{Arrival, Placer};
use std::collections::BTreeMap;

pub struct World<'s> {
    setting: &'s Setting,
    pub cluster: Cluster,
    /// Absent where nobody asks how much is in fragments.
    fragments: Option<Fragments<'s>>,
    /// Who is where, by number.
    placed: BTreeMap<usize, (usize, Seat)>,
}

/// Who came in, and who had to leave for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// By its rank; `None` if there was no room.
    pub node: Option<usize>,
    /// By their places in the setting's pods.
    pub evicted: Vec<usize>,
}

impl<'s> World<'s> {
    pub fn new(setting: &'s Setting, ranks: &[usize], typical: Option<&'s Typical>) -> Self {
        let cluster = Cluster::new(setting, ranks);
        let fragments = typical.map(|typical| Fragments::of(typical, cluster.nodes()));
        Self { setting, cluster, fragments, placed: BTreeMap::new() }
    }

    /// The pod comes, and is placed or dropped.
    pub fn admit(&mut self, arrival: Arrival, placer: &mut dyn Placer) -> Outcome {
        let Some(placed) = placer.place(&self.cluster, arrival) else { return Outcome::default() };
        let evicted = placed.evicted.iter().filter_map(|number| self.remove(*number)).collect();
        self.cluster.take(&self.setting.kinds[arrival.kind], placed.seat);
        self.placed.insert(arrival.number, (arrival.pod, placed.seat));
        self.look_again(placed.seat.node);
        Outcome { node: Some(placed.seat.node), evicted }
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
