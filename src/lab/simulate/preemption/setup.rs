//! The fleet and the manifests of the pods: nodes of equal GPUs, and requests in thousandths of one.

use super::workload::{Job, JobRole, Workload};
use crate::simulate::fleet::machines::{MachineSpec, Machines};
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::openb::WHOLE_GPU;
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuModel, ModelId, NodeName, OwnerUid};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Bytes;

/// A common GPU size; every figure is a part of it.
const GPU: Bytes = Bytes::gib(80);

pub fn machines(workload: &Workload, policy: &Policy) -> Machines {
    let spec = |(name, gpus): &(NodeName, u32)| MachineSpec {
        name: name.clone(),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse("any").expect("it is a plain word"),
        gpus: *gpus,
        vram: GPU,
        page_cache: Bytes::ZERO,
    };
    Machines::new(workload.nodes.iter().map(spec), policy.loading.clone())
}

/// The manifest of a job's pod. `number` tells all pods of a run apart.
pub fn pod(job: usize, Job { role, size, .. }: &Job, number: u64, policy: &Policy) -> PodSpec {
    let allocatable = GPU.minus(policy.headroom.default.of(GPU));
    let per_gpu = Bytes(allocatable.0 * u64::from(size.milli) / u64::from(WHOLE_GPU));
    let vram = per_gpu.times(size.gpus.into());
    // No other pod has its model, so that no node has any of it: all pods load over the network.
    let model = ModelId::parse(&format!("model-{number}")).expect("a word and digits are a name");
    PodSpec {
        priority: role.priority(),
        gpus: size.gpus,
        exclusive: size.milli == WHOLE_GPU,
        owner: Some(OwnerUid::parse(&format!("job-{job}")).expect("a word and digits are a name")),
        ..PodSpec::serving("sim", model, vram, vram)
    }
}

/// Whether residents may be evicted for a pod of this priority.
pub fn may_preempt(priority: i32) -> bool {
    priority >= JobRole::Arrival.priority()
}
