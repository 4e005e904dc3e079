//! One fleet, simulated: hardware, pods from their submission to their end, engines, traffic and replicas, under a scheduler that
//! is Stowage as it ships or one that it is compared with. The scenarios are played on it.
//!
//! [`machines`] is the hardware and the oracle of every run; [`stage`] has the clock and carries [`messages`] between the fleet
//! and its [`schedulers`]; [`pods`] are what manifests say. [`engines`] is a fluid model of inference engines that batch
//! continuously; [`traffic`] is what asks them: traces of serving, and generated days; [`replicas`] drives the number of a
//! model's replicas from what its engines report. [`scenarios`] are the stories that are played on all of it, and [`assessed`] is a
//! week of a cluster before and after an assessment.

pub mod assessed;
pub mod engines;
pub mod machines;
pub mod messages;
pub mod pods;
pub mod replicas;
pub mod scenarios;
pub mod schedulers;
pub mod stage;
pub mod traffic;

#[cfg(test)]
mod tests;
