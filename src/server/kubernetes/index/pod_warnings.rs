//! What is wrong with a pod, in words: a label of `stowage_pod_warnings_total`, and an Event of the pod.

use stowage_scheduling::control_loop::{PodEvent, PodEventReason};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::ledger::{Ledger, PodWarning};
use stowage_scheduling::units::plural;

/// A short name for metrics.
pub(super) fn code(warning: PodWarning) -> Option<&'static str> {
    match warning {
        PodWarning::Nothing => None,
        PodWarning::DevicesEdited => Some("devices-edited"),
        PodWarning::DemandEdited => Some("demand-edited"),
        PodWarning::Unplaced => Some("unplaced"),
        PodWarning::CheckpointUnreadable => Some("checkpoint-unreadable"),
        PodWarning::CheckpointInFuture => Some("checkpoint-in-future"),
    }
}

/// What an operator reads about a pod on a node whose warning is current.
pub(super) fn event(ledger: &Ledger, uid: &PodUid, warning: PodWarning) -> Option<PodEvent> {
    let entry = ledger.pod_state(uid)?;
    let node = entry.node()?;
    let devices = || {
        entry.devices().map_or_else(String::new, |uuids| {
            uuids
                .iter()
                .map(|u| u.as_str())
                .collect::<Vec<_>>()
                .join(",")
        })
    };
    let (kind, text) = match warning {
        PodWarning::Nothing => return None,
        PodWarning::Unplaced => (
            PodEventReason::Unplaced,
            format!(
                "The pod is on {node} and has no record of its GPUs: Stowage did not bind it. {} are charged on every GPU of the node until an agent reports where it runs. Set its schedulerName so that Stowage places it.",
                entry.demand.per_gpu
            ),
        ),
        PodWarning::DevicesEdited => (
            PodEventReason::EditIgnored,
            format!(
                "The annotation stowage.dev/devices was edited after the pod was bound. The edit is ignored: the pod is charged on {} of {node}.",
                devices()
            ),
        ),
        PodWarning::DemandEdited => (
            PodEventReason::EditIgnored,
            format!(
                "The pod's request was edited after it was bound. The edit is ignored: the pod is charged {} on each of {} of {node}.",
                entry.demand.per_gpu,
                plural(entry.demand.gpus, "GPU")
            ),
        ),
        PodWarning::CheckpointUnreadable => (
            PodEventReason::EditIgnored,
            "The time of the pod's last checkpoint cannot be read, so the pod counts as never checkpointed. Write stowage.dev/checkpoint-time as RFC 3339, such as 2026-03-01T12:00:00Z.".to_owned(),
        ),
        PodWarning::CheckpointInFuture => (
            PodEventReason::EditIgnored,
            "The time of the pod's last checkpoint is in the future; it counts as now. Check the clocks of its node and of the control plane.".to_owned(),
        ),
    };
    Some(PodEvent {
        key: entry.key.clone(),
        uid: uid.clone(),
        kind,
        text,
    })
}
