//! Recent demand, and the value of free VRAM that follows from it. Nothing is solved here: a caller that has the time takes the
//! demand history, and brings a packing model.

use super::Ledger;
use super::pod_state::{PodPhase, PodState};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::placing::learned::{DemandHistory, DemandShape, PackingModel};
use crate::scheduling::policy::{LearningMode, PackingPolicy, PackingRules};
use crate::scheduling::vocabulary::demand::{Demand, HostResources};
use std::sync::Arc;

impl Ledger {
    /// The demand seen lately.
    pub fn demand_history(&self) -> &Arc<DemandHistory> {
        &self.demand_history
    }

    /// The same, with those who were refused and still wait: to be learned from.
    pub fn demand_history_to_learn(&self) -> DemandHistory {
        let refused = self.refused.iter().filter_map(|uid| self.pod_states.get(uid));
        let refused =
            refused.filter(|pod_state| pod_state.refused().is_some() && !pod_state.demand.asks_plugin());
        DemandHistory::clone(&self.demand_history)
            .with_waiting(refused.map(|pod_state| pod_state.demand.vram()).sum())
    }

    pub fn packing_model(&self) -> &Arc<PackingModel> {
        &self.packing_model
    }

    /// Whether the policy goes by what free VRAM is worth, and enough has come to learn it anew.
    pub fn is_packing_model_due(&self) -> bool {
        let PackingRules { policy, learning, .. } = self.policy.packing;
        let is_wanted = policy == PackingPolicy::Learned && learning == LearningMode::Continuous;
        is_wanted && self.demand_history.is_due(self.packing_model.learned_at())
    }

    /// From now on free VRAM is worth this.
    pub(in crate::scheduling) fn set_packing_model(&mut self, packing_model: PackingModel) {
        let packing_model = Arc::new(packing_model.with_generation(self.packing_model.generation() + 1));
        self.packing_model = packing_model.clone();
        self.generation += 1;
        Arc::make_mut(&mut self.published).set_packing_model(self.generation, packing_model);
    }

    /// Brings what is remembered to the policy. Where it goes by best fit nothing is known of worth.
    pub(super) fn take_packing(&mut self) {
        Arc::make_mut(&mut self.demand_history).set_window(self.policy.packing.window);
        if self.policy.packing.policy == PackingPolicy::BestFit && self.packing_model.is_learned() {
            self.set_packing_model(PackingModel::default());
        }
    }

    /// CPU and memory that a node has left, without all pods that are seen to be bound there; `None` if nobody knows. Pods that are
    /// on their way are taken off here.
    pub(in crate::scheduling) fn set_free_host(&mut self, name: &NodeName, free_host: Option<HostResources>) {
        let Some(node_state) = self.node_states.get_mut(name) else { return };
        node_state.unbound = free_host;
        let free_host = node_state.free_host(&self.pod_states);
        // Nothing else of the node follows from it.
        if node_state.view.free_host != free_host {
            self.generation += 1;
            (node_state.view.free_host, node_state.view.generation) = (free_host, self.generation);
            self.publish(name);
        }
    }

    /// A pod that was never seen before came.
    pub(super) fn note_arrival(&mut self, uid: &PodUid, demand: &Demand) {
        if !self.pod_states.contains_key(uid)
            && let Some(demand_shape) = DemandShape::of(demand)
        {
            Arc::make_mut(&mut self.demand_history).arrive(demand_shape);
        }
    }

    /// A pod is gone.
    pub(super) fn note_departure(&mut self, pod_state: &PodState) {
        if pod_state.demand.asks_plugin() {
            return;
        }
        if matches!(pod_state.phase, PodPhase::Bound(_)) {
            Arc::make_mut(&mut self.demand_history).depart();
        } else if pod_state.refused().is_some() {
            Arc::make_mut(&mut self.demand_history).turn_away(pod_state.demand.vram());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ObservedPhase, ObservedWaiting, PodObservation};
    use super::*;
    use crate::ids::PodKey;
    use crate::scheduling::proptests::demand_of;
    use crate::scheduling::vocabulary::demand::Sharing;

    #[test]
    fn who_was_refused_counts_as_turned_away_while_it_waits_and_when_it_gives_up() {
        let mut ledger = Ledger::default();
        let uids = ["a", "b"].map(|name| PodUid::parse(name).unwrap());
        for uid in &uids {
            let (key, demand) =
                (PodKey::parse("llm", uid.as_str()).unwrap(), demand_of(10, 1, Sharing::Shared, 0));
            let state = ObservedPhase::Waiting(ObservedWaiting::default());
            ledger.see(PodObservation { uid: uid.clone(), key, demand, state, observed: None });
        }
        assert_eq!(ledger.demand_history_to_learn().turned_away(), 0.0, "nobody was refused");
        ledger.note_refused(&uids[0], None);
        assert_eq!(ledger.demand_history_to_learn().turned_away(), 0.5, "it waits");
        ledger.release(&uids[0]);
        assert_eq!(
            (ledger.demand_history().turned_away(), ledger.demand_history_to_learn().turned_away()),
            (0.5, 0.5),
            "it gave up"
        );
        ledger.release(&uids[1]);
        assert_eq!(ledger.demand_history_to_learn().turned_away(), 0.5, "it was never refused");
    }
}
