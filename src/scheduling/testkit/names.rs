//! Names from text that is known to be valid. Each panics at any other.

use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use std::fmt::Display;

pub fn uid(text: &str) -> PodUid {
    PodUid::parse(text).unwrap()
}

pub fn node(text: &str) -> NodeName {
    NodeName::parse(text).unwrap()
}

/// `namespace/name`, or a name in the namespace `default`.
pub fn key(text: &str) -> PodKey {
    let (namespace, name) = text.split_once('/').unwrap_or(("default", text));
    PodKey::parse(namespace, name).unwrap()
}

pub fn gpu(uuid: &str) -> GpuUuid {
    GpuUuid::parse(uuid).unwrap()
}

/// The UUID that the testkit's GPUs have: `GPU-<node>-<index>`.
pub fn gpu_at(node: impl Display, index: impl Display) -> GpuUuid {
    gpu(&format!("GPU-{node}-{index}"))
}

/// The names of property tests, which draw numbers.
pub mod numbered {
    use crate::ids::{NodeName, PodKey, PodUid};

    pub fn uid(pod: u8) -> PodUid {
        super::uid(&format!("uid-{pod}"))
    }

    pub fn key(pod: u8) -> PodKey {
        super::key(&format!("pod-{pod}"))
    }

    pub fn node_name(node: u8) -> NodeName {
        super::node(&format!("node-{node}"))
    }
}
