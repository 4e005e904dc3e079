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
const MAX_NODES_TRIED: usize = 8;
/// Steps that the close examination of one node counts for.
const NODE_STEPS: u64 = 16;

impl PlanningState<'_> {
    /// The first of the cheapest nodes whose victims all fit elsewhere, reserved on the scratch ledger.
    pub(super) fn place_by_moving(
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
        let preemptor = self.preemptor(pod).with_moved_victims();
        let step_budget = self.step_budget;
        let mut finder = self.finder(signature, &snapshot, &demand, &preemptor);
        let nodes = snapshot
            .nodes()
            .iter()
            .take_while(|_| step_budget.spend_unless_stopped(NODE_STEPS));
        let candidates: Vec<PreemptionCandidate> = nodes
            .filter_map(|node| finder.candidate(&node.name))
            .collect();
        let gain_of = |set: &VictimSet, candidate: &PreemptionCandidate| {
            gain(&demand, set.gpus, candidate, rules)
        };
        let mut sets: Vec<VictimSet> = candidates
            .iter()
            .take_while(|_| step_budget.spend_unless_stopped(NODE_STEPS))
            .filter_map(|candidate| {
                let set = evicting::cheapest_victims(candidate, &demand, BudgetRules::Keep)?;
                (set.eviction_cost.cost < gain_of(&set, candidate)).then_some(set)
            })
            .collect();
        sets.sort_by(|a, b| (a.eviction_cost, &a.node).cmp(&(b.eviction_cost, &b.node)));
        sets.iter()
            .take(MAX_NODES_TRIED)
            .find_map(|set| self.move_all(pod, signature, set))
    }

    /// Reserves the place, if every victim has a place elsewhere; nothing otherwise.
    fn move_all(
        &mut self,
        pod: &PendingPod,
        signature: &PodSignature,
        set: &VictimSet,
    ) -> Option<PlannedPlacement> {
        let placement = self.reserve_set_by_moving(pod, signature, set)?;
        if set
            .evicted()
            .all(|victim| self.reserve_for_successor(pod, victim).is_some())
        {
            return Some(placement);
        }
        self.release_reservation(&placement);
        None
    }

    /// Finds a place for the pod that the controller will create in place of the victim, and reserves it on the scratch ledger,
    /// so that neither the next pod of the queue nor the next moved pod gets it.
    fn reserve_for_successor(&mut self, pod: &PendingPod, victim: &PodUid) -> Option<()> {
        let pod_state = self.ledger.pod_state(victim)?;
        // No controller would recreate it.
        pod_state.disruption_info.owner.as_ref()?;
        let requirements = self.kube_filters.successor_requirements(victim).cloned();
        let successor = PodUid::parse(&format!("{victim}-successor")).ok()?;
        let key = PodKey::parse(
            &pod_state.key.namespace,
            &format!("{}-successor", pod_state.key.name),
        )
        .ok()?;
        // What is lent is no place for good: it would be evicted a second time.
        let mut demand = pod_state.demand.clone();
        demand.terms.borrows = false;
        let pending = PendingPod {
            uid: successor.clone(),
            key: key.clone(),
            demand: demand.clone(),
            wait_kind: WaitKind::Gated,
            since: self.ledger.now(),
            turn: 0,
        };
        let signature =
            PodSignature::for_successor(&self.ledger.with_spare_rules(&demand), requirements);
        let (index, gpus) = self.best_node_for(signature.demand(), &signature)?;
        let waiting = ObservedWaiting {
            gate: SchedulingGate::Open,
            ..ObservedWaiting::default()
        };
        self.ledger.observe_pod(PodObservation {
            uid: successor.clone(),
            key,
            demand,
            state: ObservedPhase::Waiting(waiting),
            observed: None,
        });
        let snapshot = self.ledger.snapshot();
        if self.reserve_at(&pending, &snapshot, index, gpus).is_none() {
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
        let view = PlanView {
            ledger: &self.ledger,
            snapshot: &snapshot,
        };
        let filter_query = signature.filter_query(self.kube_filters);
        let step_budget = self.step_budget;
        let nodes = self
            .ledger
            .incoming_pods_by_node()
            .enumerate()
            .take_while(|_| step_budget.spend_unless_stopped(1));
        let fits = nodes.filter_map(|(index, (node, coming))| {
            debug_assert_eq!(node, &snapshot.nodes()[index].name);
            let assumed_change = AssumedNodeChange {
                leaving: &[],
                coming,
            };
            signature
                .admits(index, &view, filter_query.as_ref(), &assumed_change)
                .ok()?;
            let (score, gpus) =
                rank::score_node(&snapshot, index, demand, self.ledger.policy()).ok()?;
            Some((score, index, gpus))
        });
        fits.min_by_key(|(score, index, _)| (*score, *index))
            .map(|(_, index, gpus)| (index, gpus))
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
        .map(|index| candidate.gpus[index].usage_of(demand).milli_gpus)
        .sum();
    part.saturating_mul(rules.gain.0 / 1000)
}
