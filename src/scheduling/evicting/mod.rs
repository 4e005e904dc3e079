//! Finds the victims of a preemption: the cheapest set of pods whose eviction frees the GPUs that the pod needs, on one node of
//! many. The result is optimal unless the search runs into its budget ([`VictimSet::exact`] says which).
//!
//! [`candidate`] is what is known of one node, [`eviction_cost`] what makes one set better than another. Pods that are evicted
//! together are one [`victim_unit`]; [`lower_bound`] bounds the cost of a set, so that [`branch_and_bound`] examines few sets,
//! and [`best_first`] few nodes.

mod best_first;
mod branch_and_bound;
pub mod candidate;
mod cost_bounds;
mod device_plugin;
pub mod eviction_cost;
mod lower_bound;
mod survey;
mod victim_unit;
mod without_evictable;

pub(crate) use best_first::{
    CandidateSource, ExaminedCandidate, NodeCostBound, VictimSearchResult, find_among,
};
pub use best_first::{cheapest, cheapest_among, examined};
pub use candidate::PreemptionCandidate;
pub(crate) use candidate::{MembersElsewhere, Shortfall, VictimGroup};
pub use eviction_cost::EvictionCost;
pub(crate) use lower_bound::{GpuFloor, gpu_need};
pub(crate) use survey::CandidateSurvey;
pub use without_evictable::WithoutEvictable;

use super::vocabulary::demand::Demand;
use super::vocabulary::gpu::GpuSet;
use crate::ids::{NodeName, PodUid};
use crate::units::Millis;
use serde::{Deserialize, Serialize};

/// How the search treats disruption budgets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BudgetRules {
    /// A set that overdraws a budget is not allowed.
    Keep,
    /// A set that overdraws a budget is more expensive than any that overdraws less.
    Violate,
}

/// How many branches the search examines before it settles for the best set found so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SearchEffort {
    pub per_node: u32,
    pub per_search: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VictimSet {
    pub node: NodeName,
    /// The GPUs the pod will get.
    pub gpus: GpuSet,
    /// Pods of the node to evict, in order of UID.
    pub victims: Vec<PodUid>,
    /// Pods of other nodes that are evicted with their groups, in order of UID.
    pub elsewhere: Vec<PodUid>,
    /// Pods of the node that are leaving anyway and must be gone, in order of UID.
    pub awaited: Vec<PodUid>,
    pub eviction_cost: EvictionCost,
    pub longest_grace: Millis,
    /// False if the search ended early: cheaper sets may exist.
    pub exact: bool,
}

impl Default for SearchEffort {
    /// Pods of equal size and cost differ by name only, so few nodes take a hundred branches; the full budget takes some ten
    /// milliseconds.
    fn default() -> Self {
        Self {
            per_node: 5_000,
            per_search: 20_000,
        }
    }
}

impl SearchEffort {
    /// No limit.
    pub const UNLIMITED: Self = Self {
        per_node: u32::MAX,
        per_search: u32::MAX,
    };
}

impl VictimSet {
    /// Every pod that must be gone before the preemptor can be placed, in order of UID: the victims that its reservation names.
    pub fn all_victims(&self) -> Vec<PodUid> {
        let mut all: Vec<PodUid> = self
            .victims
            .iter()
            .chain(&self.elsewhere)
            .chain(&self.awaited)
            .cloned()
            .collect();
        all.sort_unstable();
        all
    }

    /// The pods to evict for it, on whichever node.
    pub fn evicted(&self) -> impl Iterator<Item = &PodUid> {
        self.victims.iter().chain(&self.elsewhere)
    }
}

/// The cheapest set of one candidate; see [`cheapest_victims`]. It is empty if no pod has to be evicted.
pub fn cheapest_victims(
    candidate: &PreemptionCandidate,
    demand: &Demand,
    rules: BudgetRules,
) -> Option<VictimSet> {
    cheapest(
        std::slice::from_ref(candidate),
        demand,
        rules,
        SearchEffort::default(),
    )
}

#[cfg(test)]
mod candidate_tests;
#[cfg(test)]
mod tests;
