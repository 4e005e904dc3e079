//! Disruption budgets: how many pods of a set may be evicted now.
//!
//! PodDisruptionBudgets as data, so that the price of a victim set and the planner can respect them before the API server has
//! to refuse. The API server decides: what it makes of an eviction is not repeated here.

use super::classification::PodTraits;
use super::label_selector::Selector;
use serde::{Deserialize, Serialize};

/// A PodDisruptionBudget as its owner and its controller last left it.
///
/// The Eviction API refuses a pod that two budgets cover, whatever they allow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisruptionBudget {
    pub namespace: String,
    pub name: String,
    /// Selects pods of its namespace. [`Selector::Nothing`] covers none, [`Selector::EVERYTHING`] all of them.
    pub selector: Selector,
    /// How many of those it covers may be evicted now (`status.disruptionsAllowed`); none while that was computed for an
    /// older version of the budget.
    pub allowed: u32,
    /// Pods of it that are not Ready may be evicted whatever it allows: it says so (`AlwaysAllow`), or as many are healthy as it
    /// wants.
    #[serde(default)]
    pub unhealthy_may_go: bool,
}

/// Whether the cluster's budgets can be seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BudgetVisibility {
    /// The ledger's are all there are.
    #[default]
    Complete,
    /// Stowage may not read them: any pod may be covered by one that allows nothing.
    Forbidden,
}

impl DisruptionBudget {
    /// Whether this pod is one of those it counts.
    pub fn covers(&self, pod: &PodTraits) -> bool {
        self.namespace == pod.namespace && self.selector.matches(&pod.labels)
    }
}

#[cfg(test)]
mod tests {
    use super::super::label_selector::Requirement;
    use super::*;
    use std::collections::BTreeMap;

    fn pod(namespace: &str, app: &str) -> PodTraits {
        let labels = BTreeMap::from([("app".to_owned(), app.to_owned())]);
        PodTraits {
            namespace: namespace.into(),
            labels,
            ..PodTraits::default()
        }
    }

    fn budget(selector: Selector) -> DisruptionBudget {
        DisruptionBudget {
            namespace: "serving".into(),
            name: "chat".into(),
            selector,
            allowed: 1,
            unhealthy_may_go: false,
        }
    }

    #[test]
    fn a_budget_covers_what_it_selects_in_its_own_namespace_only() {
        let budget = budget(Selector::All(vec![Requirement::equals("app", "chat")]));
        assert!(budget.covers(&pod("serving", "chat")));
        assert!(!budget.covers(&pod("serving", "batch")));
        assert!(!budget.covers(&pod("other", "chat")));
    }

    #[test]
    fn a_budget_with_an_empty_selector_covers_its_whole_namespace_and_one_with_none_no_pod() {
        assert!(budget(Selector::EVERYTHING).covers(&pod("serving", "chat")));
        assert!(!budget(Selector::EVERYTHING).covers(&pod("other", "chat")));
        assert!(!budget(Selector::Nothing).covers(&pod("serving", "chat")));
    }
}
