//! Pods and nodes as the scheduler counts them, parsed once from their JSON.
//!
//! A value that cannot be parsed counts as nothing: validation is the API server's task.

use super::quantity::milli;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Resource name → thousandths.
pub type Resources = BTreeMap<String, i128>;

#[derive(Debug, Clone)]
pub(crate) struct SchedulerPod {
    pub object: Arc<Value>,
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub scheduler_name: String,
    pub priority: i64,
    /// Where it is bound, or assumed to be.
    pub node: Option<String>,
    pub nominated_node: Option<String>,
    pub requests: Resources,
    pub is_gated: bool,
    pub is_terminating: bool,
    /// Succeeded or failed: it uses no resources any more.
    pub has_ended: bool,
}

impl SchedulerPod {
    pub fn parse(object: Arc<Value>) -> Option<Self> {
        let (metadata, spec, status) = (&object["metadata"], &object["spec"], &object["status"]);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let named = |value: &Value| {
            value
                .as_str()
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
        };
        Some(Self {
            uid: named(&metadata["uid"])?,
            namespace: text(&metadata["namespace"]),
            name: named(&metadata["name"])?,
            scheduler_name: text(&spec["schedulerName"]),
            priority: spec["priority"].as_i64().unwrap_or_default(),
            node: named(&spec["nodeName"]),
            nominated_node: named(&status["nominatedNodeName"]),
            requests: pod_requests(spec),
            is_gated: !list(&spec["schedulingGates"]).is_empty(),
            is_terminating: !metadata["deletionTimestamp"].is_null(),
            has_ended: matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")),
            object,
        })
    }

    /// `namespace/name`.
    pub(crate) fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    pub fn never_preempts(&self) -> bool {
        self.object["spec"]["preemptionPolicy"] == "Never"
    }

    /// Whether any container, init containers included, names the resource.
    pub fn mentions_resource(&self, resource: &str) -> bool {
        let spec = &self.object["spec"];
        let containers = list(&spec["containers"])
            .iter()
            .chain(list(&spec["initContainers"]));
        containers.into_iter().any(|container| {
            let resources = &container["resources"];
            ["requests", "limits"]
                .iter()
                .any(|half| resources[half].get(resource).is_some())
        })
    }

    /// Whether it is terminating because of this scheduler's own preemption.
    pub(crate) fn is_being_preempted(&self) -> bool {
        self.is_terminating
            && self
                .condition("DisruptionTarget")
                .is_some_and(|it| it["reason"] == "PreemptionByScheduler")
    }

    pub fn condition(&self, kind: &str) -> Option<&Value> {
        list(&self.object["status"]["conditions"])
            .iter()
            .find(|condition| condition["type"] == kind)
    }

    /// When it started; text of one format, so it orders as time does. A pod that has not started counts as the latest, as in
    /// the real scheduler, which uses the present time.
    pub fn start_time(&self) -> &str {
        self.object["status"]["startTime"]
            .as_str()
            .unwrap_or("not yet")
    }

    /// Without the fields that every write changes: two versions of a pod that are equal in this are equal for the queue.
    pub(crate) fn differs_from(&self, other: &Self) -> bool {
        let without_version = |pod: &Self| {
            let mut object = Value::clone(&pod.object);
            object["metadata"]["resourceVersion"] = Value::Null;
            object
        };
        without_version(self) != without_version(other)
    }

    /// The object as Go encodes it in a request: no kind, no apiVersion.
    pub(crate) fn to_wire_json(&self) -> Value {
        without_type(&self.object)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct SchedulerNode {
    pub object: Arc<Value>,
    pub name: String,
    pub allocatable: Resources,
    pub is_unschedulable: bool,
}

impl SchedulerNode {
    /// A node without a name gets the empty one, as in Go.
    pub fn parse(object: Arc<Value>) -> Self {
        Self {
            name: object["metadata"]["name"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            allocatable: resources(&object["status"]["allocatable"]),
            is_unschedulable: object["spec"]["unschedulable"]
                .as_bool()
                .unwrap_or_default(),
            object,
        }
    }

    pub fn taints(&self) -> &[Value] {
        list(&self.object["spec"]["taints"])
    }

    pub fn label(&self, key: &str) -> Option<&str> {
        self.object["metadata"]["labels"][key].as_str()
    }

    pub(crate) fn to_wire_json(&self) -> Value {
        without_type(&self.object)
    }
}

pub fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn without_type(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(fields) = object.as_object_mut() {
        fields.remove("kind");
        fields.remove("apiVersion");
    }
    object
}

fn resources(quantities: &Value) -> Resources {
    let entries = quantities.as_object().into_iter().flatten();
    entries
        .filter_map(|(name, quantity)| Some((name.clone(), amount(quantity)?)))
        .collect()
}

fn amount(quantity: &Value) -> Option<i128> {
    match quantity {
        Value::String(text) => milli(text),
        Value::Number(number) => milli(&number.to_string()),
        _ => None,
    }
}

/// The scheduler's pod-request formula: containers that run together are added, init containers count if they need more.
fn pod_requests(spec: &Value) -> Resources {
    let requests = |container: &Value| resources(&container["resources"]["requests"]);
    let mut running = Resources::new();
    list(&spec["containers"])
        .iter()
        .for_each(|container| add(&mut running, &requests(container)));
    let (mut sidecars, mut starting) = (Resources::new(), Resources::new());
    for container in list(&spec["initContainers"]) {
        let requested = requests(container);
        if container["restartPolicy"] == "Always" {
            add(&mut sidecars, &requested);
            add(&mut running, &requested);
            raise_to_max(&mut starting, &sidecars);
        } else {
            let mut now = sidecars.clone();
            add(&mut now, &requested);
            raise_to_max(&mut starting, &now);
        }
    }
    raise_to_max(&mut running, &starting);
    add(&mut running, &resources(&spec["overhead"]));
    running
}

pub fn add(sum: &mut Resources, more: &Resources) {
    for (name, amount) in more {
        *sum.entry(name.clone()).or_default() += amount;
    }
}

pub(crate) fn subtract(sum: &mut Resources, less: &Resources) {
    for (name, amount) in less {
        *sum.entry(name.clone()).or_default() -= amount;
    }
}

fn raise_to_max(level: &mut Resources, to: &Resources) {
    for (name, amount) in to {
        let current = level.entry(name.clone()).or_default();
        *current = (*current).max(*amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn init_containers_count_where_they_need_more_and_sidecars_always() {
        let container = |name: &str, vram: &str, policy: Value| json!({"name": name, "restartPolicy": policy, "resources": {"requests": {"stowage.dev/vram": vram}}});
        let spec = json!({
            "initContainers": [container("side", "1", json!("Always")), container("load", "9", Value::Null)],
            "containers": [container("a", "4", Value::Null), container("b", "3", Value::Null)],
        });
        assert_eq!(pod_requests(&spec)["stowage.dev/vram"], 10_000);
    }
}
