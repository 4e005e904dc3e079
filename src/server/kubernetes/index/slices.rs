//! Brings ResourceSlices into the ledger, relisted like pods and nodes, and handles API servers without them.

use super::ClusterIndex;
use crate::service::ServerState;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::sync::Arc;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::control_loop::{PodEvent, PodEventReason};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::ledger::{Ledger, NewlyPublished};
use stowage_scheduling::verbs::observe::{SliceDeleted, SliceObserved};
use stowage_scheduling::vocabulary::node::NodeKind;

/// A slice may reach every node: Events for so many pods say it clearly enough.
const MAX_PUBLISHED_EVENTS: usize = 256;

impl ClusterIndex {
    /// Applies a slice's present state. Returns Events for pods whose GPUs are published from now on.
    pub(crate) fn apply_slice(
        &mut self,
        state: &ServerState,
        slice: &ResourceSlice,
    ) -> Vec<PodEvent> {
        let Some((name, slice)) = objects::device_slice(slice) else {
            return Vec::new();
        };
        self.unlisted_slices.remove(&name);
        let mut cluster = state.cluster();
        let published = cluster.apply(SliceObserved { name, slice });
        newly_published_events(cluster.ledger(), &published)
    }

    pub(crate) fn delete_slice(
        &mut self,
        state: &ServerState,
        slice: &ResourceSlice,
    ) -> Vec<PodEvent> {
        let Some(name) = slice.metadata.name.as_deref() else {
            return Vec::new();
        };
        remove_slice(state, &name.into())
    }

    /// Marks the ResourceSlice list incomplete unless it was begun in this term of leadership or later.
    pub(crate) fn expect_slice_list(&mut self, term: u64) {
        self.slices_list.expect(term);
    }

    pub(crate) fn begin_slice_list(&mut self, state: &ServerState) {
        self.unlisted_slices = state.cluster().ledger().slice_names().cloned().collect();
    }

    /// Ends the list: slices that it did not contain are gone. Returns Events for pods whose GPUs are published from now on.
    pub(crate) fn end_slice_list(&mut self, state: &ServerState) -> Vec<PodEvent> {
        let gone = std::mem::take(&mut self.unlisted_slices);
        let events = gone
            .iter()
            .flat_map(|name| remove_slice(state, name))
            .collect();
        self.slices_list.is_complete = true;
        events
    }

    /// Counts the list as complete, because the API server has no ResourceSlices. Slices of an earlier list stay.
    pub(crate) fn mark_slices_not_served(&mut self) {
        self.slices_list.is_complete = true;
    }
}

fn remove_slice(state: &ServerState, name: &Arc<str>) -> Vec<PodEvent> {
    let mut cluster = state.cluster();
    let published = cluster.apply(SliceDeleted(name.clone()));
    newly_published_events(cluster.ledger(), &published)
}

fn newly_published_events(ledger: &Ledger, published: &NewlyPublished) -> Vec<PodEvent> {
    for node in &published.nodes {
        tracing::warn!(
            %node,
            "a DRA driver publishes the GPUs of a node on which pods of Stowage are: kube-scheduler may allocate them again. No pod of Stowage is placed there any more. Remove the driver from the node, or move the pods"
        );
    }
    published
        .nodes
        .iter()
        .flat_map(|node| events_on(ledger, node))
        .take(MAX_PUBLISHED_EVENTS)
        .collect()
}

/// Events for all pods whose GPUs are published.
pub(super) fn current_published_events<'a>(
    ledger: &'a Ledger,
    nodes: impl Iterator<Item = &'a NodeName> + 'a,
) -> impl Iterator<Item = PodEvent> + 'a {
    let is_published = |name: &&NodeName| {
        ledger
            .node(name)
            .is_some_and(|node| node.kind == NodeKind::Dra)
    };
    nodes
        .filter(is_published)
        .flat_map(|node| events_on(ledger, node))
        .take(MAX_PUBLISHED_EVENTS)
}

fn events_on<'a>(ledger: &'a Ledger, node: &'a NodeName) -> impl Iterator<Item = PodEvent> + 'a {
    let stowage_pods = ledger
        .pods_on_node(node)
        .filter(|(_, pod_state)| !pod_state.demand.is_allocated_externally());
    stowage_pods.map(move |(uid, pod_state)| PodEvent {
        key: pod_state.key.clone(),
        uid: uid.clone(),
        kind: PodEventReason::PublishedByDra,
        text: format!(
            "A DRA driver publishes the GPUs of {node} as ResourceSlices: kube-scheduler may allocate the pod's GPUs to a claim as well. Stowage places no more pods there. Remove the driver from the node, or move the pod."
        ),
    })
}

#[cfg(test)]
mod tests;
