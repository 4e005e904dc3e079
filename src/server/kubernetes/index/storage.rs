//! Brings persistent volumes, claims and storage classes into the view of kube-scheduler's filters, relisted like nodes.

use super::ClusterIndex;
use crate::service::Service;
use stowage_kubernetes_objects::StorageResource;
use stowage_scheduling::kube_filters::StorageKind;
use stowage_scheduling::verbs::observe::{StorageDeleted, StorageObserved};

impl ClusterIndex {
    pub(crate) fn apply_storage<K: StorageResource>(&mut self, service: &Service, object: &K) {
        let Some(name) = object.known_as() else {
            return;
        };
        if let Some(unlisted) = self.unlisted_storage.get_mut(&K::KIND) {
            unlisted.remove(&name);
        }
        service.cluster().apply(StorageObserved {
            name,
            object: object.object(),
        });
    }

    pub(crate) fn delete_storage<K: StorageResource>(&mut self, service: &Service, object: &K) {
        if let Some(name) = object.known_as() {
            service.cluster().apply(StorageDeleted {
                kind: K::KIND,
                name,
            });
        }
    }

    /// Begins a list of all objects of one kind.
    pub(crate) fn begin_storage(&mut self, service: &Service, kind: StorageKind) {
        let known = service.cluster().kube_filters().storage_names(kind);
        self.unlisted_storage
            .insert(kind, known.into_iter().collect());
    }

    /// Ends the list of one kind: objects known when it began and absent from it are gone.
    pub(crate) fn end_storage(&mut self, service: &Service, kind: StorageKind) {
        for name in self.unlisted_storage.remove(&kind).unwrap_or_default() {
            service.cluster().apply(StorageDeleted { kind, name });
        }
    }
}
