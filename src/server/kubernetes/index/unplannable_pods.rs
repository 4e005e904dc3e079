//! Pods behind the planner's gate that it will never place: they request no GPU, or their request is invalid. The ledger does
//! not have them, and nothing else would lift their gate.

use super::ClusterIndex;
use k8s_openapi::api::core::v1::Pod;
use std::ops::Bound;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::planning::WaitReason;

impl ClusterIndex {
    /// Unplannable pods in order of UID, after a given one or from the first, at most `limit`.
    pub(crate) fn unplannable_pods_after(
        &self,
        after: Option<&PodUid>,
        limit: usize,
    ) -> Vec<(PodUid, PodKey, WaitReason)> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let next = self
            .unplannable_pods
            .range::<PodUid, _>((from, Bound::Unbounded))
            .take(limit);
        next.map(|(uid, (key, why))| (uid.clone(), key.clone(), *why))
            .collect()
    }

    pub(super) fn update_unplannable_pod(
        &mut self,
        uid: &PodUid,
        key: &PodKey,
        pod: &Pod,
        is_outside_ledger: bool,
    ) {
        let is_over = objects::is_finished(pod) || pod.metadata.deletion_timestamp.is_some();
        if !is_outside_ledger || is_over || !objects::gates(pod).is_planner_gate_only() {
            self.unplannable_pods.remove(uid);
            return;
        }
        let why = if objects::asks_for_gpu(pod) {
            WaitReason::InvalidRequest
        } else {
            WaitReason::NoGpuRequested
        };
        self.unplannable_pods
            .insert(uid.clone(), (key.clone(), why));
    }
}
