//! One node in the kube-filter view: the node itself, the pods bound to it, and the sums over them.
//!
//! As in the ledger's node states, the sums are recomputed from the pods whenever one of them changes: a node has some hundred
//! pods, and sums that are never adjusted cannot drift.

use super::node::FilterNode;
use super::requirements::{NodeFootprint, Requirements};
use super::resources::HostPort;
use super::resources::RequestedSums;
use crate::ids::PodUid;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug, Clone, Default)]
pub(super) struct FilterNodeState {
    /// `None` while no node of this name has been observed: pods may be observed before their node, and outlive it.
    pub node: Option<Arc<FilterNode>>,
    pods: BTreeMap<PodUid, NodeFootprint>,
    requested: RequestedSums,
}

impl FilterNodeState {
    pub fn insert(&mut self, uid: PodUid, footprint: NodeFootprint) {
        self.pods.insert(uid, footprint);
        self.recompute_sums();
    }

    pub fn remove(&mut self, uid: &PodUid) -> Option<NodeFootprint> {
        let removed = self.pods.remove(uid);
        self.recompute_sums();
        removed
    }

    pub fn pod(&self, uid: &PodUid) -> Option<&NodeFootprint> {
        self.pods.get(uid)
    }

    /// The pods bound there, in order of UID.
    pub fn pods(&self) -> impl Iterator<Item = (&PodUid, &NodeFootprint)> {
        self.pods.iter()
    }

    pub fn is_empty(&self) -> bool {
        self.node.is_none() && self.pods.is_empty()
    }

    /// The resources in use once `leaving` pods are gone and `coming` pods are placed.
    pub fn requested_after(
        &self,
        leaving: &[PodUid],
        coming: &[&Requirements],
    ) -> Cow<'_, RequestedSums> {
        let mut taken = match leaving {
            [] => Cow::Borrowed(&self.requested),
            _ => Cow::Owned(sum(self.remaining_pods(leaving))),
        };
        coming
            .iter()
            .for_each(|pod| taken.to_mut().add(&pod.amounts));
        taken
    }

    /// The host ports in use once `leaving` pods are gone and `coming` pods are placed.
    pub fn ports_after<'a>(
        &'a self,
        leaving: &'a [PodUid],
        coming: &'a [&Requirements],
    ) -> impl Iterator<Item = &'a HostPort> + Clone {
        let staying = self
            .remaining_pods(leaving)
            .flat_map(|pod| pod.ports.iter());
        staying.chain(coming.iter().flat_map(|pod| &pod.ports))
    }

    /// Whether a pod there has ResourceClaims.
    pub fn claims_devices(&self) -> bool {
        self.pods.values().any(|pod| pod.claims_devices)
    }

    /// Number of volumes of the pods on the node once `leaving` pods are gone and `coming` pods are placed.
    pub fn volumes_after(&self, leaving: &[PodUid], coming: &[&Requirements]) -> usize {
        let staying: usize = self
            .remaining_pods(leaving)
            .map(|pod| usize::from(pod.volumes))
            .sum();
        staying + coming.iter().map(|pod| pod.claims.len()).sum::<usize>()
    }

    fn remaining_pods<'a>(
        &'a self,
        leaving: &'a [PodUid],
    ) -> impl Iterator<Item = &'a NodeFootprint> + Clone {
        self.pods
            .iter()
            .filter(|(uid, _)| !leaving.contains(uid))
            .map(|(_, pod)| pod)
    }

    fn recompute_sums(&mut self) {
        self.requested = sum(self.pods.values());
    }
}

fn sum<'a>(pods: impl Iterator<Item = &'a NodeFootprint>) -> RequestedSums {
    let mut taken = RequestedSums::default();
    pods.for_each(|pod| taken.add(&pod.amounts));
    taken
}
