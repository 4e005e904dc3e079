//! Work lost, by eviction policy: the same arrivals under several victim orders.
//!
//! # The workload
//!
//! Fixed before any of it was run, and not changed for what came out.
//!
//! - **Cluster.** Every twelfth GPU node of openb's list, in the list's order: 102 nodes with 498 GPUs, so that a seed takes
//!   seconds. All GPUs count alike, and a thousandth of a GPU is a thousandth of its allocatable VRAM. CPU and host memory are
//!   left out: this is about evictions for VRAM.
//! - **Pods.** Drawn from the trace's GPU pods with replacement, with their sizes and running times (at least a second, at most
//!   a day). `BE` pods are residents of priority −20, `Burstable` pods residents of priority −10; `LS` and `Guaranteed` pods are
//!   arrivals of priority 1000, for which residents may be evicted. A pod of 1000 thousandths requires exclusive GPUs.
//! - **Load.** Each of the three arrives at random (Poisson) at the rate that would keep 50 % (arrivals), 55 % (`BE`) and 5 %
//!   (`Burstable`) of the GPUs busy: somewhat more than there is, so that residents are pending and the cluster stays full.
//! - **Time.** Two days. Nothing is counted on the first, at the end of which as many arrivals end as begin.
//! - **Residents** are pending until they fit, the higher priority first, then the older; they evict no pod. One loads for as
//!   long as weights of its size take over the network ([`time_to_ready`]), then works, and saves its work at an interval of its
//!   own, log-uniform from 5 minutes to 4 hours, which the ledger sees as `stowage.dev/checkpoint-time`. Nothing is saved on
//!   eviction. An evicted one takes its grace period of 30 s, and returns as a new pod of the same owner, with the saved work
//!   and its place among those that are pending.
//! - **Arrivals** are placed if they fit, else residents are evicted for them, else they are rejected. They work from when they
//!   are bound, and their engines are ready after the time that loading takes.
//! - **Lost** is, for each eviction, the work since the last checkpoint or the start, and the time to load again, both times the
//!   resident's share of its GPUs: what really was lost, whatever costs the policy sets.
//!
//! The random numbers for arrivals do not depend on the simulated order, so all orders get the same pods at the same times. The
//! policy is the built-in one.
//!
//! It is played on the stage of [`fleet`](super::fleet), which enters every placement and eviction into its machines: a GPU
//! beyond its memory, an exclusive GPU with two pods and a victim of the wrong priority are counted as broken promises.
//!
//! [`workload`] generates the pods, `run` runs them, `scheduler` is Stowage with the victims of [`orders`], [`tally`] adds up,
//! [`report`] compares.
//!
//! [`time_to_ready`]: stowage_scheduling::vocabulary::model_tier::time_to_ready

mod backlog;
mod kube_scheduler;
pub mod orders;
pub mod report;
mod run;
mod scheduler;
mod setup;
pub mod tally;
pub mod workload;

pub use orders::VictimOrder;
pub use report::Report;
pub use run::play;
pub use tally::PreemptionTally;
pub use workload::{Workload, WorkloadError, WorkloadExtent};

#[cfg(test)]
mod tests;
