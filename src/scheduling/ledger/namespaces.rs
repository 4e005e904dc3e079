//! The labels of namespaces, and which pods are something else because of them.
//!
//! The ledger keeps the labels, for a policy to come; the policy keeps what its selectors say of them. A label that no selector
//! asks for changes nothing. Otherwise the policy has another version, because a pod that was classified a moment ago may be
//! something else now, and only the pods of the namespaces concerned are classified again.

use super::Ledger;
use crate::ids::PodUid;
use crate::scheduling::policy::namespaces::{Labels, NamespaceLabels};
use crate::scheduling::policy::{NamespaceSelection, Policy};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

impl Ledger {
    /// The labels of all namespaces, as far as they are known.
    pub fn namespaces(&self) -> &NamespaceLabels {
        &self.namespaces
    }

    /// A policy as it would be in force here: with what its selectors say of the known namespaces.
    pub fn under_namespaces(&self, policy: Policy) -> Policy {
        policy.with_namespaces(&self.namespaces)
    }

    /// The labels of a namespace; `None` if it is gone. Answers whether the policy says something else of it now.
    pub(in crate::scheduling) fn set_namespace(&mut self, name: &str, labels: Option<Arc<Labels>>) -> bool {
        if self.namespaces.get(name) == labels.as_ref() {
            return false;
        }
        let selection = self.policy.selection_of(labels.as_deref());
        let known = Arc::make_mut(&mut self.namespaces);
        match labels {
            Some(labels) => known.insert(name.to_owned(), labels),
            None => known.remove(name),
        };
        let changed = selection != self.policy.selection(name);
        self.select(changed.then(|| (name.to_owned(), selection)).into_iter().collect())
    }

    /// These are all namespaces, with their labels. Answers whether the policy says something else of any of them now.
    pub(in crate::scheduling) fn set_namespaces(&mut self, all: NamespaceLabels) -> bool {
        let before = std::mem::replace(&mut self.namespaces, Arc::new(all));
        let names: BTreeSet<&String> = before.keys().chain(self.namespaces.keys()).collect();
        let change = |name: &&String| {
            let selection = self.policy.selection_of(self.namespaces.get(*name).map(Arc::as_ref));
            (selection != self.policy.selection(name)).then(|| ((*name).clone(), selection))
        };
        let changes = names.iter().filter_map(change).collect();
        self.select(changes)
    }

    /// The policy says this of these namespaces from now on. Pods that are bound stay bound, as under another policy.
    fn select(&mut self, changes: BTreeMap<String, NamespaceSelection>) -> bool {
        if changes.is_empty() {
            return false;
        }
        let mut policy = Policy::clone(&self.policy);
        policy.version += 1;
        changes.iter().for_each(|(name, selection)| policy.select(name, *selection));
        self.policy = Arc::new(policy);
        let is_concerned = |uid: &PodUid| {
            self.pod_states.get(uid).is_some_and(|pod| changes.contains_key(&pod.demand.traits.namespace))
        };
        let pods = self.pod_states.in_no_order().map(|(uid, _)| uid).filter(|uid| is_concerned(uid));
        // In order, because what the pods change on their nodes is numbered.
        let pods: BTreeSet<PodUid> = pods.cloned().collect();
        for uid in &pods {
            let classification = self.policy.classify(&self.pod_states[uid].demand.traits);
            self.edit_pod(uid, |pod_state| pod_state.demand.take(classification));
        }
        // What was not to be evicted may be now.
        self.requeue_all();
        true
    }
}
