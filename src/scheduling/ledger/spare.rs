//! Spare GPUs: which free GPUs a pod of a preemptible class may not take. A rule of `planning.spare` keeps its last GPUs: such a
//! pod takes a wholly free GPU that counts for the rule only if, beside all the GPUs that the pod requests, as many are free as
//! the rule keeps. So no order of pods leaves fewer. Pods of other classes take them; they become free again as pods leave.

use super::Ledger;
use crate::ids::NodeName;
use crate::policy::SpareRule;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::spare::{SpareCounts, SpareSet};
use std::borrow::Cow;

impl Ledger {
    /// The rules whose last free GPUs such a pod may not take now.
    pub(crate) fn kept_from(&self, demand: &Demand) -> SpareSet {
        self.kept_from_beside(self.node_states.spare(), demand)
    }

    /// The same if so many GPUs were free.
    fn kept_from_beside(&self, free: &SpareCounts, demand: &Demand) -> SpareSet {
        if self.policy.planning.spare.is_empty()
            || demand.asks_plugin()
            || !self.policy.is_preemptible(demand.class)
        {
            return SpareSet::NONE;
        }
        let is_kept =
            |place: usize, rule: &SpareRule| free.of(place) < rule.gpus.saturating_add(demand.gpus);
        let rules = self.policy.spare_rules_now();
        rules
            .filter(|(place, rule)| is_kept(*place, rule))
            .map(|(place, _)| place)
            .collect()
    }

    /// The demand as it is to be decided on now.
    pub(crate) fn beside_spare<'d>(&self, demand: &'d Demand) -> Cow<'d, Demand> {
        self.beside(self.node_states.spare(), demand)
    }

    /// The same if so many GPUs were free.
    pub(crate) fn beside<'d>(&self, free: &SpareCounts, demand: &'d Demand) -> Cow<'d, Demand> {
        match self.kept_from_beside(free, demand) {
            kept if kept == demand.kept => Cow::Borrowed(demand),
            kept => Cow::Owned(Demand {
                kept,
                ..demand.clone()
            }),
        }
    }

    /// The GPUs that are free now, for each rule.
    pub(crate) fn free_for_spare(&self) -> SpareCounts {
        *self.node_states.spare()
    }

    /// Whether new pods go to a node at all: a free GPU of a node that is cordoned is no spare one.
    pub(crate) fn set_takes_new_pods(&mut self, name: &NodeName, takes_new_pods: bool) {
        self.node_states.set_takes_new_pods(name, takes_new_pods);
    }

    /// The rules of `planning.spare` in their order, with the GPUs that are free for each; `None` for one that does not hold now.
    pub fn spare(&self) -> impl Iterator<Item = (&SpareRule, Option<u32>)> {
        let free = self.node_states.spare();
        let rules = self.policy.planning.spare.iter().enumerate();
        rules.map(|(place, rule)| (rule, self.policy.holds_now(rule).then(|| free.of(place))))
    }
}

#[cfg(test)]
mod tests;
