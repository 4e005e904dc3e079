//! Applies the results of the planner's writes to its state.

use super::Planner;
use super::reservation_progress::{PAUSES, SHOWS_WITHIN};
use super::retry::{Backoff, RetryState};
use crate::ids::{PodKey, PodUid};
use crate::kubernetes::port::{ControlPlaneError, EvictionOutcome};
use crate::scheduling::verbs::wait::PodEvicted;
use crate::units::{Millis, Moment};
use tracing::{info, warn};

/// The result of one write, or of two that belong together.
#[derive(Debug)]
pub enum WriteOutcome {
    /// A reservation's condition, written before any victim is evicted.
    Held {
        key: PodKey,
        uid: PodUid,
        written: Result<(), ControlPlaneError>,
    },
    Evicted {
        preemptor: PodUid,
        key: PodKey,
        victim: PodUid,
        outcome: EvictionOutcome,
    },
    /// An eviction that serves no reservation.
    EvictedAlone {
        by: EvictionTask,
        key: PodKey,
        victim: PodUid,
        outcome: EvictionOutcome,
    },
    Told {
        key: PodKey,
        uid: PodUid,
        told: Result<(), ControlPlaneError>,
    },
}

/// Why a pod is evicted when no pending pod needs its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvictionTask {
    Relief,
    Remnant,
}

impl Planner {
    pub(super) fn note(&mut self, outcome: Option<WriteOutcome>) {
        match outcome {
            None => {}
            Some(WriteOutcome::Held { key, uid, written }) => self.note_held(&key, &uid, written),
            Some(WriteOutcome::Evicted { preemptor, key, victim, outcome }) => {
                self.note_evicted(&preemptor, &key, &victim, outcome);
            }
            Some(WriteOutcome::EvictedAlone { by, key, victim, outcome }) => {
                self.note_evicted_alone(by, &key, &victim, outcome);
            }
            Some(WriteOutcome::Told { key, uid, told }) => self.note_told(&key, &uid, told),
        }
    }

    fn note_held(&mut self, key: &PodKey, uid: &PodUid, written: Result<(), ControlPlaneError>) {
        let Some(progress) = self.progress_of.get_mut(uid) else { return };
        progress.is_writing = false;
        match written {
            Ok(()) => progress.is_written = true,
            Err(error) => {
                warn!(pod = %key, %error, "could not write the reservation; no pod is evicted");
                self.give_up(uid, "the API server did not accept it");
            }
        }
    }

    fn note_evicted(&mut self, preemptor: &PodUid, key: &PodKey, victim: &PodUid, outcome: EvictionOutcome) {
        let now = self.now();
        if outcome == EvictionOutcome::Evicted {
            self.service.cluster().apply(PodEvicted(victim.clone()));
        }
        let Some(progress) = self.progress_of.get_mut(preemptor) else { return };
        if let Err(message) = tried(progress.attempt(victim), key, outcome, now, PAUSES) {
            self.give_up(preemptor, &format!("the eviction of pod {key} was refused: {message}"));
        }
    }

    fn note_evicted_alone(
        &mut self,
        by: EvictionTask,
        key: &PodKey,
        victim: &PodUid,
        outcome: EvictionOutcome,
    ) {
        let now = self.now();
        if outcome == EvictionOutcome::Evicted {
            self.service.cluster().apply(PodEvicted(victim.clone()));
        }
        match by {
            EvictionTask::Relief => self.note_relief(victim, key, outcome, now),
            EvictionTask::Remnant => self.note_orphaned_member(victim, key, outcome, now),
        }
    }

    fn note_told(&mut self, key: &PodKey, uid: &PodUid, told: Result<(), ControlPlaneError>) {
        let now = self.now();
        let Some(progress) = self.progress_of.get_mut(uid) else { return };
        progress.note_told(now, told.is_ok());
        match told {
            Ok(()) => {}
            // The watch shows it, too.
            Err(ControlPlaneError::Gone) => {}
            Err(error) => warn!(pod = %key, %error, "could not nominate a pod to its node"),
        }
    }

    fn give_up(&mut self, uid: &PodUid, because: &str) {
        let reservation_status = self.service.cluster().reservation_of(uid);
        reservation_status.iter().for_each(|reservation_status| self.call_off(reservation_status, because));
    }
}

/// Records the result of an eviction, and when to retry it if the pod still exists by then. An error is a permanent refusal of
/// the API server.
pub(super) fn tried(
    attempt: &mut RetryState,
    key: &PodKey,
    outcome: EvictionOutcome,
    now: Moment,
    pauses: Backoff,
) -> Result<(), String> {
    match outcome {
        EvictionOutcome::Evicted => {
            info!(pod = %key, "evicted");
            attempt.done(now + SHOWS_WITHIN);
        }
        EvictionOutcome::Gone => attempt.done(now + SHOWS_WITHIN),
        EvictionOutcome::TryLater { after } => {
            let after = after.map_or(0, |after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
            attempt.failed(now, pauses, Millis(after));
        }
        EvictionOutcome::Unknown { message } => {
            warn!(pod = %key, message, "eviction unanswered");
            attempt.failed(now, pauses, Millis(0));
        }
        EvictionOutcome::Refused { message } => {
            warn!(pod = %key, message, "eviction refused");
            return Err(message);
        }
    }
    Ok(())
}
