//! The pods on this node, as far as the agent needs to know them.

use crate::ids::{GpuUuid, PodKey, PodUid};
use crate::units::Bytes;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// A pod that runs on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOnNode {
    pub uid: PodUid,
    pub key: PodKey,
    pub ip: Option<IpAddr>,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    /// The ports its containers declare, in the order in which they do.
    pub ports: Vec<u16>,
    /// The GPUs its Binding recorded.
    pub devices: Option<Vec<GpuUuid>>,
    /// The VRAM it was granted, over all its GPUs.
    pub granted: Option<Bytes>,
    /// It asks for GPU memory or for a GPU.
    pub wants_gpu: bool,
    /// It has been told to go.
    pub is_leaving: bool,
    pub is_ready: bool,
}
