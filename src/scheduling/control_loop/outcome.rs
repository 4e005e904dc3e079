//! Applies the results of the loop's writes to its state.

use super::pod_write::{EvictionTask, PodWrite, StatusPurpose, WriteOutcome};
use super::reservation_progress::{
    EVICTION_BACKOFF, FailedBy, ReservationProgress, WRITE_VISIBLE_WITHIN,
};
use super::retry::{Backoff, RetryState};
use super::{ClusterAccess, ControlLoop, LockedCluster, LoopNotice};
use crate::control_loop::{ControlPlaneError, EvictionOutcome};
use crate::ids::{PodKey, PodUid};
use crate::ledger::{Ledger, PodState};
use crate::units::{Millis, Moment};
use crate::verbs::observe::PodReleased;
use crate::verbs::wait::{EvictionRefused, EvictionsNotMade, PodEvicted};
use crate::vocabulary::placement::Reservation;

impl<B: ClusterAccess> ControlLoop<B> {
    /// Handles the outcome of a write.
    pub fn handle_write_outcome(&mut self, outcome: WriteOutcome, now: Moment) {
        self.writes.end(outcome.uid());
        match outcome {
            WriteOutcome::Status {
                key,
                uid,
                purpose,
                written,
            } => {
                self.record_status_write(&key, &uid, &purpose, written, now);
            }
            WriteOutcome::GateRemoved {
                key,
                uid,
                reservation,
                written,
            } => {
                self.record_gate_removal(&key, &uid, &reservation, written, now);
            }
            WriteOutcome::Evicted {
                key,
                uid,
                task,
                outcome,
            } => {
                self.record_eviction(&task, &key, &uid, outcome, now);
            }
            WriteOutcome::Dropped(write) => self.record_dropped_write(&write, now),
        }
    }

    /// Records that a write was not sent. What it was for may begin again.
    fn record_dropped_write(&mut self, write: &PodWrite, now: Moment) {
        match write {
            PodWrite::Status {
                uid,
                purpose:
                    StatusPurpose::Reserve { reservation } | StatusPurpose::Nominate { reservation, .. },
                ..
            } => {
                if let Some(progress) = self.progress_toward(uid, reservation) {
                    progress.end_write();
                }
            }
            PodWrite::Status {
                uid,
                purpose: StatusPurpose::AnswerWake(answer),
                ..
            } => {
                self.record_dropped_wake_answer(uid, answer);
            }
            PodWrite::Evict { uid, task, .. } => {
                if task.counts_each_attempt() {
                    self.uncount_eviction(uid);
                }
                let attempt = match task {
                    EvictionTask::Reservation { preemptor } => {
                        let progress = self.reservation_progress.get_mut(preemptor);
                        progress
                            .filter(|it| it.has_victim(uid))
                            .map(|progress| progress.eviction_attempt(uid))
                    }
                    EvictionTask::Relief => self.relief_attempts.get_mut(uid),
                    EvictionTask::LoanEnd => self.loans.attempt(uid),
                    EvictionTask::OrphanedMember => self.orphaned_attempt(uid),
                    // The ledger says when it is due again.
                    EvictionTask::Overuse => None,
                };
                // It may begin again at once.
                if let Some(attempt) = attempt {
                    attempt.record_success(now);
                }
            }
            PodWrite::Status { .. } | PodWrite::RemoveGate { .. } => {}
        }
    }

    fn record_status_write(
        &mut self,
        key: &PodKey,
        uid: &PodUid,
        purpose: &StatusPurpose,
        written: Result<(), ControlPlaneError>,
        now: Moment,
    ) {
        if written == Err(ControlPlaneError::Gone) {
            self.release_unwatched(uid);
        }
        if purpose.ends_reservation() {
            self.rewrite_current_reservation(key, uid);
        }
        let unwritten = match purpose {
            StatusPurpose::Reserve { reservation } => {
                return self.record_reservation_write(key, uid, reservation, written, now);
            }
            StatusPurpose::AnswerWake(answer) => return self.record_wake_answer(key, answer, written),
            StatusPurpose::Nominate { reservation, is_gated } => {
                return self.record_nomination(key, uid, reservation, written, *is_gated, now);
            }
            StatusPurpose::ShowReservation => return self.record_reservation_shown(key, uid, written, now),
            // As long as the pod shows it, the end is written again.
            StatusPurpose::EndReservation { .. } => "could not clear the condition of a reservation that ended",
            StatusPurpose::EndUnknownReservation => "could not clear a stale reservation condition of the pod",
            // The pod is tried again.
            StatusPurpose::Requeue => "could not requeue a pod",
            StatusPurpose::Release { why } if written.is_ok() => return self.publish_release(key, uid, why),
            StatusPurpose::Release { .. } => "could not remove the scheduling gate of a pod",
            // Written again as long as the pod shows it.
            StatusPurpose::AbandonReservation | StatusPurpose::CancelEviction
            // The condition is written when the reason changes.
            | StatusPurpose::ExplainWait => return,
        };
        if let Err(error) = written {
            self.report_failure(key, unwritten, error);
        }
    }

    /// Progress toward this reservation. The pod may have another one by now, of which the write's answer says nothing.
    pub(super) fn progress_toward(
        &mut self,
        uid: &PodUid,
        reservation: &Reservation,
    ) -> Option<&mut ReservationProgress> {
        self.reservation_progress
            .get_mut(uid)
            .filter(|progress| progress.is_for(reservation))
    }

    /// Releases a pod that is gone and that no watch has shown: none will show its end. A request of kube-scheduler came late.
    fn release_unwatched(&mut self, uid: &PodUid) {
        let mut cluster = self.cluster_access.lock();
        let is_unwatched = |pod: &PodState| pod.is_unwatched && pod.waiting().is_some();
        if cluster.ledger().pod_state(uid).is_some_and(is_unwatched) {
            cluster.apply(PodReleased(uid.clone()));
            drop(cluster);
            self.reservation_progress.remove(uid);
        }
    }

    /// The end of a reservation was written. One that the preempt verb made and wrote meanwhile may be covered by that. The
    /// planner's own are written after the end.
    fn rewrite_current_reservation(&mut self, key: &PodKey, uid: &PodUid) {
        let is_own = self
            .reservation_progress
            .get(uid)
            .is_some_and(ReservationProgress::is_planned_here);
        if !is_own && has_reservation(self.cluster_access.lock().ledger(), uid) {
            self.write_current_reservation(key, uid);
        }
    }

    fn record_reservation_write(
        &mut self,
        key: &PodKey,
        uid: &PodUid,
        reservation: &Reservation,
        written: Result<(), ControlPlaneError>,
        now: Moment,
    ) {
        let is_shown = self
            .cluster_access
            .lock()
            .ledger()
            .shows_reservation(uid, reservation);
        let Some(progress) = self.progress_toward(uid, reservation) else {
            return;
        };
        progress.end_write();
        match written {
            Ok(()) => progress.is_written = true,
            // No answer came, and the watch shows it: pods may have been evicted for it.
            Err(ControlPlaneError::Unknown(_)) if is_shown => progress.is_written = true,
            Err(error) => {
                self.report_failure(
                    key,
                    "could not write the reservation; no pod is evicted",
                    error,
                );
                let why = |_: &PodKey| "the API server did not accept it".into();
                self.abandon_if_current(uid, why, FailedBy::Preemptor, now);
            }
        }
    }

    fn record_eviction(
        &mut self,
        task: &EvictionTask,
        key: &PodKey,
        victim: &PodUid,
        outcome: EvictionOutcome,
        now: Moment,
    ) {
        match &outcome {
            EvictionOutcome::Evicted => {
                self.cluster_access.lock().apply(PodEvicted(victim.clone()))
            }
            EvictionOutcome::Refused { message } => {
                self.uncount_eviction(victim);
                self.record_refused_eviction(victim, message);
            }
            EvictionOutcome::TryLater { .. } | EvictionOutcome::CalledOff
                if task.counts_each_attempt() =>
            {
                self.uncount_eviction(victim);
            }
            EvictionOutcome::Gone
            | EvictionOutcome::TryLater { .. }
            | EvictionOutcome::CalledOff
            | EvictionOutcome::Unknown { .. } => {}
        }
        if *task != EvictionTask::Overuse {
            match &outcome {
                EvictionOutcome::Evicted => self.record(LoopNotice::Evicted(key.clone())),
                EvictionOutcome::Refused { message } => {
                    self.report_failure(key, "eviction refused", message);
                }
                EvictionOutcome::Unknown { message } => {
                    self.report_failure(key, "eviction unanswered", message);
                }
                EvictionOutcome::Gone
                | EvictionOutcome::TryLater { .. }
                | EvictionOutcome::CalledOff => {}
            }
        }
        match task {
            EvictionTask::Relief => self.record_relief_eviction(victim, outcome, now),
            EvictionTask::LoanEnd => self.record_loan_eviction(victim, outcome, now),
            EvictionTask::Overuse => self.record(LoopNotice::OveruseEviction {
                pod: key.clone(),
                outcome,
            }),
            EvictionTask::OrphanedMember => self.record_orphan_eviction(victim, outcome, now),
            EvictionTask::Reservation { preemptor } => {
                let progress = self.reservation_progress.get_mut(preemptor);
                // The preemptor may have another reservation by now, which evicts nobody or other pods.
                let Some(progress) = progress.filter(|progress| progress.has_victim(victim)) else {
                    return;
                };
                if let Err(message) = record_attempt(
                    progress.eviction_attempt(victim),
                    outcome,
                    now,
                    EVICTION_BACKOFF,
                ) {
                    let why = |reader: &PodKey| eviction_refused(reader, key, &message);
                    self.abandon_if_current(preemptor, why, FailedBy::Victim, now);
                }
            }
        }
    }

    fn record_nomination(
        &mut self,
        key: &PodKey,
        uid: &PodUid,
        reservation: &Reservation,
        written: Result<(), ControlPlaneError>,
        is_gated: bool,
        now: Moment,
    ) {
        let Some(progress) = self.progress_toward(uid, reservation) else {
            return;
        };
        progress.record_nomination(now, written.is_ok(), is_gated);
        match written {
            // The watch may have been faster than the answer.
            Ok(()) => self.remove_gate(uid, now),
            // The watch shows it, too.
            Err(ControlPlaneError::Gone) => {}
            Err(error) => {
                self.report_failure(key, "could not nominate a pod to its node", error);
            }
        }
    }

    /// Abandons the pod's reservation, if it still has the one whose progress is known; `reason_for` is the text for its owner.
    fn abandon_if_current(
        &mut self,
        uid: &PodUid,
        reason_for: impl FnOnce(&PodKey) -> String,
        failed_by: FailedBy,
        now: Moment,
    ) {
        // A statement of its own, so that the ledger is not locked any more.
        let Some(reservation_status) = self
            .cluster_access
            .lock()
            .ledger()
            .reservation_status_of(uid)
        else {
            return;
        };
        if self
            .progress_toward(uid, &reservation_status.reservation)
            .is_some()
        {
            self.abandon_reservation(
                &reservation_status,
                &reason_for(&reservation_status.key),
                failed_by,
                now,
            );
        }
    }

    pub(super) fn uncount_eviction(&mut self, victim: &PodUid) {
        self.cluster_access
            .lock()
            .apply(EvictionsNotMade(vec![victim.clone()]));
    }

    /// Records that the pod cannot be evicted for now, for any preemptor.
    pub(super) fn record_refused_eviction(&mut self, victim: &PodUid, why: &str) {
        self.cluster_access
            .lock()
            .apply(EvictionRefused::new(victim.clone(), why));
    }
}

/// The text for the preemptor's owner. The API server's message may name more than the victim.
fn eviction_refused(preemptor: &PodKey, victim: &PodKey, message: &str) -> String {
    let refused = format!(
        "the eviction of {} is refused",
        victim.name_shown_to(preemptor)
    );
    if victim.namespace == preemptor.namespace {
        format!("{refused}: {message}")
    } else {
        refused
    }
}

fn has_reservation(ledger: &Ledger, uid: &PodUid) -> bool {
    ledger
        .pod_state(uid)
        .and_then(PodState::reservation)
        .is_some()
}

/// Records the result of an eviction, and when to retry it if the pod still exists by then. An error is a permanent refusal of
/// the API server.
pub(super) fn record_attempt(
    attempt: &mut RetryState,
    outcome: EvictionOutcome,
    now: Moment,
    backoff: Backoff,
) -> Result<(), String> {
    match outcome {
        EvictionOutcome::Evicted | EvictionOutcome::Gone => {
            attempt.record_success(now + WRITE_VISIBLE_WITHIN)
        }
        EvictionOutcome::CalledOff | EvictionOutcome::Unknown { .. } => {
            attempt.record_failure(now, backoff, Millis(0));
        }
        EvictionOutcome::TryLater { after } => {
            let after = after.map_or(0, |after| {
                u64::try_from(after.as_millis()).unwrap_or(u64::MAX)
            });
            attempt.record_failure(now, backoff, Millis(after));
        }
        EvictionOutcome::Refused { message } => {
            attempt.record_failure(now, backoff, backoff.max);
            return Err(message);
        }
    }
    Ok(())
}
