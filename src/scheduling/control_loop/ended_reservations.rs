//! Reservations that ended before their pods were bound: the GPUs are free again, the nomination is cleared, and an incomplete
//! group releases what it has if the policy says so.

use super::pod_write::StatusPurpose;
use super::reservation_progress::ReservationProgress;
use super::{ClusterAccess, ControlLoop, LockedCluster, LoopNotice};
use crate::control_loop::{ControlPlaneError, FreshPod, PlanState, PodEventReason, StatusChange};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::ledger::{Ledger, PodPhase, PodState};
use crate::policy::WhenIncomplete;
use crate::units::{Moment, plural};
use crate::verbs::wait::ReleaseReservation;
use crate::vocabulary::disruption_info::GroupKey;
use std::collections::{BTreeMap, BTreeSet};

const NOT_BOUND_IN_TIME: &str =
    "The reservation expired before the pod was bound. Its GPUs are free for other pods.";
const LATE_RESERVATION: &str =
    "Ended a reservation that a previous leader wrote after this replica had taken over.";
/// The reason if kube-scheduler gives none for the pod.
const NOT_BOUND: &str = "it was not bound there in time";

/// The rest of a group of which one member was not bound in time.
#[derive(Debug, Default)]
pub(super) struct IncompleteGroup {
    /// Pending members with reservations.
    reserved: Vec<(PodUid, PodKey)>,
    bound: Vec<(PodUid, PodKey)>,
    /// Members whose Bindings are under way.
    assumed: Vec<(PodUid, PodKey)>,
    size: usize,
}

impl IncompleteGroup {
    /// Whether the pod waits with a reservation, and the group does not become whole with it.
    pub(super) fn is_reserved_in_vain(&self, uid: &PodUid) -> bool {
        let placed = self.reserved.len() + self.bound.len() + self.assumed.len();
        placed < self.size && self.reserved.iter().any(|(reserved, _)| reserved == uid)
    }
}

/// Why a reservation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReservationEnd {
    Late,
    /// Another member of its group failed.
    WithGroup,
}

impl<B: ClusterAccess> ControlLoop<B> {
    /// Handles reservations that the ledger has ended.
    pub(super) fn end_reservations(&mut self, ended: Vec<PodUid>, now: Moment) {
        let mut groups = BTreeMap::new();
        for uid in ended {
            let cluster = self.cluster_access.lock();
            let Some(pod_state) = cluster.ledger().pod_state(&uid) else {
                continue;
            };
            let (key, group) = (
                pod_state.key.clone(),
                pod_state.disruption_info.placement_group().cloned(),
            );
            drop(cluster);
            groups.extend(group.map(|group| (group, (uid.clone(), key.clone()))));
            self.end_reservation(uid, key, ReservationEnd::Late);
        }
        for (group, (uid, key)) in groups {
            self.release_incomplete_group(&group, uid, key, now);
        }
    }

    /// Handles pods whose conditions show a reservation that this leader did not make: a late write of an earlier leader. A pod
    /// that has a reservation of this leader gets its condition written again.
    pub(crate) fn end_unknown_reservations(&mut self, uids: BTreeSet<PodUid>) {
        for uid in uids {
            let cluster = self.cluster_access.lock();
            let Some(pod_state) = cluster.ledger().pod_state(&uid) else {
                continue;
            };
            let key = pod_state.key.clone();
            drop(cluster);
            self.record(LoopNotice::LateReservation(key.clone()));
            let (kind, text) = (
                PodEventReason::ReservationEnded,
                LATE_RESERVATION.to_owned(),
            );
            self.publish(key.clone(), uid.clone(), kind, text);
            let (change, purpose) = (
                StatusChange::end_reservation(),
                StatusPurpose::EndUnknownReservation,
            );
            self.write_status(key, uid, change, purpose);
        }
    }

    pub(super) fn end_reservation(&mut self, uid: PodUid, key: PodKey, ending: ReservationEnd) {
        let progress = self.reservation_progress.remove(&uid);
        let mut placed_on = None;
        if ending == ReservationEnd::Late {
            let (key, uid, text) = (key.clone(), uid.clone(), NOT_BOUND_IN_TIME.to_owned());
            self.publish(key, uid, PodEventReason::ReservationEnded, text);
            placed_on = progress.and_then(ReservationProgress::placed_on);
        }
        let mut change = StatusChange::end_reservation();
        if is_nominated(self.cluster_access.lock().ledger(), &uid) {
            change.nomination = StatusChange::clear_nomination().nomination;
        }
        let purpose = StatusPurpose::EndReservation { placed_on };
        self.write_status(key, uid, change, purpose);
    }

    /// Ends the reservations of a group of which one member was not bound in time. Recorded once, on that member.
    pub(super) fn release_incomplete_group(
        &mut self,
        group: &GroupKey,
        uid: PodUid,
        key: PodKey,
        now: Moment,
    ) {
        let mut cluster = self.cluster_access.lock();
        let Some(incomplete) = incomplete_group(cluster.ledger(), group) else {
            return;
        };
        let evicts_rest =
            cluster.ledger().policy().planning.groups.when_incomplete == WhenIncomplete::Evict;
        incomplete
            .reserved
            .iter()
            .for_each(|(uid, _)| cluster.apply(ReleaseReservation(uid.clone())));
        drop(cluster);
        let IncompleteGroup {
            reserved,
            bound,
            assumed,
            ..
        } = incomplete;
        let placed: Vec<(PodUid, PodKey)> = bound.iter().chain(&assumed).cloned().collect();
        let text = format!(
            "A pod of {group} was not bound in time. Released {} of the group; {} {}.",
            plural(reserved.len(), "reservation"),
            plural(placed.len(), "bound pod"),
            match (evicts_rest, placed.len()) {
                (true, 1) => "is evicted",
                (true, _) => "are evicted",
                (false, 1) => "keeps running (planning.groups.whenIncomplete)",
                (false, _) => "keep running (planning.groups.whenIncomplete)",
            },
        );
        self.publish(key, uid, PodEventReason::GroupFailed, text);
        reserved
            .into_iter()
            .for_each(|(uid, key)| self.end_reservation(uid, key, ReservationEnd::WithGroup));
        // A Binding that is under way may fail.
        let remembered = if evicts_rest { placed } else { assumed };
        remembered
            .into_iter()
            .for_each(|(uid, key)| self.add_orphaned_member(uid, key, group, now));
    }
}

/// Why a pod that the planner had placed on the node was not bound, in kube-scheduler's words, by a read of the pod. `None` if it
/// was bound after all.
pub fn rejected_plan_state(
    node: &NodeName,
    uid: &PodUid,
    read: Result<Option<FreshPod>, ControlPlaneError>,
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
pub(super) fn incomplete_group(ledger: &Ledger, group: &GroupKey) -> Option<IncompleteGroup> {
    let mut incomplete = IncompleteGroup::default();
    for (uid, pod_state) in ledger.members(group) {
        // A group without a declared size is never known to be incomplete.
        incomplete.size = incomplete
            .size
            .max(pod_state.disruption_info.group_size.unwrap_or(0) as usize);
        let member = (uid.clone(), pod_state.key.clone());
        match &pod_state.phase {
            PodPhase::Waiting(waiting) if waiting.reservation.is_some() => {
                incomplete.reserved.push(member)
            }
            PodPhase::Bound(bound) if bound.leaving.is_none() => incomplete.bound.push(member),
            PodPhase::Assumed(_) => incomplete.assumed.push(member),
            _ => {}
        }
    }
    let placeless = ledger.count_placeless(group).iter().sum::<u32>() as usize;
    (incomplete.bound.len() + incomplete.assumed.len() + placeless < incomplete.size)
        .then_some(incomplete)
}

pub(super) fn is_nominated(ledger: &Ledger, uid: &PodUid) -> bool {
    let waiting = ledger.pod_state(uid).and_then(PodState::waiting);
    waiting.is_some_and(|waiting| waiting.nominated.is_some())
}
