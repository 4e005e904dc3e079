//! Disruption budgets, kept beside the pods they cover, so that one copy of the ledger is all a plan needs.
//!
//! They are kept, not interpreted: which pods may be evicted is for the search for victims to say.

use super::Ledger;
use super::pod_state::PodState;
use crate::ids::PodUid;
use crate::vocabulary::disruption_budget::{BudgetVisibility, DisruptionBudget};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct DisruptionBudgets {
    /// In order of namespace and name.
    budgets: Arc<Vec<Arc<DisruptionBudget>>>,
    visibility: BudgetVisibility,
}

impl DisruptionBudgets {
    /// In order of namespace and name.
    pub(super) fn all(&self) -> &[Arc<DisruptionBudget>] {
        &self.budgets
    }

    fn place_of(&self, namespace: &str, name: &str) -> Result<usize, usize> {
        self.budgets
            .binary_search_by(|budget| (&*budget.namespace, &*budget.name).cmp(&(namespace, name)))
    }

    fn set(&mut self, budget: DisruptionBudget) {
        match self.place_of(&budget.namespace, &budget.name) {
            Ok(place) => Arc::make_mut(&mut self.budgets)[place] = Arc::new(budget),
            Err(place) => Arc::make_mut(&mut self.budgets).insert(place, Arc::new(budget)),
        }
    }

    fn remove(&mut self, namespace: &str, name: &str) {
        if let Ok(place) = self.place_of(namespace, name) {
            Arc::make_mut(&mut self.budgets).remove(place);
        }
    }
}

impl Ledger {
    /// A budget as it is now, in place of the one of that name.
    pub(crate) fn set_budget(&mut self, budget: DisruptionBudget) {
        self.budgets.set(budget);
    }

    pub(crate) fn remove_budget(&mut self, namespace: &str, name: &str) {
        self.budgets.remove(namespace, name);
    }

    /// In order of namespace and name.
    pub fn budgets(&self) -> &[Arc<DisruptionBudget>] {
        self.budgets.all()
    }

    /// Whether [`Ledger::budgets`] are all there are. Where they are not, any pod may be covered by one that allows nothing:
    /// no pod is evicted.
    pub fn budgets_known(&self) -> bool {
        self.budgets.visibility == BudgetVisibility::Complete
    }

    /// Whether the pod's eviction waits for the disruption budgets that cover it. Of a pod that is not known it does.
    pub fn waits_for_budgets(&self, uid: &PodUid) -> bool {
        let class =
            |pod_state: &PodState| self.policy.class(pod_state.demand.class).honors_budgets();
        self.pod_states.get(uid).is_none_or(class)
    }

    pub(crate) fn set_budget_visibility(&mut self, visibility: BudgetVisibility) {
        self.budgets.visibility = visibility;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::label_selector::Selector;

    fn budget(namespace: &str, name: &str, allowed: u32) -> DisruptionBudget {
        DisruptionBudget {
            namespace: namespace.into(),
            name: name.into(),
            selector: Selector::EVERYTHING,
            allowed,
            unhealthy_may_go: false,
        }
    }

    #[test]
    fn budgets_stand_in_order_and_the_latest_of_a_name_counts() {
        let mut ledger = Ledger::default();
        ledger.set_budget(budget("b", "x", 1));
        ledger.set_budget(budget("a", "y", 2));
        ledger.set_budget(budget("a", "x", 3));
        ledger.set_budget(budget("b", "x", 0));
        let named = |budget: &Arc<DisruptionBudget>| {
            (
                budget.namespace.clone(),
                budget.name.clone(),
                budget.allowed,
            )
        };
        let all: Vec<_> = ledger.budgets().iter().map(named).collect();
        assert_eq!(
            all,
            [
                ("a".into(), "x".into(), 3),
                ("a".into(), "y".into(), 2),
                ("b".into(), "x".into(), 0)
            ]
        );
        ledger.remove_budget("a", "y");
        ledger.remove_budget("c", "x");
        assert_eq!(ledger.budgets().len(), 2);
    }

    #[test]
    fn budgets_are_known_until_reading_them_is_refused() {
        let mut ledger = Ledger::default();
        assert!(ledger.budgets_known());
        ledger.set_budget_visibility(BudgetVisibility::Forbidden);
        assert!(!ledger.budgets_known());
    }
}
