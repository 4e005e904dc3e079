//! The planner's marks on a pod: the gate, the nomination, and the conditions that show its progress.
//!
//! Texts and shapes only. Which of them are written, and when, is decided elsewhere.

use super::{RESERVED_CONDITION, RETRY_CONDITION};
use crate::ids::NodeName;
use crate::kubernetes::port::{EvictionCondition, PlanState};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

/// The scheduling gate under which a pod waits for the planner.
pub const PLAN_GATE: &str = "stowage.dev/plan";

/// The pod condition that shows the planner's progress with a gated pod.
pub const PLAN_CONDITION: &str = "stowage.dev/Plan";

/// The pod condition that shows a victim's owner why it is evicted.
pub const EVICTED_CONDITION: &str = "stowage.dev/Evicted";

/// All conditions that Stowage writes. The admission policy keeps others from writing the first two.
pub const CONDITIONS: [&str; 4] = [RESERVED_CONDITION, PLAN_CONDITION, EVICTED_CONDITION, RETRY_CONDITION];

/// The scheduling gates of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Gates {
    /// [`PLAN_GATE`].
    pub ours: bool,
    pub others: bool,
}

impl Gates {
    /// Whether the planner's gate is the only one.
    pub fn only_ours(self) -> bool {
        self.ours && !self.others
    }
}

pub fn gates(pod: &Pod) -> Gates {
    let gates = pod.spec.iter().flat_map(|spec| &spec.scheduling_gates).flatten();
    gates.fold(Gates::default(), |found, gate| match gate.name == PLAN_GATE {
        true => Gates { ours: true, ..found },
        false => Gates { others: true, ..found },
    })
}

/// The node the pod is nominated to, if its status names one.
pub fn nominated(pod: &Pod) -> Option<NodeName> {
    NodeName::parse(pod.status.as_ref()?.nominated_node_name.as_deref()?).ok()
}

/// Removes [`PLAN_GATE`] and keeps other gates, whatever their order: gates merge by name.
pub fn without_our_gate() -> Value {
    json!({ "schedulingGates": [{ "$patch": "delete", "name": PLAN_GATE }] })
}

pub fn plan_condition(state: &PlanState, now: jiff::Timestamp) -> PodCondition {
    let (is_placed, reason, message) = match state {
        PlanState::Placed { node } => (true, "Placed", format!("It is nominated to node {node}.")),
        PlanState::MakingRoom { node } => {
            (false, "MakingRoom", format!("It goes to node {node} when others have left."))
        }
        PlanState::Waiting { why } => (false, "NoPlaceYet", why.to_string()),
        PlanState::Released { why } => (false, "Released", why.to_string()),
        PlanState::Refused { node, why } => {
            (false, "RefusedByScheduler", format!("The scheduler did not take node {node}: {why}"))
        }
    };
    PodCondition {
        type_: PLAN_CONDITION.into(),
        status: if is_placed { "True" } else { "False" }.into(),
        reason: Some(reason.into()),
        message: Some(message),
        last_transition_time: Some(Time(now)),
        ..PodCondition::default()
    }
}

/// Without a time, so that a repeated eviction changes nothing; the pod's deletion has a time.
pub fn evicted_condition(mark: &EvictionCondition) -> PodCondition {
    let (status, reason, message) = match mark {
        EvictionCondition::Leaving(why) => ("True", why.reason(), why.to_string()),
        EvictionCondition::CalledOff => ("False", "CalledOff", "It stays.".to_owned()),
    };
    PodCondition {
        type_: EVICTED_CONDITION.into(),
        status: status.into(),
        reason: Some(reason.into()),
        message: Some(message),
        ..PodCondition::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PodKey;
    use crate::kubernetes::port::EvictionReason;

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
        assert_eq!(gates_of(json!({ "containers": [] })), Gates { ours: false, others: false });
        assert!(gated(&[PLAN_GATE]).only_ours());
        assert_eq!(gated(&["quota", PLAN_GATE]), Gates { ours: true, others: true });
        assert_eq!(gated(&["stowage.dev/plan2"]), Gates { ours: false, others: true });
        assert_eq!(gates(&Pod::default()), Gates::default());
    }

    #[test]
    fn a_nomination_that_is_no_name_is_none() {
        let nominated_to = |name: Value| {
            let pod = json!({ "metadata": {}, "status": { "nominatedNodeName": name } });
            nominated(&serde_json::from_value(pod).unwrap())
        };
        assert_eq!(nominated_to(json!("node-a")), Some(NodeName::parse("node-a").unwrap()));
        assert_eq!(nominated_to(json!("")), None);
        assert_eq!(nominated_to(json!("a b")), None);
        assert_eq!(nominated(&Pod::default()), None);
    }

    /// What `kubectl get pod -o json` shows of each.
    #[test]
    fn a_plan_is_shown_with_its_time_and_only_a_placed_pod_is_true() {
        let node = NodeName::parse("node-a").unwrap();
        let why = || "no node that the pod could go to has room".into();
        let shown = |state| {
            let now = "2026-03-01T12:00:00.25Z".parse().unwrap();
            serde_json::to_value(plan_condition(&state, now)).unwrap()
        };
        let expected = |status: &str, reason: &str, message: &str| {
            json!({
                "type": "stowage.dev/Plan",
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": "2026-03-01T12:00:00Z",
            })
        };
        assert_eq!(
            shown(PlanState::Placed { node: node.clone() }),
            expected("True", "Placed", "It is nominated to node node-a.")
        );
        assert_eq!(
            shown(PlanState::MakingRoom { node: node.clone() }),
            expected("False", "MakingRoom", "It goes to node node-a when others have left.")
        );
        assert_eq!(
            shown(PlanState::Waiting { why: why() }),
            expected("False", "NoPlaceYet", "no node that the pod could go to has room")
        );
        assert_eq!(
            shown(PlanState::Released { why: why() }),
            expected("False", "Released", "no node that the pod could go to has room")
        );
        assert_eq!(
            shown(PlanState::Refused { node, why: why() }),
            expected(
                "False",
                "RefusedByScheduler",
                "The scheduler did not take node node-a: no node that the pod could go to has room"
            )
        );
    }

    #[test]
    fn an_evicted_pod_is_told_for_which_pod_it_leaves_and_no_time() {
        let by = PodKey::parse("team-a", "llama").unwrap();
        let shown = |mark| serde_json::to_value(evicted_condition(&mark)).unwrap();
        assert_eq!(
            shown(EvictionCondition::Leaving(EvictionReason::Preempted { by })),
            json!({
                "type": "stowage.dev/Evicted",
                "status": "True",
                "reason": "Preempted",
                "message": "It leaves its GPU to pod team-a/llama, which has a higher priority.",
            })
        );
        assert_eq!(
            shown(EvictionCondition::CalledOff),
            json!({
                "type": "stowage.dev/Evicted", "status": "False", "reason": "CalledOff", "message": "It stays.",
            })
        );
    }
}
