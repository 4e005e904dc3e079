//! Reservations of earlier leaders: which of them a replica takes over when it begins to lead, and what it does with those that
//! it observes while it leads.
//!
//! A replica that does not lead mirrors the reservations that pods show. One that begins to lead puts each of them through the
//! checks of a new reservation, and from then on knows every reservation before its condition is written: one that it does not
//! know landed late, and only a write that ends it settles that. Nothing here knows a Lease or a condition.

use super::Ledger;
use super::pod_state::{PodPhase, PodState};
use super::reservation_status::SAME_DEADLINE;
use crate::ids::{LeaderEpoch, NodeName, PodKey, PodUid};
use crate::units::{Millis, Moment};
use crate::vocabulary::placement::Reservation;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Under which epoch this replica leads, if it does, the reservations that do not come from it, and those that it gave up.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct ReservationOrigin {
    leader: Option<LeaderEpoch>,
    /// Pods that showed a reservation that this leader did not make.
    unknown: BTreeSet<PodUid>,
    /// The latest reservation of each pod that this leader gave up. What shows it is older than that.
    #[serde(default)]
    given_up: BTreeMap<PodUid, Reservation>,
}

impl ReservationOrigin {
    pub(super) fn is_leading(&self) -> bool {
        self.leader.is_some()
    }

    /// The reservation was given up. Another replica may make it again, as far as one that does not lead knows.
    pub(super) fn note_given_up(&mut self, uid: &PodUid, reservation: Reservation) {
        if self.is_leading() {
            self.given_up.insert(uid.clone(), reservation);
        }
    }

    /// The pod has a node, or is gone.
    pub(super) fn forget(&mut self, uid: &PodUid) {
        self.given_up.remove(uid);
    }
}

impl Ledger {
    /// The epoch under which the replica with this ledger leads; `None` while another may.
    pub fn leader(&self) -> Option<&LeaderEpoch> {
        self.origin.leader.as_ref()
    }

    /// Observed reservations are mirrored from here on, whatever they are: another leader may make one again that this one gave up.
    pub(crate) fn stop_leading(&mut self) {
        self.origin = ReservationOrigin::default();
    }

    /// Takes over the reservations that are known, in order of priority: one that would not be made now expires with the next
    /// tick of the clock.
    pub(crate) fn begin_leading(&mut self, epoch: LeaderEpoch) {
        self.origin.leader = Some(epoch);
        self.origin.unknown.clear();
        self.adopt_reservations(|_| true);
    }

    /// The node's GPUs are known now, and so are those that its reservations name.
    pub(super) fn adopt_reservations_on(&mut self, node: &NodeName) {
        if self.origin.is_leading() {
            self.adopt_reservations(|reservation| reservation.node == *node);
        }
    }

    /// Pods that show a reservation that this leader did not make. Each is answered once for each time it is shown.
    pub(crate) fn take_unknown_reservations(&mut self) -> BTreeSet<PodUid> {
        std::mem::take(&mut self.origin.unknown)
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
        self.showing_reservations.iter().filter_map(ended).collect()
    }

    /// A watch shows the pod with this reservation, or without one.
    pub(super) fn note_shown_reservation(&mut self, uid: &PodUid, shown: Option<&Reservation>) {
        let known = self.shown_reservations.get(uid);
        // What is told by wall time wavers by some milliseconds.
        let lasts_as_long = |(known, shown): (&Reservation, &Reservation)| {
            let differ = known
                .deadline
                .since(shown.deadline)
                .max(shown.deadline.since(known.deadline));
            known.is_same(shown) && differ < Millis(SAME_DEADLINE.0 / 2)
        };
        if known == shown || known.zip(shown).is_some_and(lasts_as_long) {
            return;
        }
        let all = Arc::make_mut(&mut self.shown_reservations);
        match shown {
            Some(shown) => _ = all.insert(uid.clone(), shown.clone()),
            None => _ = all.remove(uid),
        }
    }

    /// Whether the pod shows this reservation, as a watch has shown it last: it would survive a restart. An equal one that ends
    /// sooner is an earlier one, whose end may be on its way.
    pub fn shows_reservation(&self, uid: &PodUid, reservation: &Reservation) -> bool {
        let is_it = |shown: &Reservation| {
            shown.is_same(reservation) && shown.deadline + SAME_DEADLINE >= reservation.deadline
        };
        self.shown_reservations.get(uid).is_some_and(is_it)
    }

    /// Whether the pod's condition shows a reservation, or may. One without victims is not written; it is shown if an earlier
    /// version wrote it, or if it replaced one that landed late.
    pub fn may_show_reservation(&self, uid: &PodUid) -> bool {
        let was_given_up = self.origin.given_up.contains_key(uid);
        let is_written =
            |reservation: &Reservation| !reservation.victims.is_empty() || was_given_up;
        self.shows_one(uid) || self.pod_states.reservation(uid).is_some_and(is_written)
    }

    /// Whether the pod shows a reservation, whichever.
    pub(super) fn shows_one(&self, uid: &PodUid) -> bool {
        self.shown_reservations.contains_key(uid)
    }

    /// The reservation that a pod shows, as far as it counts: a leader knows every reservation that it does not end.
    pub(super) fn believed(
        &mut self,
        uid: &PodUid,
        observed: Option<Reservation>,
    ) -> Option<Reservation> {
        let observed = observed?;
        let was_given_up = self
            .origin
            .given_up
            .get(uid)
            .is_some_and(|given_up| given_up.is_same(&observed));
        let is_known = was_given_up
            || self
                .pod_states
                .get(uid)
                .is_some_and(|pod_state| pod_state.knows(&observed));
        if !self.origin.is_leading() || is_known {
            return Some(observed);
        }
        self.origin.unknown.insert(uid.clone());
        None
    }

    /// The pod has again what it had reserved in an earlier epoch. If that would not be made now, it expires with the next tick.
    pub(crate) fn review_reservation(&mut self, uid: &PodUid) {
        let Some(reservation) = self.pod_states.reservation(uid).cloned() else {
            return;
        };
        self.set_reservation(uid, None);
        let deadline = if self.may_stand(uid, &reservation) {
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

    fn adopt_reservations(&mut self, concerns: impl Fn(&Reservation) -> bool) {
        let concerned = self
            .pod_states
            .reservations()
            .filter(|(.., reservation)| concerns(reservation));
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
        let mut fallen = Vec::new();
        for (_, uid, reservation) in reservations {
            match self.may_stand(&uid, &reservation) {
                true => self.set_reservation(&uid, Some(reservation)),
                false => fallen.push((uid, reservation)),
            }
        }
        // Only now: a reservation that falls must not stand in the way of one that could stand.
        for (uid, reservation) in fallen {
            self.set_reservation(
                &uid,
                Some(Reservation {
                    deadline: Moment::default(),
                    ..reservation
                }),
            );
        }
    }

    /// Whether the reservation would be made now, with those of its victims that are still there.
    fn may_stand(&self, uid: &PodUid, reservation: &Reservation) -> bool {
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
        let preemptor = self.preemptor_without_cost(uid).adopting();
        let stands = self.check_reservation(&preemptor, uid, &remaining);
        // It may have been made for victims that fit on other nodes.
        stands
            .or_else(|_| self.check_reservation(&preemptor.moving(), uid, &remaining))
            .is_ok()
    }
}

impl PodState {
    /// Whether a reservation that the pod shows is the one that it has.
    fn knows(&self, observed: &Reservation) -> bool {
        // What is shown of a pod that has a node is older than what is known.
        self.waiting()
            .is_none_or(|waiting| !waiting.is_news(observed))
    }
}

#[cfg(test)]
mod tests {
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
        cluster.run(
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
            deadline: cluster.now() + Millis::seconds(60),
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
        cluster.pass(1);
        cluster
            .pod_state(&uid("p"))
            .unwrap()
            .reservation()
            .is_some()
    }

    #[test]
    fn reservations_are_adopted_once_it_is_known_which_gpus_are_lost() {
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
        cluster.wait("p", demand.clone());
        let reservation = Reservation {
            node: node("n"),
            devices: Arc::from([gpu_at("n", 0)]),
            victims: Arc::default(),
            deadline: cluster.now() + Millis::seconds(60),
        };
        cluster.reserve(&uid("p"), reservation.clone()).unwrap();
        cluster.release_reservation(&uid("p"));
        meanwhile(&mut cluster);
        cluster.apply(LeadershipEnded);
        then(&mut cluster);
        let waiting = ObservedWaiting {
            reservation: Some(reservation),
            ..ObservedWaiting::default()
        };
        cluster.observe("p", demand, ObservedPhase::Waiting(waiting), None);
        assert!(
            cluster.reservation_of(&uid("p")).is_some(),
            "the GPU is kept for it"
        );
        cluster.apply(LeadershipBegan(LeaderEpoch::new("lease", 3, "nonce")));
        assert!(cluster.reservation_of(&uid("p")).is_some(), "it is adopted");
    }

    #[test]
    fn a_reservation_that_was_given_up_is_mirrored_when_another_leader_makes_it_again() {
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
    fn what_shows_a_reservation_that_was_given_up_does_not_show_an_equal_one_that_is_made_later() {
        let mut cluster = LedgerCluster::new(&[("n", 1)]);
        cluster.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        let demand = demand_of(50 << 30, 1, Sharing::Shared, 0);
        cluster.wait("p", demand.clone());
        let made = |cluster: &mut LedgerCluster| {
            let (devices, victims) = (Arc::from([gpu_at("n", 0)]), Arc::default());
            let deadline = cluster.now() + Millis::seconds(60);
            let reservation = Reservation {
                node: node("n"),
                devices,
                victims,
                deadline,
            };
            cluster.reserve(&uid("p"), reservation.clone()).unwrap();
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
            cluster.reservation_of(&uid("p")).unwrap().is_shown
        };
        let first = made(&mut cluster);
        assert!(show(&mut cluster, first.clone()));
        cluster.release_reservation(&uid("p"));
        cluster.pass(5);
        let second = made(&mut cluster);
        assert!(!cluster.reservation_of(&uid("p")).unwrap().is_shown);
        assert!(!show(&mut cluster, first), "a late event");
        assert!(show(&mut cluster, second));
    }

    #[test]
    fn what_shows_a_reservation_that_was_given_up_shows_no_later_one() {
        let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
        cluster.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        let demand = demand_of(50 << 30, 1, Sharing::Shared, 0);
        cluster.wait("p", demand.clone());
        let deadline = cluster.now() + Millis::seconds(60);
        let [first, second] = ["n", "m"].map(|on| Reservation {
            node: node(on),
            devices: Arc::from([gpu_at(on, 0)]),
            victims: Arc::default(),
            deadline,
        });
        cluster.reserve(&uid("p"), first.clone()).unwrap();
        cluster.release_reservation(&uid("p"));
        cluster.reserve(&uid("p"), second.clone()).unwrap();
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
                cluster.reservation_of(&uid("p")).unwrap().is_shown,
                is_shown
            );
        }
    }
}
