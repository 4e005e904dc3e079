//! Conditions that say something else than what is so: a reservation that has ended, none where there is one, an eviction that
//! nobody wants any more. Each is written again for as long as its pod shows it.
//!
//! A write may be lost, or land after one that came later, and a leader may die before it writes. So what counts is what the
//! watch shows. Nothing is written again before the first write has had time to appear in the watch.

use super::pod_write::StatusPurpose;
use super::reservation_progress::{EVICTION_BACKOFF, WRITE_VISIBLE_WITHIN};
use super::retry::{Backoff, RetryState};
use super::write_queue::WriteQueue;
use super::{ClusterAccess, ControlLoop};
use crate::control_loop::{ControlPlaneError, EvictionCondition, StatusChange};
use crate::ids::{PodKey, PodUid};
use crate::ledger::{Ledger, PodState, ReservationStatus};
use crate::planning::{is_relief_due, is_vram_owed};
use crate::policy::{ConflictRule, Mode};
use crate::units::{Millis, Moment};
use std::collections::{BTreeMap, BTreeSet};

/// Pauses between the writes of a condition, as long as its pod does not show it.
const CONDITION_BACKOFF: Backoff = Backoff {
    min: WRITE_VISIBLE_WITHIN,
    max: Millis::seconds(60),
};

/// An end that is on its way shows within this time. What shows a reservation that has ended looks like GPUs allocated twice, which
/// the continuous audit reports after ten seconds.
const END_VISIBLE_WITHIN: Millis = Millis::seconds(3);

/// Conditions of one kind that are written in a tick at most: nominations and evictions do not wait for thousands of them.
const WRITES_PER_TICK: usize = 32;

/// The pods whose conditions are to be written again, and when.
#[derive(Debug, Default)]
pub(super) struct StaleConditions {
    /// Pods that show reservations that have ended.
    ended: StalePods,
    /// Pods that do not show the reservations that they have.
    unshown: StalePods,
    /// Pods that show evictions that nobody wants.
    evicted: StalePods,
}

/// The pods with one such condition.
#[derive(Debug, Default)]
struct StalePods(BTreeMap<PodUid, RetryState>);

impl StalePods {
    /// The pods among `showing` whose condition is to be written. A write that is on its way shows within `shows_within`.
    fn due(
        &mut self,
        showing: BTreeMap<PodUid, PodKey>,
        shows_within: Millis,
        writes: &WriteQueue,
        now: Moment,
    ) -> Vec<(PodUid, PodKey)> {
        self.0.retain(|uid, _| showing.contains_key(uid));
        let is_due = |(uid, _): &(PodUid, PodKey)| {
            let retry = self.0.entry(uid.clone()).or_insert_with(|| {
                let mut first = RetryState::default();
                first.record_success(now + shows_within);
                first
            });
            retry.is_due(now) && !writes.has_pod(uid)
        };
        let mut due: Vec<(PodUid, PodKey)> = showing.into_iter().filter(is_due).collect();
        due.truncate(WRITES_PER_TICK);
        for (uid, _) in &due {
            self.0.entry(uid.clone()).or_default().record_failure(
                now,
                CONDITION_BACKOFF,
                Millis(0),
            );
        }
        due
    }
}

impl<B: ClusterAccess> ControlLoop<B> {
    /// Writes again the end of reservations that pods show although they have ended.
    pub(super) fn rewrite_ended(&mut self, now: Moment) {
        let showing = self
            .cluster_access
            .lock()
            .ledger()
            .pods_showing_ended_reservations();
        for (uid, key) in self
            .stale
            .ended
            .due(showing, END_VISIBLE_WITHIN, &self.writes, now)
        {
            let (change, purpose) = (
                StatusChange::end_reservation(),
                StatusPurpose::EndUnknownReservation,
            );
            self.write_status(key, uid, change, purpose);
        }
    }

    /// Writes again reservations that pods do not show although they last. One without victims is written only over another one.
    pub(super) fn rewrite_unshown(&mut self, reservations: &[ReservationStatus], now: Moment) {
        let is_unshown = |status: &&ReservationStatus| {
            status.has_another_in_condition
                || (!status.is_in_condition && !status.reservation.victims.is_empty())
        };
        let unshown = reservations.iter().filter(is_unshown);
        let unshown = unshown
            .map(|one| (one.uid.clone(), one.key.clone()))
            .collect();
        for (uid, key) in self
            .stale
            .unshown
            .due(unshown, WRITE_VISIBLE_WITHIN, &self.writes, now)
        {
            self.write_current_reservation(&key, &uid);
        }
    }

    /// Writes the pod's reservation as it is when the write begins.
    pub(super) fn write_current_reservation(&mut self, key: &PodKey, uid: &PodUid) {
        let (change, purpose) = (StatusChange::default(), StatusPurpose::ShowReservation);
        self.write_status(key.clone(), uid.clone(), change, purpose);
    }

    /// Records the write of a reservation. One that could not be written is written again soon.
    pub(super) fn record_reservation_shown(
        &mut self,
        key: &PodKey,
        uid: &PodUid,
        written: Result<(), ControlPlaneError>,
        now: Moment,
    ) {
        if let Err(error @ (ControlPlaneError::Refused(_) | ControlPlaneError::Unknown(_))) =
            written
        {
            self.report_failure(key, "could not show a reservation again", error);
            self.stale
                .unshown
                .0
                .entry(uid.clone())
                .or_default()
                .record_failure(now, EVICTION_BACKOFF, Millis(0));
        }
    }

    /// Cancels the eviction condition of pods that stay after all.
    pub(super) fn cancel_evictions(&mut self, now: Moment) {
        let cluster = self.cluster_access.lock();
        let mut showing = cluster.ledger().pods_showing_evictions();
        showing.retain(|uid, _| !cluster.ledger().is_evicted_for_overuse(uid));
        // A copy, which costs next to nothing, for what goes through all reservations.
        let ledger = (!showing.is_empty()).then(|| cluster.ledger().scratch());
        drop(cluster);
        if let Some(ledger) = ledger.filter(|ledger| ledger.policy().mode == Mode::Enforce) {
            let wanted = self.wanted_evictions(&ledger);
            showing
                .retain(|uid, _| !wanted.contains(uid) && !self.is_wanted_for_engine(uid, &ledger));
        }
        for (uid, key) in self
            .stale
            .evicted
            .due(showing, WRITE_VISIBLE_WITHIN, &self.writes, now)
        {
            let change = StatusChange::eviction(EvictionCondition::Cancelled);
            let purpose = StatusPurpose::CancelEviction;
            self.write_status(key, uid, change, purpose);
        }
    }

    /// The victims of all reservations, members of broken groups, and pods that are evicted to end a conflict.
    fn wanted_evictions(&self, ledger: &Ledger) -> BTreeSet<PodUid> {
        let mut wanted: BTreeSet<PodUid> = ledger.reserved_victims().cloned().collect();
        wanted.extend(self.orphaned_members.keys().cloned());
        if ledger.policy().conflicts == ConflictRule::EvictUnstarted {
            wanted.extend(self.over_allocation_victims.iter().cloned());
        }
        wanted
    }

    /// Whether the pod is to be evicted for an engine: one that wakes, or one under pressure.
    fn is_wanted_for_engine(&self, uid: &PodUid, ledger: &Ledger) -> bool {
        let gpus = || {
            ledger
                .pod_state(uid)
                .and_then(PodState::devices)
                .into_iter()
                .flat_map(|gpus| gpus.iter())
        };
        is_vram_owed(ledger, uid)
            || (self.relief_attempts.contains_key(uid)
                && gpus().any(|gpu| is_relief_due(ledger, uid, gpu)))
    }
}
