//! Persistent volumes, claims and storage classes, as inputs: the planner evaluates by them where a pod with volumes may run.

use super::{Change, Cluster};
use crate::kube_filters::{StorageKind, StorageObject};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// An object of storage as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageObserved {
    /// Of a claim `namespace/name`.
    pub name: Arc<str>,
    pub object: StorageObject,
}

/// The object is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageDeleted {
    pub kind: StorageKind,
    pub name: Arc<str>,
}

impl Change for StorageObserved {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.kube_filters.set_storage(self.name, self.object);
    }
}

impl Change for StorageDeleted {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        cluster.kube_filters.remove_storage(self.kind, &self.name);
    }
}
