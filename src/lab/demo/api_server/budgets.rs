//! Disruption budgets, as far as evictions depend on them.
//!
//! No controller counts pods here: a budget's status says what it allows, and each eviction takes one of it.

use super::defaults::object_at;
use super::error::ApiError;
use super::resource::Resource;
use super::store::{ObjectKey, Store};
use super::write;
use jiff::Timestamp;
use serde_json::{Value, json};
use std::sync::Arc;

/// Takes one disruption of the budget that covers the pod, if one does.
pub fn check_and_decrement(store: &mut Store, pod: &Value, now: Timestamp) -> Result<(), ApiError> {
    if can_ignore_budget(pod) {
        return Ok(());
    }
    match matching_budgets(store, pod).as_slice() {
        [] => Ok(()),
        [budget] if may_evict_unready(budget, pod) => Ok(()),
        [budget] => decrement(store, budget, pod, now),
        _ => Err(ApiError::internal(
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
        )),
    }
}

/// Whether an eviction of the pod needs no budget: it is pending, has ended, or terminates already.
fn can_ignore_budget(pod: &Value) -> bool {
    let phase = pod["status"]["phase"].as_str();
    matches!(phase, Some("Pending" | "Succeeded" | "Failed"))
        || !pod["metadata"]["deletionTimestamp"].is_null()
}

/// A pod that is not ready serves no requests: it may always be evicted, or (the default) while enough other pods are healthy.
fn may_evict_unready(budget: &Value, pod: &Value) -> bool {
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let is_ready =
        conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
    let healthy = || {
        let number = |field: &str| budget["status"][field].as_i64().unwrap_or_default();
        number("desiredHealthy") > 0 && number("currentHealthy") >= number("desiredHealthy")
    };
    !is_ready && (budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" || healthy())
}

fn matching_budgets(store: &Store, pod: &Value) -> Vec<Arc<Value>> {
    let Some(budgets) = Resource::named("poddisruptionbudgets") else {
        return Vec::new();
    };
    let covers = |budget: &&Arc<Value>| {
        budget["metadata"]["namespace"] == pod["metadata"]["namespace"]
            && selects(&budget["spec"]["selector"], &pod["metadata"]["labels"])
    };
    store.list(budgets).filter(covers).cloned().collect()
}

/// An empty selector is all pods of the namespace, none is no pod.
fn selects(selector: &Value, labels: &Value) -> bool {
    let Some(selector) = selector.as_object() else {
        return false;
    };
    let mut equal = selector
        .get("matchLabels")
        .and_then(Value::as_object)
        .into_iter()
        .flatten();
    let mut terms = selector
        .get("matchExpressions")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    equal.all(|(key, value)| labels[key] == *value)
        && terms.all(|term| matches_requirement(term, labels))
}

fn matches_requirement(term: &Value, labels: &Value) -> bool {
    let label = term["key"].as_str().and_then(|key| labels[key].as_str());
    let is_named = || {
        let values = term["values"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str);
        label.is_some_and(|label| values.into_iter().any(|value| value == label))
    };
    match term["operator"].as_str() {
        Some("In") => is_named(),
        Some("NotIn") => !is_named(),
        Some("Exists") => label.is_some(),
        Some("DoesNotExist") => label.is_none(),
        _ => false,
    }
}

fn decrement(
    store: &mut Store,
    budget: &Value,
    pod: &Value,
    now: Timestamp,
) -> Result<(), ApiError> {
    let name = budget["metadata"]["name"].as_str().unwrap_or_default();
    let status = &budget["status"];
    if status["observedGeneration"].as_i64() < budget["metadata"]["generation"].as_i64() {
        let why = format!("The disruption budget {name} is still being processed by the server.");
        return Err(ApiError::disruption_budget(why, Some(10)));
    }
    let number = |field: &str| status[field].as_i64().unwrap_or_default();
    let allowed = number("disruptionsAllowed");
    if allowed <= 0 {
        let (needed, healthy) = (number("desiredHealthy"), number("currentHealthy"));
        let why = format!(
            "The disruption budget {name} needs {needed} healthy pods and has {healthy} currently"
        );
        return Err(ApiError::disruption_budget(why, None));
    }
    let mut updated = Value::clone(budget);
    let status = object_at(&mut updated, "status");
    status.insert("disruptionsAllowed".into(), json!(allowed - 1));
    let pod = pod["metadata"]["name"].as_str().unwrap_or_default();
    object_at(&mut updated["status"], "disruptedPods")
        .insert(pod.to_owned(), json!(write::format_time(now)));
    let namespace = budget["metadata"]["namespace"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let resource = Resource::named("poddisruptionbudgets").expect("it was listed under this name");
    store
        .update(
            &ObjectKey {
                resource,
                namespace,
                name: name.to_owned(),
            },
            updated,
        )
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_selector_selects_every_pod_and_a_missing_one_selects_none() {
        let labels = json!({ "app": "a", "tier": "x" });
        for (selector, selected) in [
            (json!({}), true),
            (Value::Null, false),
            (json!({ "matchLabels": { "app": "a" } }), true),
            (json!({ "matchLabels": { "app": "a", "tier": "y" } }), false),
            (
                json!({ "matchExpressions": [{ "key": "app", "operator": "In", "values": ["b", "a"] }] }),
                true,
            ),
            (
                json!({ "matchExpressions": [{ "key": "app", "operator": "NotIn", "values": ["a"] }] }),
                false,
            ),
            (
                json!({ "matchExpressions": [{ "key": "other", "operator": "NotIn", "values": ["a"] }] }),
                true,
            ),
            (
                json!({ "matchExpressions": [{ "key": "tier", "operator": "Exists" }] }),
                true,
            ),
            (
                json!({ "matchExpressions": [{ "key": "tier", "operator": "DoesNotExist" }] }),
                false,
            ),
            (
                json!({ "matchExpressions": [{ "key": "tier", "operator": "Odd" }] }),
                false,
            ),
        ] {
            assert_eq!(selects(&selector, &labels), selected, "{selector}");
        }
        assert!(!selects(
            &json!({ "matchLabels": { "app": "a" } }),
            &Value::Null
        ));
    }
}
