//! What Stowage wrote on a pod or a node and would stay behind, and the patches that take it off. Pure.
//!
//! Annotations of bound pods stay: a container that restarts reads its GPUs from them again.

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Map, Value, json};
use stowage_kubernetes_objects::{self as objects, CONDITIONS, VRAM};
use stowage_scheduling::ids::{NodeName, PodKey, PodUid};

/// What is to be taken off one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodLeftovers {
    pub key: PodKey,
    pub uid: PodUid,
    /// It has the gate `stowage.dev/plan`.
    pub is_gated: bool,
    /// Types of Stowage's conditions.
    pub conditions: Vec<&'static str>,
    /// The planner nominated it: nothing keeps that place free any more.
    pub is_nominated: bool,
}

impl PodLeftovers {
    /// `None` if there is nothing, or the pod cannot be identified.
    pub fn from_pod(pod: &Pod) -> Option<Self> {
        let (uid, key) = objects::identity(pod).ok()?;
        let conditions_on_pod = pod
            .status
            .iter()
            .flat_map(|status| &status.conditions)
            .flatten();
        let conditions = conditions_on_pod.filter_map(|one| {
            CONDITIONS
                .into_iter()
                .find(|condition_type| *condition_type == one.type_)
        });
        let conditions: Vec<&'static str> = conditions.collect();
        let is_gated = objects::gates(pod).has_planner_gate;
        // kube-scheduler nominates pods as well: a nomination is the planner's only beside a condition of the planner.
        let is_nominated =
            is_pending(pod) && !conditions.is_empty() && objects::nominated_node(pod).is_some();
        let found = Self {
            key,
            uid,
            is_gated,
            conditions,
            is_nominated,
        };
        (found.is_gated || found.has_status()).then_some(found)
    }

    /// Whether its status has to be written.
    pub fn has_status(&self) -> bool {
        !self.conditions.is_empty() || self.is_nominated
    }

    /// A strategic merge patch of `pods/status`: conditions merge by type.
    pub(crate) fn status_patch(&self) -> Value {
        let gone = |condition: &&str| json!({ "$patch": "delete", "type": condition });
        let mut status = Map::new();
        status.insert(
            "conditions".into(),
            self.conditions.iter().map(gone).collect(),
        );
        if self.is_nominated {
            status.insert("nominatedNodeName".into(), Value::Null);
        }
        json!({ "metadata": { "uid": self.uid }, "status": status })
    }

    /// A strategic merge patch of the pod itself.
    pub(crate) fn gate_patch(&self) -> Value {
        json!({ "metadata": { "uid": self.uid }, "spec": objects::planner_gate_removal() })
    }
}

fn is_pending(pod: &Pod) -> bool {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.node_name.as_deref())
        .is_none_or(str::is_empty)
}

/// State of a pod that requests VRAM once Stowage is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RemainingPodState {
    /// It runs, and keeps its GPUs until it ends.
    Running,
    /// No scheduler will place it.
    Pending,
}

/// State in which the pod stays once Stowage is gone; `None` for pods that request no VRAM, or have ended.
pub fn left_state(pod: &Pod) -> Option<RemainingPodState> {
    let requests_vram = objects::asks_for_vram(pod) && !objects::is_finished(pod);
    requests_vram.then(|| {
        if is_pending(pod) {
            RemainingPodState::Pending
        } else {
            RemainingPodState::Running
        }
    })
}

/// The node, if it advertises VRAM.
pub(crate) fn advertising_node(node: &Node) -> Option<NodeName> {
    let status = node.status.as_ref()?;
    let advertises = [&status.capacity, &status.allocatable]
        .into_iter()
        .flatten()
        .any(|list| list.contains_key(VRAM));
    NodeName::parse(node.metadata.name.as_deref()?)
        .ok()
        .filter(|_| advertises)
}

/// A merge patch of `nodes/status`. The kubelet takes off `allocatable` what `capacity` no longer has; without a kubelet
/// nobody would.
pub(crate) fn capacity_patch() -> Value {
    json!({ "status": { "capacity": { VRAM: null }, "allocatable": { VRAM: null } } })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: Value, status: Value) -> Pod {
        let metadata = json!({ "name": "llama", "namespace": "team-a", "uid": "uid-1" });
        serde_json::from_value(json!({ "metadata": metadata, "spec": spec, "status": status }))
            .unwrap()
    }

    fn asking() -> Value {
        json!({ "containers": [{ "name": "engine", "resources": { "limits": { VRAM: "40Gi" } } }] })
    }

    #[test]
    fn a_pod_loses_stowages_gate_conditions_and_nomination_and_keeps_all_others() {
        let mut spec = asking();
        spec["schedulingGates"] = json!([{ "name": "other/gate" }, { "name": "stowage.dev/plan" }]);
        let conditions = json!([
            { "type": "PodScheduled", "status": "False" },
            { "type": "stowage.dev/Reserved", "status": "True" },
            { "type": "stowage.dev/Placed", "status": "True" },
            { "type": "example.com/Mine", "status": "True" },
        ]);
        let found = PodLeftovers::from_pod(&pod(
            spec,
            json!({ "conditions": conditions, "nominatedNodeName": "node-a" }),
        ));
        let found = found.unwrap();
        assert!(found.is_gated && found.is_nominated);
        assert_eq!(
            found.status_patch(),
            json!({ "metadata": { "uid": "uid-1" }, "status": {
                "conditions": [
                    { "$patch": "delete", "type": "stowage.dev/Reserved" },
                    { "$patch": "delete", "type": "stowage.dev/Placed" },
                ],
                "nominatedNodeName": null,
            } })
        );
        assert_eq!(
            found.gate_patch()["spec"]["schedulingGates"],
            json!([{ "$patch": "delete", "name": "stowage.dev/plan" }])
        );
    }

    #[test]
    fn a_nomination_without_a_condition_of_the_planner_is_kube_schedulers() {
        assert_eq!(
            PodLeftovers::from_pod(&pod(asking(), json!({ "nominatedNodeName": "node-a" }))),
            None
        );
    }

    #[test]
    fn a_bound_pod_with_annotations_alone_has_nothing_to_take_off_and_still_runs() {
        let mut spec = asking();
        spec["nodeName"] = "node-a".into();
        let mut bound = pod(spec, json!({ "phase": "Running" }));
        bound.metadata.annotations = Some([("stowage.dev/devices".into(), "GPU-1".into())].into());
        assert_eq!(PodLeftovers::from_pod(&bound), None);
        assert_eq!(left_state(&bound), Some(RemainingPodState::Running));
        bound.status.as_mut().unwrap().phase = Some("Succeeded".into());
        assert_eq!(left_state(&bound), None);
        assert_eq!(
            left_state(&pod(asking(), json!({}))),
            Some(RemainingPodState::Pending)
        );
        assert_eq!(
            left_state(&pod(json!({ "containers": [] }), json!({}))),
            None
        );
    }

    #[test]
    fn a_node_advertises_in_either_list_and_the_patch_names_vram_alone() {
        let node = |status: Value| -> Node {
            serde_json::from_value(json!({ "metadata": { "name": "node-a" }, "status": status }))
                .unwrap()
        };
        for list in ["capacity", "allocatable"] {
            let advertising = node(json!({ list: { "cpu": "8", VRAM: "1" } }));
            assert_eq!(advertising_node(&advertising).unwrap().as_str(), "node-a");
        }
        assert_eq!(
            advertising_node(&node(json!({ "capacity": { "cpu": "8" } }))),
            None
        );
        assert_eq!(advertising_node(&node(json!({}))), None);
        for list in capacity_patch()["status"].as_object().unwrap().values() {
            assert_eq!(list.as_object().unwrap().keys().collect::<Vec<_>>(), [VRAM]);
        }
    }
}
