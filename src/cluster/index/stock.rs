//! Every pod into the stock view, those without a GPU as well: they take CPU, memory and ports of their nodes.
//!
//! The ledger is fed elsewhere; no lock is taken under another.

use crate::contract;
use crate::ids::PodUid;
use crate::service::Service;
use k8s_openapi::api::core::v1::Pod;

/// A pod as it is now. What a waiting pod asks of its node is kept only where Stowage may have to answer for it.
pub fn see(service: &Service, uid: &PodUid, pod: &Pod) {
    // Read before the view is locked: a plan may be waiting for it.
    if let Some(footprint) = contract::stock::footprint(pod) {
        let movable = may_move(service, pod).then(|| contract::stock::successor_requirements(pod));
        let mut stock = service.stock();
        stock.set_pod(uid.clone(), footprint);
        movable.into_iter().for_each(|wants| stock.set_movable(uid.clone(), wants));
    } else if contract::asks_for_gpu(pod) && !contract::is_finished(pod) {
        let wants = contract::stock::requirements(pod);
        service.stock().set_waiting(uid.clone(), wants);
    } else {
        service.stock().remove_pod(uid);
    }
}

/// Where the policy moves nobody, nothing has to be known of successors.
fn may_move(service: &Service, pod: &Pod) -> bool {
    contract::asks_for_vram(pod) && service.ledger().policy().planning.consolidation.is_some()
}
