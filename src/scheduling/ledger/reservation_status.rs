//! The reservations and how far each is: what the planner sees to, tick after tick, until the pod is bound or the reservation is
//! given up. After a restart, too: all of it follows from what the API server keeps.

use super::Ledger;
use super::pod_state::PodState;
use super::preemptor::{CLOCKS_DIFFER, KeepReason};
use super::waiting_pod::{SchedulingGate, WaitingPod};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::units::{Millis, Moment};
use crate::vocabulary::demand::LONGEST_GRACE;
use crate::vocabulary::disruption_info::GroupKey;
use crate::vocabulary::placement::Reservation;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Two deadlines that differ by less are one.
pub(super) const SAME_DEADLINE: Millis = Millis::seconds(1);

/// A pod that waits with a reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservationStatus {
    pub uid: PodUid,
    pub key: PodKey,
    pub reservation: Reservation,
    pub gate: SchedulingGate,
    pub nominated: Option<NodeName>,
    /// Victims that have not left yet, in the order of the reservation.
    pub remaining: Vec<RemainingVictim>,
    /// The last victim has left its node, its memory too, and the GPUs are free; those of its group's other pods as well.
    pub is_free: bool,
    /// The pod shows it, as the watch has shown last.
    pub is_shown: bool,
    /// The pod shows another one.
    pub is_covered: bool,
}

/// A victim that is still there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemainingVictim {
    pub uid: PodUid,
    pub key: PodKey,
    /// It is being deleted, and gone before the reservation ends.
    pub is_leaving: bool,
    /// It is on another node, and is evicted because other pods of its group are.
    pub with_group: Option<GroupKey>,
    /// By the policy in force it may not be evicted for this pod (any more): a policy may change, and a reservation may be
    /// forged.
    pub is_protected: bool,
    /// How long it may take to leave.
    pub takes: Millis,
    /// The tenant that reclaims its quota from it.
    pub reclaimed_by: Option<Arc<str>>,
}

/// By group, the first members whose reservations are not free yet: the members of a group are looked at once for all of them.
type WaitingGroups<'l> = FxHashMap<&'l GroupKey, Vec<&'l PodUid>>;

impl Ledger {
    /// All reservations, in order of UID.
    pub fn reservation_status(&self) -> Vec<ReservationStatus> {
        let mut waiting_groups = WaitingGroups::default();
        let reservations = self.pod_states.reservations();
        let mut all: Vec<ReservationStatus> = reservations
            .filter_map(|(uid, ..)| self.status_of(uid, &mut waiting_groups))
            .collect();
        all.sort_by(|a, b| a.uid.cmp(&b.uid));
        all
    }

    /// The victims of all reservations.
    pub fn victims(&self) -> impl Iterator<Item = &PodUid> {
        self.pod_states
            .reservations()
            .flat_map(|(.., reservation)| reservation.victims.iter())
    }

    /// Pods that show that they are to be evicted, and that are not being deleted.
    pub fn pods_showing_evictions(&self) -> BTreeMap<PodUid, PodKey> {
        let staying = |uid: &PodUid| {
            let pod_state = self
                .pod_states
                .get(uid)
                .filter(|pod_state| !pod_state.is_leaving())?;
            Some((uid.clone(), pod_state.key.clone()))
        };
        self.showing_evictions.iter().filter_map(staying).collect()
    }

    /// That of one pod.
    pub fn reservation_of(&self, uid: &PodUid) -> Option<ReservationStatus> {
        self.status_of(uid, &mut WaitingGroups::default())
    }

    fn status_of<'l>(
        &'l self,
        uid: &PodUid,
        waiting_groups: &mut WaitingGroups<'l>,
    ) -> Option<ReservationStatus> {
        let pod_state = self.pod_states.get(uid)?;
        let Some(WaitingPod {
            reservation: Some(reservation),
            gate,
            nominated,
            ..
        }) = pod_state.waiting()
        else {
            return None;
        };
        let node_state = self.node_states.get(&reservation.node)?;
        let is_shown = self.shows_reservation(uid, reservation);
        Some(ReservationStatus {
            uid: uid.clone(),
            key: pod_state.key.clone(),
            reservation: reservation.clone(),
            gate: *gate,
            nominated: nominated.clone(),
            remaining: reservation
                .victims
                .iter()
                .filter_map(|victim| self.remaining(victim, pod_state, reservation))
                .collect(),
            is_free: node_state.exists()
                && self
                    .placement_of_reservation(uid, &pod_state.demand, reservation, node_state)
                    .is_ok()
                && !self.has_waiting_group_members(uid, pod_state, waiting_groups),
            is_shown,
            is_covered: !is_shown && self.shows_one(uid),
        })
    }

    /// Whether the reservation of another pod of its group is not free yet: a group starts whole.
    fn has_waiting_group_members<'l>(
        &'l self,
        uid: &PodUid,
        pod_state: &'l PodState,
        waiting_groups: &mut WaitingGroups<'l>,
    ) -> bool {
        let Some(group) = pod_state.disruption_info.placed_with() else {
            return false;
        };
        let waiting = waiting_groups.entry(group).or_insert_with(|| {
            let waits = |reservation: &Reservation| {
                let node_state = self.node_states.get(&reservation.node);
                node_state.is_none_or(|node_state| self.victims_on(reservation, node_state) > 0)
            };
            let members = self
                .members(group)
                .filter(|(_, member)| member.reservation().is_some_and(waits));
            // One would do, and a second that is not the pod itself.
            members.map(|(uid, _)| uid).take(2).collect()
        });
        waiting.iter().any(|member| *member != uid)
    }

    /// Whether the reservation of this preemptor still evicts the pod: it may have been ordered a while ago.
    pub fn is_evicted_for(&self, victim: &PodUid, preemptor: &PodUid) -> bool {
        let Some(pod_state) = self.pod_states.get(preemptor) else {
            return false;
        };
        let Some(reservation) = pod_state.reservation() else {
            return false;
        };
        let is_to_go = |victim: RemainingVictim| {
            !victim.is_leaving
                && !victim.is_protected
                && self.now + victim.takes <= reservation.deadline
        };
        reservation.victims.contains(victim)
            && self
                .remaining(victim, pod_state, reservation)
                .is_some_and(is_to_go)
    }

    fn remaining(
        &self,
        uid: &PodUid,
        preemptor: &PodState,
        reservation: &Reservation,
    ) -> Option<RemainingVictim> {
        let victim = self.pod_states.get(uid)?;
        let bound = victim.bound()?;
        let tenant = preemptor
            .demand
            .tenant
            .filter(|_| victim.demand.tenant != preemptor.demand.tenant);
        Some(RemainingVictim {
            uid: uid.clone(),
            key: victim.key.clone(),
            is_leaving: bound
                .leaving
                .is_some_and(|by| by <= reservation.deadline + CLOCKS_DIFFER),
            takes: self.time_to_leave(victim),
            with_group: victim
                .disruption_info
                .group
                .clone()
                .filter(|_| bound.node != reservation.node),
            is_protected: !matches!(
                self.own_keep_reason(victim, &preemptor.demand),
                None | Some(KeepReason::Deleting)
            ),
            reclaimed_by: tenant
                .and_then(|id| self.policy.tenant(id))
                .map(|tenant| tenant.name.as_str().into()),
        })
    }

    /// The reservation was written late: it lasts until then at least.
    pub(crate) fn extend_reservation(&mut self, uid: &PodUid, until: Moment) {
        let reservation = self.pod_states.reservation(uid).cloned();
        if let Some(reservation) = reservation.filter(|reservation| reservation.deadline < until) {
            self.set_reservation(
                uid,
                Some(Reservation {
                    deadline: until,
                    ..reservation
                }),
            );
        }
    }

    /// The API server shows a later deadline than is known: the leader has extended the reservation. A leader knows what it has
    /// extended; to it, a later deadline shows that the wall clock was set back.
    pub(super) fn observe_deadline(&mut self, uid: &PodUid, observed: &Reservation) {
        if self.origin.is_leading() {
            return;
        }
        let Some(known) = self.pod_states.reservation(uid) else {
            return;
        };
        // What is told by wall time wavers by some milliseconds.
        if known.is_same(observed) && observed.deadline > known.deadline + SAME_DEADLINE {
            let until = observed.deadline.min(self.latest_deadline());
            self.extend_reservation(uid, until);
        }
    }

    /// By when a reservation ends at the latest, whatever deadline was written down.
    pub(super) fn latest_deadline(&self) -> Moment {
        self.now + LONGEST_GRACE + self.policy.preemption.reservation_slack
    }
}
