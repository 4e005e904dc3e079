//! Moves: pods of preemptible classes are evicted although the one who waits could not have them evicted for itself (it never
//! preempts, or it borrows its share), because each of them fits elsewhere. Nobody loses a place, and what the moves cost is
//! less than what the pod's fitting is worth.
//!
//! Off unless the policy says so. Still nobody of equal or higher priority moves, and nobody who is protected.

use super::node_ranking::DemandKey;
use super::state::PlanningState;
use super::{PlanView, PlannedPlacement};
use crate::ids::{PodKey, PodUid};
use crate::scheduling::evicting;
use crate::scheduling::evicting::{BudgetRules, PreemptionCandidate, VictimSet};
use crate::scheduling::ledger::{
    ObservedPhase, ObservedWaiting, PendingPod, PodObservation, SchedulingGate, WaitKind,
};
use crate::scheduling::placing::rank;
use crate::scheduling::policy::Consolidation;
use crate::scheduling::vocabulary::demand::Demand;
use crate::scheduling::vocabulary::gpu::GpuSet;

/// Nodes whose pods are tried to be moved, the cheapest first. Where none of them works out, more will hardly.
const TRIED: usize = 8;
/// Steps that a close look at one node counts for.
const LOOK: u64 = 16;

impl PlanningState<'_> {
    /// The first of the cheapest nodes whose pods all fit elsewhere, held on the scratch ledger.
    pub(super) fn moving(&mut self, pod: &PendingPod, kind: &DemandKey) -> Option<PlannedPlacement> {
        let rules = self.ledger.policy().planning.consolidation?;
        let demand = Demand { may_preempt: true, ..pod.demand.clone() };
        let snapshot = self.ledger.snapshot();
        let preemptor = self.preemptor(pod).moving();
        let pace = self.pace;
        let mut looking = self.looking(kind, &snapshot, &demand, &preemptor);
        let nodes = snapshot.nodes().iter().take_while(|_| pace.goes_on(LOOK));
        let rooms: Vec<PreemptionCandidate> =
            nodes.filter_map(|node| looking.candidate(&node.name)).collect();
        let packing_model =
            |set: &VictimSet, candidate: &PreemptionCandidate| gain(&demand, set.gpus, candidate, rules);
        let mut sets: Vec<VictimSet> = rooms
            .iter()
            .take_while(|_| pace.goes_on(LOOK))
            .filter_map(|candidate| {
                let set = evicting::cheapest_victims(candidate, &demand, BudgetRules::Keep)?;
                (set.eviction_cost.cost < packing_model(&set, candidate)).then_some(set)
            })
            .collect();
        sets.sort_by(|a, b| (a.eviction_cost, &a.node).cmp(&(b.eviction_cost, &b.node)));
        sets.iter().take(TRIED).find_map(|set| self.move_all(pod, kind, set))
    }

    /// Holds the room, if everyone who leaves it has a place elsewhere; nothing otherwise.
    fn move_all(&mut self, pod: &PendingPod, kind: &DemandKey, set: &VictimSet) -> Option<PlannedPlacement> {
        let place = self.reserve_set_by_moving(pod, kind, set)?;
        if set.evicted().all(|victim| self.settle_elsewhere(pod, victim).is_some()) {
            return Some(place);
        }
        self.release_reservation(&place);
        None
    }

    /// Finds room for the pod that its controller will make in its place, and takes it on the scratch ledger: it is not for the
    /// next of the queue, nor for the next who moves.
    fn settle_elsewhere(&mut self, pod: &PendingPod, victim: &PodUid) -> Option<()> {
        let entry = self.ledger.pod_state(victim)?;
        // Nobody would make it again.
        entry.disruption_info.owner.as_ref()?;
        let wants = self.kube_filters.movable(victim).cloned();
        let successor = PodUid::parse(&format!("{victim}-successor")).ok()?;
        let key = PodKey::parse(&entry.key.namespace, &format!("{}-successor", entry.key.name)).ok()?;
        let demand = entry.demand.clone();
        let pending = PendingPod {
            uid: successor.clone(),
            key: key.clone(),
            demand: demand.clone(),
            way: WaitKind::Gated,
            since: self.ledger.now(),
            share: 0,
        };
        let (place, gpus) = self.best_node_for(&demand, &DemandKey::successor_of(&demand, wants))?;
        let waiting = ObservedWaiting { gate: SchedulingGate::Open, ..ObservedWaiting::default() };
        self.ledger.see(PodObservation {
            uid: successor.clone(),
            key,
            demand,
            state: ObservedPhase::Waiting(waiting),
            observed: None,
        });
        let snapshot = self.ledger.snapshot();
        if self.reserve_at(&pending, &snapshot, place, gpus).is_none() {
            self.ledger.release(&successor);
            return None;
        }
        self.successors.entry(pod.uid.clone()).or_default().push(successor);
        Some(())
    }

    /// The best place that is free now for a pod that is not in the queue.
    fn best_node_for(&mut self, demand: &Demand, kind: &DemandKey) -> Option<(usize, GpuSet)> {
        let snapshot = self.ledger.snapshot();
        let seeing = PlanView { ledger: &self.ledger, snapshot: &snapshot };
        let question = kind.question(self.kube_filters);
        let pace = self.pace;
        let gpu_candidates =
            (0..snapshot.nodes().len()).take_while(|_| pace.goes_on(1)).filter_map(|place| {
                kind.admits(place, &seeing, question.as_ref(), &[]).ok()?;
                let (score, gpus) = rank::score_node(&snapshot, place, demand, self.ledger.policy()).ok()?;
                Some((score, place, gpus))
            });
        gpu_candidates.min_by_key(|(score, place, _)| (*score, *place)).map(|(_, place, gpus)| (place, gpus))
    }
}

/// What it is worth that the pod fits, in thousandths of a GPU for a second.
fn gain(demand: &Demand, gpus: GpuSet, candidate: &PreemptionCandidate, rules: Consolidation) -> u64 {
    let part: u64 = gpus.iter().map(|place| candidate.gpus[place].part_of(demand).milli_gpus).sum();
    part.saturating_mul(rules.gain.0 / 1000)
}
