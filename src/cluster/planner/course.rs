//! One hold, from the first eviction to the moment when its pod has been told where to go.

use super::Planner;
use super::attempt::{Backoff, RetryState};
use super::outcome::WriteOutcome;
use crate::control_plane::{
    EvictionCondition, EvictionReason, PlanState, PodEvent, PodEventReason, StatusChange,
};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::scheduling::decision::Reservation;
use crate::scheduling::ledger::{RemainingVictim, ReservationStatus, SchedulingGate};
use crate::scheduling::plan::EvictionRight;
use crate::scheduling::stock::{AssumedNodeChange, FilterReason, FilterSnapshot, FilterVerdict};
use crate::units::{Millis, Moment};
use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::ops::Deref;

/// The victims of a preemption are evicted by the scheduler, at once. Whom it has not told by then it never will: it restarted,
/// or took another way.
const SCHEDULERS_TURN: Millis = Millis::seconds(3);
/// What was accepted shows in the watch; if it does not, it is asked for again.
pub const SHOWS_WITHIN: Millis = Millis::seconds(10);
/// Between attempts that failed.
pub const PAUSES: Backoff = Backoff { first: Millis(500), longest: Millis::seconds(10) };
/// What the scheduler may need from being told to the Binding: its longest back-off, ten seconds, and a bind that takes as long as
/// one may, five.
const TIME_TO_BIND: Millis = Millis::seconds(15);
/// A nomination that the scheduler clears each time is not wanted there.
const NOMINATIONS: u32 = 3;

/// How far a hold is, beyond what the ledger says of it. All of it may be lost.
#[derive(Debug)]
pub struct ReservationProgress {
    /// When the planner first saw the hold.
    since: Moment,
    /// It made the hold itself: nobody else evicts for it.
    is_own: bool,
    by: EvictionRight,
    /// The condition says so already, as far as it needs to.
    pub is_written: bool,
    /// A write for the pod itself is under way.
    pub is_writing: bool,
    told: u32,
    /// The node that it was nominated to behind the gate.
    placed_on: Option<NodeName>,
    tell_again: Moment,
    /// It was given time to be bound in. Once: who is told again and again is not wanted there.
    is_extended: bool,
    /// The API server has shown what the pod was told.
    was_shown: bool,
    evictions: BTreeMap<PodUid, RetryState>,
}

impl ReservationProgress {
    /// Of a hold that somebody else made, or this replica's predecessor.
    pub fn found(since: Moment) -> Self {
        Self {
            since,
            is_own: false,
            by: EvictionRight::Preemption,
            is_written: false,
            is_writing: false,
            told: 0,
            placed_on: None,
            tell_again: since,
            is_extended: false,
            was_shown: false,
            evictions: BTreeMap::new(),
        }
    }

    /// Of a hold of the planner's own, of which nothing is written yet.
    pub fn own(since: Moment, by: EvictionRight) -> Self {
        Self { is_own: true, by, is_written: false, ..Self::found(since) }
    }

    /// To evict this victim.
    pub fn attempt(&mut self, victim: &PodUid) -> &mut RetryState {
        self.evictions.entry(victim.clone()).or_default()
    }

    /// What came of telling the pod. What was written shows, later if the API server is busy; to write it again would keep it
    /// busier.
    pub fn note_told(&mut self, now: Moment, is_ok: bool) {
        self.is_writing = false;
        self.was_shown = false;
        self.tell_again = now + if is_ok { SHOWS_WITHIN } else { PAUSES.first };
        self.told += u32::from(is_ok);
    }

    /// What was told stands: the next time that it does not, somebody has taken it back.
    fn note_shown(&mut self, now: Moment) {
        if !self.was_shown && self.told > 0 {
            self.was_shown = true;
            self.tell_again = now + PAUSES.after(self.told);
        }
    }

    /// Where the planner has placed the pod before the scheduler saw it, if it was told so.
    pub fn placed_on(self) -> Option<NodeName> {
        self.placed_on.filter(|_| self.told > 0)
    }

    /// It knows where to go.
    pub fn waits_to_be_bound(&self) -> bool {
        self.told > 0
    }

    fn may_evict(&mut self, victim: &RemainingVictim, is_shown: bool, now: Moment) -> bool {
        let is_its_turn = self.is_own || self.since + SCHEDULERS_TURN <= now;
        (self.is_written || is_shown) && is_its_turn && self.attempt(&victim.uid).is_due(now)
    }

    /// Whether the pod has to be told (again) that it can go where its room is.
    fn must_tell(&self, held: &ReservationStatus, now: Moment) -> bool {
        let is_nominated = held.nominated.as_ref() == Some(&held.hold.node);
        let is_wanted = self.told == 0
            || held.gate == SchedulingGate::Planned
            || (!is_nominated && self.told < NOMINATIONS);
        is_wanted && !self.is_writing && self.tell_again <= now
    }
}

impl Planner {
    /// Evicts for, and tells, whoever has room held.
    pub(super) fn advance_reservations(&mut self) {
        let ledger = self.service.ledger();
        let (now, held) = (ledger.now(), ledger.held());
        drop(ledger);
        self.courses.retain(|uid, _| held.binary_search_by(|one| one.uid.cmp(uid)).is_ok());
        let service = self.service.clone();
        // Most ticks evict nobody.
        let stock = LazyCell::new(|| service.stock().snapshot());
        for held in held {
            self.advance_reservation(&held, now, &stock);
        }
    }

    fn advance_reservation(
        &mut self,
        held: &ReservationStatus,
        now: Moment,
        stock: &impl Deref<Target = FilterSnapshot>,
    ) {
        let course = self.courses.entry(held.uid.clone()).or_insert_with(|| ReservationProgress::found(now));
        if held.gate == SchedulingGate::Others {
            return;
        }
        if let Some(stays) = held.remaining.iter().find(|victim| victim.is_protected && !victim.is_leaving) {
            let text = format!("pod {} may not be evicted for it any more", stays.key);
            return self.call_off(held, &text);
        }
        if let Some(late) =
            held.remaining.iter().find(|one| !one.is_leaving && now + one.takes > held.hold.deadline)
        {
            let text = format!("pod {} would not have left in time any more", late.key);
            return self.call_off(held, &text);
        }
        let due: Vec<&RemainingVictim> = held
            .remaining
            .iter()
            .filter(|victim| !victim.is_leaving && course.may_evict(victim, held.is_shown, now))
            .collect();
        if held.gate == SchedulingGate::Open && held.nominated.as_ref() == Some(&held.hold.node) {
            course.note_shown(now);
        }
        let tells = held.is_free && course.must_tell(held, now);
        // The node may have been cordoned or tainted since the hold was taken, or since the last attempt.
        if let Some(reason) = (!due.is_empty()).then(|| self.refusal(held, stock)).flatten() {
            return self.call_off(held, &format!("the node would refuse the pod by now: {reason}"));
        }
        for victim in &due {
            self.courses
                .get_mut(&held.uid)
                .into_iter()
                .for_each(|course| course.attempt(&victim.uid).begin());
        }
        due.into_iter().for_each(|victim| self.evict(held, victim));
        if tells {
            self.tell(held);
        }
    }

    /// Why the stock filters would refuse the pod on the node of its hold, once its victims have left; `None` where they would
    /// not, or nobody can say.
    fn refusal(&self, held: &ReservationStatus, stock: &FilterSnapshot) -> Option<FilterReason> {
        let Reservation { node, victims, .. } = &held.hold;
        let coming = self.service.ledger().coming_to(node).to_vec();
        match stock.verdict(
            &held.uid,
            stock.wants(&held.uid)?,
            node,
            &AssumedNodeChange { leaving: victims, coming: &coming },
        ) {
            FilterVerdict::Refuses(reason) => Some(reason),
            FilterVerdict::Accepts | FilterVerdict::CannotJudge(_) => None,
        }
    }

    fn evict(&mut self, held: &ReservationStatus, victim: &RemainingVictim) {
        let by = held.key.clone();
        let moves = self.courses.get(&held.uid).is_some_and(|course| course.by == EvictionRight::Moves);
        let why = match (&victim.reclaimed_by, &victim.with_group) {
            _ if moves => EvictionReason::Consolidated { to_fit: by },
            (Some(owner), _) => EvictionReason::Reclaimed { owner: owner.clone(), by },
            (None, Some(group)) => EvictionReason::GroupLeaves { group: group.to_string().into(), by },
            (None, None) => EvictionReason::Preempted { by },
        };
        let (control_plane, key) = (self.control_plane.clone(), victim.key.clone());
        let (holder, victim) = (held.uid.clone(), victim.uid.clone());
        self.writes.add(victim.clone(), async move {
            let outcome = control_plane.evict(&key, &victim, &why).await;
            Some(WriteOutcome::Evicted { holder, key, victim, outcome })
        });
    }

    /// Nominates the pod to the node of its room and touches it, in one write; then lets it through its gate.
    pub(super) fn tell(&mut self, held: &ReservationStatus) {
        let hold = self.with_time_to_bind(held);
        let Some(course) = self.courses.get_mut(&held.uid) else { return };
        course.is_writing = true;
        let node = hold.node.clone();
        // Whoever reads the condition after a restart goes by its deadline. A hold for which nobody leaves is written nowhere.
        let is_news = hold != held.hold && !hold.victims.is_empty();
        let change = if is_news { StatusChange::hold(hold.clone()) } else { StatusChange::default() };
        let mut change = change.and_nominate(node.clone()).and_touch();
        let is_gated = held.gate == SchedulingGate::Planned;
        if is_gated {
            course.placed_on = Some(node.clone());
            change.plan = Some(PlanState::Placed { node });
        }
        let (control_plane, key, uid) = (self.control_plane.clone(), held.key.clone(), held.uid.clone());
        let service = self.service.clone();
        self.writes.add(uid.clone(), async move {
            // It may have waited for its turn, and the room may be gone since.
            let stands = service.ledger().entry(&uid).is_some_and(|entry| entry.hold() == Some(&hold));
            if !stands {
                return None;
            }
            let told = async {
                control_plane.write_status(&key, &uid, &change).await?;
                if is_gated { control_plane.remove_scheduling_gate(&key, &uid).await } else { Ok(()) }
            };
            let told = told.await;
            Some(WriteOutcome::Told { key, uid, told })
        });
    }

    /// The hold, which lasts at least until the scheduler has had time to bind the pod.
    fn with_time_to_bind(&mut self, held: &ReservationStatus) -> Reservation {
        let Some(course) = self.courses.get_mut(&held.uid) else { return held.hold.clone() };
        if std::mem::replace(&mut course.is_extended, true) {
            return held.hold.clone();
        }
        let mut ledger = self.service.ledger();
        let until = ledger.now() + TIME_TO_BIND;
        ledger.extend_reservation(&held.uid, until);
        Reservation { deadline: held.hold.deadline.max(until), ..held.hold.clone() }
    }

    /// Gives the room up before its time, with nobody evicted for it in vain from here on.
    pub(super) fn call_off(&mut self, held: &ReservationStatus, because: &str) {
        let mut ledger = self.service.ledger();
        if !held.hold.victims.is_empty() {
            ledger.note_failed_eviction(&held.uid);
        }
        ledger.release_reservation(&held.uid);
        let group = ledger.entry(&held.uid).and_then(|entry| entry.stake.group.clone());
        drop(ledger);
        let course = self.courses.remove(&held.uid);
        let (key, uid) = (held.key.clone(), held.uid.clone());
        let told = |victim: &&RemainingVictim| {
            let attempt = course.as_ref().and_then(|course| course.evictions.get(&victim.uid));
            !victim.is_leaving && attempt.is_some_and(RetryState::was_begun)
        };
        held.remaining
            .iter()
            .filter(told)
            .for_each(|victim| self.clear_eviction_condition(&victim.uid, &victim.key));
        if let Some(group) = group {
            self.break_up(&group, uid.clone(), key.clone());
        }
        self.control_plane.notify(PodEvent {
            key: key.clone(),
            uid: uid.clone(),
            kind: PodEventReason::HoldEnded,
            text: format!("The room held for the pod on {} is given up: {because}.", held.hold.node),
        });
        let control_plane = self.control_plane.clone();
        let change = StatusChange::end_reservation_and_nomination();
        self.writes.add(uid.clone(), async move {
            // Should it fail, the condition stands until its deadline, and whoever reads it then ends it again.
            let _ = control_plane.write_status(&key, &uid, &change).await;
            None
        });
    }

    /// It was told that it leaves, and does not.
    pub(super) fn clear_eviction_condition(&mut self, uid: &PodUid, key: &PodKey) {
        let (control_plane, key, uid) = (self.control_plane.clone(), key.clone(), uid.clone());
        let change = StatusChange::eviction(EvictionCondition::CalledOff);
        self.writes.add(uid.clone(), async move {
            // Should it fail, its owner reads of an eviction that was not; it runs all the same.
            let _ = control_plane.write_status(&key, &uid, &change).await;
            None
        });
    }
}
