//! Evicts the members of a group that stays incomplete, if the policy keeps no part of one: each like any other victim, within
//! the rate limits, and retried with back-off until it is gone. Members whose Bindings were under way are waited for.
//!
//! Not durable: a new leader does not know which groups were given up before.

use super::ended_reservations::{ReservationEnd, incomplete_group};
use super::outcome::record_attempt;
use super::pod_write::EvictionTask;
use super::reservation_progress::EVICTION_BACKOFF;
use super::retry::RetryState;
use super::{ClusterAccess, ControlLoop, LockedCluster};
use crate::control_loop::{EvictionOutcome, EvictionReason};
use crate::ids::{PodKey, PodUid};
use crate::ledger::{Ledger, PodState};
use crate::policy::WhenIncomplete;
use crate::units::{Millis, Moment};
use crate::verbs::wait::{EvictionsOrdered, ReleaseReservation};
use crate::vocabulary::disruption_info::GroupKey;

/// A disruption budget that allows nothing for this long is not expected to. The pod stays.
const ORPHAN_EVICTION_TIMEOUT: Millis = Millis::seconds(600);

#[derive(Debug)]
pub(crate) struct OrphanedMember {
    key: PodKey,
    group: GroupKey,
    since: Moment,
    /// It counts towards the rate limits once, however often the eviction is retried.
    is_ordered: bool,
    attempt: RetryState,
}

impl<B: ClusterAccess> ControlLoop<B> {
    /// A member of a group that failed. It is evicted once it is bound, if the policy keeps no part of a group; if its Binding fails,
    /// it gives its reservation back.
    pub(super) fn add_orphaned_member(
        &mut self,
        uid: PodUid,
        key: PodKey,
        group: &GroupKey,
        now: Moment,
    ) {
        let group = group.clone();
        let member = OrphanedMember {
            key,
            group,
            since: now,
            is_ordered: false,
            attempt: RetryState::default(),
        };
        self.orphaned_members.entry(uid).or_insert(member);
    }

    pub(super) fn advance_orphaned_members(&mut self, now: Moment) {
        for uid in self.orphaned_members.keys().cloned().collect::<Vec<_>>() {
            self.advance_orphaned_member(&uid, now);
        }
    }

    fn advance_orphaned_member(&mut self, uid: &PodUid, now: Moment) {
        let Some(member) = self.orphaned_members.get_mut(uid) else {
            return;
        };
        let mut cluster = self.cluster_access.lock();
        let is_being_bound = cluster
            .ledger()
            .pod_state(uid)
            .is_some_and(PodState::is_assumed);
        // Another member may have been bound in place of the missing one.
        if !is_being_bound && !is_orphaned(cluster.ledger(), uid) {
            drop(cluster);
            return self.drop_orphaned_member(uid);
        }
        if member.since + ORPHAN_EVICTION_TIMEOUT <= now {
            drop(cluster);
            return self.keep_orphaned_member(uid, "it could not be evicted in time");
        }
        let one = std::slice::from_ref(uid);
        if is_being_bound
            || !member.attempt.is_due(now)
            || !(member.is_ordered || cluster.ledger().is_within_eviction_rates(one))
        {
            return;
        }
        if !std::mem::replace(&mut member.is_ordered, true) {
            cluster.apply(EvictionsOrdered(one.to_vec()));
        }
        drop(cluster);
        member.attempt.begin();
        let why = EvictionReason::GroupIncomplete {
            group: member.group.to_string().into(),
        };
        let (key, uid, task) = (
            member.key.clone(),
            uid.clone(),
            EvictionTask::OrphanedMember,
        );
        self.write_eviction(key, uid, why, task);
    }

    /// The member is not evicted: it is gone, its group is whole, or its Binding has failed. In that case it gives its reservation
    /// back, unless its group becomes whole with it.
    fn drop_orphaned_member(&mut self, uid: &PodUid) {
        let Some(OrphanedMember { key, group, .. }) = self.orphaned_members.remove(uid) else {
            return;
        };
        let mut cluster = self.cluster_access.lock();
        if !incomplete_group(cluster.ledger(), &group)
            .is_some_and(|broken| broken.is_reserved_in_vain(uid))
        {
            return;
        }
        cluster.apply(ReleaseReservation(uid.clone()));
        drop(cluster);
        self.end_reservation(uid.clone(), key, ReservationEnd::WithGroup);
    }

    /// The retry state of this member's eviction.
    pub(super) fn orphaned_attempt(&mut self, uid: &PodUid) -> Option<&mut RetryState> {
        self.orphaned_members
            .get_mut(uid)
            .map(|member| &mut member.attempt)
    }

    pub(super) fn record_orphan_eviction(
        &mut self,
        uid: &PodUid,
        outcome: EvictionOutcome,
        now: Moment,
    ) {
        let Some(member) = self.orphaned_members.get_mut(uid) else {
            return;
        };
        if let Err(message) = record_attempt(&mut member.attempt, outcome, now, EVICTION_BACKOFF) {
            self.keep_orphaned_member(uid, &message);
        }
    }

    fn keep_orphaned_member(&mut self, uid: &PodUid, because: &str) {
        let Some(OrphanedMember { key, group, .. }) = self.orphaned_members.remove(uid) else {
            return;
        };
        self.report_failure(
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
    let is_bound = ledger.is_staying(pod_state);
    let group = pod_state.disruption_info.placement_group();
    is_bound
        && !pod_state.disruption_info.is_static()
        && ledger.policy().planning.groups.when_incomplete == WhenIncomplete::Evict
        && group.is_some_and(|group| incomplete_group(ledger, group).is_some())
}
