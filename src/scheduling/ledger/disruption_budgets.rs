//! Disruption budgets, kept beside the pods they cover, so that one copy of the ledger is all a plan needs.
//!
//! They are kept, not interpreted: which pods may be evicted is for the search for victims to say. [`BudgetIndex`]
//! finds the budgets that cover a pod without asking each of them: a decision asks for thousands of pods, and nearly every budget
//! names a label's value.

use super::Ledger;
use super::pod_state::PodState;
use crate::ids::PodUid;
use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::disruption_budget::{BudgetVisibility, DisruptionBudget};
use crate::vocabulary::disruption_info::PodHealth;
use crate::vocabulary::label_selector::{Rule, Selector};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
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

    fn index_of(&self, namespace: &str, name: &str) -> Result<usize, usize> {
        self.budgets
            .binary_search_by(|budget| (&*budget.namespace, &*budget.name).cmp(&(namespace, name)))
    }

    fn set(&mut self, budget: DisruptionBudget) {
        match self.index_of(&budget.namespace, &budget.name) {
            Ok(index) => Arc::make_mut(&mut self.budgets)[index] = Arc::new(budget),
            Err(index) => Arc::make_mut(&mut self.budgets).insert(index, Arc::new(budget)),
        }
    }

    fn remove(&mut self, namespace: &str, name: &str) {
        if let Ok(index) = self.index_of(namespace, name) {
            Arc::make_mut(&mut self.budgets).remove(index);
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
    pub fn are_budgets_known(&self) -> bool {
        self.budgets.visibility == BudgetVisibility::Complete
    }

    /// Whether the pod's eviction waits for the disruption budgets that cover it; `true` for a pod that is not in the ledger.
    pub fn honors_budgets(&self, uid: &PodUid) -> bool {
        let class_honors_budgets =
            |pod_state: &PodState| self.policy.class(pod_state.demand.class).honors_budgets();
        self.pod_states.get(uid).is_none_or(class_honors_budgets)
    }

    pub(crate) fn set_budget_visibility(&mut self, visibility: BudgetVisibility) {
        self.budgets.visibility = visibility;
    }
}

/// The index of a budget that does not exist. It stands for several budgets: the Eviction API evicts no pod that several cover,
/// whatever they allow.
const SEVERAL_BUDGETS: usize = usize::MAX;

/// The most budgets, requirements and values of one namespace. A decision goes through all of them: beyond that many, every pod
/// of the namespace counts as covered by several.
const MAX_VALUES_PER_NAMESPACE: usize = 4096;

#[derive(Default)]
pub(crate) struct BudgetIndex<'a> {
    budgets: &'a [Arc<DisruptionBudget>],
    by_namespace: FxHashMap<&'a str, NamespaceBudgets<'a>>,
}

/// The budgets of one namespace, by their indices.
#[derive(Default)]
struct NamespaceBudgets<'a> {
    by_label: BTreeMap<&'a str, FxHashMap<&'a str, Vec<usize>>>,
    without_required_label: Vec<usize>,
    value_count: usize,
}

impl<'a> BudgetIndex<'a> {
    pub(super) fn new(budgets: &'a [Arc<DisruptionBudget>]) -> Self {
        let mut index = Self {
            budgets,
            ..Self::default()
        };
        for (budget_index, budget) in budgets.iter().enumerate() {
            let namespace = index.by_namespace.entry(&budget.namespace).or_default();
            let required = required_label(&budget.selector);
            namespace.value_count += count_values(&budget.selector);
            match required.filter(|_| namespace.value_count <= MAX_VALUES_PER_NAMESPACE) {
                Some((key, values)) => {
                    let by_value = namespace.by_label.entry(key).or_default();
                    values
                        .iter()
                        .for_each(|value| by_value.entry(value).or_default().push(budget_index));
                }
                None => namespace.without_required_label.push(budget_index),
            }
        }
        index
    }

    /// The budgets that the Eviction API consults for such a pod, in the form of [`Self::covering`].
    pub(crate) fn consulted_by_eviction(&self, pod: &PodTraits, health: PodHealth) -> Vec<usize> {
        let covering = if health == PodHealth::Pending {
            Vec::new()
        } else {
            self.covering(pod)
        };
        match &covering[..] {
            [only] if health == PodHealth::Unready && self.budgets[*only].unhealthy_may_go => {
                Vec::new()
            }
            _ => covering,
        }
    }

    /// The budgets that cover a pod, by their indices in the list, and [`SEVERAL_BUDGETS`] if they are several.
    pub(crate) fn covering(&self, pod: &PodTraits) -> Vec<usize> {
        let Some(namespace) = self.by_namespace.get(&*pod.namespace) else {
            return Vec::new();
        };
        if namespace.value_count > MAX_VALUES_PER_NAMESPACE {
            return vec![SEVERAL_BUDGETS; 2];
        }
        let by_label = namespace
            .by_label
            .iter()
            .filter_map(|(key, of_key)| of_key.get(pod.labels.get(*key)?.as_str()))
            .flatten();
        let candidates = by_label.chain(&namespace.without_required_label).copied();
        let mut covering: Vec<usize> = candidates
            .filter(|index| self.budgets[*index].covers(pod))
            .collect();
        if covering.len() > 1 {
            covering.push(SEVERAL_BUDGETS);
        }
        covering
    }
}

/// How many comparisons a pod takes with this selector: one for the budget, and for each requirement one for its rule and one
/// for each of its values.
fn count_values(selector: &Selector) -> usize {
    let Selector::All(requirements) = selector else {
        return 1;
    };
    let values = requirements
        .iter()
        .map(|requirement| match &requirement.rule {
            Rule::In(values) | Rule::NotIn(values) => 1 + values.len(),
            Rule::Exists | Rule::DoesNotExist | Rule::Above(_) | Rule::Below(_) => 1,
        });
    1 + values.sum::<usize>()
}

fn required_label(selector: &Selector) -> Option<(&str, &BTreeSet<String>)> {
    let Selector::All(requirements) = selector else {
        return None;
    };
    requirements
        .iter()
        .find_map(|requirement| match &requirement.rule {
            Rule::In(values) => Some((&*requirement.key, values)),
            _ => None,
        })
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
    fn budgets_are_sorted_and_a_later_one_replaces_its_namesake() {
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
        assert!(ledger.are_budgets_known());
        ledger.set_budget_visibility(BudgetVisibility::Forbidden);
        assert!(!ledger.are_budgets_known());
    }
}

#[cfg(test)]
mod budget_index_tests {
    use super::*;
    use crate::vocabulary::label_selector::Requirement;

    #[test]
    fn every_budget_that_covers_a_pod_is_found_and_no_other() {
        let requirement = |key: &str, operator: &str, values: &[&str]| {
            let values: Vec<String> = values.iter().map(ToString::to_string).collect();
            Requirement::parse(key, operator, &values).unwrap()
        };
        let rules = [
            vec![],
            vec![requirement("app", "In", &["a", "b"])],
            vec![requirement("app", "NotIn", &["a"])],
            vec![
                requirement("tier", "Exists", &[]),
                requirement("app", "In", &["b"]),
            ],
        ];
        let selectors = rules
            .into_iter()
            .map(Selector::All)
            .chain([Selector::Nothing]);
        let budgets: Vec<Arc<DisruptionBudget>> = selectors
            .flat_map(|selector| {
                let of = |namespace: &str| DisruptionBudget {
                    namespace: namespace.into(),
                    name: "one".into(),
                    selector: selector.clone(),
                    allowed: 1,
                    unhealthy_may_go: false,
                };
                [of("here"), of("there")].map(Arc::new)
            })
            .collect();
        let coverage = BudgetIndex::new(&budgets);
        let labels = [
            vec![],
            vec![("app", "a")],
            vec![("app", "b"), ("tier", "x")],
            vec![("tier", "y")],
        ];
        for (namespace, labels) in labels
            .iter()
            .flat_map(|labels| [("here", labels), ("nowhere", labels)])
        {
            let labels = labels
                .iter()
                .map(|(key, value)| (key.to_string(), value.to_string()))
                .collect();
            let pod = PodTraits {
                namespace: namespace.into(),
                labels,
                ..PodTraits::default()
            };
            let mut expected: Vec<usize> = (0..budgets.len())
                .filter(|index| budgets[*index].covers(&pod))
                .collect();
            if expected.len() > 1 {
                expected.push(SEVERAL_BUDGETS);
            }
            let mut found = coverage.covering(&pod);
            found.sort_unstable();
            assert_eq!(found, expected, "{pod:?}");
        }
    }

    #[test]
    fn a_namespace_with_more_values_than_are_gone_through_protects_all_its_pods_and_no_others() {
        let budget = |namespace: &str, name: usize| {
            let values: Vec<String> = (0..100).map(|value| format!("{name}-{value}")).collect();
            let selector = Selector::All(vec![Requirement::one_of("app", &values)]);
            let namespace = namespace.to_owned();
            let budget = DisruptionBudget {
                namespace,
                name: name.to_string(),
                selector,
                allowed: 9,
                unhealthy_may_go: true,
            };
            Arc::new(budget)
        };
        let budgets: Vec<_> = (0..60)
            .map(|n| budget("large", n))
            .chain([budget("small", 0)])
            .collect();
        let index = BudgetIndex::new(&budgets);
        let of = |namespace: &str, app: &str| {
            let labels = BTreeMap::from([("app".to_owned(), app.to_owned())]);
            let pod = PodTraits {
                namespace: namespace.into(),
                labels,
                ..PodTraits::default()
            };
            index.consulted_by_eviction(&pod, PodHealth::Unready)
        };
        assert_eq!(of("large", "nobody's"), [SEVERAL_BUDGETS; 2]);
        assert_eq!(
            (
                of("small", "0-1"),
                of("small", "nobody's"),
                index.covering(&PodTraits::default())
            ),
            (vec![], vec![], vec![])
        );
    }
}
