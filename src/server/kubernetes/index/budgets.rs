//! Brings disruption budgets into the ledger, relisted like pods and nodes, and handles clusters where they may not be read.

use super::ClusterIndex;
use crate::service::ServerState;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::verbs::observe::{BudgetDeleted, BudgetObserved, BudgetsVisible};
use stowage_scheduling::vocabulary::disruption_budget::BudgetVisibility;

impl ClusterIndex {
    pub(crate) fn apply_budget(&mut self, state: &ServerState, budget: &PodDisruptionBudget) {
        let Some(budget) = objects::budget(budget) else {
            return;
        };
        self.unlisted_budgets
            .remove(&(budget.namespace.clone(), budget.name.clone()));
        state.cluster().apply(BudgetObserved(budget));
    }

    pub(crate) fn delete_budget(&mut self, state: &ServerState, budget: &PodDisruptionBudget) {
        if let Some(budget) = objects::budget(budget) {
            state.cluster().apply(BudgetDeleted {
                namespace: budget.namespace.clone(),
                name: budget.name.clone(),
            });
        }
    }

    /// Marks the budget list incomplete unless it was begun in this term of leadership or later.
    pub(crate) fn expect_budget_list(&mut self, term: u64) {
        self.budgets_list.expect(term);
    }

    pub(crate) fn begin_budget_list(&mut self, state: &ServerState) {
        let cluster = state.cluster();
        let names = cluster
            .ledger()
            .budgets()
            .iter()
            .map(|budget| (budget.namespace.clone(), budget.name.clone()));
        self.unlisted_budgets = names.collect();
    }

    /// Ends the list: budgets that it did not contain are gone.
    pub(crate) fn end_budget_list(&mut self, state: &ServerState) {
        let mut cluster = state.cluster();
        for (namespace, name) in std::mem::take(&mut self.unlisted_budgets) {
            cluster.apply(BudgetDeleted {
                namespace: namespace.clone(),
                name: name.clone(),
            });
        }
        cluster.apply(BudgetsVisible(BudgetVisibility::Complete));
        self.budgets_list.is_complete = true;
    }

    /// Records that budgets may not be read. Pods are placed without them, and no pod is evicted.
    pub(crate) fn mark_budgets_forbidden(&mut self, state: &ServerState) {
        self.budgets_list.is_complete = true;
        state
            .cluster()
            .apply(BudgetsVisible(BudgetVisibility::Forbidden));
    }
}
