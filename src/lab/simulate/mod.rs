//! Simulated time: workloads played on the very functions that the extender and the planner call, so that what comes out here
//! is a result of the code that ships. Pure: texts of traces come in, figures go out; time is the simulation's own, and
//! whatever is random comes from a seed.
//!
//! [`openb`] reads a production trace, or makes one up where there is none; [`events`] is the order of what happens and
//! [`random`] the dice. [`preemption`] asks what is lost by whom one evicts, [`packing`] how full GPUs become.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod events;
pub mod openb;
pub mod packing;
pub mod preemption;
pub mod random;
