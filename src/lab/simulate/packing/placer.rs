//! The interface of a simulated placement policy.

use super::cluster::{SimulatedCluster, SimulatedPlacement};

/// A pod that comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodArrival {
    /// How many came before it. One row of a trace may come several times.
    pub number: usize,
    /// By its place in the setting's pods.
    pub pod: usize,
    /// By its place in the setting's kinds.
    pub kind: usize,
}

/// Where a pod goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    pub seat: SimulatedPlacement,
    /// Who has left for it, by their numbers.
    pub evicted: Vec<usize>,
}

impl Placed {
    /// Nobody leaves.
    pub fn alone(seat: SimulatedPlacement) -> Self {
        Self { seat, evicted: Vec::new() }
    }
}

pub trait Placer {
    /// Where the pod goes; `None` if there is no room for it. It is there from then on.
    fn place(&mut self, cluster: &SimulatedCluster, arrival: PodArrival) -> Option<Placed>;

    /// A pod that was placed has ended. Who remembers nothing of pods has nothing to do.
    fn end(&mut self, _number: usize) {}
}
