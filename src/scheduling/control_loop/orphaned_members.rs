//! Evicts the members of a group that stays incomplete, if the policy keeps no part of one: each like any other victim, within
//! the rate limits, and retried with back-off until it is gone. Members whose Bindings were under way are waited for.
//!
//! Not durable: a new leader does not know which groups were given up before.

use super::ended_reservations::{ReservationEnd, broken};
use super::outcome::tried;
use super::pod_write::EvictionTask;
use super::reservation_progress::PAUSES;
use super::retry::RetryState;
use super::{Books, ControlLoop, LockedBooks};
use crate::control_loop::{EvictionOutcome, EvictionReason};
use crate::ids::{PodKey, PodUid};
use crate::ledger::{Ledger, PodState};
use crate::policy::WhenIncomplete;
use crate::units::{Millis, Moment};
use crate::verbs::wait::{EvictionsOrdered, ReleaseReservation};
use crate::vocabulary::disruption_info::GroupKey;

/// A disruption budget that allows nothing for this long is not expected to. The pod stays.
const GIVEN_UP_AFTER: Millis = Millis::seconds(600);

#[derive(Debug)]
pub(crate) struct OrphanedMember {
    key: PodKey,
    group: GroupKey,
    since: Moment,
    /// It counts towards the rate limits once, however often the eviction is retried.
    is_ordered: bool,
    attempt: RetryState,
}

impl<B: Books> ControlLoop<B> {
    /// A member of a group that failed. It is evicted once it is bound, if the policy keeps no part of a group; if its Binding fails,
    /// it gives its reservation back.
    pub(super) fn remember_member(
        &mut self,
        uid: PodUid,
        key: PodKey,
        group: &GroupKey,
        now: Moment,
    ) {
        let group = group.clone();
        let remnant = OrphanedMember {
            key,
            group,
            since: now,
            is_ordered: false,
            attempt: RetryState::default(),
        };
        self.orphaned_members.entry(uid).or_insert(remnant);
    }

    pub(super) fn advance_orphaned_members(&mut self, now: Moment) {
        for uid in self.orphaned_members.keys().cloned().collect::<Vec<_>>() {
            self.see_off(&uid, now);
        }
    }

    fn see_off(&mut self, uid: &PodUid, now: Moment) {
        let Some(remnant) = self.orphaned_members.get_mut(uid) else {
            return;
        };
        let mut cluster = self.books.lock();
        let is_being_bound = cluster
            .ledger()
            .pod_state(uid)
            .is_some_and(PodState::is_assumed);
        // Another member may have been bound in place of the missing one.
        if !is_being_bound && !is_orphaned(cluster.ledger(), uid) {
            drop(cluster);
            return self.let_go(uid);
        }
        if remnant.since + GIVEN_UP_AFTER <= now {
            drop(cluster);
            return self.keep_orphaned_member(uid, "it could not be evicted in time");
        }
        let one = std::slice::from_ref(uid);
        if is_being_bound
            || !remnant.attempt.is_due(now)
            || !(remnant.is_ordered || cluster.ledger().may_order(one))
        {
            return;
        }
        if !std::mem::replace(&mut remnant.is_ordered, true) {
            cluster.apply(EvictionsOrdered(one.to_vec()));
        }
        drop(cluster);
        remnant.attempt.begin();
        let why = EvictionReason::GroupIncomplete {
            group: remnant.group.to_string().into(),
        };
        let (key, uid, task) = (
            remnant.key.clone(),
            uid.clone(),
            EvictionTask::OrphanedMember,
        );
        self.write_eviction(key, uid, why, task);
    }

    /// The member is not evicted: it is gone, its group is whole, or its Binding has failed. In that case it gives its reservation
    /// back, unless its group becomes whole with it.
    fn let_go(&mut self, uid: &PodUid) {
        let Some(OrphanedMember { key, group, .. }) = self.orphaned_members.remove(uid) else {
            return;
        };
        let mut cluster = self.books.lock();
        if !broken(cluster.ledger(), &group).is_some_and(|broken| broken.holds_in_vain(uid)) {
            return;
        }
        cluster.apply(ReleaseReservation(uid.clone()));
        drop(cluster);
        self.end_one(uid.clone(), key, ReservationEnd::WithGroup);
    }

    /// The retry state of this member's eviction.
    pub(super) fn orphaned_attempt(&mut self, uid: &PodUid) -> Option<&mut RetryState> {
        self.orphaned_members
            .get_mut(uid)
            .map(|remnant| &mut remnant.attempt)
    }

    pub(super) fn note_orphaned_member(
        &mut self,
        uid: &PodUid,
        outcome: EvictionOutcome,
        now: Moment,
    ) {
        let Some(remnant) = self.orphaned_members.get_mut(uid) else {
            return;
        };
        if let Err(message) = tried(&mut remnant.attempt, outcome, now, PAUSES) {
            self.keep_orphaned_member(uid, &message);
        }
    }

    fn keep_orphaned_member(&mut self, uid: &PodUid, because: &str) {
        let Some(OrphanedMember { key, group, .. }) = self.orphaned_members.remove(uid) else {
            return;
        };
        self.failed(
            &key,
            "it stays, though its group is not whole",
            format!("{group}: {because}"),
        );
    }
}

/// Whether the pod is bound, its group is incomplete, and the policy keeps no part of one.
pub(super) fn is_orphaned(ledger: &Ledger, uid: &PodUid) -> bool {
    let Some(pod_state) = ledger.pod_state(uid) else {
        return false;
    };
    let is_there = ledger.stays(pod_state);
    let group = pod_state.disruption_info.placed_with();
    is_there
        && !pod_state.disruption_info.is_static()
        && ledger.policy().planning.groups.when_incomplete == WhenIncomplete::Evict
        && group.is_some_and(|group| broken(ledger, group).is_some())
}
