//! What an autoscaler sees and answers.

use stowage_scheduling::autoscaling::{EngineFigures, ModelLoad};
use stowage_scheduling::units::{Millis, Moment};

/// Between two evaluations, as an HPA's `--horizontal-pod-autoscaler-sync-period`.
pub const SYNC_PERIOD: Millis = Millis::seconds(15);

/// One replica that serves or sleeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ObservedReplica {
    pub figures: EngineFigures,
    /// The share of the time since the last evaluation in which its GPUs had a kernel running.
    pub busy_share: f64,
}

/// A model's replicas at an evaluation. Those that terminate are not among them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ObservedReplicas {
    pub replicas: Vec<ObservedReplica>,
    /// Replicas that are wanted and do not serve yet: pending, or starting.
    pub starting: u32,
    /// How long one more would take.
    pub ready_in: Millis,
}

/// What the autoscaler asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScalingDecision {
    /// In all, those that start and those that sleep included.
    pub replicas: u32,
    /// How many of the sleeping replicas to wake now.
    pub wake: u32,
}

/// An autoscaler of one model. It decides every [`SYNC_PERIOD`].
pub trait Scaler {
    fn decide(&mut self, observed: &ObservedReplicas, now: Moment) -> ScalingDecision;
}

impl ObservedReplicas {
    /// The model's load, as the autoscaler in scheduling::autoscaling counts it.
    pub fn load(&self) -> ModelLoad {
        let mut load = ModelLoad {
            ready_in: self.ready_in,
            ..ModelLoad::default()
        };
        self.replicas
            .iter()
            .for_each(|replica| load.add(replica.figures));
        (0..self.starting).for_each(|_| load.add(EngineFigures::Starting));
        load
    }

    /// All there are: they serve, sleep or start.
    pub fn count(&self) -> u32 {
        self.replicas.len() as u32 + self.starting
    }
}
