//! What the tests of the core are made of: names, GPUs, demands, and clusters small enough to see what is right.
//!
//! A test says here only what it is about; what several tests would otherwise each write for themselves stands in this module.
//! The tests of [`super::explaining`] have a kit of their own, which draws whole clusters from shorthand.

mod cluster;
mod demands;
mod filters;
mod gpus;
pub mod histories;
mod lending;
mod names;
pub mod oracle;
pub mod random;

pub use cluster::{LedgerCluster, START};
pub use demands::{demand_of, reclassified, with_namespace};
pub use filters::{accepting_filters, apply_plan, plan_steps, steps_with_filters};
pub use gpus::{gpu_pair, h100, unit_gpu, whole_gpu};
pub use lending::lending_policy;
pub use names::{gpu, gpu_at, key, node, numbered, uid};
