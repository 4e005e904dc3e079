//! Reservations that ended before their pods were bound: the GPUs are free again, the nomination is cleared, and an incomplete
//! group releases what it has if the policy says so.

use super::pod_write::StatusPurpose;
use super::reservation_progress::ReservationProgress;
use super::{Books, ControlLoop, LockedBooks, Notice};
use crate::control_loop::{
    ControlPlaneError, PlanState, PodEventReason, PodOnRecord, StatusChange,
};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::ledger::{Ledger, PodPhase, PodState};
use crate::policy::WhenIncomplete;
use crate::units::{Moment, plural};
use crate::verbs::wait::ReleaseReservation;
use crate::vocabulary::disruption_info::GroupKey;
use std::collections::{BTreeMap, BTreeSet};

const NOT_BOUND_IN_TIME: &str =
    "The reservation expired before the pod was bound. Its GPUs are free for other pods.";
const LANDED_LATE: &str =
    "Ended a reservation that a previous leader wrote after this replica had taken over.";
/// The reason if kube-scheduler gives none for the pod.
const NOT_BOUND: &str = "it was not bound there in time";

/// The rest of a group of which one member was not bound in time.
#[derive(Debug, Default)]
pub(super) struct BrokenGroup {
    /// Pending members with reservations.
    holding: Vec<(PodUid, PodKey)>,
    bound: Vec<(PodUid, PodKey)>,
    /// Members whose Bindings are under way.
    assumed: Vec<(PodUid, PodKey)>,
    size: usize,
}

impl BrokenGroup {
    /// Whether the pod waits with a reservation, and the group does not become whole with it.
    pub(super) fn holds_in_vain(&self, uid: &PodUid) -> bool {
        let placed = self.holding.len() + self.bound.len() + self.assumed.len();
        placed < self.size && self.holding.iter().any(|(holding, _)| holding == uid)
    }
}

/// Why a reservation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReservationEnd {
    Late,
    /// Another member of its group failed.
    WithGroup,
}

impl<B: Books> ControlLoop<B> {
    /// Handles reservations that the ledger has ended.
    pub(super) fn end(&mut self, ended: Vec<PodUid>, now: Moment) {
        let mut groups = BTreeMap::new();
        for uid in ended {
            let cluster = self.books.lock();
            let Some(entry) = cluster.ledger().pod_state(&uid) else {
                continue;
            };
            let (key, group) = (
                entry.key.clone(),
                entry.disruption_info.placed_with().cloned(),
            );
            drop(cluster);
            groups.extend(group.map(|group| (group, (uid.clone(), key.clone()))));
            self.end_one(uid, key, ReservationEnd::Late);
        }
        for (group, (uid, key)) in groups {
            self.break_up(&group, uid, key, now);
        }
    }

    /// Handles pods whose conditions show a reservation that this leader did not make: a late write of an earlier leader. A pod
    /// that has a reservation of this leader gets its condition written again.
    pub(crate) fn end_unknown(&mut self, uids: BTreeSet<PodUid>) {
        for uid in uids {
            let cluster = self.books.lock();
            let Some(entry) = cluster.ledger().pod_state(&uid) else {
                continue;
            };
            let key = entry.key.clone();
            drop(cluster);
            self.note(Notice::LandedLate(key.clone()));
            let (kind, text) = (PodEventReason::ReservationEnded, LANDED_LATE.to_owned());
            self.publish(key.clone(), uid.clone(), kind, text);
            let (change, purpose) = (
                StatusChange::end_reservation(),
                StatusPurpose::EndUnknownReservation,
            );
            self.write_status(key, uid, change, purpose);
        }
    }

    pub(super) fn end_one(&mut self, uid: PodUid, key: PodKey, ending: ReservationEnd) {
        let progress = self.progress_of.remove(&uid);
        let mut placed_on = None;
        if ending == ReservationEnd::Late {
            let (key, uid, text) = (key.clone(), uid.clone(), NOT_BOUND_IN_TIME.to_owned());
            self.publish(key, uid, PodEventReason::ReservationEnded, text);
            placed_on = progress.and_then(ReservationProgress::placed_on);
        }
        let mut change = StatusChange::end_reservation();
        if is_nominated(self.books.lock().ledger(), &uid) {
            change.nomination = StatusChange::clear_nomination().nomination;
        }
        let purpose = StatusPurpose::EndReservation { placed_on };
        self.write_status(key, uid, change, purpose);
    }

    /// Ends the reservations of a group of which one member was not bound in time. Recorded once, on that member.
    pub(super) fn break_up(&mut self, group: &GroupKey, uid: PodUid, key: PodKey, now: Moment) {
        let mut cluster = self.books.lock();
        let Some(broken) = broken(cluster.ledger(), group) else {
            return;
        };
        let leaves =
            cluster.ledger().policy().planning.groups.when_incomplete == WhenIncomplete::Evict;
        broken
            .holding
            .iter()
            .for_each(|(uid, _)| cluster.apply(ReleaseReservation(uid.clone())));
        drop(cluster);
        let BrokenGroup {
            holding,
            bound,
            assumed,
            ..
        } = broken;
        let placed: Vec<(PodUid, PodKey)> = bound.iter().chain(&assumed).cloned().collect();
        let text = format!(
            "A pod of {group} was not bound in time. Released {} of the group; {} {}.",
            plural(holding.len(), "reservation"),
            plural(placed.len(), "bound pod"),
            match (leaves, placed.len()) {
                (true, 1) => "is evicted",
                (true, _) => "are evicted",
                (false, 1) => "keeps running (planning.groups.whenIncomplete)",
                (false, _) => "keep running (planning.groups.whenIncomplete)",
            },
        );
        self.publish(key, uid, PodEventReason::GroupFailed, text);
        holding
            .into_iter()
            .for_each(|(uid, key)| self.end_one(uid, key, ReservationEnd::WithGroup));
        // A Binding that is under way may fail.
        let remembered = if leaves { placed } else { assumed };
        remembered
            .into_iter()
            .for_each(|(uid, key)| self.remember_member(uid, key, group, now));
    }
}

/// Why a pod that the planner had placed on the node was not bound, in kube-scheduler's words, by a read of the pod. `None` if it
/// was bound after all.
pub fn refused(
    node: &NodeName,
    uid: &PodUid,
    read: Result<Option<PodOnRecord>, ControlPlaneError>,
) -> Option<PlanState> {
    let why = match read {
        Ok(record) => {
            record
                .filter(|record| record.uid == *uid && record.node.is_none())?
                .refusal
        }
        Err(_) => None,
    };
    Some(PlanState::Rejected {
        node: node.clone(),
        why: why.unwrap_or_else(|| NOT_BOUND.into()),
    })
}

/// `None` if the group has enough members without the missing one.
pub(super) fn broken(ledger: &Ledger, group: &GroupKey) -> Option<BrokenGroup> {
    let mut broken = BrokenGroup::default();
    for (uid, entry) in ledger.members(group) {
        // A group without a declared size is never known to be incomplete.
        broken.size = broken
            .size
            .max(entry.disruption_info.group_size.unwrap_or(0) as usize);
        let who = (uid.clone(), entry.key.clone());
        match &entry.phase {
            PodPhase::Waiting(waiting) if waiting.reservation.is_some() => broken.holding.push(who),
            PodPhase::Bound(bound) if bound.leaving.is_none() => broken.bound.push(who),
            PodPhase::Assumed(_) => broken.assumed.push(who),
            _ => {}
        }
    }
    let placeless = ledger.count_placeless(group).iter().sum::<u32>() as usize;
    (broken.bound.len() + broken.assumed.len() + placeless < broken.size).then_some(broken)
}

pub(super) fn is_nominated(ledger: &Ledger, uid: &PodUid) -> bool {
    let waiting = ledger.pod_state(uid).and_then(PodState::waiting);
    waiting.is_some_and(|waiting| waiting.nominated.is_some())
}
