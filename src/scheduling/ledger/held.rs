//! The holds that stand, and how far each is: what the planner sees to, tick after tick, until the pod is bound or the room is
//! given up. After a restart, too: all of it follows from what the API server keeps.

use super::Ledger;
use super::claim::KeepReason;
use super::entry::{PodPhase, PodState, SchedulingGate, WaitingPod};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::scheduling::decision::Reservation;
use crate::scheduling::stake::GroupKey;
use crate::units::{Millis, Moment};
use std::sync::Arc;

/// What a hold may last beyond its slack, whatever it says: longer than any pod should take to leave.
const LONGEST_GRACE: Millis = Millis::seconds(3600);

/// Two deadlines that differ by less are one.
const SAME_DEADLINE: Millis = Millis::seconds(1);

/// A pod that waits with room held for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservationStatus {
    pub uid: PodUid,
    pub key: PodKey,
    pub hold: Reservation,
    pub gate: SchedulingGate,
    pub nominated: Option<NodeName>,
    /// Victims that have not left yet, in the order of the hold.
    pub remaining: Vec<RemainingVictim>,
    /// The last victim has left its node, its memory too, and the room is there; that of all its group's other pods as well.
    pub is_free: bool,
    /// The API server has shown it.
    pub is_shown: bool,
}

/// A victim that is still there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemainingVictim {
    pub uid: PodUid,
    pub key: PodKey,
    /// It has been told.
    pub is_leaving: bool,
    /// It is on another node, and leaves because others of its group do.
    pub with_group: Option<GroupKey>,
    /// By the policy in force it may not be evicted for this pod (any more): a policy may change, and a hold may be forged.
    pub is_protected: bool,
    /// How long it may take to leave.
    pub takes: Millis,
    /// The tenant that lent it its share and takes it back.
    pub reclaimed_by: Option<Arc<str>>,
}

impl Ledger {
    /// All holds that stand, in order of UID.
    pub fn held(&self) -> Vec<ReservationStatus> {
        let with_deadline = self.deadlines.iter().map(|(_, uid)| uid);
        let mut held: Vec<ReservationStatus> =
            with_deadline.filter_map(|uid| self.reservation_of(uid)).collect();
        held.sort_by(|a, b| a.uid.cmp(&b.uid));
        held.dedup_by(|a, b| a.uid == b.uid);
        held
    }

    /// That of one pod.
    pub fn reservation_of(&self, uid: &PodUid) -> Option<ReservationStatus> {
        let entry = self.entries.get(uid)?;
        let PodPhase::Waiting(WaitingPod { hold: Some(hold), gate, nominated, hold_shown, .. }) =
            &entry.phase
        else {
            return None;
        };
        let book = self.books.get(&hold.node)?;
        Some(ReservationStatus {
            uid: uid.clone(),
            key: entry.key.clone(),
            hold: hold.clone(),
            gate: *gate,
            nominated: nominated.clone(),
            remaining: hold.victims.iter().filter_map(|victim| self.remaining(victim, entry, hold)).collect(),
            is_free: book.exists
                && self.placement_of_reservation(uid, &entry.demand, hold, book).is_ok()
                && !self.has_waiting_group_members(uid, entry),
            is_shown: *hold_shown,
        })
    }

    /// Whether room of another pod of its group is not free yet: a group starts whole.
    fn has_waiting_group_members(&self, uid: &PodUid, entry: &PodState) -> bool {
        let fellows = entry.stake.group.iter().flat_map(|group| self.members(group));
        fellows
            .filter(|(fellow, _)| *fellow != uid)
            .filter_map(|(_, fellow)| fellow.hold())
            .any(|hold| self.books.get(&hold.node).is_none_or(|book| self.victims_on(hold, book) > 0))
    }

    fn remaining(&self, uid: &PodUid, preemptor: &PodState, hold: &Reservation) -> Option<RemainingVictim> {
        let victim = self.entries.get(uid)?;
        let PodPhase::Bound(bound) = &victim.phase else { return None };
        let tenant = preemptor.demand.tenant.filter(|_| victim.demand.tenant != preemptor.demand.tenant);
        Some(RemainingVictim {
            uid: uid.clone(),
            key: victim.key.clone(),
            is_leaving: bound.leaving.is_some(),
            takes: victim.demand.grace + self.policy.class(victim.demand.class).drain_time,
            with_group: victim.stake.group.clone().filter(|_| bound.node != hold.node),
            is_protected: !matches!(
                self.own_keep_reason(victim, &preemptor.demand),
                None | Some(KeepReason::Leaving)
            ),
            reclaimed_by: tenant
                .and_then(|id| self.policy.tenant(id))
                .map(|tenant| tenant.name.as_str().into()),
        })
    }

    /// The pod was told late where its room is: that lasts until then at least.
    pub fn extend_reservation(&mut self, uid: &PodUid, until: Moment) {
        let hold = self.entries.get(uid).and_then(|entry| entry.hold().cloned());
        if let Some(hold) = hold.filter(|hold| hold.deadline < until) {
            self.set_reservation(uid, Some(Reservation { deadline: until, ..hold }));
        }
    }

    /// The API server shows a later deadline than is known: whoever leads has extended the hold.
    pub(super) fn observe_deadline(&mut self, uid: &PodUid, shown: Option<&Reservation>) {
        let known = self.entries.get(uid).and_then(|entry| entry.hold());
        let Some((shown, known)) = shown.zip(known) else { return };
        let is_it =
            (&known.node, &known.devices, &known.victims) == (&shown.node, &shown.devices, &shown.victims);
        // What is told by wall time wavers by some milliseconds.
        if is_it && shown.deadline > known.deadline + SAME_DEADLINE {
            let until = shown.deadline.min(self.latest_deadline());
            self.extend_reservation(uid, until);
        }
    }

    /// By when a hold ends at the latest, whatever deadline was written down.
    pub(super) fn latest_deadline(&self) -> Moment {
        self.now + LONGEST_GRACE + self.policy.hold_slack
    }
}
