//! One attempt of kube-scheduler to place a pod, where nothing else is asked meanwhile: replays, plans and simulators.

use super::Cluster;
use super::bind::{BindAnswer, BindAsked, BindDecision};
use super::filter::{self, FilterAsked};
use super::request::VerbRequest;
use crate::ids::{NodeName, PodUid};
use crate::ledger::ObservedWaiting;
use crate::placing::score_cache::ScoreCache;

impl Cluster {
    /// A request about a pod of the ledger.
    pub fn request_of(&self, uid: &PodUid) -> Option<VerbRequest> {
        let pod = self.ledger().pod_state(uid)?;
        Some(VerbRequest {
            uid: uid.clone(),
            key: pod.key.clone(),
            demand: pod.demand.clone(),
            waiting: ObservedWaiting {
                reservation: pod.reservation().cloned(),
                ..ObservedWaiting::default()
            },
            disruption: None,
        })
    }

    /// The named node that filter ranks first. A pod that fits on none has been refused, and is the planner's.
    pub fn best_node<'a>(
        &mut self,
        request: VerbRequest,
        names: impl ExactSizeIterator<Item = &'a str>,
        scores: &mut ScoreCache,
    ) -> Option<NodeName> {
        let view = self.apply(FilterAsked(request));
        let mut cached = scores.take(&view.snapshot, &view.request.demand, &view.policy);
        let list = filter::filter(&view, names, &mut cached);
        scores.put(cached);
        let Some(best) = list.best.first() else {
            self.apply(filter::refusal_of(&view, &list));
            return None;
        };
        self.apply(filter::offer_of(&view, best));
        Some(view.snapshot.nodes()[best.node_index].name.clone())
    }

    /// The decision of a bind request for the pod on the node; `None` if it does not fit, or is bound. The Binding is still
    /// to be written.
    pub fn allocate(&mut self, uid: &PodUid, node: &NodeName) -> Option<BindDecision> {
        let query = BindAsked::for_pod(self.ledger(), uid, node)?;
        match self.apply(query) {
            Ok(BindAnswer::Write(decision)) => Some(decision),
            Ok(BindAnswer::AlreadyBound) | Err(_) => None,
        }
    }
}
