//! Builds the patch of `pods/status` for a status change, and the patch that removes the planner's gate.
//!
//! Both name the pod's UID, which no patch can change: another pod of the same name rejects them and stays unchanged. Pure.

use crate::service::Clock;
use k8s_openapi::api::core::v1::PodCondition;
use serde_json::{Value, json};
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::ReservationMessage;
use stowage_scheduling::control_loop::{NominationChange, ReservationChange, StatusChange};
use stowage_scheduling::ids::{LeaderEpoch, PodKey, PodUid};

/// The condition's reason once the reservation has ended.
const RESERVATION_ENDED: &str = "ReservationEnded";

/// A strategic merge patch: conditions merge by type, and fields that are not named stay.
pub(crate) fn status_patch(
    pod: &PodKey,
    uid: &PodUid,
    change: &StatusChange,
    epoch: &LeaderEpoch,
    clock: &Clock,
    now: jiff::Timestamp,
) -> Value {
    // Each part by its name: one that is not sent is an error here.
    let StatusChange {
        reservation,
        nomination,
        requeue: touch,
        plan,
        eviction,
        wake,
    } = change;
    let changed = [
        reservation
            .as_ref()
            .map(|reservation| reserved_condition(reservation, epoch, clock, now)),
        plan.as_ref()
            .map(|state| objects::placed_condition(state, now)),
        wake.as_ref()
            .map(|answer| objects::wakeable_condition(answer, now)),
        eviction
            .as_ref()
            .map(|mark| objects::disruption_target_condition(mark, pod)),
        touch.map(|_| objects::requeued_condition(now)),
    ];
    let conditions: Vec<PodCondition> = changed.into_iter().flatten().collect();
    let mut status = json!({});
    if !conditions.is_empty() {
        status["conditions"] = json!(conditions);
    }
    match &nomination {
        None => {}
        Some(NominationChange::To(node)) => status["nominatedNodeName"] = json!(node),
        // A null removes the field.
        Some(NominationChange::Cleared) => status["nominatedNodeName"] = Value::Null,
    }
    json!({ "metadata": { "uid": uid }, "status": status })
}

pub(crate) fn scheduling_gate_patch(uid: &PodUid) -> Value {
    json!({ "metadata": { "uid": uid }, "spec": objects::planner_gate_removal() })
}

fn reserved_condition(
    change: &ReservationChange,
    epoch: &LeaderEpoch,
    clock: &Clock,
    now: jiff::Timestamp,
) -> PodCondition {
    match change {
        ReservationChange::Ended => objects::reservation_ended_condition(RESERVATION_ENDED, now),
        ReservationChange::Set(reservation) => {
            let message = ReservationMessage {
                node: reservation.node.clone(),
                devices: reservation.devices.clone(),
                victims: reservation.victims.clone(),
                deadline: clock.to_wall(reservation.deadline),
                epoch: Some(epoch.clone()),
            };
            message.condition(now)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::ServerState;
    use stowage_scheduling::control_loop::{EvictionCondition, EvictionReason, PlanState};
    use stowage_scheduling::ids::NodeName;
    use stowage_scheduling::policy::Policy;
    use stowage_scheduling::vocabulary::placement::Reservation;

    fn patch(change: &StatusChange) -> Value {
        let state = ServerState::new(Policy::default());
        let (pod, uid) = (
            PodKey::parse("team-a", "pod").unwrap(),
            PodUid::parse("uid-1").unwrap(),
        );
        let epoch = LeaderEpoch::new("lease", 3, "nonce");
        status_patch(
            &pod,
            &uid,
            change,
            &epoch,
            &state.clock,
            jiff::Timestamp::UNIX_EPOCH,
        )
    }

    fn node() -> NodeName {
        NodeName::parse("node-a").unwrap()
    }

    #[test]
    fn any_parts_of_a_change_make_one_patch_that_names_the_pod() {
        let change = StatusChange {
            eviction: Some(EvictionCondition::Evicting(EvictionReason::Preempted {
                by: PodKey::parse("team-a", "llama").unwrap(),
            })),
            ..StatusChange::nominate(node())
                .and_requeue()
                .and_plan(PlanState::Nominated { node: node() })
        };
        let patch = patch(&change);
        assert_eq!(patch["metadata"], json!({ "uid": "uid-1" }));
        assert_eq!(patch["status"]["nominatedNodeName"], "node-a");
        let types: Vec<&Value> = patch["status"]["conditions"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| &one["type"])
            .collect();
        assert_eq!(
            types,
            [
                "stowage.dev/Placed",
                "stowage.dev/DisruptionTarget",
                "stowage.dev/Requeued"
            ]
        );
    }

    #[test]
    fn a_reservation_names_the_leader_that_made_it() {
        let reservation = Reservation {
            node: node(),
            devices: [].into(),
            victims: [].into(),
            deadline: stowage_scheduling::units::Moment::default(),
        };
        let patch = patch(&StatusChange::reservation(reservation));
        let message = patch["status"]["conditions"][0]["message"]
            .as_str()
            .unwrap();
        let message: Value = serde_json::from_str(message).unwrap();
        assert_eq!(message["epoch"], "lease/3/nonce");
    }

    #[test]
    fn the_patch_names_only_changed_fields() {
        assert_eq!(
            patch(&StatusChange::nominate(node()))["status"],
            json!({ "nominatedNodeName": "node-a" })
        );
        assert_eq!(
            patch(&StatusChange::clear_nomination())["status"],
            json!({ "nominatedNodeName": null })
        );
        assert_eq!(
            patch(&StatusChange::requeue())["status"].get("nominatedNodeName"),
            None
        );
        assert_eq!(patch(&StatusChange::default())["status"], json!({}));
    }
}
