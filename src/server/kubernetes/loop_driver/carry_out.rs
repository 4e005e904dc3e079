//! Sends one write of the loop.

use crate::service::Service;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_scheduling::control_loop::{
    EvictionTask, PodWrite, StatusPurpose, WriteOutcome, refused,
};

/// Sends a write, if it is still to be sent, and returns what became of it.
pub(super) async fn carry_out(
    mut write: PodWrite,
    service: &Service,
    control_plane: &dyn ControlPlane,
) -> WriteOutcome {
    read_refusal(&mut write, control_plane).await;
    // A statement of its own, so that the lock is released with it.
    let begun = write.clone().begin(service.cluster().ledger());
    let Some(write) = begun else {
        return WriteOutcome::Dropped(write);
    };
    match write {
        PodWrite::Evict {
            key,
            uid,
            why,
            task,
        } => {
            let span = service.traces().write("evict pod", &uid, &key);
            span.set("stowage.eviction.reason", task.code());
            if let EvictionTask::Reservation { preemptor } = &task
                && span.is_recorded()
            {
                span.set("stowage.preemptor.uid", preemptor.to_string());
            }
            let is_due = || task.is_due(service.cluster().ledger(), &uid, &why);
            let outcome = span
                .around(control_plane.evict(&key, &uid, &why, &is_due))
                .await;
            span.set("stowage.outcome", outcome.code());
            WriteOutcome::Evicted {
                key,
                uid,
                task,
                outcome,
            }
        }
        PodWrite::LiftGate {
            key,
            uid,
            reservation,
        } => {
            let span = service.traces().write("lift scheduling gate", &uid, &key);
            let written = span
                .around(control_plane.remove_scheduling_gate(&key, &uid))
                .await;
            if written.is_err() {
                span.fail("not-written");
            }
            WriteOutcome::GateLifted {
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
            let span = service.traces().write("write pod status", &uid, &key);
            span.set("stowage.purpose", purpose.code());
            let mut written = span
                .around(control_plane.write_status(&key, &uid, &change))
                .await;
            if written.is_ok() && matches!(purpose, StatusPurpose::Release { .. }) {
                // That may have taken long. The nomination of a pod that was placed meanwhile replaces its condition.
                if !purpose.stands(service.cluster().ledger(), &uid) {
                    return WriteOutcome::Dropped(PodWrite::Status {
                        key,
                        uid,
                        change,
                        purpose,
                    });
                }
                written = span
                    .around(control_plane.remove_scheduling_gate(&key, &uid))
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
        change.plan = refused(node, uid, control_plane.read_pod(key).await);
    }
}
