//! The nouns of a decision: what a pod asks for ([`demand`]) and how it is classified ([`classification`]), GPUs ([`gpu`],
//! [`device_plugin`]) and nodes ([`node`]), what an agent measured there ([`node_reading`]), which model weights are near
//! ([`model_tier`]) and what engines have of them on GPUs ([`engine_model`]), what disrupting a pod costs or breaks ([`disruption_info`], [`disruption_budget`], [`label_selector`]), and
//! where a pod is put ([`placement`]).
//!
//! Data and arithmetic on one value only: nothing here decides.

pub mod classification;
pub mod cluster_share;
pub mod demand;
pub mod device_plugin;
pub mod disruption_budget;
pub mod disruption_info;
pub mod engine_model;
pub mod gpu;
pub mod headroom;
pub mod label_selector;
pub mod model_tier;
pub mod node;
pub mod node_reading;
pub mod placement;
