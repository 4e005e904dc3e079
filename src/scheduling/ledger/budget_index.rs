//! Which disruption budgets cover a pod, found without asking each of them: a decision asks for thousands of pods, and nearly
//! every budget names a label's value.

use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::disruption_budget::DisruptionBudget;
use crate::vocabulary::disruption_info::PodHealth;
use crate::vocabulary::label_selector::{Rule, Selector};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The place of a budget that does not exist: a pod that several budgets cover is refused by the Eviction API whatever they
/// allow.
pub(crate) const SEVERAL: usize = usize::MAX;

/// Budgets of one namespace, with their rules and the values these name. A decision goes through all of them: beyond that
/// many, every pod of the namespace counts as covered by several.
const MOST_VALUES: usize = 4096;

#[derive(Default)]
pub(crate) struct BudgetIndex<'a> {
    budgets: &'a [Arc<DisruptionBudget>],
    by_namespace: FxHashMap<&'a str, Namespace<'a>>,
}

/// The budgets of one namespace, by their places.
#[derive(Default)]
struct Namespace<'a> {
    by_label: BTreeMap<&'a str, FxHashMap<&'a str, Vec<usize>>>,
    others: Vec<usize>,
    values: usize,
}

impl<'a> BudgetIndex<'a> {
    pub(super) fn new(budgets: &'a [Arc<DisruptionBudget>]) -> Self {
        let mut coverage = Self {
            budgets,
            ..Self::default()
        };
        for (place, budget) in budgets.iter().enumerate() {
            let namespace = coverage.by_namespace.entry(&budget.namespace).or_default();
            let wanted = wanted_label(&budget.selector);
            namespace.values += values_of(&budget.selector);
            match wanted.filter(|_| namespace.values <= MOST_VALUES) {
                Some((key, values)) => {
                    let of_key = namespace.by_label.entry(key).or_default();
                    values
                        .iter()
                        .for_each(|value| of_key.entry(value).or_default().push(place));
                }
                None => namespace.others.push(place),
            }
        }
        coverage
    }

    /// The budgets that the Eviction API asks about such a pod, as [`Self::of`] has them.
    pub(crate) fn asked(&self, pod: &PodTraits, health: PodHealth) -> Vec<usize> {
        let over = if health == PodHealth::Pending {
            Vec::new()
        } else {
            self.of(pod)
        };
        match &over[..] {
            [only] if health == PodHealth::Unready && self.budgets[*only].unhealthy_may_go => {
                Vec::new()
            }
            _ => over,
        }
    }

    /// The budgets that cover a pod, by their places in the list, and [`SEVERAL`] if they are several.
    pub(crate) fn of(&self, pod: &PodTraits) -> Vec<usize> {
        let Some(namespace) = self.by_namespace.get(&*pod.namespace) else {
            return Vec::new();
        };
        if namespace.values > MOST_VALUES {
            return vec![SEVERAL; 2];
        }
        let by_label = namespace
            .by_label
            .iter()
            .filter_map(|(key, of_key)| of_key.get(pod.labels.get(*key)?.as_str()))
            .flatten();
        let meant = by_label.chain(&namespace.others).copied();
        let mut over: Vec<usize> = meant
            .filter(|place| self.budgets[*place].covers(pod))
            .collect();
        if over.len() > 1 {
            over.push(SEVERAL);
        }
        over
    }
}

/// A label without one of whose values nothing is selected.
/// What there is to compare a pod with: each rule is looked at, too.
fn values_of(selector: &Selector) -> usize {
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

fn wanted_label(selector: &Selector) -> Option<(&str, &BTreeSet<String>)> {
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
                .filter(|place| budgets[*place].covers(&pod))
                .collect();
            if expected.len() > 1 {
                expected.push(SEVERAL);
            }
            let mut found = coverage.of(&pod);
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
            index.asked(&pod, PodHealth::Unready)
        };
        assert_eq!(of("large", "nobody's"), [SEVERAL; 2]);
        assert_eq!(
            (
                of("small", "0-1"),
                of("small", "nobody's"),
                index.of(&PodTraits::default())
            ),
            (vec![], vec![], vec![])
        );
    }
}
