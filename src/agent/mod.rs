//! The node edge: samples one node once a second and reports it to every replica of Stowage.

pub mod engines;
pub mod pods;
