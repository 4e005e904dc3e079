//! The node edge: samples one node once a second and reports it to every replica of Stowage.

pub mod findings;
pub mod models;
pub mod ownership;
pub mod pods;
