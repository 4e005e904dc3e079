//! GPU allocation by placement policy: the same pods, placed by several policies, including Stowage's own.
//!
//! # The protocol
//!
//! That of the published runs ("Beware of Fragmentation", Weng, Yang et al., USENIX ATC 2023), so that figures compare:
//!
//! - Every node of the trace. Pods without GPUs land on them too.
//! - All pods come in an order of the seed, then pods drawn with replacement until the next one would ask for more than 130 %
//!   of the GPUs. Nobody leaves. A pod that does not fit is dropped.
//! - A pod fits where CPU, memory, the GPU's model and a slot allow it, and as many GPUs as it asks for have the thousandths free.
//! - Nodes are ranked by the seed; of nodes that are equal to a policy the lowest rank is taken.
//! - Allocation at a load of L % is the mean over all arrivals at which what has been asked for rounds to L % of the GPUs.
//!
//! [`trace`] is the workload, [`arrivals`] its order, [`cluster`] the free resources, [`placer`] the interface of a policy,
//! [`baseline`] the published policies, [`shipped`] Stowage, [`run`] one step, [`mod@replay`] one run of the protocol, [`mod@churn`]
//! one in which pods end, [`curve`] the figures of a replay, [`fragmentation`] the free capacity that is of no use, [`bound`]
//! the upper bounds of allocation, [`report`] the comparison.

pub mod arrivals;
pub mod baseline;
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
pub use fragmentation::Typical;
pub use policy::PlayedPolicy;
pub use replay::{Replay, replay};
pub use report::PackingLine;
pub use shipped::{CpuRule, SimulatedEviction};
pub use trace::PlayedTrace;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
