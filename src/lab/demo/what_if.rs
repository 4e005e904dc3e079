//! What the core would decide for a pod that does not exist yet: the functions that `filter` calls, on the snapshot that it
//! would use. Changes nothing.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use std::sync::Arc;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::{GpuUuid, NodeName};
use stowage_scheduling::placing::rank::{ScheduleAttempt, estimate_start, shortlist};
use stowage_scheduling::placing::snapshot::Snapshot;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Millis;
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_server::service::ServerState;

pub(crate) struct HypotheticalPod {
    snapshot: Arc<Snapshot>,
    policy: Arc<Policy>,
    demand: Demand,
}

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PredictedGpu {
    pub node: NodeName,
    pub gpu: GpuUuid,
}

impl HypotheticalPod {
    pub fn for_manifest(state: &ServerState, manifest: Value) -> Result<Self> {
        let pod: Pod = serde_json::from_value(manifest).context("the story's pods are pods")?;
        let mut ledger = state.cluster();
        let policy = ledger.ledger().policy().clone();
        let demand = objects::demand(&pod, &policy)?;
        Ok(Self {
            snapshot: ledger.snapshot(),
            policy,
            demand,
        })
    }

    /// This pod without the name of its model.
    pub fn without_model(mut self) -> Self {
        self.demand.model = None;
        self
    }

    /// The pod's placement, by its first GPU.
    pub fn predicted_gpu(&self) -> Option<PredictedGpu> {
        let names: Vec<&str> = self
            .snapshot
            .nodes()
            .iter()
            .map(|node| node.name.as_str())
            .collect();
        let attempt = ScheduleAttempt {
            limit: 1,
            ..ScheduleAttempt::unreserved(&self.policy)
        };
        let list = shortlist(&self.snapshot, &self.demand, names.into_iter(), attempt);
        let best = list.best.first()?;
        let node = &self.snapshot.nodes()[best.node_index];
        let gpu = node.devices[best.gpus.iter().next()?].uuid.clone();
        Some(PredictedGpu {
            node: node.name.clone(),
            gpu,
        })
    }

    /// How long until its model would answer on each node, soonest first.
    pub fn start_times(&self) -> Vec<(Millis, NodeName)> {
        let nodes = self.snapshot.nodes().iter();
        let mut times: Vec<_> = nodes
            .filter_map(|node| {
                let start = estimate_start(
                    node,
                    &self.demand,
                    self.snapshot.start_model(),
                    &self.policy.loading,
                )?;
                Some((start.total(), node.name.clone()))
            })
            .collect();
        times.sort();
        times
    }

    /// Whether the engines on a GPU are too busy for it.
    pub(crate) fn is_excluded_from(&self, seat: &PredictedGpu) -> bool {
        let Some(node) = self.snapshot.node(seat.node.as_str()) else {
            return false;
        };
        let index = node
            .devices
            .iter()
            .position(|device| device.uuid == seat.gpu);
        index.is_some_and(|gpu_index| {
            self.demand
                .terms
                .is_exceeded_by(node.gpus[gpu_index].engine_load)
        })
    }
}

/// Whether an engine is starting anywhere: until it is ready, no other starts on its GPU.
pub(crate) fn is_any_engine_starting(state: &ServerState) -> bool {
    let snapshot = state.cluster().snapshot();
    snapshot
        .nodes()
        .iter()
        .flat_map(|node| node.gpus.iter())
        .any(|gpu| gpu.starting)
}
