//! Decisions as data: what was promised to whom.

use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::units::{Bytes, Moment};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Where a pod goes: what its Binding says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    pub node: NodeName,
    pub devices: Arc<[GpuUuid]>,
    /// What it may use over all its GPUs.
    pub granted: Bytes,
    /// The part of its GPUs' memory that is, in hundredths, rounded down; the least over its GPUs. Engines take
    /// it as `--gpu-memory-utilization`.
    pub memory_hundredths: u8,
}

/// Room kept for a pod that waits for others to leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub node: NodeName,
    pub devices: Arc<[GpuUuid]>,
    pub victims: Arc<[PodUid]>,
    pub deadline: Moment,
}
