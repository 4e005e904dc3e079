//! A fleet of GPU nodes in simulated time.
//!
//! [`engines`] is a fluid model of inference engines that batch continuously; [`traffic`] is what asks them: traces of serving,
//! and generated days; [`replicas`] drives the number of a model's replicas from what its engines report.

pub mod engines;
pub mod replicas;
pub mod traffic;
