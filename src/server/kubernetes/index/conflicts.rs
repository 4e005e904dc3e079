//! Brings pods into the continuous audit as the watch shows them, independently of the ledger.

use crate::service::Service;
use k8s_openapi::api::core::v1::Pod;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::audit::conflicts::AuditedPod;
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::vocabulary::classification::PodTraits;

/// Passes a pod that requests a GPU and has not ended to the audit.
pub fn see(service: &Service, uid: &PodUid, key: &PodKey, pod: &Pod) {
    let shown = objects::observed_binding(pod, key).or_else(|| reservation(service, key, pod));
    service.conflicts().see(uid, shown);
}

fn reservation(service: &Service, key: &PodKey, pod: &Pod) -> Option<AuditedPod> {
    let classify = |traits: &PodTraits| service.classify(traits);
    objects::observed_reservation(pod, key, classify, |deadline| {
        service.clock.to_moment(deadline)
    })
}
