//! Small settings for this module's tests.

use super::trace::{PodKind, WorkloadNode, WorkloadPod, WorkloadTrace};
use stowage_scheduling::ids::{GpuModel, NodeName};

/// A pod of any model without memory.
pub fn kind(cpu: u64, gpus: u32, milli: u32) -> PodKind {
    PodKind {
        cpu,
        memory: 0,
        gpus,
        milli_per_gpu: milli,
        models: [true, true].into(),
    }
}

/// Nodes of the first of two models, by CPU and GPUs; a pod of each kind.
pub fn setting(nodes: &[(u64, u32)], kinds: &[PodKind]) -> WorkloadTrace {
    let site = |(index, (cpu, gpus)): (usize, &(u64, u32))| WorkloadNode {
        name: NodeName::parse(&format!("n{index}")).unwrap(),
        model: 0,
        cpu: *cpu,
        memory: 1 << 40,
        gpus: *gpus,
    };
    WorkloadTrace {
        nodes: nodes.iter().enumerate().map(site).collect(),
        models: ["a", "b"]
            .map(|model| GpuModel::parse(model).unwrap())
            .into(),
        kinds: kinds.to_vec(),
        pods: (0..kinds.len())
            .map(|kind| WorkloadPod { kind, qos: None })
            .collect(),
    }
}
