//! Simulations: workloads in simulated time, with the same functions that the extender and the planner call, so that the
//! results are those of the production code. Pure: traces come in as text, figures go out; time is simulated, and random
//! numbers come from a seed.
//!
//! [`openb`] reads a production trace, or generates one; [`table`] parses tables of traces; [`events`] is the event queue,
//! and `core_inputs` tells the core of nodes and pods. [`fleet`] is a cluster with its hardware, engines and
//! traffic, on which scenarios are played. [`packing`] measures the GPU allocation by placement policy.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod core_inputs;
pub mod events;
pub mod fleet;
pub mod openb;
pub mod packing;
pub mod table;
