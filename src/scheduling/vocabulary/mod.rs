//! The nouns of a decision: what a pod asks for ([`demand`]) and how it is classified ([`classification`]), GPUs ([`gpu`],
//! [`health`], [`device_plugin`]) and nodes ([`node`], [`node_signs`]), what an agent measured there ([`node_reading`],
//! [`smoothed_load`]), which model weights ([`model_tier`]) and images ([`image`]) are near, what engines have of a model on GPUs
//! ([`engine_model`]) and how long they take to start there ([`start_time`]), what disrupting a pod costs or breaks ([`disruption_info`],
//! [`disruption_budget`], [`label_selector`]), where a pod is put ([`placement`]), and what its engine is told to use there
//! ([`memory_fraction`]).
//!
//! Data and arithmetic on one value only: nothing here decides.

mod bits;
pub mod classification;
pub mod cluster_share;
pub mod demand;
pub mod device_plugin;
pub mod disruption_budget;
pub mod disruption_info;
pub mod engine_model;
pub mod gpu;
pub mod gpu_wish;
pub mod headroom;
pub mod health;
pub mod image;
pub mod label_selector;
pub mod latency;
pub mod memory_fraction;
pub mod model_tier;
pub mod node;
pub mod node_reading;
pub mod node_signs;
pub mod placement;
pub(crate) mod smoothed_load;
pub mod spare;
pub mod start_time;

/// Whether a stored field says nothing, so that it is left out. Recordings of versions before the field do not have it.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
