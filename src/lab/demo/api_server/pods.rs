//! The pod subresources `binding` and `eviction`.
//!
//! A binder's idempotence relies on their errors, so the texts and codes are the real server's.

use super::budgets;
use super::defaults::object_at;
use super::error::ApiError;
use super::store::{ObjectKey, Store};
use super::write;
use jiff::Timestamp;
use serde_json::{Value, json};

/// What the real server calls the thing a conflicting Binding was about.
const BINDING_RESOURCE: &str = "pods/binding";

/// Sets the node, and in the same write the Binding's labels and annotations and the `PodScheduled` condition.
pub fn bind(
    store: &mut Store,
    key: &ObjectKey,
    binding: &Value,
    now: Timestamp,
) -> Result<(), ApiError> {
    let node = binding["target"]["name"]
        .as_str()
        .filter(|name| !name.is_empty());
    let node = node.ok_or_else(|| ApiError::bad_request("target.name: Required value"))?;
    let current = store.get(key)?.clone();
    check_binding(key, &current, binding)?;
    let mut bound = Value::clone(&current);
    object_at(&mut bound, "spec").insert("nodeName".into(), json!(node));
    for field in ["annotations", "labels"] {
        if let Some(added) = binding["metadata"][field].as_object() {
            object_at(&mut bound["metadata"], field).extend(added.clone());
        }
    }
    object_at(&mut bound, "status").remove("nominatedNodeName");
    set_condition(
        &mut bound,
        json!({"type": "PodScheduled", "status": "True"}),
        now,
    );
    store.update(key, bound).map(drop)
}

/// Asks the pod's disruption budget, marks the pod as disrupted through the API, and deletes it gracefully.
pub fn evict(
    store: &mut Store,
    key: &ObjectKey,
    eviction: &Value,
    now: Timestamp,
) -> Result<(), ApiError> {
    let current = store.get(key)?.clone();
    let options = &eviction["deleteOptions"];
    write::check_preconditions(
        key,
        &current,
        &json!({"metadata": options["preconditions"]}),
    )?;
    budgets::check_and_decrement(store, &current, now)?;
    let mut marked = Value::clone(&current);
    let condition = json!({
        "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
    });
    set_condition(&mut marked, condition, now);
    store.update(key, marked)?;
    let mut options = options.clone();
    if let Some(preconditions) = options
        .get_mut("preconditions")
        .and_then(Value::as_object_mut)
    {
        preconditions.remove("resourceVersion");
    }
    write::delete(store, key, &options, now).map(drop)
}

fn check_binding(key: &ObjectKey, pod: &Value, binding: &Value) -> Result<(), ApiError> {
    let name = &key.name;
    let conflict = |why: String| Err(ApiError::conflict(BINDING_RESOURCE, name, why));
    let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
    let requested = binding["metadata"]["uid"].as_str().unwrap_or_default();
    if !requested.is_empty() && requested != uid {
        return conflict(format!(
            "Precondition failed: UID in precondition: {requested}, UID in object meta: {uid}"
        ));
    }
    if !pod["metadata"]["deletionTimestamp"].is_null() {
        return conflict(format!(
            "pod {name} is being deleted, cannot be assigned to a host"
        ));
    }
    if let Some(node) = pod["spec"]["nodeName"]
        .as_str()
        .filter(|node| !node.is_empty())
    {
        return conflict(format!("pod {name} is already assigned to node \"{node}\""));
    }
    if pod["spec"]["schedulingGates"]
        .as_array()
        .is_some_and(|gates| !gates.is_empty())
    {
        return conflict(format!("pod {name} has non-empty .spec.schedulingGates"));
    }
    Ok(())
}

/// Adds a condition or replaces the one of its type; the transition time moves only with the status.
pub(crate) fn set_condition(pod: &mut Value, mut condition: Value, now: Timestamp) {
    let status = object_at(pod, "status");
    let conditions = status.entry("conditions").or_insert_with(|| json!([]));
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    let conditions = conditions.as_array_mut().expect("made an array above");
    let index = conditions
        .iter()
        .position(|existing| existing["type"] == condition["type"]);
    let unchanged = index
        .map(|index| &conditions[index])
        .filter(|old| old["status"] == condition["status"]);
    condition["lastTransitionTime"] = unchanged.map_or_else(
        || json!(write::format_time(now)),
        |old| old["lastTransitionTime"].clone(),
    );
    match index {
        Some(index) => conditions[index] = condition,
        None => conditions.push(condition),
    }
}
