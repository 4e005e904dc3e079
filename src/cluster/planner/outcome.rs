//! What came of the planner's writes, brought back into its state.

use super::Planner;
use crate::control_plane::{ControlPlaneError, EvictionOutcome};
use crate::ids::{PodKey, PodUid};
use crate::units::Millis;
use tracing::{info, warn};

/// Of one write, or of two that belong together.
#[derive(Debug)]
pub enum Outcome {
    /// A hold's condition, before anyone is evicted for it.
    Held {
        key: PodKey,
        uid: PodUid,
        written: Result<(), ControlPlaneError>,
    },
    Evicted {
        holder: PodUid,
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

impl Planner {
    pub(super) fn note(&mut self, outcome: Option<Outcome>) {
        match outcome {
            None => {}
            Some(Outcome::Held { key, uid, written }) => self.note_held(&key, &uid, written),
            Some(Outcome::Evicted { holder, key, victim, outcome }) => {
                self.note_evicted(&holder, &key, &victim, outcome);
            }
            Some(Outcome::Told { key, uid, told }) => self.note_told(&key, &uid, told),
        }
    }

    fn note_held(&mut self, key: &PodKey, uid: &PodUid, written: Result<(), ControlPlaneError>) {
        let Some(course) = self.courses.get_mut(uid) else { return };
        course.is_writing = false;
        match written {
            Ok(()) => course.is_written = true,
            Err(error) => {
                warn!(pod = %key, %error, "the hold could not be written; nobody is evicted");
                self.give_up(uid, "the API server did not take the hold");
            }
        }
    }

    fn note_evicted(&mut self, holder: &PodUid, key: &PodKey, victim: &PodUid, outcome: EvictionOutcome) {
        let now = self.service.now();
        let Some(course) = self.courses.get_mut(holder) else { return };
        match outcome {
            EvictionOutcome::Evicted => {
                info!(pod = %key, "evicted");
                course.note_eviction(victim, now, None);
                self.service.ledger().note_evicted(victim);
            }
            EvictionOutcome::Gone => course.note_eviction(victim, now, None),
            EvictionOutcome::TryLater { after } => {
                let after = after.map_or(0, |after| after.as_millis() as u64);
                course.note_eviction(victim, now, Some(Millis(after)));
            }
            EvictionOutcome::Unknown { message } => {
                warn!(pod = %key, message, "eviction unanswered");
                course.note_eviction(victim, now, Some(Millis(0)));
            }
            EvictionOutcome::Refused { message } => {
                warn!(pod = %key, message, "eviction refused");
                self.give_up(holder, &format!("the eviction of pod {key} is refused: {message}"));
            }
        }
    }

    fn note_told(&mut self, key: &PodKey, uid: &PodUid, told: Result<(), ControlPlaneError>) {
        let now = self.service.now();
        let Some(course) = self.courses.get_mut(uid) else { return };
        course.note_told(now, told.is_ok());
        match told {
            Ok(()) => {}
            // The watch says so, too.
            Err(ControlPlaneError::Gone) => {}
            Err(error) => warn!(pod = %key, %error, "a pod was not told that there is room for it"),
        }
    }

    fn give_up(&mut self, uid: &PodUid, because: &str) {
        let held = self.service.ledger().held_by(uid);
        held.iter().for_each(|held| self.call_off(held, because));
    }
}
