//! Reservations: made after the checks of one function, and given up. How far each is, [`super::reservation_status`] says; which
//! of an earlier leader's are kept, [`super::adopt_reservations`].

use super::Ledger;
use super::assume::{AssumeConflict, forget_measured};
use super::node_state::NodeState;
use super::pod_state::PodState;
use super::potential_victim::given_back;
use super::preemptor::{Departure, KeepReason, Preemptor};
use crate::ids::PodUid;
use crate::ledger::{PotentialVictim, discharge, settle_class_exclusions};
use crate::placing::fit::{Misfit, check_node_admission, misfit};
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::placement::Reservation;

impl Ledger {
    /// Keeps GPUs for a waiting pod until its victims are gone: pods of that node, pods of other nodes that are evicted with
    /// their groups, and pods that are leaving anyway.
    pub(crate) fn reserve(
        &mut self,
        uid: &PodUid,
        reservation: Reservation,
    ) -> Result<(), AssumeConflict> {
        let preemptor = self.preemptor_without_cost(uid);
        self.reserve_by(&preemptor, uid, reservation)
    }

    /// The same, if its victims fit on other nodes.
    pub(crate) fn reserve_by_moving(
        &mut self,
        uid: &PodUid,
        reservation: Reservation,
    ) -> Result<(), AssumeConflict> {
        let preemptor = self.preemptor_without_cost(uid).moving();
        self.reserve_by(&preemptor, uid, reservation)
    }

    fn reserve_by(
        &mut self,
        preemptor: &Preemptor,
        uid: &PodUid,
        reservation: Reservation,
    ) -> Result<(), AssumeConflict> {
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
    ) -> Result<(), AssumeConflict> {
        let pod_state = self.waiting(uid)?;
        if let Some(known) = pod_state.reservation() {
            return Err(AssumeConflict::AlreadyReserved {
                node: known.node.clone(),
            });
        }
        let node_state = self
            .node_states
            .get(&reservation.node)
            .ok_or(Misfit::UnknownNode)?;
        match check_node_admission(node_state.view(), &pod_state.demand) {
            Err(Misfit::NoFreshReport) if preemptor.adopts() => {}
            admission => admission?,
        }
        let mut gpus = node_state.gpus_without(uid, &self.pod_states, &self.policy);
        if preemptor.adopts() {
            forget_measured(&mut gpus);
        }
        let class_exclusions = node_state.class_exclusions(uid, &self.pod_states);
        // A tenant at its limit may put one of its pods in the place of others of its own.
        let mut given_back = TenantUsage::default();
        for (resident, returned) in
            self.group_victims(preemptor, &pod_state.demand, reservation, node_state)?
        {
            given_back += returned;
            resident
                .iter()
                .for_each(|resident| discharge(&mut gpus, resident));
        }
        settle_class_exclusions(&class_exclusions, &mut gpus, |uid| {
            reservation.victims.contains(uid)
        });
        // What an earlier leader has reserved is taken already.
        let demand = self.as_borrower(uid, pod_state.demand.clone());
        let demand = match preemptor.adopts() {
            true => &demand,
            false => &*self.beside_spare(&demand),
        };
        let gpu_candidates = node_state
            .resolve(&reservation.devices)
            .ok_or_else(|| misfit(&gpus, demand))?;
        if !gpu_candidates.iter().all(|g| gpus[g].can_take(demand)) {
            return Err(misfit(&gpus, demand).into());
        }
        self.within_limit(
            self.allowance_beside(uid, demand, given_back),
            demand,
            &gpus,
            gpu_candidates,
        )?;
        Ok(())
    }

    /// All pods that must have left before the reserved GPUs are free, with what each gives back to the pod's own tenant; of pods
    /// on other nodes nothing is discharged here.
    fn group_victims(
        &self,
        preemptor: &Preemptor,
        demand: &Demand,
        reservation: &Reservation,
        node_state: &NodeState,
    ) -> Result<Vec<(Option<PotentialVictim>, TenantUsage)>, AssumeConflict> {
        let wanted = node_state.most_used_by(demand);
        let leaver = |victim: &PodUid| {
            let Some(there) = self.pod_states.get(victim) else {
                return self.ended_victim(preemptor, victim, node_state);
            };
            let home = there
                .node()
                .and_then(|node| self.node_states.get(node))
                .ok_or(AssumeConflict::VictimGone)?;
            let is_soon = matches!(self.departure_of(there), Some(Departure::Soon(_)));
            match self.keep_reason(victim, there, demand, wanted, preemptor) {
                Some(KeepReason::VictimOfAnother | KeepReason::Deleting)
                    if preemptor.spoken_for().contains(victim) =>
                {
                    return Err(AssumeConflict::VictimGone);
                }
                Some(KeepReason::Deleting) if is_soon || preemptor.adopts() => {}
                None if (demand.may_preempt || preemptor.moves())
                    && (self.departure_of(there).is_some()
                        || !self.would_break(there, &reservation.victims)) => {}
                _ => return Err(AssumeConflict::VictimProtected),
            }
            let is_here = there.node() == Some(&reservation.node);
            let resident = self.resident(victim, there, home).filter(|_| is_here);
            if resident.is_none() && !self.leaves_with_another(there, reservation) {
                return Err(AssumeConflict::VictimGone);
            }
            Ok((
                resident,
                given_back(there, home.use_of(there).unwrap_or_default(), demand),
            ))
        };
        reservation.victims.iter().map(leaver).collect()
    }

    /// A pod that has ended, and whose memory becomes free for this preemptor.
    fn ended_victim(
        &self,
        preemptor: &Preemptor,
        victim: &PodUid,
        node_state: &NodeState,
    ) -> Result<(Option<PotentialVictim>, TenantUsage), AssumeConflict> {
        let is_free_to_go = |ended: &PotentialVictim| {
            ended.uid == *victim && !preemptor.spoken_for().contains(victim)
        };
        let ended = self
            .ended_victims(node_state)
            .find(is_free_to_go)
            .ok_or(AssumeConflict::VictimGone)?;
        Ok((Some(ended), TenantUsage::default()))
    }

    /// Whether a member of its group leaves the node of the reservation.
    fn leaves_with_another(&self, leaver: &PodState, reservation: &Reservation) -> bool {
        let is_member_there = |uid: &PodUid| {
            let pod_state = self.pod_states.get(uid);
            pod_state.is_some_and(|e| {
                e.node() == Some(&reservation.node)
                    && e.disruption_info.group == leaver.disruption_info.group
            })
        };
        leaver.disruption_info.group.is_some() && reservation.victims.iter().any(is_member_there)
    }

    /// Gives the pod's reservation up. To a leader, what shows it from here on is older than that.
    pub(crate) fn release_reservation(&mut self, uid: &PodUid) {
        let Some(given_up) = self.pod_states.reservation(uid).cloned() else {
            return;
        };
        self.set_reservation(uid, None);
        self.origin.note_given_up(uid, given_up);
    }

    /// The API server shows no reservation any more, and what it shows counts.
    pub(crate) fn forget_observed_reservation(&mut self, uid: &PodUid) {
        self.set_reservation(uid, None);
    }
}
