//! What the watch of namespaces shows, as inputs: their labels, for the selectors of a policy.

use super::{Change, Cluster};
use crate::scheduling::policy::NamespaceLabels;
use crate::scheduling::policy::namespaces::Labels;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// These are all namespaces, with their labels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespacesListed(pub NamespaceLabels);

/// A namespace as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceObserved {
    pub name: String,
    pub labels: Arc<Labels>,
}

/// The namespace is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceDeleted(pub String);

impl Change for NamespacesListed {
    /// Whether the policy says something else of any namespace now; it has another version then.
    type Output = bool;

    fn apply_to(self, cluster: &mut Cluster) -> bool {
        cluster.ledger.set_namespaces(self.0)
    }
}

impl Change for NamespaceObserved {
    /// The same.
    type Output = bool;

    fn apply_to(self, cluster: &mut Cluster) -> bool {
        cluster.ledger.set_namespace(&self.name, Some(self.labels))
    }
}

impl Change for NamespaceDeleted {
    /// The same.
    type Output = bool;

    fn apply_to(self, cluster: &mut Cluster) -> bool {
        cluster.ledger.set_namespace(&self.0, None)
    }
}
