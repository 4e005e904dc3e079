//! Progress of one reservation, from the first eviction to the nomination of its pod.

use super::pod_write::{EvictionTask, StatusPurpose};
use super::retry::{Backoff, RetryState};
use super::{ClusterAccess, ControlLoop, LockedCluster};
use crate::control_loop::{EvictionReason, PlanState, PodEventReason, StatusChange};
use crate::ids::{NodeName, PodUid};
use crate::kube_filters::{AssumedNodeChange, FilterReason, FilterSnapshot, FilterVerdict};
use crate::ledger::{PodState, RemainingVictim, ReservationStatus, SchedulingGate};
use crate::planning::EvictionRight;
use crate::units::{Millis, Moment};
use crate::verbs::wait::{EvictionFailed, ExtendReservation, ReleaseReservation};
use crate::vocabulary::placement::Reservation;
use std::collections::BTreeMap;

/// How long kube-scheduler has to evict the victims of a preemption, which it does at once. Victims left after that are never
/// evicted by it: it restarted, or chose another node.
const SCHEDULER_EVICTION_TIME: Millis = Millis::seconds(3);
/// An accepted eviction shows in the watch; if it does not, it is requested again.
pub const WRITE_VISIBLE_WITHIN: Millis = Millis::seconds(10);
/// Pauses between failed attempts.
pub const EVICTION_BACKOFF: Backoff = Backoff {
    min: Millis(500),
    max: Millis::seconds(10),
};
/// The time that kube-scheduler may need from the nomination to the Binding: its longest back-off, ten seconds, and the longest
/// bind, five.
const TIME_TO_BIND: Millis = Millis::seconds(15);
/// Nominations of a pod at most: if kube-scheduler clears so many, it does not want the pod on that node.
const MAX_NOMINATIONS: u32 = 3;

/// Why a reservation came to nothing: because of the preemptor, which then waits before others are evicted for it again, or
/// because of a victim, which was the wrong one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailedBy {
    Preemptor,
    Victim,
}

/// Progress of a reservation beyond what the ledger has. All of it may be lost.
#[derive(Debug)]
pub(crate) struct ReservationProgress {
    /// The reservation that this is the progress of: the pod may have another one later.
    reservation: Reservation,
    /// When the planner first saw the reservation.
    since: Moment,
    /// The planner made the reservation itself: nothing else evicts for it.
    is_planned_here: bool,
    eviction_right: EvictionRight,
    /// The condition shows it already, as far as necessary.
    pub is_written: bool,
    /// A write for the pod itself is in progress.
    is_writing: bool,
    nominations: u32,
    /// Since when its nomination is written and its gate is still to be lifted.
    pub nominated_since: Option<Moment>,
    /// The node to which it was nominated behind the gate.
    placed_on: Option<NodeName>,
    next_nomination_at: Moment,
    /// Its deadline was extended for the bind. Only once: a pod that has to be nominated again and again is not wanted there.
    is_extended: bool,
    /// The API server has shown the nomination.
    is_nomination_visible: bool,
    evictions: BTreeMap<PodUid, RetryState>,
}

impl ReservationProgress {
    /// The progress of a reservation made by another component, or by this replica's predecessor.
    pub fn for_found(reservation: Reservation, since: Moment) -> Self {
        Self {
            reservation,
            since,
            is_planned_here: false,
            eviction_right: EvictionRight::Preemption,
            is_written: false,
            is_writing: false,
            nominations: 0,
            nominated_since: None,
            placed_on: None,
            next_nomination_at: since,
            is_extended: false,
            is_nomination_visible: false,
            evictions: BTreeMap::new(),
        }
    }

    /// The progress of a reservation of the planner's own that is not written yet.
    pub fn for_planned(
        reservation: Reservation,
        since: Moment,
        eviction_right: EvictionRight,
    ) -> Self {
        Self {
            is_planned_here: true,
            eviction_right,
            ..Self::for_found(reservation, since)
        }
    }

    /// Whether this is the progress of that reservation.
    pub fn is_for(&self, reservation: &Reservation) -> bool {
        self.reservation.is_same(reservation)
    }

    /// Whether the reservation has this victim.
    pub(crate) fn has_victim(&self, victim: &PodUid) -> bool {
        self.reservation.victims.contains(victim)
    }

    pub(crate) fn begin_write(&mut self) {
        self.is_writing = true;
    }

    pub(crate) fn end_write(&mut self) {
        self.is_writing = false;
    }

    /// The retry state of this victim's eviction.
    pub fn eviction_attempt(&mut self, victim: &PodUid) -> &mut RetryState {
        self.evictions.entry(victim.clone()).or_default()
    }

    /// Whether the eviction of this victim was requested: it may be under way.
    fn has_requested_eviction(&self, victim: &PodUid) -> bool {
        self.evictions
            .get(victim)
            .is_some_and(|attempt| !attempt.is_due(Moment::default()))
    }

    /// The result of nominating the pod. A written nomination shows in the watch, later if the API server is busy; writing it
    /// again would keep it busier.
    pub(crate) fn record_nomination(&mut self, now: Moment, is_ok: bool, is_gated: bool) {
        self.is_writing = false;
        self.nominated_since = (is_ok && is_gated).then_some(now);
        self.is_nomination_visible = false;
        self.next_nomination_at = now
            + if is_ok {
                WRITE_VISIBLE_WITHIN
            } else {
                EVICTION_BACKOFF.min
            };
        self.nominations += u32::from(is_ok);
    }

    /// The gate could not be removed: the pod is nominated again, and its gate removed after that.
    pub(crate) fn nominate_soon(&mut self, now: Moment) {
        self.next_nomination_at = now + EVICTION_BACKOFF.min;
    }

    /// The nomination has been seen: if it is missing later, another component has cleared it.
    fn record_nomination_shown(&mut self, now: Moment) {
        if !self.is_nomination_visible && self.nominations > 0 {
            self.is_nomination_visible = true;
            self.next_nomination_at = now + EVICTION_BACKOFF.pause_after(self.nominations);
        }
    }

    /// The node on which the planner placed the pod before kube-scheduler saw it, if the pod was nominated.
    pub(crate) fn placed_on(self) -> Option<NodeName> {
        self.placed_on.filter(|_| self.nominations > 0)
    }

    /// Whether the planner made the reservation itself.
    pub fn is_planned_here(&self) -> bool {
        self.is_planned_here
    }

    /// Whether it has been nominated.
    pub(crate) fn was_nominated(&self) -> bool {
        self.nominations > 0
    }

    fn may_evict(&mut self, victim: &RemainingVictim, is_shown: bool, now: Moment) -> bool {
        let is_its_turn = self.is_planned_here || self.since + SCHEDULER_EVICTION_TIME <= now;
        (self.is_written || is_shown)
            && is_its_turn
            && self.eviction_attempt(&victim.uid).is_due(now)
    }

    /// Whether the pod must be nominated (again) to the node of its reservation.
    fn needs_nomination(&self, reservation_status: &ReservationStatus, now: Moment) -> bool {
        let is_nominated =
            reservation_status.nominated.as_ref() == Some(&reservation_status.reservation.node);
        let is_wanted = self.nominations == 0
            || reservation_status.gate == SchedulingGate::Planned
            || (!is_nominated && self.nominations < MAX_NOMINATIONS);
        is_wanted && !self.is_writing && self.next_nomination_at <= now
    }
}

impl<B: ClusterAccess> ControlLoop<B> {
    /// Evicts the victims of each reservation, then nominates its pod.
    pub(super) fn advance_reservations(&mut self, now: Moment) {
        // On a copy: a filter waits for the lock, and thousands of pods may have reservations.
        let ledger = self.cluster_access.lock().ledger().scratch();
        let statuses = ledger.reservation_statuses();
        // A Binding that is under way may fail; the pod goes on then with what it has tried.
        let is_being_bound = |uid: &PodUid| ledger.pod_state(uid).is_some_and(PodState::is_assumed);
        self.reservation_progress.retain(|uid, _| {
            statuses
                .binary_search_by(|status| status.uid.cmp(uid))
                .is_ok()
                || is_being_bound(uid)
        });
        drop(ledger);
        self.rewrite_unshown(&statuses, now);
        // Most ticks evict no pod.
        let mut kube_filters = None;
        for reservation_status in statuses {
            self.advance_reservation(&reservation_status, now, &mut kube_filters);
        }
    }

    fn advance_reservation(
        &mut self,
        reservation_status: &ReservationStatus,
        now: Moment,
        kube_filters: &mut Option<FilterSnapshot>,
    ) {
        let found = || ReservationProgress::for_found(reservation_status.reservation.clone(), now);
        let progress = self
            .reservation_progress
            .entry(reservation_status.uid.clone())
            .or_insert_with(found);
        if !progress.is_for(&reservation_status.reservation) {
            *progress = found();
        }
        if reservation_status.gate == SchedulingGate::Others {
            return;
        }
        if let Some(stays) = reservation_status
            .remaining
            .iter()
            .find(|victim| victim.is_protected && !victim.is_leaving)
        {
            let text = format!(
                "{} may no longer be evicted for it",
                stays.key.name_shown_to(&reservation_status.key)
            );
            if !progress.has_requested_eviction(&stays.uid) {
                self.uncount_eviction(&stays.uid);
            }
            self.record_refused_eviction(
                &stays.uid,
                "it came under protection when it was to leave",
            );
            return self.abandon_reservation(reservation_status, &text, FailedBy::Victim, now);
        }
        if let Some(late) = reservation_status.remaining.iter().find(|victim| {
            !victim.is_leaving
                && now + victim.termination_time > reservation_status.reservation.deadline
        }) {
            let text = format!(
                "{} would not have terminated in time",
                late.key.name_shown_to(&reservation_status.key)
            );
            let failed_by = if progress.has_requested_eviction(&late.uid) {
                self.record_refused_eviction(&late.uid, "it did not begin to leave in time");
                FailedBy::Victim
            } else {
                self.uncount_eviction(&late.uid);
                FailedBy::Preemptor
            };
            return self.abandon_reservation(reservation_status, &text, failed_by, now);
        }
        let due: Vec<&RemainingVictim> = reservation_status
            .remaining
            .iter()
            .filter(|victim| {
                !victim.is_leaving
                    && progress.may_evict(victim, reservation_status.is_in_condition, now)
            })
            .collect();
        if reservation_status.gate == SchedulingGate::Open
            && reservation_status.nominated.as_ref() == Some(&reservation_status.reservation.node)
        {
            progress.record_nomination_shown(now);
        }
        let nominates =
            reservation_status.is_free && progress.needs_nomination(reservation_status, now);
        // The node may have been cordoned or tainted since the reservation was made, or since the last attempt.
        if let Some(reason) = (!due.is_empty())
            .then(|| self.filter_refusal(reservation_status, kube_filters))
            .flatten()
        {
            let text = format!("the node would refuse the pod by now: {reason}");
            return self.abandon_reservation(reservation_status, &text, FailedBy::Preemptor, now);
        }
        if let Some(progress) = self.reservation_progress.get_mut(&reservation_status.uid) {
            due.iter()
                .for_each(|victim| progress.eviction_attempt(&victim.uid).begin());
        }
        due.into_iter()
            .for_each(|victim| self.evict(reservation_status, victim));
        if nominates {
            self.nominate(reservation_status, now);
        }
    }

    /// Why kube-scheduler's filters would reject the pod on the node of its reservation once its victims are gone; `None` if
    /// they would not, or that is unknown.
    fn filter_refusal(
        &mut self,
        reservation_status: &ReservationStatus,
        kube_filters: &mut Option<FilterSnapshot>,
    ) -> Option<FilterReason> {
        let Reservation { node, victims, .. } = &reservation_status.reservation;
        let kube_filters = kube_filters
            .get_or_insert_with(|| self.cluster_access.lock().kube_filters().snapshot());
        let coming = self
            .cluster_access
            .lock()
            .ledger()
            .incoming_pods(node)
            .to_vec();
        match kube_filters.verdict(
            &reservation_status.uid,
            kube_filters.requirements_of(&reservation_status.uid)?,
            node,
            &AssumedNodeChange {
                leaving: victims,
                coming: &coming,
            },
        ) {
            FilterVerdict::Rejects(reason) => Some(reason),
            FilterVerdict::Accepts | FilterVerdict::Unsupported(_) => None,
        }
    }

    fn evict(&mut self, reservation_status: &ReservationStatus, victim: &RemainingVictim) {
        let by = reservation_status.key.clone();
        let moves = self
            .reservation_progress
            .get(&reservation_status.uid)
            .is_some_and(|progress| progress.eviction_right == EvictionRight::Moves);
        let why = match (&victim.reclaimed_by, &victim.evicted_with_group) {
            _ if moves => EvictionReason::Consolidated { to_fit: by },
            (Some(owner), _) => EvictionReason::Reclaimed {
                owner: owner.clone(),
                by,
            },
            (None, Some(group)) => EvictionReason::GroupEvicted {
                group: group.to_string().into(),
                by,
            },
            (None, None) => EvictionReason::Preempted { by },
        };
        let (key, uid) = (victim.key.clone(), victim.uid.clone());
        let task = EvictionTask::Reservation {
            preemptor: reservation_status.uid.clone(),
        };
        self.write_eviction(key, uid, why, task);
    }

    /// Nominates the pod to the node of its reservation. A requeue mark in the same write makes kube-scheduler try it, or else the
    /// removal of its gate after it.
    pub(super) fn nominate(&mut self, reservation_status: &ReservationStatus, now: Moment) {
        let reservation = self.with_time_to_bind(reservation_status, now);
        let Some(progress) = self.reservation_progress.get_mut(&reservation_status.uid) else {
            return;
        };
        progress.begin_write();
        let node = reservation.node.clone();
        // After a restart the condition's deadline applies. A reservation without victims is not written.
        let is_news =
            reservation != reservation_status.reservation && !reservation.victims.is_empty();
        let change = if is_news {
            StatusChange::reservation(reservation.clone())
        } else {
            StatusChange::default()
        };
        let change = change.and_nominate(node.clone());
        let is_gated = reservation_status.gate == SchedulingGate::Planned;
        let change = match is_gated {
            true => {
                progress.placed_on = Some(node.clone());
                change.and_plan(PlanState::Nominated { node })
            }
            false => change.and_requeue(),
        };
        let (key, uid) = (
            reservation_status.key.clone(),
            reservation_status.uid.clone(),
        );
        let purpose = StatusPurpose::Nominate {
            reservation,
            is_gated,
        };
        self.write_status(key, uid, change, purpose);
    }

    /// The reservation, extended until kube-scheduler has had time to bind the pod.
    fn with_time_to_bind(
        &mut self,
        reservation_status: &ReservationStatus,
        now: Moment,
    ) -> Reservation {
        let Some(progress) = self.reservation_progress.get_mut(&reservation_status.uid) else {
            return reservation_status.reservation.clone();
        };
        if std::mem::replace(&mut progress.is_extended, true) {
            return reservation_status.reservation.clone();
        }
        let until = now + TIME_TO_BIND;
        self.cluster_access.lock().apply(ExtendReservation {
            uid: reservation_status.uid.clone(),
            until,
        });
        Reservation {
            deadline: reservation_status.reservation.deadline.max(until),
            ..reservation_status.reservation.clone()
        }
    }

    /// Releases the reservation before its deadline. No further victim is evicted for it.
    pub(super) fn abandon_reservation(
        &mut self,
        reservation_status: &ReservationStatus,
        because: &str,
        failed_by: FailedBy,
        now: Moment,
    ) {
        let mut cluster = self.cluster_access.lock();
        let present = cluster
            .ledger()
            .pod_state(&reservation_status.uid)
            .and_then(PodState::reservation);
        if !present.is_some_and(|present| present.is_same(&reservation_status.reservation)) {
            return;
        }
        if failed_by == FailedBy::Preemptor && !reservation_status.reservation.victims.is_empty() {
            cluster.apply(EvictionFailed(reservation_status.uid.clone()));
        }
        cluster.apply(ReleaseReservation(reservation_status.uid.clone()));
        let group = cluster
            .ledger()
            .pod_state(&reservation_status.uid)
            .and_then(|pod_state| pod_state.disruption_info.placement_group().cloned());
        drop(cluster);
        self.reservation_progress.remove(&reservation_status.uid);
        let (key, uid) = (
            reservation_status.key.clone(),
            reservation_status.uid.clone(),
        );
        if let Some(group) = group {
            self.release_incomplete_group(&group, uid.clone(), key.clone(), now);
        }
        self.publish(
            key.clone(),
            uid.clone(),
            PodEventReason::ReservationEnded,
            format!(
                "Released the reservation on node {}: {because}.",
                reservation_status.reservation.node
            ),
        );
        let change = StatusChange::end_reservation_and_nomination();
        let purpose = StatusPurpose::AbandonReservation;
        self.write_status(key, uid, change, purpose);
    }
}
