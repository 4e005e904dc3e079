//! Sends one write of the loop.

use crate::service::ServerState;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_scheduling::control_loop::{
    EvictionTask, PodWrite, StatusPurpose, WriteOutcome, rejected_plan_state,
};

/// Sends a write, if it is still to be sent, and returns what became of it.
pub(super) async fn carry_out(
    mut write: PodWrite,
    state: &ServerState,
    control_plane: &dyn ControlPlane,
) -> WriteOutcome {
    read_refusal(&mut write, control_plane).await;
    // A statement of its own, so that the lock is released with it.
    let still_due = write.clone().revalidate(state.cluster().ledger());
    let Some(write) = still_due else {
        return WriteOutcome::Dropped(write);
    };
    match write {
        PodWrite::Evict {
            key,
            uid,
            why,
            task,
        } => {
            let span = state.traces().write("evict pod", &uid, &key);
            span.set("stowage.eviction.reason", task.into_str());
            if let EvictionTask::Reservation { preemptor } = &task
                && span.is_recorded()
            {
                span.set("stowage.preemptor.uid", preemptor.to_string());
            }
            let is_due = || task.is_still_wanted(state.cluster().ledger(), &uid, &why);
            let outcome = span
                .instrument(control_plane.evict(&key, &uid, &why, &is_due))
                .await;
            span.set("stowage.outcome", outcome.code());
            WriteOutcome::Evicted {
                key,
                uid,
                task,
                outcome,
            }
        }
        PodWrite::RemoveGate {
            key,
            uid,
            reservation,
        } => {
            let span = state.traces().write("lift scheduling gate", &uid, &key);
            let written = span
                .instrument(control_plane.remove_scheduling_gate(&key, &uid))
                .await;
            if written.is_err() {
                span.fail("not-written");
            }
            WriteOutcome::GateRemoved {
                key,
                uid,
                reservation,
                written,
            }
        }
        PodWrite::Status {
            key,
            uid,
            change,
            purpose,
        } => {
            let span = state.traces().write("write pod status", &uid, &key);
            span.set("stowage.purpose", purpose.into_str());
            let mut written = span
                .instrument(control_plane.write_status(&key, &uid, &change))
                .await;
            if written.is_ok() && matches!(purpose, StatusPurpose::Release { .. }) {
                // That may have taken long. The nomination of a pod that was placed meanwhile replaces its condition.
                if !purpose.is_current(state.cluster().ledger(), &uid) {
                    return WriteOutcome::Dropped(PodWrite::Status {
                        key,
                        uid,
                        change,
                        purpose,
                    });
                }
                written = span
                    .instrument(control_plane.remove_scheduling_gate(&key, &uid))
                    .await;
            }
            if written.is_err() {
                span.fail("not-written");
            }
            WriteOutcome::Status {
                key,
                uid,
                purpose,
                written,
            }
        }
    }
}

/// Reads why a gated pod was not bound where it was placed, if that is to be shown.
async fn read_refusal(write: &mut PodWrite, control_plane: &dyn ControlPlane) {
    if let PodWrite::Status {
        key,
        uid,
        change,
        purpose: StatusPurpose::EndReservation {
            placed_on: Some(node),
        },
    } = write
    {
        change.plan = rejected_plan_state(node, uid, control_plane.read_pod(key).await);
    }
}
