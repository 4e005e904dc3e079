//! Progress of one reservation, from the first eviction to the nomination of its pod.

use super::pod_write::{EvictionTask, StatusPurpose};
use super::retry::{Backoff, RetryState};
use super::{Books, ControlLoop, LockedBooks};
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
const SCHEDULERS_TURN: Millis = Millis::seconds(3);
/// An accepted eviction shows in the watch; if it does not, it is requested again.
pub const SHOWS_WITHIN: Millis = Millis::seconds(10);
/// Pauses between failed attempts.
pub const PAUSES: Backoff = Backoff {
    first: Millis(500),
    longest: Millis::seconds(10),
};
/// The time that kube-scheduler may need from the nomination to the Binding: its longest back-off, ten seconds, and the longest
/// bind, five.
const TIME_TO_BIND: Millis = Millis::seconds(15);
/// Nominations of a pod at most: if kube-scheduler clears so many, it does not want the pod on that node.
const NOMINATIONS: u32 = 3;

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
    is_own: bool,
    by: EvictionRight,
    /// The condition shows it already, as far as necessary.
    pub is_written: bool,
    /// A write for the pod itself is in progress.
    is_writing: bool,
    nominations: u32,
    /// Since when its nomination is written and its gate is still to be lifted.
    pub nominated_since: Option<Moment>,
    /// The node to which it was nominated behind the gate.
    placed_on: Option<NodeName>,
    nominate_again_at: Moment,
    /// Its deadline was extended for the bind. Only once: a pod that has to be nominated again and again is not wanted there.
    is_extended: bool,
    /// The API server has shown the nomination.
    was_shown: bool,
    evictions: BTreeMap<PodUid, RetryState>,
}

impl ReservationProgress {
    /// The progress of a reservation made by another component, or by this replica's predecessor.
    pub fn found(reservation: Reservation, since: Moment) -> Self {
        Self {
            reservation,
            since,
            is_own: false,
            by: EvictionRight::Preemption,
            is_written: false,
            is_writing: false,
            nominations: 0,
            nominated_since: None,
            placed_on: None,
            nominate_again_at: since,
            is_extended: false,
            was_shown: false,
            evictions: BTreeMap::new(),
        }
    }

    /// The progress of a reservation of the planner's own that is not written yet.
    pub fn own(reservation: Reservation, since: Moment, by: EvictionRight) -> Self {
        Self {
            is_own: true,
            by,
            ..Self::found(reservation, since)
        }
    }

    /// Whether this is the progress of that reservation.
    pub fn is_of(&self, reservation: &Reservation) -> bool {
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
    pub fn attempt(&mut self, victim: &PodUid) -> &mut RetryState {
        self.evictions.entry(victim.clone()).or_default()
    }

    /// Whether the eviction of this victim was requested: it may be under way.
    fn has_asked(&self, victim: &PodUid) -> bool {
        self.evictions
            .get(victim)
            .is_some_and(|attempt| !attempt.is_due(Moment::default()))
    }

    /// The result of nominating the pod. A written nomination shows in the watch, later if the API server is busy; writing it
    /// again would keep it busier.
    pub(crate) fn note_nominated(&mut self, now: Moment, is_ok: bool, is_gated: bool) {
        self.is_writing = false;
        self.nominated_since = (is_ok && is_gated).then_some(now);
        self.was_shown = false;
        self.nominate_again_at = now + if is_ok { SHOWS_WITHIN } else { PAUSES.first };
        self.nominations += u32::from(is_ok);
    }

    /// The gate could not be removed: the pod is nominated again, and its gate removed after that.
    pub(crate) fn nominate_soon(&mut self, now: Moment) {
        self.nominate_again_at = now + PAUSES.first;
    }

    /// The nomination has been seen: if it is missing later, another component has cleared it.
    fn note_shown(&mut self, now: Moment) {
        if !self.was_shown && self.nominations > 0 {
            self.was_shown = true;
            self.nominate_again_at = now + PAUSES.after(self.nominations);
        }
    }

    /// The node on which the planner placed the pod before kube-scheduler saw it, if the pod was nominated.
    pub(crate) fn placed_on(self) -> Option<NodeName> {
        self.placed_on.filter(|_| self.nominations > 0)
    }

    /// Whether the planner made the reservation itself.
    pub fn is_own(&self) -> bool {
        self.is_own
    }

    /// Whether it has been nominated.
    pub(crate) fn waits_to_be_bound(&self) -> bool {
        self.nominations > 0
    }

    fn may_evict(&mut self, victim: &RemainingVictim, is_shown: bool, now: Moment) -> bool {
        let is_its_turn = self.is_own || self.since + SCHEDULERS_TURN <= now;
        (self.is_written || is_shown) && is_its_turn && self.attempt(&victim.uid).is_due(now)
    }

    /// Whether the pod must be nominated (again) to the node of its reservation.
    fn must_nominate(&self, reservation_status: &ReservationStatus, now: Moment) -> bool {
        let is_nominated =
            reservation_status.nominated.as_ref() == Some(&reservation_status.reservation.node);
        let is_wanted = self.nominations == 0
            || reservation_status.gate == SchedulingGate::Planned
            || (!is_nominated && self.nominations < NOMINATIONS);
        is_wanted && !self.is_writing && self.nominate_again_at <= now
    }
}

impl<B: Books> ControlLoop<B> {
    /// Evicts the victims of each reservation, then nominates its pod.
    pub(super) fn advance_reservations(&mut self, now: Moment) {
        // On a copy: a filter waits for the lock, and thousands of pods may have reservations.
        let ledger = self.books.lock().ledger().scratch();
        let reservation_status = ledger.reservation_status();
        // A Binding that is under way may fail; the pod goes on then with what it has tried.
        let is_being_bound = |uid: &PodUid| ledger.pod_state(uid).is_some_and(PodState::is_assumed);
        self.progress_of.retain(|uid, _| {
            reservation_status
                .binary_search_by(|one| one.uid.cmp(uid))
                .is_ok()
                || is_being_bound(uid)
        });
        drop(ledger);
        self.show_again(&reservation_status, now);
        // Most ticks evict no pod.
        let mut kube_filters = None;
        for reservation_status in reservation_status {
            self.advance_reservation(&reservation_status, now, &mut kube_filters);
        }
    }

    fn advance_reservation(
        &mut self,
        reservation_status: &ReservationStatus,
        now: Moment,
        kube_filters: &mut Option<FilterSnapshot>,
    ) {
        let found = || ReservationProgress::found(reservation_status.reservation.clone(), now);
        let progress = self
            .progress_of
            .entry(reservation_status.uid.clone())
            .or_insert_with(found);
        if !progress.is_of(&reservation_status.reservation) {
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
                stays.key.named_to(&reservation_status.key)
            );
            if !progress.has_asked(&stays.uid) {
                self.take_back(&stays.uid);
            }
            self.note_refused(&stays.uid, "it came under protection when it was to leave");
            return self.call_off(reservation_status, &text, FailedBy::Victim, now);
        }
        if let Some(late) = reservation_status.remaining.iter().find(|one| {
            !one.is_leaving && now + one.takes > reservation_status.reservation.deadline
        }) {
            let text = format!(
                "{} would not have terminated in time",
                late.key.named_to(&reservation_status.key)
            );
            let failed_by = if progress.has_asked(&late.uid) {
                self.note_refused(&late.uid, "it did not begin to leave in time");
                FailedBy::Victim
            } else {
                self.take_back(&late.uid);
                FailedBy::Preemptor
            };
            return self.call_off(reservation_status, &text, failed_by, now);
        }
        let due: Vec<&RemainingVictim> = reservation_status
            .remaining
            .iter()
            .filter(|victim| {
                !victim.is_leaving && progress.may_evict(victim, reservation_status.is_shown, now)
            })
            .collect();
        if reservation_status.gate == SchedulingGate::Open
            && reservation_status.nominated.as_ref() == Some(&reservation_status.reservation.node)
        {
            progress.note_shown(now);
        }
        let nominates =
            reservation_status.is_free && progress.must_nominate(reservation_status, now);
        // The node may have been cordoned or tainted since the reservation was made, or since the last attempt.
        if let Some(reason) = (!due.is_empty())
            .then(|| self.refusal(reservation_status, kube_filters))
            .flatten()
        {
            let text = format!("the node would refuse the pod by now: {reason}");
            return self.call_off(reservation_status, &text, FailedBy::Preemptor, now);
        }
        if let Some(progress) = self.progress_of.get_mut(&reservation_status.uid) {
            due.iter()
                .for_each(|victim| progress.attempt(&victim.uid).begin());
        }
        due.into_iter()
            .for_each(|victim| self.evict(reservation_status, victim));
        if nominates {
            self.nominate(reservation_status, now);
        }
    }

    /// Why kube-scheduler's filters would reject the pod on the node of its reservation once its victims are gone; `None` if
    /// they would not, or that is unknown.
    fn refusal(
        &mut self,
        reservation_status: &ReservationStatus,
        kube_filters: &mut Option<FilterSnapshot>,
    ) -> Option<FilterReason> {
        let Reservation { node, victims, .. } = &reservation_status.reservation;
        let kube_filters =
            kube_filters.get_or_insert_with(|| self.books.lock().kube_filters().snapshot());
        let coming = self.books.lock().ledger().coming_to(node).to_vec();
        match kube_filters.verdict(
            &reservation_status.uid,
            kube_filters.wants(&reservation_status.uid)?,
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
            .progress_of
            .get(&reservation_status.uid)
            .is_some_and(|progress| progress.by == EvictionRight::Moves);
        let why = match (&victim.reclaimed_by, &victim.with_group) {
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
        let Some(progress) = self.progress_of.get_mut(&reservation_status.uid) else {
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
            false => change.and_touch(),
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
        let Some(progress) = self.progress_of.get_mut(&reservation_status.uid) else {
            return reservation_status.reservation.clone();
        };
        if std::mem::replace(&mut progress.is_extended, true) {
            return reservation_status.reservation.clone();
        }
        let until = now + TIME_TO_BIND;
        self.books.lock().apply(ExtendReservation {
            uid: reservation_status.uid.clone(),
            until,
        });
        Reservation {
            deadline: reservation_status.reservation.deadline.max(until),
            ..reservation_status.reservation.clone()
        }
    }

    /// Releases the reservation before its deadline. No further victim is evicted for it.
    pub(super) fn call_off(
        &mut self,
        reservation_status: &ReservationStatus,
        because: &str,
        failed_by: FailedBy,
        now: Moment,
    ) {
        let mut cluster = self.books.lock();
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
            .and_then(|entry| entry.disruption_info.placed_with().cloned());
        drop(cluster);
        self.progress_of.remove(&reservation_status.uid);
        let (key, uid) = (
            reservation_status.key.clone(),
            reservation_status.uid.clone(),
        );
        if let Some(group) = group {
            self.break_up(&group, uid.clone(), key.clone(), now);
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
