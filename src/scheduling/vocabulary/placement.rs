//! Decisions as data: which GPUs a pod has, or has reserved.

use super::is_default;
use super::memory_fraction::MemoryFraction;
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::units::{Bytes, Moment};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Where a pod goes: what its Binding says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    pub node: NodeName,
    /// None, if the kubelet picks them.
    pub devices: Arc<[GpuUuid]>,
    /// What it may use over all its GPUs.
    pub granted: Bytes,
    /// The part of its GPUs' memory that is; over unequal GPUs the least, so that it is more than granted on none. Recordings of
    /// version 0.3 do not have it.
    #[serde(default)]
    pub memory_fraction: MemoryFraction,
    /// The greatest over its GPUs, if it is another: an engine that takes one figure for all leaves the rest of this GPU unused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub greatest_fraction: Option<MemoryFraction>,
    /// The engines on its GPUs that lend to it, in order of UID. None, if its VRAM was free without them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub borrowed_from: Arc<[PodUid]>,
    /// The driver keeps each container within its part: the Binding says how much that is.
    #[serde(default, skip_serializing_if = "is_default")]
    pub has_vram_limits: bool,
}

impl Placement {
    /// The placement of a pod whose GPUs the kubelet picks.
    pub fn from_plugin(node: NodeName) -> Self {
        Self {
            node,
            devices: Arc::new([]),
            granted: Bytes::ZERO,
            memory_fraction: MemoryFraction::ZERO,
            greatest_fraction: None,
            borrowed_from: Arc::new([]),
            has_vram_limits: false,
        }
    }

    /// What its Binding records of GPUs, if it records any.
    pub fn recorded_gpus(&self) -> Option<Arc<[GpuUuid]>> {
        (!self.devices.is_empty()).then(|| self.devices.clone())
    }
}

/// GPUs kept for a pod that waits for others to leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    pub node: NodeName,
    pub devices: Arc<[GpuUuid]>,
    /// The pods that must be gone first.
    pub victims: Arc<[PodUid]>,
    pub deadline: Moment,
}

impl Reservation {
    /// Whether it is the same reservation, until the same or another deadline.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.node, &self.devices, &self.victims) == (&other.node, &other.devices, &other.victims)
    }
}
