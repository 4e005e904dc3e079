//! One node as a decision sees it: its GPUs and what is left of each.

use super::device::{Device, Gpu};
use crate::ids::NodeName;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// `gpus` and `devices` run in parallel: the first is what changes and what decisions read, the second what the
/// hardware is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub name: NodeName,
    /// The ledger's generation when this node last changed.
    pub generation: u64,
    pub gpus: Arc<[Gpu]>,
    pub devices: Arc<[Device]>,
}

impl Node {
    /// Free VRAM over all its GPUs.
    pub fn free(&self) -> Bytes {
        self.gpus.iter().map(Gpu::free).sum()
    }

    pub fn capacity(&self) -> Bytes {
        self.gpus.iter().map(|gpu| gpu.capacity).sum()
    }

    pub fn charged(&self) -> Bytes {
        self.gpus.iter().map(|gpu| gpu.charged).sum()
    }
}
