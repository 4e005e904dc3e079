//! The trace's nodes and pods as the ledger gets them. All GPUs count alike, and a thousandth of one is a thousandth of its
//! allocatable VRAM; a pod of 1000 thousandths requires an exclusive GPU.

use super::PodTier;
use crate::simulate::core_inputs::{self, NodeGpuKind};
use crate::simulate::openb::WHOLE_GPU;
use crate::simulate::packing::cluster::SimulatedPlacement;
use crate::simulate::packing::trace::{PodKind, WorkloadTrace};
use std::collections::BTreeSet;
use std::sync::Arc;
use stowage_scheduling::ids::{GpuModel, GpuUuid, NodeName, PodUid};
use stowage_scheduling::ledger::{Ledger, ObservedPhase, PodObservation};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::observe::NodeObserved;
use stowage_scheduling::vocabulary::demand::{ContainerRequest, Demand, PodRequest};
use stowage_scheduling::vocabulary::disruption_info::ObservedDisruptionInfo;
use stowage_scheduling::vocabulary::node::NodeKind;

/// A common GPU size; every figure is a part of it.
const GPU_VRAM: Bytes = Bytes::gib(80);

/// Names that sort in the order of the ranks.
pub fn names(setting: &WorkloadTrace, ranks: &[usize]) -> Vec<NodeName> {
    let width = ranks.len().to_string().len();
    let name = |(rank, site): (usize, &usize)| {
        let name = &setting.nodes[*site].name;
        // A name that is too long to have its rank before it is left out.
        NodeName::parse(&format!("{rank:0width$}-{name}"))
            .or_else(|_| NodeName::parse(&format!("{rank:0width$}")))
            .expect("digits are a name")
    };
    ranks.iter().enumerate().map(name).collect()
}

/// The nodes with their GPUs, under these names.
pub fn add_nodes(
    ledger: &mut Cluster,
    setting: &WorkloadTrace,
    ranks: &[usize],
    names: &[NodeName],
) {
    for (rank, site) in ranks.iter().enumerate() {
        let site = &setting.nodes[*site];
        let uuid =
            |index: u32| GpuUuid::parse(&format!("GPU-{rank}-{index}")).expect("digits are a name");
        let node = NodeObserved::new(names[rank].clone(), NodeKind::Stowage);
        let kind = NodeGpuKind {
            model: &setting.models[site.model],
            vram: GPU_VRAM,
        };
        core_inputs::add_node(ledger, node, (0..site.gpus).map(uuid), kind);
    }
}

/// The request of such a pod's manifest, by [`PodTier`]; no Stowage resource if it has no GPU.
pub fn demands(setting: &WorkloadTrace, kind: &PodKind, policy: &Policy) -> Option<[Demand; 3]> {
    let models: Arc<[GpuModel]> = models(setting, kind).cloned().collect();
    let demand = |tier| Demand {
        models: models.clone(),
        ..demand(kind, tier, policy)
    };
    (kind.gpus > 0).then(|| PodTier::ALL.map(demand))
}

/// The GPU models that a pod requires; none if it runs on any.
pub fn models<'s>(
    setting: &'s WorkloadTrace,
    kind: &PodKind,
) -> impl Iterator<Item = &'s GpuModel> {
    let requires_models = kind.models.contains(&false);
    let named = setting.models.iter().zip(kind.models.clone());
    named
        .filter(move |(_, accepted)| requires_models && *accepted)
        .map(|(model, _)| model)
}

pub fn uid(number: usize) -> PodUid {
    PodUid::parse(&format!("pod-{number}")).expect("digits are a name")
}

pub fn observation(uid: &PodUid, demand: Demand, state: ObservedPhase) -> PodObservation {
    core_inputs::pod_observation(uid, "sim", demand, state, ObservedDisruptionInfo::default())
}

/// A pod's request over all its GPUs.
pub fn vram(kind: &PodKind, policy: &Policy) -> Bytes {
    let allocatable = GPU_VRAM.minus(policy.headroom.default.share_of(GPU_VRAM));
    let per_gpu = allocatable.0 * u64::from(kind.milli_per_gpu) / u64::from(WHOLE_GPU);
    Bytes(per_gpu).times(kind.gpus.into())
}

/// Whether it requires exclusive GPUs.
pub fn is_exclusive(kind: &PodKind) -> bool {
    kind.milli_per_gpu == WHOLE_GPU
}

/// A pod's placement, as its cluster's rank of the node and indices of GPUs.
pub fn placement(
    ledger: &Ledger,
    names: &[NodeName],
    node: &NodeName,
    devices: &[GpuUuid],
) -> SimulatedPlacement {
    let rank = names
        .binary_search(node)
        .expect("a pod is placed on a node that is there");
    let there = ledger
        .node(node)
        .map(|node| node.devices.clone())
        .unwrap_or_default();
    let chosen = |gpu_index: &usize| devices.contains(&there[*gpu_index].uuid);
    SimulatedPlacement {
        node: rank,
        gpus: (0..there.len()).filter(chosen).collect(),
    }
}

fn demand(kind: &PodKind, tier: PodTier, policy: &Policy) -> Demand {
    let (vram, gpus) = (vram(kind, policy).0.to_string(), kind.gpus.to_string());
    let (cpu, memory) = (format!("{}m", kind.cpu), kind.memory.to_string());
    let containers = [ContainerRequest {
        vram: Some(&vram),
        cpu: Some(&cpu),
        memory: Some(&memory),
        ..ContainerRequest::plain("main")
    }];
    let pod = PodRequest {
        priority: tier.priority(),
        may_preempt: tier == PodTier::Preemptor,
        gpus: Some(&gpus),
        exclusive: is_exclusive(kind).then_some("true"),
        resources: &BTreeSet::from(["stowage.dev/vram"]),
        ..PodRequest::plain("sim", &containers)
    };
    Demand::from_pod(&pod, policy).expect("sizes of a checked trace are sound")
}
