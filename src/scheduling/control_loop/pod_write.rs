//! The loop's writes as values: what to send to the API server for one pod, and what for.
//!
//! [`ControlLoop`](super::ControlLoop) decides which writes there are and what follows from their results. A write may be on its
//! way for a while: [`PodWrite::revalidate`] checks it against the ledger when it is sent. Who sends it decides nothing.

use super::loans::due_wake_answer;
use super::orphaned_members::is_orphaned;
use crate::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, StatusChange, WakeAnswer,
};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::ledger::Ledger;
use crate::planning::{is_relief_due, is_vram_owed};
use crate::policy::Mode;
use crate::vocabulary::placement::Reservation;
use std::sync::Arc;

/// One write for one pod: at most a read, a request that writes, and for a release the removal of the gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodWrite {
    Status {
        key: PodKey,
        uid: PodUid,
        change: StatusChange,
        purpose: StatusPurpose,
    },
    /// Lets kube-scheduler see the pod while this reservation lasts.
    RemoveGate {
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
#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum StatusPurpose {
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
    Requeue,
    /// Shows why the pod is not placed, and lifts its gate.
    Release { why: Arc<str> },
}

/// Why a pod is evicted.
#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum EvictionTask {
    /// For the reservation of this pod.
    #[strum(serialize = "preemption")]
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

/// The outcome of a write: the API server's answer to it, if it was sent.
#[derive(Debug)]
pub enum WriteOutcome {
    Status {
        key: PodKey,
        uid: PodUid,
        purpose: StatusPurpose,
        written: Result<(), ControlPlaneError>,
    },
    GateRemoved {
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
    /// The write was not to be sent any more when its turn came.
    Dropped(PodWrite),
}

impl PodWrite {
    /// The pod that is written. Its writes are made one after the other.
    pub fn uid(&self) -> &PodUid {
        match self {
            Self::Status { uid, .. } | Self::RemoveGate { uid, .. } | Self::Evict { uid, .. } => {
                uid
            }
        }
    }

    /// The outcome, by the API server's answer.
    pub fn into_outcome(
        self,
        written: Result<(), ControlPlaneError>,
        eviction: EvictionOutcome,
    ) -> WriteOutcome {
        match self {
            Self::Status {
                key, uid, purpose, ..
            } => WriteOutcome::Status {
                key,
                uid,
                purpose,
                written,
            },
            Self::RemoveGate {
                key,
                uid,
                reservation,
            } => WriteOutcome::GateRemoved {
                key,
                uid,
                reservation,
                written,
            },
            Self::Evict { key, uid, task, .. } => WriteOutcome::Evicted {
                key,
                uid,
                task,
                outcome: eviction,
            },
        }
    }

    /// The outcome of a write whose sender panicked: it may have been made.
    pub fn into_panicked(self) -> WriteOutcome {
        let message = "the write broke off, which is a defect of Stowage's own: its log says where"
            .to_owned();
        let written = Err(ControlPlaneError::Unknown(message.clone()));
        self.into_outcome(written, EvictionOutcome::Unknown { message })
    }

    /// Whether no reservation, eviction or wake of an engine depends on it: a pending pod's condition can wait.
    pub(super) fn can_wait(&self) -> bool {
        matches!(
            self,
            Self::Status {
                purpose: StatusPurpose::ExplainWait
                    | StatusPurpose::Requeue
                    | StatusPurpose::Release { .. },
                ..
            }
        )
    }

    /// The write as it is to be sent now; `None` if not at all. Reservations may have begun or ended, and the policy may have
    /// changed, while it was queued.
    pub fn revalidate(self, ledger: &Ledger) -> Option<Self> {
        let current = |uid: &PodUid| ledger.pod_state(uid).and_then(|pod| pod.reservation());
        let is_due = match &self {
            Self::Evict { uid, why, task, .. } => task.is_still_wanted(ledger, uid, why),
            Self::RemoveGate {
                uid, reservation, ..
            } => current(uid).is_some_and(|present| present.is_same(reservation)),
            Self::Status { uid, purpose, .. } => purpose.is_current(ledger, uid),
        };
        let mut write = is_due.then_some(self)?;
        if let Self::Status {
            uid,
            change,
            purpose,
            ..
        } = &mut write
            && (purpose.ends_reservation() || *purpose == StatusPurpose::ShowReservation)
            && let Some(present) = current(uid)
        {
            *change = StatusChange::reservation(present.clone());
            *purpose = StatusPurpose::ShowReservation;
        }
        Some(write)
    }
}

impl WriteOutcome {
    /// The pod that was to be written.
    pub(super) fn uid(&self) -> &PodUid {
        match self {
            Self::Status { uid, .. }
            | Self::GateRemoved { uid, .. }
            | Self::Evicted { uid, .. } => uid,
            Self::Dropped(write) => write.uid(),
        }
    }
}

impl EvictionTask {
    /// Whether what the pod is evicted for still holds.
    pub fn is_still_wanted(&self, ledger: &Ledger, uid: &PodUid, why: &EvictionReason) -> bool {
        let is_wanted = match (self, why) {
            (Self::Reservation { preemptor }, _) => ledger.is_evicted_for(uid, preemptor),
            (Self::Relief, EvictionReason::Pressure { gpu, .. }) => is_relief_due(ledger, uid, gpu),
            (Self::Relief, _) => false,
            (Self::LoanEnd, _) => is_vram_owed(ledger, uid),
            (Self::OrphanedMember, _) => is_orphaned(ledger, uid),
            (Self::Overuse, _) => ledger.is_evicted_for_overuse(uid),
        };
        is_wanted && ledger.policy().mode == Mode::Enforce
    }

    /// Whether each attempt counts within the eviction rates by itself. Of the others, one counts for all.
    pub(super) fn counts_each_attempt(&self) -> bool {
        match self {
            Self::Relief | Self::LoanEnd | Self::Overuse => true,
            Self::Reservation { .. } | Self::OrphanedMember => false,
        }
    }
}

impl StatusPurpose {
    /// Whether it is what the pod is to be told by now.
    pub fn is_current(&self, ledger: &Ledger, uid: &PodUid) -> bool {
        let reservation = || ledger.pod_state(uid).and_then(|pod| pod.reservation());
        match self {
            Self::Reserve {
                reservation: planned,
            }
            | Self::Nominate {
                reservation: planned,
                ..
            } => reservation().is_some_and(|present| present.is_same(planned)),
            Self::AnswerWake(sent) => {
                ledger
                    .wake_status(uid)
                    .and_then(|wake| due_wake_answer(&wake))
                    .as_ref()
                    == Some(sent)
            }
            Self::ShowReservation => reservation().is_some(),
            // A run may have found a placement since.
            Self::Release { .. } => reservation().is_none(),
            Self::CancelEviction => !ledger.is_leaving(uid),
            _ => true,
        }
    }

    /// Whether it clears the condition of a reservation. If the pod has one by then, that is shown instead: it may be written
    /// already, because the preempt verb does not wait for the loop's writes.
    pub(super) fn ends_reservation(&self) -> bool {
        matches!(
            self,
            Self::EndReservation { .. } | Self::EndUnknownReservation | Self::AbandonReservation
        )
    }
}
