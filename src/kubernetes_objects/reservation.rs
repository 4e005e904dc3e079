//! A reservation as a pod shows it: the condition that makes it durable, and the one that makes kube-scheduler retry the pod.

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, LeaderEpoch, NodeName, PodUid};

/// The pod condition that makes a reservation durable.
pub const RESERVED_CONDITION: &str = "stowage.dev/Reserved";

/// The pod condition whose change requeues a rejected pod: kube-scheduler retries a pod of which anything changed.
pub const REQUEUED_CONDITION: &str = "stowage.dev/Requeued";

/// The message of a reservation's condition: JSON, readable by people and programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReservationMessage {
    pub node: NodeName,
    pub devices: Arc<[GpuUuid]>,
    pub victims: Arc<[PodUid]>,
    /// RFC 3339.
    pub deadline: jiff::Timestamp,
    /// The leader that made the reservation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<LeaderEpoch>,
}

impl ReservationMessage {
    pub fn condition(&self, now: jiff::Timestamp) -> PodCondition {
        PodCondition {
            type_: RESERVED_CONDITION.into(),
            status: "True".into(),
            reason: Some(
                if self.victims.is_empty() {
                    "GpusAvailable"
                } else {
                    "WaitingForVictims"
                }
                .into(),
            ),
            message: Some(serde_json::to_string(self).expect("names and times are always JSON")),
            last_transition_time: Some(Time(now)),
            ..PodCondition::default()
        }
    }

    /// The active reservation that a pod's condition describes, if any.
    pub fn read(pod: &Pod) -> Option<Self> {
        let conditions = pod.status.as_ref()?.conditions.as_ref()?;
        let condition = conditions
            .iter()
            .find(|c| c.type_ == RESERVED_CONDITION && c.status == "True")?;
        serde_json::from_str(condition.message.as_deref()?).ok()
    }
}

/// The condition that makes kube-scheduler retry the pod, with the time at which its demand began to fit.
pub fn requeued_condition(now: jiff::Timestamp) -> PodCondition {
    PodCondition {
        type_: REQUEUED_CONDITION.into(),
        status: "True".into(),
        reason: Some("VramFreed".into()),
        // Seconds are not enough: a second requeue within one would be the same write, and requeue nothing.
        message: Some(now.to_string()),
        last_transition_time: Some(Time(now)),
        ..PodCondition::default()
    }
}

/// The condition of a reservation that has ended.
pub fn reservation_ended_condition(reason: &str, now: jiff::Timestamp) -> PodCondition {
    PodCondition {
        type_: RESERVED_CONDITION.into(),
        status: "False".into(),
        reason: Some(reason.into()),
        last_transition_time: Some(Time(now)),
        ..PodCondition::default()
    }
}
