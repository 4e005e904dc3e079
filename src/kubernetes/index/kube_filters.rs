//! Brings every pod into the view of kube-scheduler's filters, including pods without a GPU: they use CPU, memory and ports of
//! their nodes.
//!
//! From here the ledger only learns how much CPU and memory a node has left. No lock is taken under another.

use crate::ids::{NodeName, PodUid};
use crate::kubernetes::objects;
use crate::service::Service;
use k8s_openapi::api::core::v1::Pod;

/// Applies a pod's present state. What a pending pod requires of its node is stored only if Stowage may have to evaluate it.
pub fn see(service: &Service, uid: &PodUid, pod: &Pod) {
    let before = node_of(service, uid);
    enter(service, uid, pod);
    let after = node_of(service, uid);
    after.iter().for_each(|node| tell_free_host(service, node));
    before.iter().filter(|node| Some(*node) != after.as_ref()).for_each(|node| tell_free_host(service, node));
}

/// The pod has ended or was deleted.
pub fn forget(service: &Service, uid: &PodUid) {
    let before = node_of(service, uid);
    service.kube_filters().remove_pod(uid);
    before.iter().for_each(|node| tell_free_host(service, node));
}

/// Updates the ledger's free CPU and memory of a node.
pub fn tell_free_host(service: &Service, node: &NodeName) {
    let free_host = service.kube_filters().free_host(node);
    service.ledger().set_free_host(node, free_host);
}

fn node_of(service: &Service, uid: &PodUid) -> Option<NodeName> {
    service.kube_filters().node_of(uid).cloned()
}

fn enter(service: &Service, uid: &PodUid, pod: &Pod) {
    // Read before the view is locked: a plan may be waiting for the lock.
    if let Some(footprint) = objects::kube_filters::footprint(pod) {
        let movable = may_move(service, pod).then(|| objects::kube_filters::successor_requirements(pod));
        let mut kube_filters = service.kube_filters();
        kube_filters.set_pod(uid.clone(), footprint);
        movable.into_iter().for_each(|wants| kube_filters.set_movable(uid.clone(), wants));
    } else if objects::asks_for_gpu(pod) && !objects::is_finished(pod) {
        let wants = objects::kube_filters::requirements(pod);
        service.kube_filters().set_waiting(uid.clone(), wants);
    } else {
        service.kube_filters().remove_pod(uid);
    }
}

/// If the policy moves no pods, requirements of successors are not needed.
fn may_move(service: &Service, pod: &Pod) -> bool {
    objects::asks_for_vram(pod) && service.ledger().policy().planning.consolidation.is_some()
}
