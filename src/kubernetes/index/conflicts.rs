//! Brings pods into the continuous audit as the watch shows them, independently of the ledger.

use crate::ids::{PodKey, PodUid};
use crate::kubernetes::objects;
use crate::service::Service;
use k8s_openapi::api::core::v1::Pod;

/// A pod that requests a GPU and has not ended.
pub fn see(service: &Service, uid: &PodUid, key: &PodKey, pod: &Pod) {
    let shown = objects::observed_binding(pod, key).or_else(|| reservation(service, key, pod));
    service.conflicts().see(uid, shown);
}

fn reservation(
    service: &Service,
    key: &PodKey,
    pod: &Pod,
) -> Option<crate::scheduling::audit::conflicts::AuditedPod> {
    // Few pods have a reservation; for the others the policy is not needed.
    objects::ReservationMessage::read(pod)?;
    let policy = service.cluster().policy().clone();
    objects::observed_reservation(pod, key, &policy, |deadline| service.clock.to_moment(deadline))
}
