//! Reservations: made after the checks of one function, followed until the pod is bound, and released. After a restart they are
//! rebuilt from what the API server keeps. Nothing here knows a Lease or a condition.
//!
//! A replica that does not lead mirrors the reservations that pods show. One that begins to lead puts each of them through the checks
//! of a new reservation, and from then on knows every reservation before its condition is written: one that it does not know landed
//! late, and only a write that ends it settles that.

use super::assume::{AllocationFailure, clear_measurements};
use super::node_state::NodeState;
use super::pod_state::{PodPhase, PodState, SchedulingGate, WaitingPod};
use super::preemptor::{CLOCK_SKEW_ALLOWANCE, Departure, KeepReason, Preemptor, returned_quota};
use super::{Ledger, PotentialVictim, discharge, recompute_class_exclusions};
use crate::ids::{LeaderEpoch, NodeName, PodKey, PodUid};
use crate::placing::fit::{Misfit, check_node_admission, misfit};
use crate::units::{Millis, Moment};
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::{Demand, MAX_GRACE_PERIOD};
use crate::vocabulary::disruption_info::GroupKey;
use crate::vocabulary::placement::Reservation;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

impl Ledger {
    /// Keeps GPUs for a waiting pod until its victims are gone: pods of that node, pods of other nodes that are evicted with
    /// their groups, and pods that are leaving anyway.
    pub(crate) fn reserve(
        &mut self,
        uid: &PodUid,
        reservation: Reservation,
    ) -> Result<(), AllocationFailure> {
        let preemptor = self.preemptor_without_cost(uid);
        self.reserve_as(&preemptor, uid, reservation)
    }

    /// Reserves GPUs for a waiting pod, on the condition that its victims fit on other nodes.
    pub(crate) fn reserve_by_moving_victims(
        &mut self,
        uid: &PodUid,
        reservation: Reservation,
    ) -> Result<(), AllocationFailure> {
        let preemptor = self.preemptor_without_cost(uid).with_moved_victims();
        self.reserve_as(&preemptor, uid, reservation)
    }

    fn reserve_as(
        &mut self,
        preemptor: &Preemptor,
        uid: &PodUid,
        reservation: Reservation,
    ) -> Result<(), AllocationFailure> {
        self.check_reservation(preemptor, uid, &reservation)?;
        self.set_reservation(uid, Some(reservation));
        Ok(())
    }

    /// Whether the pod may have this reservation, in place of none.
    pub(crate) fn check_reservation(
        &self,
        preemptor: &Preemptor,
        uid: &PodUid,
        reservation: &Reservation,
    ) -> Result<(), AllocationFailure> {
        let pod_state = self.waiting_pod(uid)?;
        if let Some(recorded) = pod_state.reservation() {
            return Err(AllocationFailure::AlreadyReserved {
                node: recorded.node.clone(),
            });
        }
        let node_state = self
            .node_states
            .get(&reservation.node)
            .ok_or(Misfit::UnknownNode)?;
        match check_node_admission(node_state.view(), &pod_state.demand) {
            Err(Misfit::NoFreshReport) if preemptor.is_adopting() => {}
            admission => admission?,
        }
        let mut gpus = node_state.gpus_without(uid, &self.pod_states, &self.policy);
        if preemptor.is_adopting() {
            clear_measurements(&mut gpus);
        }
        let class_exclusions = node_state.class_exclusions(uid, &self.pod_states);
        // A tenant at its limit may put one of its pods in the place of others of its own.
        let mut returned_quota = TenantUsage::default();
        for (resident, returned) in
            self.check_victims(preemptor, &pod_state.demand, reservation, node_state)?
        {
            returned_quota += returned;
            resident
                .iter()
                .for_each(|resident| discharge(&mut gpus, resident));
        }
        recompute_class_exclusions(&class_exclusions, &mut gpus, |uid| {
            reservation.victims.contains(uid)
        });
        // What an earlier leader has reserved is taken already.
        let demand = self.for_placing(uid, pod_state.demand.clone());
        let demand = match preemptor.is_adopting() {
            true => &demand,
            false => &*self.with_spare_rules(&demand),
        };
        let reserved_gpus = node_state
            .resolve(&reservation.devices)
            .ok_or_else(|| misfit(&gpus, demand))?;
        if !reserved_gpus.iter().all(|g| gpus[g].can_take(demand)) {
            return Err(misfit(&gpus, demand).into());
        }
        self.check_tenant_limit(
            self.tenant_allowance_after(uid, demand, returned_quota),
            demand,
            &gpus,
            reserved_gpus,
        )?;
        Ok(())
    }

    /// All pods that must have left before the reserved GPUs are free, with what each gives back to the pod's own tenant; of pods
    /// on other nodes nothing is discharged here.
    fn check_victims(
        &self,
        preemptor: &Preemptor,
        demand: &Demand,
        reservation: &Reservation,
        node_state: &NodeState,
    ) -> Result<Vec<(Option<PotentialVictim>, TenantUsage)>, AllocationFailure> {
        let requested = node_state.max_usage_of(demand);
        let check_victim = |victim: &PodUid| {
            let Some(victim_state) = self.pod_states.get(victim) else {
                return self.check_ended_victim(preemptor, victim, node_state);
            };
            let home_node = victim_state
                .node()
                .and_then(|node| self.node_states.get(node))
                .ok_or(AllocationFailure::VictimGone)?;
            let is_soon = matches!(self.departure_of(victim_state), Some(Departure::Soon(_)));
            match self.keep_reason(victim, victim_state, demand, requested, preemptor) {
                Some(KeepReason::VictimOfAnother | KeepReason::Deleting)
                    if preemptor.victims_of_others().contains(victim) =>
                {
                    return Err(AllocationFailure::VictimGone);
                }
                Some(KeepReason::Deleting) if is_soon || preemptor.is_adopting() => {}
                None if (demand.may_preempt || preemptor.is_moving_victims())
                    && (self.departure_of(victim_state).is_some()
                        || !self.would_break_group(victim_state, &reservation.victims)) => {}
                _ => return Err(AllocationFailure::VictimProtected),
            }
            let is_here = victim_state.node() == Some(&reservation.node);
            let resident = self
                .potential_victim(victim, victim_state, home_node)
                .filter(|_| is_here);
            if resident.is_none() && !self.has_group_victim_on_node(victim_state, reservation) {
                return Err(AllocationFailure::VictimGone);
            }
            Ok((
                resident,
                returned_quota(
                    victim_state,
                    home_node.usage_of(victim_state).unwrap_or_default(),
                    demand,
                ),
            ))
        };
        reservation.victims.iter().map(check_victim).collect()
    }

    /// A pod that has ended, and whose memory becomes free for this preemptor.
    fn check_ended_victim(
        &self,
        preemptor: &Preemptor,
        victim: &PodUid,
        node_state: &NodeState,
    ) -> Result<(Option<PotentialVictim>, TenantUsage), AllocationFailure> {
        let is_available = |ended: &PotentialVictim| {
            ended.uid == *victim && !preemptor.victims_of_others().contains(victim)
        };
        let ended = self
            .ended_victims(node_state)
            .find(is_available)
            .ok_or(AllocationFailure::VictimGone)?;
        Ok((Some(ended), TenantUsage::default()))
    }

    /// Whether a member of its group leaves the node of the reservation.
    fn has_group_victim_on_node(&self, victim: &PodState, reservation: &Reservation) -> bool {
        let is_member_there = |uid: &PodUid| {
            let pod_state = self.pod_states.get(uid);
            pod_state.is_some_and(|e| {
                e.node() == Some(&reservation.node)
                    && e.disruption_info.group == victim.disruption_info.group
            })
        };
        victim.disruption_info.group.is_some() && reservation.victims.iter().any(is_member_there)
    }

    /// Ends the pod's reservation. A leader takes a later observation of it for an outdated one.
    pub(crate) fn release_reservation(&mut self, uid: &PodUid) {
        let Some(released) = self.pod_states.reservation(uid).cloned() else {
            return;
        };
        self.set_reservation(uid, None);
        self.leader_record.record_released(uid, released);
    }

    /// Forgets a reservation, because the API server shows none any more.
    pub(crate) fn forget_ended_reservation(&mut self, uid: &PodUid) {
        self.set_reservation(uid, None);
    }
}

/// Deadlines that differ by less are equal: they are derived from wall time, which wavers by some milliseconds.
const DEADLINE_TOLERANCE: Millis = Millis::seconds(1);

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
    /// The pod's condition names this reservation, as the watch showed it last.
    pub is_in_condition: bool,
    /// The pod's condition names another reservation.
    pub has_another_in_condition: bool,
}

/// A victim that is still there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemainingVictim {
    pub uid: PodUid,
    pub key: PodKey,
    /// It is being deleted, and gone before the reservation ends.
    pub is_leaving: bool,
    /// It is on another node, and is evicted because other pods of its group are.
    pub evicted_with_group: Option<GroupKey>,
    /// By the policy in force it may not be evicted for this pod (any more): a policy may change, and a reservation may be
    /// forged.
    pub is_protected: bool,
    /// How long it may take to leave.
    pub termination_time: Millis,
    /// The tenant that reclaims its quota from it.
    pub reclaimed_by: Option<Arc<str>>,
}

/// The first members of each group whose reservations are not free yet, so that a group's members are read only once.
type WaitingGroups<'l> = FxHashMap<&'l GroupKey, Vec<&'l PodUid>>;

impl Ledger {
    /// All reservations, in order of UID.
    pub fn reservation_statuses(&self) -> Vec<ReservationStatus> {
        let mut waiting_groups = WaitingGroups::default();
        let reservations = self.pod_states.reservations();
        let mut all: Vec<ReservationStatus> = reservations
            .filter_map(|(uid, ..)| self.status_of(uid, &mut waiting_groups))
            .collect();
        all.sort_by(|a, b| a.uid.cmp(&b.uid));
        all
    }

    /// The victims of all reservations.
    pub fn reserved_victims(&self) -> impl Iterator<Item = &PodUid> {
        self.pod_states
            .reservations()
            .flat_map(|(.., reservation)| reservation.victims.iter())
    }

    /// Pods that show that they are to be evicted, and that are not being deleted.
    pub fn pods_showing_evictions(&self) -> BTreeMap<PodUid, PodKey> {
        let not_deleted = |uid: &PodUid| {
            let pod_state = self
                .pod_states
                .get(uid)
                .filter(|pod_state| !pod_state.is_leaving())?;
            Some((uid.clone(), pod_state.key.clone()))
        };
        self.pods_with_eviction_condition
            .iter()
            .filter_map(not_deleted)
            .collect()
    }

    /// The status of one pod's reservation.
    pub fn reservation_status_of(&self, uid: &PodUid) -> Option<ReservationStatus> {
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
                .filter_map(|victim| self.remaining_victim(victim, pod_state, reservation))
                .collect(),
            is_free: node_state.exists()
                && self
                    .reserved_gpus(uid, &pod_state.demand, reservation, node_state)
                    .is_ok()
                && !self.has_waiting_group_members(uid, pod_state, waiting_groups),
            is_in_condition: is_shown,
            has_another_in_condition: !is_shown && self.shows_any_reservation(uid),
        })
    }

    /// Whether the reservation of another pod of its group is not free yet: a group starts whole.
    fn has_waiting_group_members<'l>(
        &'l self,
        uid: &PodUid,
        pod_state: &'l PodState,
        waiting_groups: &mut WaitingGroups<'l>,
    ) -> bool {
        let Some(group) = pod_state.disruption_info.placement_group() else {
            return false;
        };
        let waiting = waiting_groups.entry(group).or_insert_with(|| {
            let waits = |reservation: &Reservation| {
                let node_state = self.node_states.get(&reservation.node);
                node_state.is_none_or(|node_state| {
                    self.count_remaining_victims(reservation, node_state) > 0
                })
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
        let must_leave = |victim: RemainingVictim| {
            !victim.is_leaving
                && !victim.is_protected
                && self.now + victim.termination_time <= reservation.deadline
        };
        reservation.victims.contains(victim)
            && self
                .remaining_victim(victim, pod_state, reservation)
                .is_some_and(must_leave)
    }

    fn remaining_victim(
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
                .is_some_and(|by| by <= reservation.deadline + CLOCK_SKEW_ALLOWANCE),
            termination_time: self.termination_time(victim),
            evicted_with_group: victim
                .disruption_info
                .group
                .clone()
                .filter(|_| bound.node != reservation.node),
            is_protected: !matches!(
                self.intrinsic_keep_reason(victim, &preemptor.demand),
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
        if self.leader_record.is_leading() {
            return;
        }
        let Some(recorded) = self.pod_states.reservation(uid) else {
            return;
        };
        // What is told by wall time wavers by some milliseconds.
        if recorded.is_same(observed) && observed.deadline > recorded.deadline + DEADLINE_TOLERANCE
        {
            let until = observed.deadline.min(self.latest_deadline());
            self.extend_reservation(uid, until);
        }
    }

    /// By when a reservation ends at the latest, whatever deadline was written down.
    pub(super) fn latest_deadline(&self) -> Moment {
        self.now + MAX_GRACE_PERIOD + self.policy.preemption.reservation_slack
    }
}

/// What a leader remembers of reservations: its epoch, those that it did not make, and those that it released.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct LeaderRecord {
    leader: Option<LeaderEpoch>,
    /// Pods that showed a reservation that this leader did not make.
    unknown: BTreeSet<PodUid>,
    /// The latest reservation of each pod that this leader gave up. What shows it is older than that.
    #[serde(default)]
    #[serde(rename = "given_up")]
    abandoned: BTreeMap<PodUid, Reservation>,
}

impl LeaderRecord {
    pub(super) fn is_leading(&self) -> bool {
        self.leader.is_some()
    }

    /// Records a released reservation. A standby records none, because the leader may make it again.
    fn record_released(&mut self, uid: &PodUid, reservation: Reservation) {
        if self.is_leading() {
            self.abandoned.insert(uid.clone(), reservation);
        }
    }

    /// The pod has a node, or is gone.
    pub(super) fn forget(&mut self, uid: &PodUid) {
        self.abandoned.remove(uid);
    }
}

impl Ledger {
    /// The epoch under which the replica with this ledger leads; `None` while another may.
    pub fn leader(&self) -> Option<&LeaderEpoch> {
        self.leader_record.leader.as_ref()
    }

    /// Observed reservations are mirrored from here on, whatever they are: another leader may make one again that this one gave up.
    pub(crate) fn stop_leading(&mut self) {
        self.leader_record = LeaderRecord::default();
    }

    /// Takes over the reservations that are known, in order of priority: one that would not be made now expires with the next
    /// tick of the clock.
    pub(crate) fn begin_leading(&mut self, epoch: LeaderEpoch) {
        self.leader_record.leader = Some(epoch);
        self.leader_record.unknown.clear();
        self.adopt_reservations(|_| true);
    }

    /// The node's GPUs are known now, and so are those that its reservations name.
    pub(super) fn adopt_reservations_on(&mut self, node: &NodeName) {
        if self.leader_record.is_leading() {
            self.adopt_reservations(|reservation| reservation.node == *node);
        }
    }

    /// Pods that show a reservation that this leader did not make. Each is answered once for each time it is shown.
    pub(crate) fn take_unknown_reservations(&mut self) -> BTreeSet<PodUid> {
        std::mem::take(&mut self.leader_record.unknown)
    }

    /// Pods that show a reservation and have none, or are bound: the write that ends it was lost, or is on its way.
    pub fn pods_showing_ended_reservations(&self) -> BTreeMap<PodUid, PodKey> {
        let ended = |uid: &PodUid| {
            let pod_state = self.pod_states.get(uid)?;
            let is_over = match &pod_state.phase {
                PodPhase::Waiting(waiting) => waiting.reservation.is_none(),
                // Its Binding may fail, and the reservation lasts until then.
                PodPhase::Assumed(_) => false,
                PodPhase::Bound(bound) => bound.leaving.is_none(),
            };
            is_over.then(|| (uid.clone(), pod_state.key.clone()))
        };
        self.pods_with_reservation_condition
            .iter()
            .filter_map(ended)
            .collect()
    }

    /// Records the reservation in the pod's condition, as a watch shows it; `None` if there is none.
    pub(super) fn record_observed_reservation(
        &mut self,
        uid: &PodUid,
        observed: Option<&Reservation>,
    ) {
        let recorded = self.observed_reservations.get(uid);
        // What is told by wall time wavers by some milliseconds.
        let lasts_as_long = |(recorded_one, shown): (&Reservation, &Reservation)| {
            let differ = recorded_one
                .deadline
                .since(shown.deadline)
                .max(shown.deadline.since(recorded_one.deadline));
            recorded_one.is_same(shown) && differ < Millis(DEADLINE_TOLERANCE.0 / 2)
        };
        if recorded == observed || recorded.zip(observed).is_some_and(lasts_as_long) {
            return;
        }
        let observed_reservations = Arc::make_mut(&mut self.observed_reservations);
        match observed {
            Some(shown) => _ = observed_reservations.insert(uid.clone(), shown.clone()),
            None => _ = observed_reservations.remove(uid),
        }
    }

    /// Whether the pod shows this reservation, as a watch has shown it last: it would survive a restart. An equal one that ends
    /// sooner is an earlier one, whose end may be on its way.
    pub fn shows_reservation(&self, uid: &PodUid, reservation: &Reservation) -> bool {
        let is_it = |shown: &Reservation| {
            shown.is_same(reservation)
                && shown.deadline + DEADLINE_TOLERANCE >= reservation.deadline
        };
        self.observed_reservations.get(uid).is_some_and(is_it)
    }

    /// Whether the pod's condition shows a reservation, or may. One without victims is not written; it is shown if an earlier
    /// version wrote it, or if it replaced one that landed late.
    pub fn may_show_reservation(&self, uid: &PodUid) -> bool {
        let was_abandoned = self.leader_record.abandoned.contains_key(uid);
        let is_written =
            |reservation: &Reservation| !reservation.victims.is_empty() || was_abandoned;
        self.shows_any_reservation(uid) || self.pod_states.reservation(uid).is_some_and(is_written)
    }

    /// Whether the pod's condition names any reservation.
    pub(super) fn shows_any_reservation(&self, uid: &PodUid) -> bool {
        self.observed_reservations.contains_key(uid)
    }

    /// Returns an observed reservation if it counts. A leader has made each one that counts, and has any other ended.
    pub(super) fn accept_observed_reservation(
        &mut self,
        uid: &PodUid,
        observed: Option<Reservation>,
    ) -> Option<Reservation> {
        let observed = observed?;
        let was_abandoned = self
            .leader_record
            .abandoned
            .get(uid)
            .is_some_and(|abandoned| abandoned.is_same(&observed));
        let is_known = was_abandoned
            || self
                .pod_states
                .get(uid)
                .is_some_and(|pod_state| pod_state.is_recorded_reservation(&observed));
        if !self.leader_record.is_leading() || is_known {
            return Some(observed);
        }
        self.leader_record.unknown.insert(uid.clone());
        None
    }

    /// Checks again a reservation of an earlier epoch that the pod got back. If it would not be made now, it expires with the next tick.
    pub(crate) fn revalidate_reservation(&mut self, uid: &PodUid) {
        let Some(reservation) = self.pod_states.reservation(uid).cloned() else {
            return;
        };
        self.set_reservation(uid, None);
        let deadline = if self.is_still_valid(uid, &reservation) {
            reservation.deadline
        } else {
            Moment::default()
        };
        self.set_reservation(
            uid,
            Some(Reservation {
                deadline,
                ..reservation
            }),
        );
    }

    fn adopt_reservations(&mut self, is_concerned: impl Fn(&Reservation) -> bool) {
        let concerned = self
            .pod_states
            .reservations()
            .filter(|(.., reservation)| is_concerned(reservation));
        let mut reservations: Vec<_> = concerned
            .map(|(uid, pod_state, reservation)| {
                (
                    Reverse(pod_state.demand.priority),
                    uid.clone(),
                    reservation.clone(),
                )
            })
            .collect();
        reservations.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        reservations
            .iter()
            .for_each(|(_, uid, _)| self.set_reservation(uid, None));
        let mut invalid = Vec::new();
        for (_, uid, reservation) in reservations {
            match self.is_still_valid(&uid, &reservation) {
                true => self.set_reservation(&uid, Some(reservation)),
                false => invalid.push((uid, reservation)),
            }
        }
        // Only now: an invalid reservation must not keep a valid one from being set.
        for (uid, reservation) in invalid {
            self.set_reservation(
                &uid,
                Some(Reservation {
                    deadline: Moment::default(),
                    ..reservation
                }),
            );
        }
    }

    /// Whether the reservation would be made now, with those of its victims that remain.
    fn is_still_valid(&self, uid: &PodUid, reservation: &Reservation) -> bool {
        let Some(node_state) = self.node_states.existing(&reservation.node) else {
            return false;
        };
        // Until the agent reports, it may be unknown which GPUs it names.
        if !node_state.is_reported() && node_state.resolve(&reservation.devices).is_none() {
            return true;
        }
        let is_there = |victim: &&PodUid| self.pod_states.contains(victim);
        let remaining = reservation
            .victims
            .iter()
            .filter(is_there)
            .cloned()
            .collect();
        let remaining = Reservation {
            victims: remaining,
            ..reservation.clone()
        };
        let preemptor = self.preemptor_without_cost(uid).for_adoption();
        let validity = self.check_reservation(&preemptor, uid, &remaining);
        // It may have been made for victims that fit on other nodes.
        validity
            .or_else(|_| self.check_reservation(&preemptor.with_moved_victims(), uid, &remaining))
            .is_ok()
    }
}

impl PodState {
    /// Whether a reservation that the pod shows is the one that it has.
    fn is_recorded_reservation(&self, observed: &Reservation) -> bool {
        // What is shown of a pod that has a node is older than what is known.
        self.waiting()
            .is_none_or(|waiting| !waiting.is_new_reservation(observed))
    }
}

#[cfg(test)]
mod adopt_reservations_tests {
    use super::*;
    use crate::ledger::{ObservedPhase, ObservedWaiting};
    use crate::policy::Policy;
    use crate::testkit::{LedgerCluster, demand_of, gpu_at, h100, key, node, uid};
    use crate::verbs::bind::BindAsked;
    use crate::verbs::binding::BindingFailed;
    use crate::verbs::observe::{DevicesReported, NodeObserved};
    use crate::verbs::tick::{LeadershipBegan, LeadershipEnded};
    use crate::vocabulary::demand::Sharing;
    use crate::vocabulary::disruption_info::ObservedDisruptionInfo;
    use crate::vocabulary::node::NodeKind;

    /// Whether a reservation of 50 GiB on a node's first GPU stands after the first report, while a pod of 40 GiB is on that GPU.
    fn stands_beside_pod_on(gpu: u32) -> bool {
        let mut cluster = LedgerCluster::empty(Policy::default());
        let demand = |gib: u64| demand_of(gib << 30, 1, Sharing::Shared, 0);
        cluster.apply(NodeObserved::new(node("n"), NodeKind::Stowage));
        cluster.add_running(
            "resident",
            ("n", gpu),
            demand(40),
            None,
            ObservedDisruptionInfo::default(),
        );
        let reservation = Reservation {
            node: node("n"),
            devices: Arc::from([gpu_at("n", 0)]),
            victims: Arc::default(),
            deadline: cluster.ledger().now() + Millis::seconds(60),
        };
        let waiting = ObservedWaiting {
            reservation: Some(reservation),
            ..ObservedWaiting::default()
        };
        cluster.observe("p", demand(50), ObservedPhase::Waiting(waiting), None);
        cluster.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        let devices = vec![h100("n", 0), h100("n", 1)];
        cluster
            .apply(DevicesReported {
                node: node("n"),
                devices: devices.into(),
                are_all: true,
            })
            .unwrap();
        cluster.advance(1);
        cluster
            .ledger()
            .pod_state(&uid("p"))
            .unwrap()
            .reservation()
            .is_some()
    }

    #[test]
    fn reservations_are_adopted_with_the_first_device_report() {
        assert!(
            !stands_beside_pod_on(0),
            "40 and 50 GiB are too much for one GPU"
        );
        assert!(stands_beside_pod_on(1));
        assert!(
            stands_beside_pod_on(7),
            "the machine has no eighth GPU, and the pod none of the first two"
        );
    }

    /// Whether a reservation that this leader gave up is mirrored when another leader makes it again, and adopted later.
    fn is_mirrored_again(
        meanwhile: impl FnOnce(&mut LedgerCluster),
        then: impl FnOnce(&mut LedgerCluster),
    ) {
        let mut cluster = LedgerCluster::new(&[("n", 1)]);
        cluster.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        let demand = demand_of(50 << 30, 1, Sharing::Shared, 0);
        cluster.add_waiting("p", demand.clone());
        let reservation = Reservation {
            node: node("n"),
            devices: Arc::from([gpu_at("n", 0)]),
            victims: Arc::default(),
            deadline: cluster.ledger().now() + Millis::seconds(60),
        };
        cluster
            .ledger_mut()
            .reserve(&uid("p"), reservation.clone())
            .unwrap();
        cluster.ledger_mut().release_reservation(&uid("p"));
        meanwhile(&mut cluster);
        cluster.apply(LeadershipEnded);
        then(&mut cluster);
        let waiting = ObservedWaiting {
            reservation: Some(reservation),
            ..ObservedWaiting::default()
        };
        cluster.observe("p", demand, ObservedPhase::Waiting(waiting), None);
        assert!(
            cluster.ledger().reservation_status_of(&uid("p")).is_some(),
            "the GPU is kept for it"
        );
        cluster.apply(LeadershipBegan(LeaderEpoch::new("lease", 3, "nonce")));
        assert!(
            cluster.ledger().reservation_status_of(&uid("p")).is_some(),
            "it is adopted"
        );
    }

    #[test]
    fn a_released_reservation_is_mirrored_when_another_leader_makes_it_again() {
        is_mirrored_again(|_| (), |_| ());
        let bind = BindAsked {
            uid: uid("p"),
            key: key("p"),
            node: node("n"),
        };
        let assume = |cluster: &mut LedgerCluster| drop(cluster.apply(bind).unwrap());
        is_mirrored_again(assume, |cluster| cluster.apply(BindingFailed(uid("p"))));
    }

    #[test]
    fn a_late_event_of_a_released_reservation_does_not_confirm_an_equal_later_one() {
        let mut cluster = LedgerCluster::new(&[("n", 1)]);
        cluster.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        let demand = demand_of(50 << 30, 1, Sharing::Shared, 0);
        cluster.add_waiting("p", demand.clone());
        let made = |cluster: &mut LedgerCluster| {
            let (devices, victims) = (Arc::from([gpu_at("n", 0)]), Arc::default());
            let deadline = cluster.ledger().now() + Millis::seconds(60);
            let reservation = Reservation {
                node: node("n"),
                devices,
                victims,
                deadline,
            };
            cluster
                .ledger_mut()
                .reserve(&uid("p"), reservation.clone())
                .unwrap();
            reservation
        };
        let show = |cluster: &mut LedgerCluster, shown| {
            let waiting = ObservedWaiting {
                reservation: Some(shown),
                ..ObservedWaiting::default()
            };
            let watched = Some(ObservedDisruptionInfo::default());
            cluster.observe(
                "p",
                demand.clone(),
                ObservedPhase::Waiting(waiting),
                watched,
            );
            cluster
                .ledger()
                .reservation_status_of(&uid("p"))
                .unwrap()
                .is_in_condition
        };
        let first = made(&mut cluster);
        assert!(show(&mut cluster, first.clone()));
        cluster.ledger_mut().release_reservation(&uid("p"));
        cluster.advance(5);
        let second = made(&mut cluster);
        assert!(
            !cluster
                .ledger()
                .reservation_status_of(&uid("p"))
                .unwrap()
                .is_in_condition
        );
        assert!(!show(&mut cluster, first), "a late event");
        assert!(show(&mut cluster, second));
    }

    #[test]
    fn a_late_event_of_a_released_reservation_does_not_confirm_a_later_one_elsewhere() {
        let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
        cluster.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        let demand = demand_of(50 << 30, 1, Sharing::Shared, 0);
        cluster.add_waiting("p", demand.clone());
        let deadline = cluster.ledger().now() + Millis::seconds(60);
        let [first, second] = ["n", "m"].map(|on| Reservation {
            node: node(on),
            devices: Arc::from([gpu_at(on, 0)]),
            victims: Arc::default(),
            deadline,
        });
        cluster
            .ledger_mut()
            .reserve(&uid("p"), first.clone())
            .unwrap();
        cluster.ledger_mut().release_reservation(&uid("p"));
        cluster
            .ledger_mut()
            .reserve(&uid("p"), second.clone())
            .unwrap();
        // A late event of the first one, and one of the second.
        for (shown, is_shown) in [(first, false), (second, true)] {
            let waiting = ObservedWaiting {
                reservation: Some(shown),
                ..ObservedWaiting::default()
            };
            let watched = Some(ObservedDisruptionInfo::default());
            cluster.observe(
                "p",
                demand.clone(),
                ObservedPhase::Waiting(waiting),
                watched,
            );
            assert_eq!(
                cluster
                    .ledger()
                    .reservation_status_of(&uid("p"))
                    .unwrap()
                    .is_in_condition,
                is_shown
            );
        }
    }
}
