//! The classes and the tenant whose selectors match a namespace by its labels.
//!
//! The labels themselves are the ledger's. A policy keeps only what follows from them, so that a label that no selector asks for
//! changes nothing, and pods are classified by one look at their namespace.

use super::{NamespaceSelector, OveruseRule, Policy, Tenant};
use crate::vocabulary::classification::{ClassId, ClassSet, TenantId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The labels of one namespace.
pub type Labels = BTreeMap<String, String>;

/// The labels of all namespaces, as far as they are known, by name.
pub type NamespaceLabels = BTreeMap<String, Arc<Labels>>;

/// What the selectors of a policy say of one namespace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NamespaceSelection {
    /// Classes with a selector that takes it.
    pub classes: ClassSet,
    /// The first tenant with a selector that takes it.
    pub tenant: Option<TenantId>,
}

/// The label of namespaces whose pods an administrator lets see all GPUs.
pub const ALL_GPUS_LABEL: &str = "stowage.dev/all-gpus";
/// The namespace that needs no such label.
pub const ALL_GPUS_NAMESPACE: &str = "kube-system";

/// The namespaces that any selector takes, by name.
pub(crate) type NamespaceSelections = Arc<BTreeMap<String, NamespaceSelection>>;

impl Policy {
    /// Whether anything in it depends on the labels of namespaces.
    pub fn depends_on_namespace_labels(&self) -> bool {
        self.ungranted == OveruseRule::Evict
            || self
                .classes()
                .iter()
                .any(|class| class.matches.namespace_selector.is_some())
            || self
                .tenants()
                .iter()
                .any(|tenant| tenant.namespace_selector.is_some())
    }

    /// This policy, with what its selectors say of these namespaces.
    pub fn with_namespace_labels(self, labels: &NamespaceLabels) -> Self {
        let selected = match self.depends_on_namespace_labels() {
            true => labels
                .iter()
                .map(|(name, labels)| (name.clone(), self.select_by_labels(Some(labels))))
                .collect(),
            false => BTreeMap::new(),
        };
        let is_selected =
            |selection: &NamespaceSelection| *selection != NamespaceSelection::default();
        let selected: BTreeMap<_, _> = selected
            .into_iter()
            .filter(|(_, selection)| is_selected(selection))
            .collect();
        Self {
            namespace_selections: Arc::new(selected),
            ..self
        }
    }

    /// What its selectors say of a namespace with these labels; unknown labels are taken by none.
    pub(crate) fn select_by_labels(&self, labels: Option<&Labels>) -> NamespaceSelection {
        let Some(labels) = labels else {
            return NamespaceSelection::default();
        };
        let is_selected = |selector: &Option<NamespaceSelector>| {
            selector.as_ref().is_some_and(|one| one.matches(labels))
        };
        let classes = self.classes().iter().enumerate();
        let classes = classes.filter(|(_, class)| is_selected(&class.matches.namespace_selector));
        let is_its = |tenant: &Tenant| is_selected(&tenant.namespace_selector);
        NamespaceSelection {
            classes: classes
                .map(|(class_index, _)| ClassId::from_index(class_index))
                .collect(),
            tenant: self
                .tenants()
                .iter()
                .position(is_its)
                .map(TenantId::from_index),
        }
    }

    /// What its selectors say of every namespace that any takes.
    pub fn namespace_selections(&self) -> &NamespaceSelections {
        &self.namespace_selections
    }

    /// What its selectors say of a namespace, by what is known of it.
    pub fn namespace_selection(&self, namespace: &str) -> NamespaceSelection {
        self.namespace_selections
            .get(namespace)
            .copied()
            .unwrap_or_default()
    }

    /// Sets what the selectors say of a namespace. The caller gives the policy another version.
    pub(crate) fn set_namespace_selection(
        &mut self,
        namespace: &str,
        selection: NamespaceSelection,
    ) {
        let selected = Arc::make_mut(&mut self.namespace_selections);
        match selection == NamespaceSelection::default() {
            true => selected.remove(namespace),
            false => selected.insert(namespace.to_owned(), selection),
        };
    }

    /// The tenant of a namespace: by name first, then by patterns and selectors, in order of tenants.
    pub(super) fn tenant_of(&self, namespace: &str) -> Option<TenantId> {
        let named = self.tenants_by_namespace.get(namespace).copied();
        named.or_else(|| {
            let by_pattern = self
                .tenant_patterns
                .iter()
                .find(|(pattern, _)| super::selection::pattern_matches(pattern, namespace));
            let by_pattern = by_pattern.map(|(_, tenant)| *tenant);
            let by_labels = self.namespace_selection(namespace).tenant;
            by_pattern.into_iter().chain(by_labels).min()
        })
    }
}
