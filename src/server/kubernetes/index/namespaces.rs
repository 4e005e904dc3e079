//! Brings the labels of namespaces into the cluster, relisted like pods and nodes, as long as a policy asks for them.

use super::ClusterIndex;
use crate::service::ServerState;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::sync::Arc;
use stowage_scheduling::policy::NamespaceLabels;
use stowage_scheduling::policy::namespaces::Labels;
use stowage_scheduling::verbs::namespaces::{NamespaceDeleted, NamespaceObserved};

impl ClusterIndex {
    /// Marks the namespace list incomplete unless it was begun in this term of leadership or later.
    pub(crate) fn expect_namespace_list(&mut self, term: u64) {
        self.namespaces_list.expect(term);
    }

    pub(crate) fn begin_namespace_list(&mut self) {
        self.listed_namespaces.clear();
    }

    /// Adds a namespace of the list in progress, which takes effect as a whole at its end.
    pub(crate) fn add_listed_namespace(&mut self, metadata: &ObjectMeta) {
        self.listed_namespaces.extend(name_and_labels(metadata));
    }

    /// Hands out the labels of all namespaces of the list that has ended.
    pub(crate) fn take_listed_namespaces(&mut self) -> NamespaceLabels {
        std::mem::take(&mut self.listed_namespaces)
    }

    /// Marks the list complete, once the cluster has the labels of all its namespaces.
    pub(crate) fn end_namespace_list(&mut self) {
        self.namespaces_list.is_complete = true;
    }

    /// Forgets all namespaces, because no policy selects by their labels any more and their watch has ended.
    pub(crate) fn forget_namespaces(&mut self, state: &ServerState) {
        if state.forget_namespaces() {
            self.namespaces_list.is_complete = false;
            self.listed_namespaces.clear();
        }
    }

    /// The leadership term in which all namespaces were listed; `None` until the list is complete.
    pub(crate) fn namespaces_synced_term(&self) -> Option<u64> {
        self.namespaces_list
            .is_complete
            .then_some(self.namespaces_list.term)
    }
}

/// Applies a namespace's labels. May take seconds: hold no lock.
pub fn apply(state: &ServerState, metadata: &ObjectMeta) {
    let Some((name, labels)) = name_and_labels(metadata) else {
        return;
    };
    let change = NamespaceObserved {
        name: name.clone(),
        labels,
    };
    state.apply_namespaces(change, |namespace| namespace == name);
}

/// Removes a namespace that is gone. May take seconds: hold no lock.
pub fn delete(state: &ServerState, metadata: &ObjectMeta) {
    let Some((name, _)) = name_and_labels(metadata) else {
        return;
    };
    state.apply_namespaces(NamespaceDeleted(name.clone()), |namespace| {
        namespace == name
    });
}

fn name_and_labels(metadata: &ObjectMeta) -> Option<(String, Arc<Labels>)> {
    Some((
        metadata.name.clone()?,
        Arc::new(metadata.labels.clone().unwrap_or_default()),
    ))
}
