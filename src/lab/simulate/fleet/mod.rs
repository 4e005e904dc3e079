//! One fleet, simulated: hardware, pods from their submission to their end, engines, traffic and replicas, under a scheduler that
//! is Stowage as it ships or one that it is compared with. The scenarios are played on it.
//!
//! [`machines`] is the hardware and the oracle of every run; [`stage`] has the clock and carries [`messages`] between the fleet and
//! its [`schedulers`]; [`pods`] are what manifests say. [`scenarios`] are the stories that are played on it.

pub mod machines;
pub mod messages;
pub mod pods;
pub mod scenarios;
pub mod schedulers;
pub mod stage;

#[cfg(test)]
mod tests;
