//! Brings pods into the continuous audit as the watch shows them, independently of the ledger.

use crate::service::ServerState;
use k8s_openapi::api::core::v1::Pod;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::audit::conflicts::AuditedPod;
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::vocabulary::classification::PodTraits;

/// Passes a pod that requests a GPU and has not ended to the audit.
pub fn observe_pod(state: &ServerState, uid: &PodUid, key: &PodKey, pod: &Pod) {
    let audited = objects::audited_binding(pod, key).or_else(|| reservation(state, key, pod));
    state.over_allocations().observe(uid, audited);
}

fn reservation(state: &ServerState, key: &PodKey, pod: &Pod) -> Option<AuditedPod> {
    let classify = |traits: &PodTraits| state.classify(traits);
    objects::audited_reservation(pod, key, classify, |deadline| {
        state.clock.to_moment(deadline)
    })
}
