//! The replicas of a model under traffic, and what drives their number.
//!
//! [`ServingDay`] steps a model's engines and asks a [`Scaler`] every fifteen seconds: [`ShippedScaler`] is the autoscaler that
//! ships, on the figures that the engines report; [`UtilizationScaler`] an HPA on GPU utilization, as a baseline. Where the
//! replicas run is the owner's to say: [`ReplicaSet`] has their pods on a stage.

#[cfg(test)]
mod pretend_pods;
mod replica_set;
mod scaler;
mod serving_day;
mod shipped;
mod utilization;

#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use pretend_pods::SimulatedReplicas;
pub(crate) use replica_set::ReplicaTiming;
pub use replica_set::{ReplicaSet, devices};
pub(crate) use scaler::Scaler;
pub use scaler::{ObservedReplica, ObservedReplicas, SYNC_PERIOD, ScalingDecision};
pub use serving_day::{Replica, ReplicaState, Replicas, ServingTally};
pub(crate) use serving_day::{ReplicaId, ServingDay};
pub(crate) use shipped::ShippedScaler;
pub(crate) use utilization::UtilizationScaler;
