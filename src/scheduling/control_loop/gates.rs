//! Removes the gates of nominated pods, once the watch shows the nomination.
//!
//! The API server makes a patch on the pod as its cache has it. A patch that follows another write at once meets the pod from
//! before that write, fails at the store, and is made again on the pod as it is: its admission policies run twice, and it costs
//! twice as much. What a watch shows, the cache has.

use super::pod_write::PodWrite;
use super::{ClusterAccess, ControlLoop};
use crate::control_loop::ControlPlaneError;
use crate::ids::{PodKey, PodUid};
use crate::ledger::{Ledger, SchedulingGate, WaitingPod};
use crate::units::{Millis, Moment};
use crate::vocabulary::placement::Reservation;

/// How long to wait for the watch to show a nomination. After that a patch may cost twice as much, and the pod waits no longer.
const NOMINATION_VISIBLE_WITHIN: Millis = Millis::seconds(1);

impl<B: ClusterAccess> ControlLoop<B> {
    /// Removes all gates that are due.
    pub fn remove_gates(&mut self, now: Moment) {
        let nominated = self
            .reservation_progress
            .iter()
            .filter(|(_, progress)| progress.nominated_since.is_some());
        let nominated: Vec<PodUid> = nominated.map(|(uid, _)| uid.clone()).collect();
        nominated.iter().for_each(|uid| self.remove_gate(uid, now));
    }

    /// Removes the gate of this pod if it is due.
    pub(super) fn remove_gate(&mut self, uid: &PodUid, now: Moment) {
        let Some(progress) = self.reservation_progress.get_mut(uid) else {
            return;
        };
        let Some(since) = progress.nominated_since else {
            return;
        };
        let Some(GatedPod {
            key,
            reservation,
            is_shown,
        }) = gated_pod(self.cluster_access.lock().ledger(), uid)
        else {
            return;
        };
        if progress.is_for(&reservation) && (is_shown || since + NOMINATION_VISIBLE_WITHIN <= now) {
            progress.nominated_since = None;
            self.writes.add(PodWrite::RemoveGate {
                key,
                uid: uid.clone(),
                reservation,
            });
        }
    }

    pub(super) fn record_gate_removal(
        &mut self,
        key: &PodKey,
        uid: &PodUid,
        reservation: &Reservation,
        removed: Result<(), ControlPlaneError>,
        now: Moment,
    ) {
        match removed {
            // The watch shows it, too.
            Ok(()) | Err(ControlPlaneError::Gone) => {}
            Err(error) => {
                self.report_failure(key, "could not lift the gate of a nominated pod", error);
                if let Some(progress) = self.progress_toward(uid, reservation) {
                    progress.nominate_soon(now);
                }
            }
        }
    }
}

/// A pod behind the planner's gate that has a reservation.
struct GatedPod {
    key: PodKey,
    reservation: Reservation,
    /// The watch has shown its nomination to the reservation's node.
    is_shown: bool,
}

fn gated_pod(ledger: &Ledger, uid: &PodUid) -> Option<GatedPod> {
    let pod = ledger.pod_state(uid)?;
    let Some(WaitingPod {
        gate: SchedulingGate::Planned,
        reservation: Some(reservation),
        nominated,
        ..
    }) = pod.waiting()
    else {
        return None;
    };
    let is_shown = nominated.as_ref() == Some(&reservation.node);
    Some(GatedPod {
        key: pod.key.clone(),
        reservation: reservation.clone(),
        is_shown,
    })
}
