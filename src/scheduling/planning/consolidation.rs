//! Consolidation: evicts preemptible pods for a pending pod that may not preempt them itself (it never preempts, or it borrows
//! its share), if each of them fits on another node. No pod loses its place for good, and the moves cost less than the gain from
//! placing the pending pod.
//!
//! Off unless the policy enables it. Pods of equal or higher priority and protected pods are never moved.

use super::node_ranking::PodSignature;
use super::state::PlanningState;
use super::{PlanView, PlannedPlacement};
use crate::evicting;
use crate::evicting::{BudgetRules, PreemptionCandidate, VictimSet};
use crate::ids::{PodKey, PodUid};
use crate::kube_filters::AssumedNodeChange;
use crate::ledger::{
    ObservedPhase, ObservedWaiting, PendingPod, PodObservation, SchedulingGate, WaitKind,
};
use crate::placing::rank;
use crate::policy::Consolidation;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::gpu::GpuSet;

/// Nodes whose pods the planner tries to move, the cheapest first. If none of these works out, more rarely would.
const TRIED: usize = 8;
/// Steps that the close examination of one node counts for.
const LOOK: u64 = 16;

impl PlanningState<'_> {
    /// The first of the cheapest nodes whose victims all fit elsewhere, reserved on the scratch ledger.
    pub(super) fn moving(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
    ) -> Option<PlannedPlacement> {
        let rules = self.ledger.policy().planning.consolidation?;
        let demand = Demand {
            may_preempt: true,
            ..pod.demand.clone()
        };
        let snapshot = self.ledger.snapshot();
        let preemptor = self.preemptor(pod).moving();
        let pace = self.pace;
        let mut looking = self.looking(signature, &snapshot, &demand, &preemptor);
        let nodes = snapshot.nodes().iter().take_while(|_| pace.goes_on(LOOK));
        let candidates: Vec<PreemptionCandidate> = nodes
            .filter_map(|node| looking.candidate(&node.name))
            .collect();
        let packing_model = |set: &VictimSet, candidate: &PreemptionCandidate| {
            gain(&demand, set.gpus, candidate, rules)
        };
        let mut sets: Vec<VictimSet> = candidates
            .iter()
            .take_while(|_| pace.goes_on(LOOK))
            .filter_map(|candidate| {
                let set = evicting::cheapest_victims(candidate, &demand, BudgetRules::Keep)?;
                (set.eviction_cost.cost < packing_model(&set, candidate)).then_some(set)
            })
            .collect();
        sets.sort_by(|a, b| (a.eviction_cost, &a.node).cmp(&(b.eviction_cost, &b.node)));
        sets.iter()
            .take(TRIED)
            .find_map(|set| self.move_all(pod, signature, set))
    }

    /// Reserves the place, if every victim has a place elsewhere; nothing otherwise.
    fn move_all(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        set: &VictimSet,
    ) -> Option<PlannedPlacement> {
        let place = self.reserve_set_by_moving(pod, signature, set)?;
        if set
            .evicted()
            .all(|victim| self.settle_elsewhere(pod, victim).is_some())
        {
            return Some(place);
        }
        self.release_reservation(&place);
        None
    }

    /// Finds a place for the pod that the controller will create in place of the victim, and reserves it on the scratch ledger,
    /// so that neither the next pod of the queue nor the next moved pod gets it.
    fn settle_elsewhere(&mut self, pod: &PendingPod, victim: &PodUid) -> Option<()> {
        let entry = self.ledger.pod_state(victim)?;
        // No controller would recreate it.
        entry.disruption_info.owner.as_ref()?;
        let wants = self.kube_filters.movable(victim).cloned();
        let successor = PodUid::parse(&format!("{victim}-successor")).ok()?;
        let key = PodKey::parse(
            &entry.key.namespace,
            &format!("{}-successor", entry.key.name),
        )
        .ok()?;
        // What is lent is no place for good: it would be evicted a second time.
        let mut demand = entry.demand.clone();
        demand.terms.borrows = false;
        let pending = PendingPod {
            uid: successor.clone(),
            key: key.clone(),
            demand: demand.clone(),
            way: WaitKind::Gated,
            since: self.ledger.now(),
            turn: 0,
        };
        let signature = PodSignature::successor_of(&self.ledger.beside_spare(&demand), wants);
        let (place, gpus) = self.best_node_for(signature.demand(), &signature)?;
        let waiting = ObservedWaiting {
            gate: SchedulingGate::Open,
            ..ObservedWaiting::default()
        };
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
        self.successors
            .entry(pod.uid.clone())
            .or_default()
            .push(successor);
        Some(())
    }

    /// The best free place for a pod that is not in the queue.
    fn best_node_for(
        &mut self,
        demand: &Demand,
        signature: &PodSignature,
    ) -> Option<(usize, GpuSet)> {
        let snapshot = self.ledger.snapshot();
        let seeing = PlanView {
            ledger: &self.ledger,
            snapshot: &snapshot,
        };
        let question = signature.question(self.kube_filters);
        let pace = self.pace;
        let nodes = self
            .ledger
            .coming_by_node()
            .enumerate()
            .take_while(|_| pace.goes_on(1));
        let gpu_candidates = nodes.filter_map(|(place, (node, coming))| {
            debug_assert_eq!(node, &snapshot.nodes()[place].name);
            let beside = AssumedNodeChange {
                leaving: &[],
                coming,
            };
            signature
                .admits(place, &seeing, question.as_ref(), &beside)
                .ok()?;
            let (score, gpus) =
                rank::score_node(&snapshot, place, demand, self.ledger.policy()).ok()?;
            Some((score, place, gpus))
        });
        gpu_candidates
            .min_by_key(|(score, place, _)| (*score, *place))
            .map(|(_, place, gpus)| (place, gpus))
    }
}

/// The gain from placing the pod, in thousandths of a GPU-second.
fn gain(
    demand: &Demand,
    gpus: GpuSet,
    candidate: &PreemptionCandidate,
    rules: Consolidation,
) -> u64 {
    let part: u64 = gpus
        .iter()
        .map(|place| candidate.gpus[place].part_of(demand).milli_gpus)
        .sum();
    part.saturating_mul(rules.gain.0 / 1000)
}
