//! The interface of a simulated placement policy.

use super::cluster::{SimulatedCluster, SimulatedPlacement};

/// A pod that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodArrival {
    /// How many arrived before it. One row of a trace may arrive several times.
    pub number: usize,
    /// Its index in the setting's pods.
    pub pod: usize,
    /// Its index in the setting's kinds.
    pub kind: usize,
}

/// A pod's placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedPod {
    pub placement: SimulatedPlacement,
    /// Numbers of its victims.
    pub victims: Vec<usize>,
}

impl PlacedPod {
    /// A placement that evicts no pod.
    pub fn without_victims(seat: SimulatedPlacement) -> Self {
        Self {
            placement: seat,
            victims: Vec::new(),
        }
    }
}

pub trait Placer {
    /// Places the pod; `None` if it does not fit. It counts as placed from then on.
    fn place(&mut self, cluster: &SimulatedCluster, arrival: PodArrival) -> Option<PlacedPod>;

    /// A placed pod has ended. A policy without state per pod has nothing to do.
    fn end(&mut self, _number: usize) {}
}
