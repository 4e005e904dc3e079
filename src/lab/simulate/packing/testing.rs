//! Small settings for this module's tests.

use super::trace::{PlayedNode, PlayedPod, PlayedTrace, PodKind};
use stowage_scheduling::ids::{GpuModel, NodeName};

/// A pod of any model without memory.
pub fn kind(cpu: u64, gpus: u32, milli: u32) -> PodKind {
    PodKind {
        cpu,
        memory: 0,
        gpus,
        milli,
        models: [true, true].into(),
    }
}

/// Nodes of the first of two models, by CPU and GPUs; a pod of each kind.
pub fn setting(nodes: &[(u64, u32)], kinds: &[PodKind]) -> PlayedTrace {
    let site = |(place, (cpu, gpus)): (usize, &(u64, u32))| PlayedNode {
        name: NodeName::parse(&format!("n{place}")).unwrap(),
        model: 0,
        cpu: *cpu,
        memory: 1 << 40,
        gpus: *gpus,
    };
    PlayedTrace {
        sites: nodes.iter().enumerate().map(site).collect(),
        models: ["a", "b"]
            .map(|model| GpuModel::parse(model).unwrap())
            .into(),
        kinds: kinds.to_vec(),
        pods: (0..kinds.len())
            .map(|kind| PlayedPod { kind, qos: None })
            .collect(),
    }
}
