//! Planner runs: the steps of a plan are checked one after the other, and take effect as the planner would have them.

use super::World;
use crate::simulate::decisions::core_under_test::{place_of, pod_number};
use crate::simulate::decisions::oracle::Checked;
use crate::simulate::decisions::planted::PlantedBug;
use crate::simulate::decisions::record::{KnownState, Place};
use stowage_scheduling::ledger::WaitKind;
use stowage_scheduling::planning::{
    EvictionRight, PlanBounds, PlanStep, PlannedPlacement, WaitReason, plan_within,
};
use stowage_scheduling::verbs::wait::{
    NoPlacementFound, PodEvicted, PodRequeued, PutBack, ReservePlaces, ScopeReserved, TakePending,
};

/// As many as one run of the planner takes.
const PODS: usize = 2048;
const BOUNDS: PlanBounds<'static> = PlanBounds {
    free: 50_000,
    evictions: 50_000,
    places: 256,
    is_stopped: &|| false,
};

impl World<'_> {
    pub(super) fn plan(&mut self) -> Checked {
        let pending = self.core.apply(TakePending { limit: PODS });
        if pending.is_empty() {
            return Ok(());
        }
        self.tally.plan += 1;
        self.count();
        let is_on_its_way = pending
            .iter()
            .any(|pod| matches!(pod.way, WaitKind::OnItsWay { .. }));
        let (scratch, generation) = (self.core.cluster.scratch(), self.core.cluster.generation());
        let filters = self.core.cluster.kube_filters().snapshot();
        let mut plan = plan_within(scratch, &filters, &pending, BOUNDS);
        if self.core.has(PlantedBug::LeavesPodsWaiting) {
            plan.steps.iter_mut().for_each(leave_waiting);
        }
        self.note(|| format!("plan: {:?}", plan.steps));
        self.core.apply(PutBack(plan.left_over));
        for (scope, uid) in plan.reserved {
            self.record.reserve_minute(pod_number(&uid));
            self.core.apply(ScopeReserved { scope, uid });
        }
        let is_idle = !plan
            .steps
            .iter()
            .any(|step| !matches!(step, PlanStep::Wait { .. }));
        for step in plan.steps {
            match step {
                PlanStep::Place(places) => self.take_places(places, generation)?,
                PlanStep::Wake { uid, .. } => self.core.apply(PodRequeued(uid)),
                PlanStep::Wait { uid, why, .. } => {
                    // What others were given, or are on their way to, is not free.
                    if is_idle && !is_on_its_way {
                        self.check_wait(pod_number(&uid), why)?;
                    }
                    self.core.apply(NoPlacementFound { uid, generation });
                }
            }
        }
        Ok(())
    }

    fn take_places(&mut self, mut places: Vec<PlannedPlacement>, generation: u64) -> Checked {
        if self.core.has(PlantedBug::PlansWithoutVictims) {
            places
                .iter_mut()
                .for_each(|place| place.reservation.victims = [].into());
        }
        let mut evicted = Vec::new();
        for PlannedPlacement {
            uid,
            reservation,
            by,
            ..
        } in &places
        {
            let (pod, place) = (pod_number(uid), place_of(reservation));
            if *by != EvictionRight::Preemption {
                return Err(format!(
                    "pods are moved for pod {pod}, which the policy does not allow"
                ));
            }
            let seen = self.evictions_of(&reservation.victims);
            self.tally.victims += reservation.victims.len() as u64;
            self.record.check_plan(pod, place, &seen)?;
            self.record.note_evictions(&seen.evicted)?;
            self.keep(pod, reservation.clone());
            evicted.extend(seen.evicted);
        }
        let is_gated =
            |place: &PlannedPlacement| self.api[pod_number(&place.uid) as usize].is_gated;
        if places.iter().any(is_gated) {
            self.check_whole_group(&places)?;
        }
        let pods: Vec<(u32, Place, bool)> = places
            .iter()
            .map(|place| {
                let is_free = place.reservation.victims.is_empty();
                (
                    pod_number(&place.uid),
                    place_of(&place.reservation),
                    is_free,
                )
            })
            .collect();
        if let Err((at, conflict)) = self.core.apply(ReservePlaces { places, generation }) {
            let pod = pods[at].0;
            return Err(format!(
                "the place that was planned for pod {pod} is not taken: {conflict}"
            ));
        }
        for victim in &evicted {
            self.core
                .apply(PodEvicted(self.pods[*victim as usize].uid.clone()));
        }
        self.evict(&evicted);
        for (pod, _, is_free) in pods {
            let api = &mut self.api[pod as usize];
            api.is_gated = false;
            // A reservation without victims is not written: the nomination shows it.
            if is_free {
                api.condition = None;
            }
            self.show_pod(pod);
        }
        Ok(())
    }

    /// A group is placed whole.
    fn check_whole_group(&self, places: &[PlannedPlacement]) -> Checked {
        let Some((number, size)) = places
            .first()
            .and_then(|place| self.record.spec(pod_number(&place.uid)).group)
        else {
            return Ok(());
        };
        let is_member = |pod: &&u32| {
            self.record
                .spec(**pod)
                .group
                .is_some_and(|(group, _)| group == number)
        };
        let is_placed = |pod: &&u32| {
            self.record.told(**pod).place().is_some() || self.record.kept(**pod).is_some()
        };
        let placed = self
            .record
            .known
            .iter()
            .filter(is_member)
            .filter(is_placed)
            .count() as u32;
        match placed >= size {
            true => Ok(()),
            false => Err(format!(
                "{placed} of the {size} pods of group {number} are placed"
            )),
        }
    }

    /// A pod that waits fits nowhere, not even where pods may be evicted for it.
    fn check_wait(&mut self, pod: u32, why: WaitReason) -> Checked {
        let api = &self.api[pod as usize];
        let may_be_anywhere = api.is_gated || api.is_refused_everywhere;
        if self.record.spec(pod).group.is_some()
            || !may_be_anywhere
            || self.record.told(pod) != KnownState::Waiting
        {
            return Ok(());
        }
        for node in 0..self.record.nodes.len() as u8 {
            if self.record.is_certain(node) && self.record.fits_anew(pod, node) {
                return Err(format!(
                    "the planner lets pod {pod} wait ({}), which fits on node {node}",
                    why.code()
                ));
            }
        }
        for node in 0..self.record.nodes.len() as u8 {
            if self.record.is_certain(node)
                && let Some(victims) = self.record.enough_victims(pod, node, &mut self.tally)
            {
                return Err(format!(
                    "the planner lets pod {pod} wait ({}), for which {victims:?} on node {node} may leave",
                    why.code()
                ));
            }
        }
        Ok(())
    }
}

fn leave_waiting(step: &mut PlanStep) {
    if let PlanStep::Place(places) = step
        && let Some(PlannedPlacement { uid, key, .. }) = places.first()
    {
        *step = PlanStep::Wait {
            uid: uid.clone(),
            key: key.clone(),
            why: WaitReason::NoNode,
        };
    }
}
