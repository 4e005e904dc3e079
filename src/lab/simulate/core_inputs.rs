//! A simulated cluster as the core learns of it: nodes with GPUs that are all alike, pods, and what a Binding allocates.
//! Each simulation says which; how they are said is this module's.

use std::sync::Arc;
use stowage_scheduling::ids::{GpuModel, GpuUuid, PodKey, PodUid};
use stowage_scheduling::ledger::{ObservedPhase, PodObservation};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Bytes;
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::observe::{BudgetsVisible, DevicesReported, NodeObserved};
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::disruption_budget::BudgetVisibility;
use stowage_scheduling::vocabulary::disruption_info::ObservedDisruptionInfo;
use stowage_scheduling::vocabulary::gpu::{Device, Health};

/// The model and VRAM of all GPUs of a node.
#[derive(Debug, Clone, Copy)]
pub struct NodeGpuKind<'a> {
    pub model: &'a GpuModel,
    pub vram: Bytes,
}

/// A cluster without nodes. There are no disruption budgets, and the ledger knows it.
pub(crate) fn empty_cluster(policy: Arc<Policy>) -> Cluster {
    let mut cluster = Cluster::new(policy);
    cluster.apply(BudgetsVisible(BudgetVisibility::Complete));
    cluster
}

/// The node is there, and its agent has reported its GPUs: healthy, and all theirs is the pods'.
pub fn add_node(
    cluster: &mut Cluster,
    observed_node: NodeObserved,
    gpus: impl IntoIterator<Item = GpuUuid>,
    kind: NodeGpuKind<'_>,
) {
    let device = |(index, uuid)| Device {
        uuid,
        index,
        model: kind.model.clone(),
        parent: None,
        total: kind.vram,
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        exclusive_process: false,
        island: None,
    };
    let node = observed_node.name.clone();
    cluster.apply(observed_node);
    let devices = (0..).zip(gpus).map(device).collect();
    let reported = cluster.apply(DevicesReported {
        node,
        devices,
        are_all: true,
    });
    debug_assert!(
        reported.is_ok(),
        "a simulated node has no more GPUs than a node may"
    );
}

/// A pod as the API server shows it, under its UID as its name.
pub fn pod_observation(
    uid: &PodUid,
    namespace: &str,
    demand: Demand,
    state: ObservedPhase,
    observed: ObservedDisruptionInfo,
) -> PodObservation {
    let key =
        PodKey::parse(namespace, uid.as_str()).expect("simulated namespaces and UIDs are names");
    PodObservation {
        uid: uid.clone(),
        key,
        demand,
        state,
        observed: Some(observed),
    }
}
