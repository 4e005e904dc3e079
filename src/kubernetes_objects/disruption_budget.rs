//! A PodDisruptionBudget, and the label selectors of Kubernetes objects.
//!
//! A budget's status is taken as the API server's controller computed it; nothing is counted here.

use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use stowage_scheduling::vocabulary::disruption_budget::DisruptionBudget;
use stowage_scheduling::vocabulary::label_selector::{Requirement, Selector, UnreadableRule};

/// A budget as the core takes it, or `None` if it has no name.
///
/// A selector that cannot be parsed covers the whole namespace: better to protect one pod too many.
pub fn budget(found: &PodDisruptionBudget) -> Option<DisruptionBudget> {
    let spec = found.spec.as_ref();
    let wanted = spec.and_then(|spec| spec.selector.as_ref());
    let policy = spec.and_then(|spec| spec.unhealthy_pod_eviction_policy.as_deref());
    let always_allows = policy == Some("AlwaysAllow");
    let status = found
        .status
        .as_ref()
        .filter(|status| is_current(status, found.metadata.generation));
    Some(DisruptionBudget {
        namespace: found
            .metadata
            .namespace
            .clone()
            .unwrap_or_else(|| "default".into()),
        name: found.metadata.name.clone()?,
        selector: wanted.map_or(Selector::Nothing, |wanted| {
            parse_selector(wanted).unwrap_or(Selector::EVERYTHING)
        }),
        allowed: status.map_or(0, |status| {
            status
                .disruptions_allowed
                .unwrap_or(0)
                .try_into()
                .unwrap_or(0)
        }),
        unhealthy_may_go: always_allows || status.is_some_and(is_healthy),
    })
}

/// A status older than the budget's spec is outdated: it allows no disruption.
fn is_current(status: &PodDisruptionBudgetStatus, generation: Option<i64>) -> bool {
    status.observed_generation.unwrap_or(0) >= generation.unwrap_or(0)
}

/// As the Eviction API compares it.
fn is_healthy(status: &PodDisruptionBudgetStatus) -> bool {
    let desired = status.desired_healthy.unwrap_or(0);
    desired > 0 && status.current_healthy.unwrap_or(0) >= desired
}

pub(super) fn parse_selector(found: &LabelSelector) -> Result<Selector, UnreadableRule> {
    let labels = found
        .match_labels
        .iter()
        .flatten()
        .map(|(key, value)| Ok(Requirement::equals(key, value)));
    let rules = found.match_expressions.iter().flatten().map(|rule| {
        Requirement::parse(
            &rule.key,
            &rule.operator,
            rule.values.as_deref().unwrap_or_default(),
        )
    });
    labels
        .chain(rules)
        .collect::<Result<_, _>>()
        .map(Selector::All)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::collections::BTreeMap;
    use stowage_scheduling::vocabulary::classification::PodTraits;

    fn read(spec: Value, status: Value) -> DisruptionBudget {
        let object = json!({
            "metadata": { "name": "chat", "namespace": "serving", "generation": 2 },
            "spec": spec,
            "status": status,
        });
        budget(&serde_json::from_value(object).unwrap()).unwrap()
    }

    fn covers(budget: &DisruptionBudget, app: &str) -> bool {
        let labels = BTreeMap::from([("app".to_owned(), app.to_owned())]);
        budget.covers(&PodTraits {
            namespace: "serving".into(),
            labels,
            ..PodTraits::default()
        })
    }

    #[test]
    fn labels_and_expressions_of_a_budget_must_all_hold() {
        let rule = json!({ "key": "app", "operator": "NotIn", "values": ["batch"] });
        let status = json!({ "disruptionsAllowed": 1, "observedGeneration": 2 });
        let of = |selector: Value| read(json!({ "selector": selector }), status.clone());
        let both = of(json!({ "matchLabels": { "app": "batch" }, "matchExpressions": [rule] }));
        assert!(!covers(&both, "batch") && !covers(&both, "chat"));
        let rule_alone = of(json!({ "matchExpressions": [rule] }));
        assert!(covers(&rule_alone, "chat") && !covers(&rule_alone, "batch"));
        assert!(covers(&of(json!({})), "anyone"));
        assert!(!covers(&read(json!({}), status.clone()), "anyone"));
    }

    #[test]
    fn a_selector_that_cannot_be_parsed_covers_every_pod() {
        let rule = json!({ "key": "app", "operator": "Resembles", "values": ["batch"] });
        let budget = read(
            json!({ "selector": { "matchExpressions": [rule] } }),
            json!({}),
        );
        assert!(covers(&budget, "chat"));
    }

    #[test]
    fn a_status_that_is_older_than_its_budget_or_missing_allows_nothing() {
        let allowed = |status| read(json!({ "selector": {} }), status).allowed;
        assert_eq!(
            allowed(json!({ "disruptionsAllowed": 3, "observedGeneration": 2 })),
            3
        );
        assert_eq!(
            allowed(json!({ "disruptionsAllowed": 3, "observedGeneration": 1 })),
            0
        );
        assert_eq!(allowed(json!({ "disruptionsAllowed": 3 })), 0);
        assert_eq!(
            allowed(json!({ "disruptionsAllowed": -1, "observedGeneration": 2 })),
            0
        );
        assert_eq!(allowed(Value::Null), 0);
    }
}
