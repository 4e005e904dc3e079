//! Holds: made by the checks of one place, and given up. How far a hold is, `held` says; which of an earlier leader's stand, `adopt`.

use super::Ledger;
use super::book::NodeState;
use super::claim::{Departure, KeepReason, Preemptor};
use super::entry::{PodPhase, PodState};
use super::promise::{AssumeConflict, forget_measured};
use super::room::given_back;
use crate::ids::PodUid;
use crate::scheduling::decision::Reservation;
use crate::scheduling::fit::{Misfit, misfit, shut};
use crate::scheduling::policy::TenantUsage;
use crate::scheduling::preempt::{PotentialVictim, discharge, settle_class_exclusions};
use crate::scheduling::request::Demand;

impl Ledger {
    /// Keeps room for a waiting pod until its victims are gone: pods of that node, those of other nodes that leave with their
    /// groups, and such as are leaving anyway.
    pub fn hold(&mut self, uid: &PodUid, hold: Reservation) -> Result<(), AssumeConflict> {
        let claim = self.preemptor_without_cost(uid);
        self.reserve_by(&claim, uid, hold)
    }

    /// The same, if its victims have room elsewhere.
    pub fn reserve_by_moving(&mut self, uid: &PodUid, hold: Reservation) -> Result<(), AssumeConflict> {
        let claim = self.preemptor_without_cost(uid).moving();
        self.reserve_by(&claim, uid, hold)
    }

    fn reserve_by(
        &mut self,
        claim: &Preemptor,
        uid: &PodUid,
        hold: Reservation,
    ) -> Result<(), AssumeConflict> {
        self.check_reservation(claim, uid, &hold)?;
        self.set_reservation(uid, Some(hold));
        if let Some(PodPhase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase) {
            waiting.hold_shown = false;
        }
        Ok(())
    }

    /// Whether the pod may have this hold, in place of none.
    pub fn check_reservation(
        &self,
        claim: &Preemptor,
        uid: &PodUid,
        hold: &Reservation,
    ) -> Result<(), AssumeConflict> {
        let entry = self.waiting(uid)?;
        if let Some(held) = entry.hold() {
            return Err(AssumeConflict::AlreadyHolds { node: held.node.clone() });
        }
        let book = self.books.get(&hold.node).ok_or(Misfit::UnknownNode)?;
        match shut(&book.view, &entry.demand) {
            Err(Misfit::Unseen) if claim.adopts => {}
            shut => shut?,
        }
        let mut gpus = book.gpus_without(uid, &self.entries, &self.policy);
        if claim.adopts {
            forget_measured(&mut gpus);
        }
        let bars = book.bars(uid, &self.entries);
        // A tenant at its limit may put one of its pods in the place of others of its own.
        let mut given_back = TenantUsage::default();
        for (resident, returned) in self.leavers(claim, &entry.demand, hold, book)? {
            given_back += returned;
            resident.iter().for_each(|resident| discharge(&mut gpus, resident));
        }
        settle_class_exclusions(&bars, &mut gpus, |uid| hold.victims.contains(uid));
        let demand = &entry.demand;
        let seats = book.resolve(&hold.devices).ok_or_else(|| misfit(&gpus, demand))?;
        if !seats.iter().all(|g| gpus[g].has_room(demand)) {
            return Err(misfit(&gpus, demand).into());
        }
        self.within_limit(self.allowance_beside(uid, demand, given_back), demand, &gpus, seats)?;
        Ok(())
    }

    /// Everyone who must have left before the held room is free, with what each gives back to the pod's own tenant; of those on
    /// other nodes nothing is discharged here.
    fn leavers(
        &self,
        claim: &Preemptor,
        demand: &Demand,
        hold: &Reservation,
        book: &NodeState,
    ) -> Result<Vec<(Option<PotentialVictim>, TenantUsage)>, AssumeConflict> {
        let wanted = book.most_used_by(demand);
        let leaver = |victim: &PodUid| {
            let there = self.entries.get(victim).ok_or(AssumeConflict::VictimGone)?;
            let home =
                there.node().and_then(|node| self.books.get(node)).ok_or(AssumeConflict::VictimGone)?;
            let is_soon = matches!(self.departure_of(there), Some(Departure::Soon(_)));
            match self.stays(victim, there, demand, wanted, claim) {
                Some(KeepReason::SpokenFor | KeepReason::Leaving) if claim.spoken_for.contains(victim) => {
                    return Err(AssumeConflict::VictimGone);
                }
                Some(KeepReason::Leaving) if is_soon || claim.adopts => {}
                None if (demand.may_preempt || claim.moves) && !self.would_break(there, &hold.victims) => {}
                _ => return Err(AssumeConflict::VictimStays),
            }
            let is_here = there.node() == Some(&hold.node);
            let resident = self.resident(victim, there, home).filter(|_| is_here);
            if resident.is_none() && !self.leaves_with_another(there, hold) {
                return Err(AssumeConflict::VictimGone);
            }
            Ok((resident, given_back(there, home.use_of(there).unwrap_or_default(), demand)))
        };
        hold.victims.iter().map(leaver).collect()
    }

    /// Whether a member of its group leaves the node of the hold.
    fn leaves_with_another(&self, leaver: &PodState, hold: &Reservation) -> bool {
        let is_member_there = |uid: &PodUid| {
            let entry = self.entries.get(uid);
            entry.is_some_and(|e| e.node() == Some(&hold.node) && e.stake.group == leaver.stake.group)
        };
        leaver.stake.group.is_some() && hold.victims.iter().any(is_member_there)
    }

    /// Gives the pod's room up. Whatever shows the hold from here on is older than that.
    pub fn release_reservation(&mut self, uid: &PodUid) {
        let given_up = self.entries.get(uid).and_then(|entry| entry.hold().cloned());
        self.set_reservation(uid, None);
        if let Some(PodPhase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase) {
            waiting.given_up = given_up.map(Box::new).or(waiting.given_up.take());
            waiting.hold_shown = false;
        }
    }

    /// The API server shows no hold any more, and what it shows counts.
    pub fn forget_observed_reservation(&mut self, uid: &PodUid) {
        self.set_reservation(uid, None);
    }
}
