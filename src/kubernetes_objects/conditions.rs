//! The planner's marks on a pod: the gate, the nomination, and the conditions that show its progress.
//!
//! Texts and shapes only. Which of them are written, and when, is decided elsewhere.

use super::{REQUEUED_CONDITION, RESERVED_CONDITION};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use std::sync::Arc;
use stowage_scheduling::control_loop::{EvictionCondition, PlanState, WakeAnswer};
use stowage_scheduling::ids::{NodeName, PodKey};

/// The scheduling gate under which a pod waits for the planner.
pub const PLAN_GATE: &str = "stowage.dev/plan";

/// The pod condition that shows the planner's progress with a gated pod: `True` once it is nominated to a node.
pub const PLACED_CONDITION: &str = "stowage.dev/Placed";

/// The pod condition that shows a victim's owner why it is evicted: written before the eviction, as Kubernetes' own
/// `DisruptionTarget` is, which the Eviction API and kube-scheduler write beside it.
pub const DISRUPTION_TARGET_CONDITION: &str = "stowage.dev/DisruptionTarget";

/// The pod condition that tells a sleeping engine's pod that it may wake: no other pod has any of its grant, and none will get
/// any. Its message is the request that it answers.
pub const WAKEABLE_CONDITION: &str = "stowage.dev/Wakeable";

/// All conditions that Stowage writes. The admission policy keeps others from writing the first four.
pub const CONDITIONS: [&str; 5] = [
    RESERVED_CONDITION,
    PLACED_CONDITION,
    WAKEABLE_CONDITION,
    DISRUPTION_TARGET_CONDITION,
    REQUEUED_CONDITION,
];

/// The scheduling gates of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gates {
    /// [`PLAN_GATE`].
    pub has_planner_gate: bool,
    pub has_other_gates: bool,
}

impl Gates {
    /// Whether the planner's gate is the only one.
    pub fn is_planner_gate_only(self) -> bool {
        self.has_planner_gate && !self.has_other_gates
    }
}

pub fn gates(pod: &Pod) -> Gates {
    let gates = pod
        .spec
        .iter()
        .flat_map(|spec| &spec.scheduling_gates)
        .flatten();
    gates.fold(Gates::default(), |found, gate| {
        match gate.name == PLAN_GATE {
            true => Gates {
                has_planner_gate: true,
                ..found
            },
            false => Gates {
                has_other_gates: true,
                ..found
            },
        }
    })
}

/// The node the pod is nominated to, if its status names one.
pub fn nominated_node(pod: &Pod) -> Option<NodeName> {
    NodeName::parse(pod.status.as_ref()?.nominated_node_name.as_deref()?).ok()
}

/// Removes [`PLAN_GATE`] and keeps other gates, whatever their order: gates merge by name.
pub fn planner_gate_removal() -> Value {
    json!({ "schedulingGates": [{ "$patch": "delete", "name": PLAN_GATE }] })
}

pub fn placed_condition(state: &PlanState, now: jiff::Timestamp) -> PodCondition {
    let (is_placed, reason, message) = match state {
        PlanState::Nominated { node } => (true, "Nominated", format!("Nominated to node {node}.")),
        PlanState::Preempting { node } => (
            false,
            "Preempting",
            format!("Waiting for victims on node {node} to terminate."),
        ),
        PlanState::Unschedulable { why } => (false, "Unschedulable", why.to_string()),
        PlanState::GateRemoved { why } => (false, "GateRemoved", why.to_string()),
        PlanState::Rejected { node, why } => (
            false,
            "RejectedByScheduler",
            format!("kube-scheduler did not bind it to node {node}: {why}"),
        ),
    };
    PodCondition {
        type_: PLACED_CONDITION.into(),
        status: if is_placed { "True" } else { "False" }.into(),
        reason: Some(reason.into()),
        message: Some(message),
        last_transition_time: Some(Time(now)),
        ..PodCondition::default()
    }
}

pub fn wakeable_condition(answer: &WakeAnswer, now: jiff::Timestamp) -> PodCondition {
    let (status, reason, message) = match answer {
        WakeAnswer::Wakeable { request } => ("True", "VramAvailable", request.to_string()),
        WakeAnswer::Reclaiming => (
            "False",
            "Reclaiming",
            "Pods that borrow its VRAM are evicted.".to_owned(),
        ),
        WakeAnswer::Withdrawn => (
            "False",
            "NotRequested",
            "Its VRAM may be lent while it sleeps: ask before it wakes.".to_owned(),
        ),
    };
    PodCondition {
        type_: WAKEABLE_CONDITION.into(),
        status: status.into(),
        reason: Some(reason.into()),
        message: Some(message),
        last_transition_time: Some(Time(now)),
        ..PodCondition::default()
    }
}

/// The request that the pod's condition answers, while it is true.
pub(crate) fn wakeable_request(pod: &Pod) -> Option<Arc<str>> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let condition =
        conditions.find(|one| one.type_ == WAKEABLE_CONDITION && one.status == "True")?;
    Some(condition.message.as_deref().unwrap_or_default().into())
}

/// The condition of an eviction's victim. It has no time, so that a repeated eviction changes nothing; the pod's deletion has one.
pub fn disruption_target_condition(mark: &EvictionCondition, victim: &PodKey) -> PodCondition {
    let (status, reason, message) = match mark {
        EvictionCondition::Evicting(why) => ("True", why.reason(), why.text_for(victim)),
        EvictionCondition::Cancelled => ("False", "Cancelled", "It is not evicted.".to_owned()),
    };
    PodCondition {
        type_: DISRUPTION_TARGET_CONDITION.into(),
        status: status.into(),
        reason: Some(reason.into()),
        message: Some(message),
        ..PodCondition::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::control_loop::EvictionReason;

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap()
    }

    #[test]
    fn the_planners_gate_is_distinguished_from_others() {
        let gated = |names: &[&str]| {
            let gates: Vec<Value> = names.iter().map(|name| json!({ "name": name })).collect();
            gates_of(json!({ "containers": [], "schedulingGates": gates }))
        };
        fn gates_of(spec: Value) -> Gates {
            gates(&pod(spec))
        }
        assert_eq!(
            gates_of(json!({ "containers": [] })),
            Gates {
                has_planner_gate: false,
                has_other_gates: false
            }
        );
        assert!(gated(&[PLAN_GATE]).is_planner_gate_only());
        assert_eq!(
            gated(&["quota", PLAN_GATE]),
            Gates {
                has_planner_gate: true,
                has_other_gates: true
            }
        );
        assert_eq!(
            gated(&["stowage.dev/plan2"]),
            Gates {
                has_planner_gate: false,
                has_other_gates: true
            }
        );
        assert_eq!(gates(&Pod::default()), Gates::default());
    }

    #[test]
    fn a_nomination_that_is_no_name_is_none() {
        let nominated_to = |name: Value| {
            let pod = json!({ "metadata": {}, "status": { "nominatedNodeName": name } });
            nominated_node(&serde_json::from_value(pod).unwrap())
        };
        assert_eq!(
            nominated_to(json!("node-a")),
            Some(NodeName::parse("node-a").unwrap())
        );
        assert_eq!(nominated_to(json!("")), None);
        assert_eq!(nominated_to(json!("a b")), None);
        assert_eq!(nominated_node(&Pod::default()), None);
    }

    /// What `kubectl get pod -o json` shows of each.
    #[test]
    fn a_plan_is_shown_with_its_time_and_only_a_placed_pod_is_true() {
        let node = NodeName::parse("node-a").unwrap();
        let why = || "no GPU can take the pod now".into();
        let shown = |state| {
            let now = "2026-03-01T12:00:00.25Z".parse().unwrap();
            serde_json::to_value(placed_condition(&state, now)).unwrap()
        };
        let expected = |status: &str, reason: &str, message: &str| {
            json!({
                "type": "stowage.dev/Placed",
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": "2026-03-01T12:00:00Z",
            })
        };
        assert_eq!(
            shown(PlanState::Nominated { node: node.clone() }),
            expected("True", "Nominated", "Nominated to node node-a.")
        );
        assert_eq!(
            shown(PlanState::Preempting { node: node.clone() }),
            expected(
                "False",
                "Preempting",
                "Waiting for victims on node node-a to terminate."
            )
        );
        assert_eq!(
            shown(PlanState::Unschedulable { why: why() }),
            expected("False", "Unschedulable", "no GPU can take the pod now")
        );
        assert_eq!(
            shown(PlanState::GateRemoved { why: why() }),
            expected("False", "GateRemoved", "no GPU can take the pod now")
        );
        assert_eq!(
            shown(PlanState::Rejected { node, why: why() }),
            expected(
                "False",
                "RejectedByScheduler",
                "kube-scheduler did not bind it to node node-a: no GPU can take the pod now"
            )
        );
    }

    #[test]
    fn a_victims_condition_names_the_preemptor_and_has_no_time() {
        let by = PodKey::parse("team-a", "llama").unwrap();
        let victim = PodKey::parse("team-a", "batch").unwrap();
        let shown =
            |mark| serde_json::to_value(disruption_target_condition(&mark, &victim)).unwrap();
        assert_eq!(
            shown(EvictionCondition::Evicting(EvictionReason::Preempted {
                by
            })),
            json!({
                "type": "stowage.dev/DisruptionTarget",
                "status": "True",
                "reason": "Preempted",
                "message": "Preempted by pod team-a/llama, which has a higher priority.",
            })
        );
        assert_eq!(
            shown(EvictionCondition::Cancelled),
            json!({
                "type": "stowage.dev/DisruptionTarget", "status": "False", "reason": "Cancelled", "message": "It is not evicted.",
            })
        );
    }
}
