//! Brings persistent volumes, claims and storage classes into the view of kube-scheduler's filters, relisted like nodes.

use super::ClusterIndex;
use crate::service::ServerState;
use stowage_kubernetes_objects::StorageResource;
use stowage_scheduling::kube_filters::StorageKind;
use stowage_scheduling::verbs::observe::{StorageDeleted, StorageObserved};

impl ClusterIndex {
    pub(crate) fn apply_storage<K: StorageResource>(&mut self, state: &ServerState, object: &K) {
        let Some(name) = object.key() else {
            return;
        };
        if let Some(unlisted) = self.unlisted_storage.get_mut(&K::KIND) {
            unlisted.remove(&name);
        }
        state.cluster().apply(StorageObserved {
            name,
            object: object.to_storage_object(),
        });
    }

    pub(crate) fn delete_storage<K: StorageResource>(&mut self, state: &ServerState, object: &K) {
        if let Some(name) = object.key() {
            state.cluster().apply(StorageDeleted {
                kind: K::KIND,
                name,
            });
        }
    }

    /// Begins a list of all objects of one kind.
    pub(crate) fn begin_storage_list(&mut self, state: &ServerState, kind: StorageKind) {
        let names = state.cluster().kube_filters().storage_names(kind);
        self.unlisted_storage
            .insert(kind, names.into_iter().collect());
    }

    /// Ends the list of one kind: objects known when it began and absent from it are gone.
    pub(crate) fn end_storage_list(&mut self, state: &ServerState, kind: StorageKind) {
        for name in self.unlisted_storage.remove(&kind).unwrap_or_default() {
            state.cluster().apply(StorageDeleted { kind, name });
        }
    }
}
