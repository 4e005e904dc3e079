//! Brings the labels of namespaces into the cluster, relisted like pods and nodes, as long as a policy asks for them.

use super::ClusterIndex;
use crate::service::Service;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::sync::Arc;
use stowage_scheduling::policy::NamespaceLabels;
use stowage_scheduling::policy::namespaces::Labels;
use stowage_scheduling::verbs::namespaces::{NamespaceDeleted, NamespaceObserved};

impl ClusterIndex {
    /// The same for namespaces.
    pub(crate) fn expect_namespaces(&mut self, term: u64) {
        self.namespaces_list.expect(term);
    }

    pub(crate) fn begin_namespaces(&mut self) {
        self.listed_namespaces.clear();
    }

    /// One of a list, which counts as a whole at its end.
    pub(crate) fn list_namespace(&mut self, metadata: &ObjectMeta) {
        self.listed_namespaces.extend(named(metadata));
    }

    /// These are all namespaces, at the end of the list.
    pub(crate) fn listed_namespaces(&mut self) -> NamespaceLabels {
        std::mem::take(&mut self.listed_namespaces)
    }

    /// The cluster has the labels of all of them.
    pub(crate) fn end_namespaces(&mut self) {
        self.namespaces_list.is_complete = true;
    }

    /// Nothing shows them any more, unless a policy asks for them again.
    pub(crate) fn forget_namespaces(&mut self, service: &Service) {
        if service.forget_namespaces() {
            self.namespaces_list.is_complete = false;
            self.listed_namespaces.clear();
        }
    }

    /// The term since which every namespace has been seen once; `None` before that and during a list.
    pub(crate) fn namespaces_since(&self) -> Option<u64> {
        self.namespaces_list
            .is_complete
            .then_some(self.namespaces_list.term)
    }
}

/// A namespace as it is shown. May take seconds: hold no lock.
pub fn apply(service: &Service, metadata: &ObjectMeta) {
    let Some((name, labels)) = named(metadata) else {
        return;
    };
    let change = NamespaceObserved {
        name: name.clone(),
        labels,
    };
    service.apply_namespaces(change, |namespace| namespace == name);
}

/// The same of one that is gone.
pub fn delete(service: &Service, metadata: &ObjectMeta) {
    let Some((name, _)) = named(metadata) else {
        return;
    };
    service.apply_namespaces(NamespaceDeleted(name.clone()), |namespace| {
        namespace == name
    });
}

fn named(metadata: &ObjectMeta) -> Option<(String, Arc<Labels>)> {
    Some((
        metadata.name.clone()?,
        Arc::new(metadata.labels.clone().unwrap_or_default()),
    ))
}
