//! Brings disruption budgets into the ledger, relisted like pods and nodes, and handles clusters where they may not be read.

use super::ClusterIndex;
use crate::service::Service;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::verbs::observe::{BudgetDeleted, BudgetObserved, BudgetsVisible};
use stowage_scheduling::vocabulary::disruption_budget::BudgetVisibility;

impl ClusterIndex {
    pub(crate) fn apply_budget(&mut self, service: &Service, budget: &PodDisruptionBudget) {
        let Some(budget) = objects::budget(budget) else {
            return;
        };
        self.unlisted_budgets
            .remove(&(budget.namespace.clone(), budget.name.clone()));
        service.cluster().apply(BudgetObserved(budget));
    }

    pub(crate) fn delete_budget(&mut self, service: &Service, budget: &PodDisruptionBudget) {
        if let Some(budget) = objects::budget(budget) {
            service.cluster().apply(BudgetDeleted {
                namespace: budget.namespace.clone(),
                name: budget.name.clone(),
            });
        }
    }

    /// Marks the budget list incomplete unless it was begun in this term of leadership or later.
    pub(crate) fn expect_budgets(&mut self, term: u64) {
        self.budgets_list.expect(term);
    }

    pub(crate) fn begin_budgets(&mut self, service: &Service) {
        let ledger = service.cluster();
        let named = ledger
            .ledger()
            .budgets()
            .iter()
            .map(|budget| (budget.namespace.clone(), budget.name.clone()));
        self.unlisted_budgets = named.collect();
    }

    /// Ends the list: budgets that it did not contain are gone.
    pub(crate) fn end_budgets(&mut self, service: &Service) {
        let mut ledger = service.cluster();
        for (namespace, name) in std::mem::take(&mut self.unlisted_budgets) {
            ledger.apply(BudgetDeleted {
                namespace: namespace.clone(),
                name: name.clone(),
            });
        }
        ledger.apply(BudgetsVisible(BudgetVisibility::Complete));
        self.budgets_list.is_complete = true;
    }

    /// Records that budgets may not be read. Pods are placed without them, and no pod is evicted.
    pub(crate) fn forbid_budgets(&mut self, service: &Service) {
        self.budgets_list.is_complete = true;
        service
            .cluster()
            .apply(BudgetsVisible(BudgetVisibility::Forbidden));
    }
}
