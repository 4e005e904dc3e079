//! The cluster and its pods as the ledger gets them: nodes of equal GPUs, and the requests of each kind of manifest.

use super::backlog::JobKind;
use super::workload::{Job, JobRole, Workload};
use crate::ids::{GpuModel, GpuUuid, NodeName};
use crate::lab::simulate::openb::WHOLE_GPU;
use crate::scheduling::policy::Policy;
use crate::scheduling::verbs::Cluster;
use crate::scheduling::verbs::observe::{DevicesReported, NodeObserved};
use crate::scheduling::vocabulary::demand::{ContainerRequest, Demand, PodRequest};
use crate::scheduling::vocabulary::gpu::{Device, Health};
use crate::scheduling::vocabulary::node::NodeKind;
use crate::units::Bytes;
use std::collections::{BTreeMap, BTreeSet};

/// A common GPU size; every figure is a part of it.
const GPU: Bytes = Bytes::gib(80);

pub fn add_node(ledger: &mut Cluster, name: &NodeName, gpus: u32) {
    let device = |index: u32| Device {
        uuid: GpuUuid::parse(&format!("GPU-{name}-{index}")).expect("a node's name is short enough"),
        index,
        model: GpuModel::parse("any").expect("it is a plain word"),
        parent: None,
        total: GPU,
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        island: None,
    };
    ledger.apply(NodeObserved::new(name.clone(), NodeKind::Stowage));
    let reported =
        ledger.apply(DevicesReported { node: name.clone(), devices: (0..gpus).map(device).collect() });
    debug_assert!(reported.is_ok(), "a trace's nodes have no more GPUs than a node may");
}

/// The request of each kind of pod, parsed like a pod's manifest.
pub fn demands(workload: &Workload, policy: &Policy) -> BTreeMap<JobKind, Demand> {
    let kinds: BTreeSet<JobKind> =
        workload.jobs.iter().map(|Job { role, size, .. }| JobKind { role: *role, size: *size }).collect();
    kinds.into_iter().map(|kind| (kind, demand(kind, policy))).collect()
}

fn demand(kind: JobKind, policy: &Policy) -> Demand {
    let JobKind { role, size } = kind;
    let promisable = GPU.minus(policy.headroom.default.of(GPU));
    let per_gpu = promisable.0 * u64::from(size.milli) / u64::from(WHOLE_GPU);
    let (vram, gpus) = ((per_gpu * u64::from(size.gpus)).to_string(), size.gpus.to_string());
    let containers = [ContainerRequest { vram: Some(&vram), ..ContainerRequest::plain("main") }];
    let pod = PodRequest {
        priority: role.priority(),
        may_preempt: role == JobRole::Arrival,
        gpus: Some(&gpus),
        exclusive: (size.milli == WHOLE_GPU).then_some("true"),
        model: (role != JobRole::Arrival).then_some("a-job"),
        resources: &BTreeSet::from(["stowage.dev/vram"]),
        ..PodRequest::plain("sim", &containers)
    };
    Demand::of(&pod, policy).expect("sizes of a checked trace are sound")
}
