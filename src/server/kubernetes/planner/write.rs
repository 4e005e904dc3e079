//! The planner's writes as values: what to send to the API server for one pod, and what for.
//!
//! [`Planner`](super::Planner) decides which writes there are, and `Planner::note` what follows from their results. A write may
//! be queued for a while: [`PlannerWrite::begin`] checks it against the ledger when its turn comes. [`perform`] sends what the
//! value says and returns the answer; it decides nothing.

use super::ended_reservations::refused;
use super::loans::answer;
use super::orphaned_members::is_orphaned;
use crate::service::Service;
use std::sync::Arc;
use stowage_kubernetes_objects::port::{
    ControlPlane, ControlPlaneError, EvictionOutcome, EvictionReason, StatusChange, WakeAnswer,
};
use stowage_scheduling::ids::{NodeName, PodKey, PodUid};
use stowage_scheduling::ledger::Ledger;
use stowage_scheduling::planning::{is_relief_due, is_vram_owed};
use stowage_scheduling::policy::Mode;
use stowage_scheduling::vocabulary::placement::Reservation;

/// One write for one pod: at most a read, a request that writes, and for a release the removal of the gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PlannerWrite {
    Status {
        key: PodKey,
        uid: PodUid,
        change: StatusChange,
        purpose: StatusPurpose,
    },
    /// Lets kube-scheduler see the pod while this reservation lasts.
    LiftGate {
        key: PodKey,
        uid: PodUid,
        reservation: Reservation,
    },
    Evict {
        key: PodKey,
        uid: PodUid,
        why: EvictionReason,
        task: EvictionTask,
    },
}

/// What a change of a pod's status is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StatusPurpose {
    /// Shows a new reservation while it lasts, before any victim is evicted.
    Reserve { reservation: Reservation },
    /// Nominates the pod to the node of this reservation while it lasts.
    Nominate {
        reservation: Reservation,
        is_gated: bool,
    },
    /// Clears a reservation that ended. With the node on which a gated pod was placed it also shows why the pod was not bound
    /// there, which is read first.
    EndReservation { placed_on: Option<NodeName> },
    /// Clears a reservation that the pod shows and does not have, as this leader knows, or shows its own one instead.
    EndUnknownReservation,
    /// Clears a reservation that the planner gave up.
    AbandonReservation,
    /// Shows the pod's reservation once more: a write about an earlier one may have covered it.
    ShowReservation,
    /// Shows that a pod that was to be evicted stays.
    CancelEviction,
    /// Shows why a gated pod is not placed.
    ExplainWait,
    /// Tells a sleeping engine's pod whether it may wake.
    AnswerWake(WakeAnswer),
    /// Makes kube-scheduler try the pod again.
    Wake,
    /// Shows why the pod is not placed, and lifts its gate.
    Release { why: Arc<str> },
}

/// Why a pod is evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EvictionTask {
    /// For the reservation of this pod.
    Reservation { preemptor: PodUid },
    /// An engine on its GPU is under pressure.
    Relief,
    /// It borrows from an engine that wakes.
    LoanEnd,
    /// Its group stays incomplete.
    OrphanedMember,
    /// It uses more VRAM than it was granted.
    Overuse,
}

/// What became of a write: the API server's answer to it, if it was sent.
#[derive(Debug)]
pub(crate) enum WriteOutcome {
    Status {
        key: PodKey,
        uid: PodUid,
        purpose: StatusPurpose,
        written: Result<(), ControlPlaneError>,
    },
    GateLifted {
        key: PodKey,
        uid: PodUid,
        reservation: Reservation,
        written: Result<(), ControlPlaneError>,
    },
    Evicted {
        key: PodKey,
        uid: PodUid,
        task: EvictionTask,
        outcome: EvictionOutcome,
    },
    /// It was not to be sent any more when its turn came.
    Dropped(PlannerWrite),
}

impl PlannerWrite {
    /// The pod that is written. Its writes are made one after the other.
    pub fn uid(&self) -> &PodUid {
        match self {
            Self::Status { uid, .. } | Self::LiftGate { uid, .. } | Self::Evict { uid, .. } => uid,
        }
    }

    /// What is known of a write whose task panicked: it may have been made.
    pub(crate) fn broken_off(self) -> WriteOutcome {
        let message = || {
            "the write broke off, which is a defect of Stowage's own: its log says where".to_owned()
        };
        match self {
            Self::Status {
                key, uid, purpose, ..
            } => {
                let written = Err(ControlPlaneError::Unknown(message()));
                WriteOutcome::Status {
                    key,
                    uid,
                    purpose,
                    written,
                }
            }
            Self::LiftGate {
                key,
                uid,
                reservation,
            } => {
                let written = Err(ControlPlaneError::Unknown(message()));
                WriteOutcome::GateLifted {
                    key,
                    uid,
                    reservation,
                    written,
                }
            }
            Self::Evict { key, uid, task, .. } => WriteOutcome::Evicted {
                key,
                uid,
                task,
                outcome: EvictionOutcome::Unknown { message: message() },
            },
        }
    }

    /// Whether no reservation, eviction or wake of an engine depends on it: a pending pod's condition can wait.
    pub(crate) fn can_wait(&self) -> bool {
        matches!(
            self,
            Self::Status {
                purpose: StatusPurpose::ExplainWait
                    | StatusPurpose::Wake
                    | StatusPurpose::Release { .. },
                ..
            }
        )
    }

    /// The write as it is to be sent now; `None` if not at all. Reservations may have begun or ended, and the policy may have
    /// changed, while it was queued.
    pub fn begin(self, ledger: &Ledger) -> Option<Self> {
        let present = |uid: &PodUid| ledger.pod_state(uid).and_then(|pod| pod.reservation());
        let is_due = match &self {
            Self::Evict { uid, why, task, .. } => is_still_due(ledger, uid, why, task),
            Self::LiftGate {
                uid, reservation, ..
            } => present(uid).is_some_and(|present| present.is_same(reservation)),
            Self::Status { uid, purpose, .. } => purpose.stands(ledger, uid),
        };
        let mut write = is_due.then_some(self)?;
        if let Self::Status {
            uid,
            change,
            purpose,
            ..
        } = &mut write
            && (purpose.ends_reservation() || *purpose == StatusPurpose::ShowReservation)
            && let Some(present) = present(uid)
        {
            *change = StatusChange::reservation(present.clone());
            *purpose = StatusPurpose::ShowReservation;
        }
        Some(write)
    }
}

/// Whether what the pod is evicted for still holds.
fn is_still_due(ledger: &Ledger, uid: &PodUid, why: &EvictionReason, task: &EvictionTask) -> bool {
    let is_wanted = match (task, why) {
        (EvictionTask::Reservation { preemptor }, _) => ledger.is_evicted_for(uid, preemptor),
        (EvictionTask::Relief, EvictionReason::Pressure { gpu, .. }) => {
            is_relief_due(ledger, uid, gpu)
        }
        (EvictionTask::Relief, _) => false,
        (EvictionTask::LoanEnd, _) => is_vram_owed(ledger, uid),
        (EvictionTask::OrphanedMember, _) => is_orphaned(ledger, uid),
        (EvictionTask::Overuse, _) => ledger.is_evicted_for_overuse(uid),
    };
    is_wanted && ledger.policy().mode == Mode::Enforce
}

impl EvictionTask {
    /// Whether each attempt counts within the eviction rates by itself. Of the others, one counts for all.
    pub(super) fn counts_each_attempt(&self) -> bool {
        match self {
            Self::Relief | Self::LoanEnd | Self::Overuse => true,
            Self::Reservation { .. } | Self::OrphanedMember => false,
        }
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Reservation { .. } => "preemption",
            Self::Relief => "relief",
            Self::LoanEnd => "loan-end",
            Self::OrphanedMember => "orphaned-member",
            Self::Overuse => "overuse",
        }
    }
}

impl StatusPurpose {
    /// Whether it is what the pod is to be told by now.
    fn stands(&self, ledger: &Ledger, uid: &PodUid) -> bool {
        let reservation = || ledger.pod_state(uid).and_then(|pod| pod.reservation());
        match self {
            Self::Reserve {
                reservation: planned,
            }
            | Self::Nominate {
                reservation: planned,
                ..
            } => reservation().is_some_and(|present| present.is_same(planned)),
            Self::AnswerWake(said) => {
                ledger
                    .wake_status(uid)
                    .and_then(|wake| answer(&wake))
                    .as_ref()
                    == Some(said)
            }
            Self::ShowReservation => reservation().is_some(),
            // A run may have found a placement since.
            Self::Release { .. } => reservation().is_none(),
            Self::CancelEviction => !ledger.is_leaving(uid),
            _ => true,
        }
    }

    /// Whether it clears the condition of a reservation. If the pod has one by then, that is shown instead: it may be written
    /// already, because the preempt verb does not wait for the planner's writes.
    pub(crate) fn ends_reservation(&self) -> bool {
        matches!(
            self,
            Self::EndReservation { .. } | Self::EndUnknownReservation | Self::AbandonReservation
        )
    }

    fn code(&self) -> &'static str {
        match self {
            Self::Reserve { .. } => "reserve",
            Self::Nominate { .. } => "nominate",
            Self::EndReservation { .. } => "end-reservation",
            Self::EndUnknownReservation => "end-unknown-reservation",
            Self::AbandonReservation => "abandon-reservation",
            Self::ShowReservation => "show-reservation",
            Self::CancelEviction => "cancel-eviction",
            Self::ExplainWait => "explain-wait",
            Self::AnswerWake(_) => "answer-wake",
            Self::Wake => "wake",
            Self::Release { .. } => "release",
        }
    }
}

/// Sends a write, if it is still to be sent, and returns what became of it.
pub async fn perform(
    mut write: PlannerWrite,
    service: &Service,
    control_plane: &dyn ControlPlane,
) -> WriteOutcome {
    write.read_refusal(control_plane).await;
    // A statement of its own, so that the lock is released with it.
    let begun = write.clone().begin(&service.cluster());
    let Some(write) = begun else {
        return WriteOutcome::Dropped(write);
    };
    match write {
        PlannerWrite::Evict {
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
            let is_due = || is_still_due(&service.cluster(), &uid, &why, &task);
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
        PlannerWrite::LiftGate {
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
        PlannerWrite::Status {
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
                if !purpose.stands(&service.cluster(), &uid) {
                    return WriteOutcome::Dropped(PlannerWrite::Status {
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

impl PlannerWrite {
    /// Reads why a gated pod was not bound where it was placed, if that is to be shown.
    async fn read_refusal(&mut self, control_plane: &dyn ControlPlane) {
        if let Self::Status {
            key,
            uid,
            change,
            purpose:
                StatusPurpose::EndReservation {
                    placed_on: Some(node),
                },
        } = self
        {
            change.plan = refused(node, uid, control_plane.read_pod(key).await);
        }
    }
}
