//! The node edge: samples one node once a second and reports it to every replica of Stowage.

pub mod nvml;
pub mod pods;
