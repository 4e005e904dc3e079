//! The planner's run and kube-scheduler's preemption in the race: what they reserve is written, and their victims are pods that
//! they have a right to.

use super::{FuzzedControlPlane, PendingWrite};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::planning::{EvictionRight, PlanStep, PlannedPlacement, plan};
use stowage_scheduling::testkit::oracle::VictimFacts;
use stowage_scheduling::verbs::preempt::{
    OfferedNode, PreemptAsked, PreemptDecided, PreemptDecision, preempt,
};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::wait::{
    NoPlacementFound, PodEvicted, PodRequeued, ReleaseReservation, ReservePlaces, TakePending,
};
use stowage_scheduling::vocabulary::placement::Reservation;

impl FuzzedControlPlane {
    /// Plans for the waiting pods. The cluster changes by `meanwhile` before the plan is applied.
    pub(super) fn plan(&mut self, limit: usize, meanwhile: impl FnOnce(&mut Self)) {
        let acting = self.leader;
        let ledger = &mut self.replicas[acting].ledger;
        let pending = ledger.apply(TakePending { limit });
        let generation = ledger.ledger().generation();
        let kube_filters = ledger.kube_filters().snapshot();
        let steps = plan(ledger.ledger().scratch(), &kube_filters, &pending);
        meanwhile(self);
        if self.leader != acting {
            return;
        }
        for step in steps {
            let ledger = &mut self.replicas[acting].ledger;
            match step {
                PlanStep::Place(places) => self.apply_plan(places, generation),
                PlanStep::Requeue { uid, .. } => ledger.apply(PodRequeued(uid)),
                PlanStep::Wait { uid, .. } => ledger.apply(NoPlacementFound { uid, generation }),
            }
        }
    }

    fn apply_plan(&mut self, places: Vec<PlannedPlacement>, generation: u64) {
        let ledger = &mut self.replicas[self.leader].ledger;
        if ledger
            .apply(ReservePlaces {
                placements: places.clone(),
                generation,
            })
            .is_err()
        {
            return;
        }
        for PlannedPlacement {
            uid,
            reservation,
            by,
            ..
        } in places
        {
            if by == EvictionRight::Preemption {
                self.assert_victims_allowed(&uid, &reservation);
            }
            self.write_reservation(uid, reservation);
        }
    }

    /// A preempt request of kube-scheduler, which offers every node with all of its pods.
    pub(super) fn preempt(&mut self, uid: &PodUid) {
        let ledger = &mut self.replicas[self.leader].ledger;
        let Some(pod) = ledger.ledger().pod_state(uid) else {
            return;
        };
        let (key, demand) = (pod.key.clone(), pod.demand.clone());
        let request = VerbRequest {
            uid: uid.clone(),
            key,
            demand,
            waiting: ObservedWaiting::default(),
            disruption: None,
        };
        let offered = self.nodes.keys().map(|node| OfferedNode {
            node: node.to_string(),
            victims: self.pods_on(node.as_str()),
            pdb_violations: 0,
        });
        let asked = PreemptAsked {
            request,
            wants: Default::default(),
            offered: offered.collect(),
        };
        let ledger = &mut self.replicas[self.leader].ledger;
        let Some((_, view)) = ledger.apply(asked) else {
            return;
        };
        let PreemptDecision::Evict { victims, .. } = preempt(view) else {
            return;
        };
        let policy = ledger.ledger().policy().version;
        if let Ok(made) = ledger.apply(PreemptDecided {
            uid: uid.clone(),
            victims,
            policy,
        }) {
            self.assert_victims_allowed(uid, &made.reservation);
            self.write_reservation(uid.clone(), made.reservation);
        }
    }

    fn pods_on(&self, node: &str) -> Vec<String> {
        let is_there = |pod: &super::ApiPod| {
            pod.spec
                .as_ref()
                .is_some_and(|spec| spec.node_name.as_deref() == Some(node))
        };
        self.pods
            .iter()
            .filter(|(_, (pod, _))| is_there(pod))
            .map(|(uid, _)| uid.to_string())
            .collect()
    }

    /// Asserts that a victim that would stay has a lower priority; one that terminates anyway, or is gone, is only awaited.
    fn assert_victims_allowed(&self, uid: &PodUid, reservation: &Reservation) {
        let stays = |victim: &&PodUid| {
            self.pods
                .get(*victim)
                .is_some_and(|(pod, _)| pod.metadata.deletion_timestamp.is_none())
        };
        // A watch may lag: of a pod that its owner has deleted nothing is known here.
        let Some(priority) = self.priority(uid) else {
            return;
        };
        for victim in reservation.victims.iter().filter(stays) {
            // Under some of the policies every class is preemptible.
            let facts = VictimFacts {
                priority: self.priority(victim).expect("it stays"),
                is_preemptible: true,
                is_protected: false,
            };
            assert_eq!(facts.check(victim, uid, priority), Ok(()));
        }
    }

    fn priority(&self, uid: &PodUid) -> Option<i32> {
        self.pods.get(uid).map(|(pod, _)| {
            pod.spec
                .as_ref()
                .and_then(|spec| spec.priority)
                .unwrap_or_default()
        })
    }

    /// Writes the reservation to the pod and evicts its victims. Nothing is written to a pod that is gone.
    fn write_reservation(&mut self, uid: PodUid, reservation: Reservation) {
        if !self.pods.contains_key(&uid) {
            self.replicas[self.leader]
                .ledger
                .apply(ReleaseReservation(uid));
            return;
        }
        for victim in reservation.victims.iter() {
            if let Some((pod, _)) = self.pods.get_mut(victim) {
                pod.metadata.deletion_timestamp =
                    serde_json::from_str("\"2026-01-01T00:00:00Z\"").ok();
                self.replicas[self.leader]
                    .ledger
                    .apply(PodEvicted(victim.clone()));
                self.broadcast_pod(victim);
            }
        }
        self.writes.push_back(PendingWrite::Reserve {
            term: self.term,
            uid,
            reservation,
        });
    }
}
