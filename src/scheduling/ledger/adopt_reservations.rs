//! Holds of earlier leaders: what a replica that begins to lead takes over, and what it never takes from a watch while it leads.
//!
//! A replica that does not lead mirrors the holds that pods show. One that begins to lead puts each of them through the
//! checks of a new hold, and from then on knows every hold before its condition is written: one that it does not know landed
//! late, and only a write that ends it settles that. Nothing here knows a Lease or a condition.

use super::Ledger;
use super::observe::is_news;
use super::pod_state::{PodPhase, PodState};
use crate::ids::{LeaderEpoch, NodeName, PodUid};
use crate::scheduling::vocabulary::placement::Reservation;
use crate::units::Moment;
use std::cmp::Reverse;
use std::collections::BTreeSet;

impl Ledger {
    /// As whom the replica with this ledger leads; `None` while another may.
    pub fn leader(&self) -> Option<&LeaderEpoch> {
        self.leader.as_ref()
    }

    /// Holds are mirrored from here on, whatever they are.
    pub(in crate::scheduling) fn stop_leading(&mut self) {
        self.leader = None;
        self.unknown_reservations.clear();
    }

    /// Takes over the holds that stand, in order of priority: one that would not be made now runs out at the next look at the
    /// clock, and its pod is told.
    pub(in crate::scheduling) fn begin_leading(&mut self, epoch: LeaderEpoch) {
        self.leader = Some(epoch);
        self.unknown_reservations.clear();
        self.adopt_reservations(|_| true);
    }

    /// The node's GPUs are known now, and so are those that its holds name.
    pub(super) fn adopt_reservations_on(&mut self, node: &NodeName) {
        if self.leader.is_some() {
            self.adopt_reservations(|reservation| reservation.node == *node);
        }
    }

    /// Pods that show a hold which this leader did not make. Each is answered once for each time it is shown.
    pub(in crate::scheduling) fn take_unknown_reservations(&mut self) -> BTreeSet<PodUid> {
        std::mem::take(&mut self.unknown_reservations)
    }

    /// What a pod shows of a hold, as far as it counts: a leader has made every hold that it does not end.
    pub(super) fn believed(&mut self, uid: &PodUid, observed: Option<Reservation>) -> Option<Reservation> {
        let observed = observed?;
        let is_known = self.pod_states.get(uid).is_some_and(|pod_state| pod_state.knows(&observed));
        if self.leader.is_none() || is_known {
            return Some(observed);
        }
        self.unknown_reservations.insert(uid.clone());
        None
    }

    fn adopt_reservations(&mut self, concerns: impl Fn(&Reservation) -> bool) {
        let holders: BTreeSet<&PodUid> = self.deadlines.iter().map(|(_, uid)| uid).collect();
        let held = |uid: &PodUid| {
            let pod_state = self.pod_states.get(uid)?;
            let reservation = pod_state.reservation().filter(|reservation| concerns(reservation))?;
            Some((Reverse(pod_state.demand.priority), uid.clone(), reservation.clone()))
        };
        let mut held: Vec<_> = holders.into_iter().filter_map(held).collect();
        held.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        held.iter().for_each(|(_, uid, _)| self.set_reservation(uid, None));
        let mut fallen = Vec::new();
        for (_, uid, reservation) in held {
            match self.may_stand(&uid, &reservation) {
                true => self.set_reservation(&uid, Some(reservation)),
                false => fallen.push((uid, reservation)),
            }
        }
        // Only now: a hold that falls must not stand in the way of one that could stand.
        for (uid, reservation) in fallen {
            self.set_reservation(&uid, Some(Reservation { deadline: Moment::default(), ..reservation }));
        }
    }

    /// Whether the hold would be made now, of those of its victims that are still there.
    fn may_stand(&self, uid: &PodUid, reservation: &Reservation) -> bool {
        let Some(node_state) = self.node_states.get(&reservation.node).filter(|node_state| node_state.exists)
        else {
            return false;
        };
        // Until the agent reports, nobody may know which GPUs it names.
        if !node_state.reported && node_state.resolve(&reservation.devices).is_none() {
            return true;
        }
        let is_there = |victim: &&PodUid| self.pod_states.contains_key(victim);
        let remaining = reservation.victims.iter().filter(is_there).cloned().collect();
        let remaining = Reservation { victims: remaining, ..reservation.clone() };
        let preemptor = self.preemptor_without_cost(uid).adopting();
        let stands = self.check_reservation(&preemptor, uid, &remaining);
        // It may have been made for pods that have room elsewhere.
        stands.or_else(|_| self.check_reservation(&preemptor.moving(), uid, &remaining)).is_ok()
    }
}

impl PodState {
    /// Whether a hold that the pod shows is the one that it has, or had and gave up.
    fn knows(&self, observed: &Reservation) -> bool {
        match &self.phase {
            PodPhase::Waiting(waiting) => !is_news(observed, waiting),
            // What is seen is older than what is known.
            _ => true,
        }
    }
}
