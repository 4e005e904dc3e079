//! What the watch of namespaces shows, as inputs: their labels, for the selectors of a policy.

use super::{Change, Cluster};
use crate::ledger::{Ledger, NamespaceEdits, PreparedLabels, RetiredPolicy};
use crate::policy::NamespaceLabels;
use crate::policy::namespaces::Labels;
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

/// Other labels of namespaces.
///
/// Applied, it answers what was in force before, to be dropped beside the lock, if the policy says something else of any namespace
/// now; it has another version then.
pub trait NamespaceChange: Change<Output = Option<RetiredPolicy>> {
    /// The labels that are others than those known.
    fn edits(&self, current: &NamespaceLabels) -> NamespaceEdits;
}

/// A change of namespaces, prepared beside the lock. It is recorded as the change itself.
#[derive(Debug)]
pub struct NamespacesPrepared<C> {
    pub change: C,
    prepared: Option<PreparedLabels>,
}

impl<C: NamespaceChange> NamespacesPrepared<C> {
    /// `copy` is [`Ledger::scratch`] of the ledger that the change is for.
    pub fn new(change: C, copy: Ledger) -> Self {
        let edits = change.edits(copy.namespaces());
        Self {
            change,
            prepared: PreparedLabels::new(copy, edits),
        }
    }

    /// Whether anything had to be prepared.
    pub fn is_prepared(&self) -> bool {
        self.prepared.is_some()
    }

    /// Prepares the change again with a later copy: less has changed since then.
    pub fn caught_up(self, copy: Ledger) -> Self {
        let edits = self.change.edits(copy.namespaces());
        let prepared = self
            .prepared
            .and_then(|prepared| prepared.caught_up(copy, edits));
        Self { prepared, ..self }
    }
}

impl<C: NamespaceChange> Change for NamespacesPrepared<C> {
    type Output = Option<RetiredPolicy>;

    fn apply_to(self, cluster: &mut Cluster) -> Option<RetiredPolicy> {
        let taken = self
            .prepared
            .and_then(|prepared| cluster.ledger.install_labels(prepared));
        taken.or_else(|| self.change.apply_to(cluster))
    }
}

impl NamespaceChange for NamespacesListed {
    fn edits(&self, current: &NamespaceLabels) -> NamespaceEdits {
        let gone = current
            .keys()
            .filter(|name| !self.0.contains_key(*name))
            .map(|name| (name.clone(), None));
        let others = self
            .0
            .iter()
            .filter(|(name, labels)| current.get(*name) != Some(labels));
        gone.chain(others.map(|(name, labels)| (name.clone(), Some(labels.clone()))))
            .collect()
    }
}

impl NamespaceChange for NamespaceObserved {
    fn edits(&self, current: &NamespaceLabels) -> NamespaceEdits {
        let is_another = current.get(&self.name) != Some(&self.labels);
        is_another
            .then(|| (self.name.clone(), Some(self.labels.clone())))
            .into_iter()
            .collect()
    }
}

impl NamespaceChange for NamespaceDeleted {
    fn edits(&self, current: &NamespaceLabels) -> NamespaceEdits {
        current
            .contains_key(&self.0)
            .then(|| (self.0.clone(), None))
            .into_iter()
            .collect()
    }
}

impl Change for NamespacesListed {
    type Output = Option<RetiredPolicy>;

    fn apply_to(self, cluster: &mut Cluster) -> Option<RetiredPolicy> {
        cluster
            .ledger
            .edit_namespaces(self.edits(cluster.ledger().namespaces()))
    }
}

impl Change for NamespaceObserved {
    type Output = Option<RetiredPolicy>;

    fn apply_to(self, cluster: &mut Cluster) -> Option<RetiredPolicy> {
        cluster
            .ledger
            .edit_namespaces(self.edits(cluster.ledger().namespaces()))
    }
}

impl Change for NamespaceDeleted {
    type Output = Option<RetiredPolicy>;

    fn apply_to(self, cluster: &mut Cluster) -> Option<RetiredPolicy> {
        cluster
            .ledger
            .edit_namespaces(self.edits(cluster.ledger().namespaces()))
    }
}
