//! The planner's writes as values: what to send to the API server for one pod, and what for.
//!
//! [`Planner`](super::Planner) decides which writes there are, and `Planner::note` what follows from their results. A write may
//! be queued for a while: [`PlannerWrite::begin`] checks it against the ledger when its turn comes. [`perform`] sends what the
//! value says and returns the answer; it decides nothing.

use super::ended_reservations::refused;
use super::loans::answer;
use crate::ids::{NodeName, PodKey, PodUid};
use crate::kubernetes::port::{
    ControlPlane, ControlPlaneError, EvictionOutcome, EvictionReason, StatusChange, WakeAnswer,
};
use crate::scheduling::ledger::Ledger;
use crate::scheduling::vocabulary::placement::Reservation;
use crate::service::Service;

/// One write for one pod: at most a read, a request that writes, and the removal of the gate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlannerWrite {
    Status { key: PodKey, uid: PodUid, change: StatusChange, purpose: StatusPurpose },
    Evict { key: PodKey, uid: PodUid, why: EvictionReason, task: EvictionTask },
}

/// What a change of a pod's status is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatusPurpose {
    /// Shows a new reservation, before any victim is evicted.
    Reserve,
    /// Nominates the pod to the node of this reservation while it lasts, and lifts the gate after that if the pod is gated.
    Nominate { reservation: Reservation, is_gated: bool },
    /// Clears a reservation that ended. With the node on which a gated pod was placed it also shows why the pod was not bound
    /// there, which is read first.
    EndReservation { placed_on: Option<NodeName> },
    /// Clears a reservation that the pod shows and does not have, as this leader knows, or shows its own one instead.
    EndUnknownReservation,
    /// Clears a reservation that the planner gave up.
    AbandonReservation,
    /// Shows that a pod that was to be evicted stays.
    CancelEviction,
    /// Shows why a gated pod is not placed.
    ExplainWait,
    /// Tells a sleeping engine's pod whether it may wake.
    AnswerWake(WakeAnswer),
    /// Makes kube-scheduler try the pod again.
    Wake,
    /// Shows why the pod is not placed, and lifts its gate.
    Release,
}

/// Why a pod is evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvictionTask {
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

/// The API server's answer to a write.
#[derive(Debug)]
pub enum WriteOutcome {
    Status { key: PodKey, uid: PodUid, purpose: StatusPurpose, written: Result<(), ControlPlaneError> },
    Evicted { key: PodKey, uid: PodUid, task: EvictionTask, outcome: EvictionOutcome },
}

impl PlannerWrite {
    /// The pod that is written. Its writes are made one after the other.
    pub fn uid(&self) -> &PodUid {
        match self {
            Self::Status { uid, .. } | Self::Evict { uid, .. } => uid,
        }
    }

    /// The write as it is to be sent now; `None` if not at all. Reservations may have begun or ended, and the policy may have changed,
    /// while it was queued.
    pub fn begin(mut self, ledger: &Ledger) -> Option<Self> {
        if let Self::Evict { uid, task: EvictionTask::Overuse, .. } = &self
            && !ledger.is_evicted_for_overuse(uid)
        {
            return None;
        }
        if let Self::Status { uid, change, purpose, .. } = &mut self {
            let current = || ledger.pod_state(uid).and_then(|pod| pod.reservation());
            match purpose {
                StatusPurpose::Nominate { reservation, .. } if current() != Some(reservation) => return None,
                StatusPurpose::AnswerWake(said) => {
                    let now = ledger.wake_status(uid).and_then(|wake| answer(&wake));
                    if now.as_ref() != Some(said) {
                        return None;
                    }
                }
                StatusPurpose::EndUnknownReservation => {
                    *change = current()
                        .cloned()
                        .map_or_else(StatusChange::end_reservation, StatusChange::reservation);
                }
                _ => {}
            }
        }
        Some(self)
    }
}

impl EvictionTask {
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
    fn code(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Nominate { .. } => "nominate",
            Self::EndReservation { .. } => "end-reservation",
            Self::EndUnknownReservation => "end-unknown-reservation",
            Self::AbandonReservation => "abandon-reservation",
            Self::CancelEviction => "cancel-eviction",
            Self::ExplainWait => "explain-wait",
            Self::AnswerWake(_) => "answer-wake",
            Self::Wake => "wake",
            Self::Release => "release",
        }
    }

    fn lifts_gate(&self) -> bool {
        matches!(self, Self::Release | Self::Nominate { is_gated: true, .. })
    }
}

/// Sends a write and returns the answer; `None` if it was not to be sent any more.
pub async fn perform(
    write: PlannerWrite,
    service: &Service,
    control_plane: &dyn ControlPlane,
) -> Option<WriteOutcome> {
    let write = write.begin(&service.cluster())?;
    match write {
        PlannerWrite::Evict { key, uid, why, task } => {
            let span = service.traces().write("evict pod", &uid, &key);
            span.set("stowage.eviction.reason", task.code());
            if let EvictionTask::Reservation { preemptor } = &task
                && span.is_recorded()
            {
                span.set("stowage.preemptor.uid", preemptor.to_string());
            }
            let outcome = span.around(control_plane.evict(&key, &uid, &why)).await;
            span.set("stowage.outcome", outcome.code());
            Some(WriteOutcome::Evicted { key, uid, task, outcome })
        }
        PlannerWrite::Status { key, uid, mut change, purpose } => {
            if let StatusPurpose::EndReservation { placed_on: Some(node) } = &purpose {
                change.plan = refused(node, &uid, control_plane.read_pod(&key).await);
            }
            let span = service.traces().write("write pod status", &uid, &key);
            span.set("stowage.purpose", purpose.code());
            let mut written = span.around(control_plane.write_status(&key, &uid, &change)).await;
            if written.is_ok() && purpose.lifts_gate() {
                written = span.around(control_plane.remove_scheduling_gate(&key, &uid)).await;
            }
            if written.is_err() {
                span.fail("not-written");
            }
            Some(WriteOutcome::Status { key, uid, purpose, written })
        }
    }
}
