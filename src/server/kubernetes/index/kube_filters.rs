//! Brings every pod into the view of kube-scheduler's filters, including pods without a GPU: they use CPU, memory and ports of
//! their nodes.

use crate::service::ServerState;
use k8s_openapi::api::core::v1::Pod;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::verbs::observe::{FilterPod, FilterPodObserved};

/// A pod's present state, read before the cluster is locked. What a pending pod requires of its node is stored only if Stowage
/// may have to evaluate it.
pub fn filter_observation(state: &ServerState, uid: &PodUid, pod: &Pod) -> FilterPodObserved {
    let pod = if let Some(footprint) = objects::kube_filters::footprint(pod) {
        let successor =
            may_move(state, pod).then(|| objects::kube_filters::successor_requirements(pod));
        FilterPod::Bound {
            footprint,
            successor,
        }
    } else if objects::asks_for_gpu(pod) && !objects::is_finished(pod) {
        FilterPod::Waiting(objects::kube_filters::requirements(pod))
    } else {
        FilterPod::Irrelevant
    };
    FilterPodObserved {
        uid: uid.clone(),
        pod,
    }
}

/// If the policy moves no pods, requirements of successors are not needed.
pub(crate) fn may_move(state: &ServerState, pod: &Pod) -> bool {
    objects::asks_for_vram(pod) && state.policy().planning.consolidation.is_some()
}
