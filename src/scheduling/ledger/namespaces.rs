//! The labels of namespaces, and which pods are something else because of them.
//!
//! The ledger keeps the labels, for a policy to come; the policy keeps what its selectors say of them. A label that no selector
//! asks for changes nothing. Otherwise it is as if another policy came into force, with another version, because a pod that was
//! classified a moment ago may be something else now; but only the pods of the namespaces concerned are classified again. Like
//! another policy it can be prepared beside the lock.

use super::Ledger;
use super::set_policy::{PreparedPolicy, RetiredPolicy};
use crate::policy::namespaces::Labels;
use crate::policy::{NamespaceLabels, NamespaceSelection, Policy};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Other labels of namespaces, by name; `None` for a namespace that is gone.
pub(crate) type NamespaceEdits = BTreeMap<String, Option<Arc<Labels>>>;

/// Other labels and everything that follows from them, made of a copy of a ledger.
#[derive(Debug)]
pub(crate) struct PreparedLabels(PreparedPolicy);

impl PreparedLabels {
    /// `copy` is [`Ledger::scratch`] of the ledger in which these labels shall be known. Answers `None` if its policy says the same
    /// of all namespaces.
    pub fn new(copy: Ledger, edits: NamespaceEdits) -> Option<Self> {
        let selections = copy.other_selections(&edits);
        (!selections.is_empty()).then(|| Self(PreparedPolicy::of_labels(copy, edits, &selections)))
    }

    /// The same, made of a later copy of the same ledger, for which the edits are these.
    pub fn caught_up(self, copy: Ledger, edits: NamespaceEdits) -> Option<Self> {
        match self.0.is_current(&copy) {
            true => Some(Self(self.0.brought_to(copy))),
            false => Self::new(copy, edits),
        }
    }
}

impl Ledger {
    /// The labels of all namespaces, as far as they are known.
    pub fn namespaces(&self) -> &NamespaceLabels {
        &self.namespaces
    }

    /// A policy as it would be in force here: with what its selectors say of the known namespaces.
    pub fn under_namespaces(&self, policy: Policy) -> Policy {
        policy.with_namespaces(&self.namespaces)
    }

    /// Namespaces have these labels from now on. Answers what was in force before if the policy says something else of any of
    /// them now.
    pub(crate) fn edit_namespaces(&mut self, edits: NamespaceEdits) -> Option<RetiredPolicy> {
        let selections = self.other_selections(&edits);
        if selections.is_empty() {
            self.note_labels(edits);
            return None;
        }
        Some(self.take_current(PreparedPolicy::of_labels(
            self.scratch(),
            edits,
            &selections,
        )))
    }

    /// The same, prepared; if its preparation is out of date, answers `None`, and nothing has changed.
    pub(crate) fn take_labels(&mut self, prepared: PreparedLabels) -> Option<RetiredPolicy> {
        prepared
            .0
            .is_current(self)
            .then(|| self.take_current(prepared.0))
    }

    /// What the policy says of the namespaces of which it says something else by these labels.
    fn other_selections(&self, edits: &NamespaceEdits) -> BTreeMap<String, NamespaceSelection> {
        let selections = edits
            .iter()
            .map(|(name, labels)| (name, self.policy.selection_of(labels.as_deref())));
        let others =
            selections.filter(|(name, selection)| *selection != self.policy.selection(name));
        others
            .map(|(name, selection)| (name.clone(), selection))
            .collect()
    }

    pub(super) fn note_labels(&mut self, edits: NamespaceEdits) {
        let known = Arc::make_mut(&mut self.namespaces);
        for (name, labels) in edits {
            match labels {
                Some(labels) => known.insert(name, labels),
                None => known.remove(&name),
            };
        }
    }
}
