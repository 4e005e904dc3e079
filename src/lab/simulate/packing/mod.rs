//! GPU allocation by placement policy: the same pods, placed by several policies, including Stowage's own.
//!
//! # The protocol
//!
//! That of the published runs ("Beware of Fragmentation", Weng, Yang et al., USENIX ATC 2023), so that figures compare:
//!
//! - The cluster is every node of the trace. Pods without GPUs are placed on these nodes too.
//! - All pods of the trace arrive in a random order that the seed determines. Then pods drawn with replacement arrive, until the
//!   next one would make the requested share exceed 130 % of the GPUs. No pod ends. A pod that does not fit is dropped.
//! - A pod fits on a node that has the CPU, the memory, the GPU model and a free pod slot, and on which as many GPUs as the pod
//!   requests have the requested thousandths free.
//! - The seed determines the rank of each node. Of nodes that a policy scores equally, the one with the lowest rank gets the pod.
//! - The allocation at a load of L % is the mean over all arrivals at which the requested share rounds to L % of the GPUs.
//!
//! It is not played on the stage of [`fleet`](super::fleet): these runs have no clock, and count CPU, memory and thousandths of
//! GPUs, which is what the published results are computed from.
//!
//! [`trace`] is the workload, [`arrivals`] its order, [`cluster`] the free resources, [`placer`] the interface of a policy,
//! [`baseline`] the published policies, [`shipped`] Stowage, [`run`] one step, [`mod@replay`] one run of the protocol,
//! [`mod@churn`] one in which pods end, [`curve`] the figures of a replay, [`fragmentation`] the free capacity that is of no
//! use, [`bound`] the upper bounds of allocation, [`report`] the comparison.

pub mod arrivals;
pub(crate) mod baseline;
pub mod bound;
pub mod churn;
pub mod cluster;
pub mod curve;
pub mod fragmentation;
pub mod placer;
pub mod policy;
pub mod replay;
pub mod report;
pub mod run;
pub mod shipped;
pub mod trace;

pub use arrivals::Arrivals;
pub use bound::AllocationBound;
pub use churn::{OfferedLoad, Rejections, churn};
pub use fragmentation::TypicalPods;
pub use policy::SimulatedPolicy;
pub use replay::{Replay, replay};
pub use report::PackingLine;
pub use shipped::{CpuRule, SimulatedEviction};
pub use trace::WorkloadTrace;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
