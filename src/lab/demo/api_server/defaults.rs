//! Defaults that the real API server sets when an object is created.
//!
//! Pure. Only the defaults that a scheduler or an extender can observe; no validation of whole objects.

use super::resource::Resource;
use serde_json::{Map, Value, json};

/// What the kubelet grants a pod that names no grace period.
const GRACE_PERIOD_SECONDS: u64 = 30;

/// Fills in a new object. `priority_of` returns the value of a PriorityClass.
pub fn set_defaults(
    object: &mut Value,
    resource: &Resource,
    priority_of: impl Fn(&str) -> Option<i64>,
) {
    let fields = fields_of(object);
    fields.insert("kind".into(), json!(resource.kind));
    fields.insert("apiVersion".into(), json!(resource.api_version));
    match resource.plural {
        "pods" => set_pod_defaults(object, priority_of),
        "nodes" => set_node_defaults(object),
        _ => {}
    }
}

fn set_pod_defaults(pod: &mut Value, priority_of: impl Fn(&str) -> Option<i64>) {
    object_at(pod, "metadata").insert("generation".into(), json!(1));
    let spec = object_at(pod, "spec");
    for list in ["initContainers", "containers"] {
        for container in spec
            .get_mut(list)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            copy_limits_to_requests(container);
        }
    }
    let class = spec
        .get("priorityClassName")
        .and_then(Value::as_str)
        .and_then(priority_of);
    if let Some(priority) = class {
        spec.insert("priority".into(), json!(priority));
    }
    for (field, default) in [
        ("priority", json!(0)),
        ("preemptionPolicy", json!("PreemptLowerPriority")),
        ("restartPolicy", json!("Always")),
        ("schedulerName", json!("default-scheduler")),
        ("terminationGracePeriodSeconds", json!(GRACE_PERIOD_SECONDS)),
    ] {
        spec.entry(field).or_insert(default);
    }
    object_at(pod, "status")
        .entry("phase")
        .or_insert(json!("Pending"));
}

/// A limit without a request is also the request; for extended resources the two must be equal anyway.
fn copy_limits_to_requests(container: &mut Value) {
    let Some(resources) = container.get_mut("resources") else {
        return;
    };
    let Some(limits) = resources.get("limits").and_then(Value::as_object).cloned() else {
        return;
    };
    let requests = object_at(resources, "requests");
    for (resource, quantity) in limits {
        requests.entry(resource).or_insert(quantity);
    }
}

/// Until a kubelet writes it, a node's allocatable is its capacity.
fn set_node_defaults(node: &mut Value) {
    object_at(node, "spec");
    let status = object_at(node, "status");
    if let Some(capacity) = status.get("capacity").cloned() {
        status.entry("allocatable").or_insert(capacity);
    }
}

/// The object at a field, created if it is missing.
pub(crate) fn object_at<'a>(parent: &'a mut Value, field: &str) -> &'a mut Map<String, Value> {
    fields_of(fields_of(parent).entry(field).or_insert(Value::Null))
}

/// The fields of a value, which becomes an empty object if it is anything else.
pub(crate) fn fields_of(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    value.as_object_mut().expect("made an object above")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_become_requests_and_the_class_gives_the_priority() {
        let mut pod = json!({"spec": {
            "priorityClassName": "high",
            "containers": [{"resources": {"limits": {"stowage.dev/vram": "1Gi", "cpu": "2"}, "requests": {"cpu": "1"}}}],
        }});
        set_defaults(&mut pod, Resource::named("pods").unwrap(), |class| {
            (class == "high").then_some(1000)
        });
        let requests = &pod["spec"]["containers"][0]["resources"]["requests"];
        assert_eq!(requests, &json!({"stowage.dev/vram": "1Gi", "cpu": "1"}));
        assert_eq!(pod["spec"]["priority"], 1000);
        assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], 30);
    }

    #[test]
    fn odd_shapes_are_survived() {
        let mut pod = json!({"metadata": {}, "spec": [], "status": 3});
        set_defaults(&mut pod, Resource::named("pods").unwrap(), |_| None);
        assert_eq!(pod["status"]["phase"], "Pending");
    }
}
