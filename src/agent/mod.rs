//! The node edge: samples one node once a second and reports it to every replica of Stowage.

pub mod blocking;
pub mod engines;
pub mod findings;
pub mod models;
pub mod nvml;
pub mod ownership;
pub mod pods;
pub mod print;
pub mod publish;
pub mod round;
pub mod run;
