//! What was asked for lately, and what follows from it for free VRAM. Solving is not done here: whoever has time for it takes the
//! mix, and brings a worth.

use super::Ledger;
use super::entry::{PodPhase, PodState};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::policy::{LearningMode, PackingPolicy, PackingRules};
use crate::scheduling::request::{Demand, HostResources};
use crate::scheduling::worth::{DemandHistory, DemandShape, PackingModel};
use std::sync::Arc;

impl Ledger {
    /// The demand seen lately.
    pub fn mix(&self) -> &Arc<DemandHistory> {
        &self.mix
    }

    /// The same, with those who were refused and still wait: to be learned from.
    pub fn demand_history_to_learn(&self) -> DemandHistory {
        let refused = self.refused.iter().filter_map(|uid| self.entries.get(uid));
        let refused = refused.filter(|entry| entry.refused().is_some() && !entry.demand.asks_plugin());
        DemandHistory::clone(&self.mix).with_waiting(refused.map(|entry| entry.demand.vram()).sum())
    }

    pub fn worth(&self) -> &Arc<PackingModel> {
        &self.worth
    }

    /// Whether the policy goes by what free VRAM is worth, and enough has come to learn it anew.
    pub fn is_packing_model_due(&self) -> bool {
        let PackingRules { policy, learning, .. } = self.policy.packing;
        let is_wanted = policy == PackingPolicy::Worth && learning == LearningMode::Continuous;
        is_wanted && self.mix.is_due(self.worth.learned_at())
    }

    /// From now on free VRAM is worth this.
    pub fn set_packing_model(&mut self, worth: PackingModel) {
        let worth = Arc::new(worth.with_generation(self.worth.generation() + 1));
        self.worth = worth.clone();
        self.generation += 1;
        Arc::make_mut(&mut self.published).set_packing_model(self.generation, worth);
    }

    /// Brings what is remembered to the policy. Where it goes by best fit nothing is known of worth.
    pub(super) fn take_packing(&mut self) {
        Arc::make_mut(&mut self.mix).set_window(self.policy.packing.window);
        if self.policy.packing.policy == PackingPolicy::BestFit && self.worth.is_learned() {
            self.set_packing_model(PackingModel::default());
        }
    }

    /// CPU and memory that a node has left, without all pods that are seen to be bound there; `None` if nobody knows. Pods that are
    /// on their way are taken off here.
    pub fn set_free_host(&mut self, name: &NodeName, spare: Option<HostResources>) {
        let Some(book) = self.books.get_mut(name) else { return };
        book.unbound = spare;
        let spare = book.spare(&self.entries);
        // Nothing else of the node follows from it.
        if book.view.spare != spare {
            self.generation += 1;
            (book.view.spare, book.view.generation) = (spare, self.generation);
            self.publish(name);
        }
    }

    /// A pod that was never seen before came.
    pub(super) fn note_arrival(&mut self, uid: &PodUid, demand: &Demand) {
        if !self.entries.contains_key(uid)
            && let Some(demand_shape) = DemandShape::of(demand)
        {
            Arc::make_mut(&mut self.mix).arrive(demand_shape);
        }
    }

    /// A pod is gone.
    pub(super) fn note_departure(&mut self, entry: &PodState) {
        if entry.demand.asks_plugin() {
            return;
        }
        if matches!(entry.phase, PodPhase::Bound(_)) {
            Arc::make_mut(&mut self.mix).depart();
        } else if entry.refused().is_some() {
            Arc::make_mut(&mut self.mix).turn_away(entry.demand.vram());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ObservedPhase, ObservedWaiting, PodObservation};
    use super::*;
    use crate::ids::PodKey;
    use crate::scheduling::proptests::demand_of;
    use crate::scheduling::request::Sharing;

    #[test]
    fn who_was_refused_counts_as_turned_away_while_it_waits_and_when_it_gives_up() {
        let mut ledger = Ledger::default();
        let uids = ["a", "b"].map(|name| PodUid::parse(name).unwrap());
        for uid in &uids {
            let (key, demand) =
                (PodKey::parse("llm", uid.as_str()).unwrap(), demand_of(10, 1, Sharing::Shared, 0));
            let state = ObservedPhase::Waiting(ObservedWaiting::default());
            ledger.see(PodObservation { uid: uid.clone(), key, demand, state, shown: None });
        }
        assert_eq!(ledger.demand_history_to_learn().turned_away(), 0.0, "nobody was refused");
        ledger.note_refused(&uids[0], None);
        assert_eq!(ledger.demand_history_to_learn().turned_away(), 0.5, "it waits");
        ledger.release(&uids[0]);
        assert_eq!(
            (ledger.mix().turned_away(), ledger.demand_history_to_learn().turned_away()),
            (0.5, 0.5),
            "it gave up"
        );
        ledger.release(&uids[1]);
        assert_eq!(ledger.demand_history_to_learn().turned_away(), 0.5, "it was never refused");
    }
}
