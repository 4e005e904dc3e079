//! The weights of the parts of the potential, by how many pods end and how many never get a place.
//!
//! Where pods arrive and stay, a place is spoilt for good: CPU that a node lacks is lacking forever. Where as many pods end as
//! arrive, everything becomes free again, and whole GPUs are worth keeping for the largest pods: nodes are kept empty as long as
//! there are any. Where the demand exceeds the capacity, no node stays empty; all that counts then is how much of the free
//! capacity could be used at once. Each setting is worse than simpler policies at the others' ends, so the observed demand
//! decides.

use super::exact;
use serde::{Deserialize, Serialize};

/// Factors of the potential's parts; see [`super::packing_cost`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct PotentialWeights {
    /// κ: the part wasted by a lack of CPU and memory.
    #[serde(with = "exact")]
    pub host_demand: f64,
    /// f: the part that recent pods could not use now.
    #[serde(with = "exact")]
    pub fragments: f64,
    /// t: what is left on the node. Breaks ties, or, where pods end, keeps some nodes empty for the largest pods.
    #[serde(with = "exact")]
    pub tie: f64,
    /// B: whole GPUs for multi-GPU pods.
    #[serde(with = "exact")]
    pub blocks: f64,
    /// Credit for blocks that are nearly whole.
    #[serde(with = "exact")]
    pub partial_blocks: f64,
    /// c: the part of the used capacity that becomes free again.
    #[serde(with = "exact")]
    pub turnover: f64,
}

/// No pod ends: found by trial on openb, as are the others.
const STAYING: PotentialWeights = PotentialWeights {
    host_demand: 1.0,
    fragments: 0.1,
    tie: 0.02,
    blocks: 0.1,
    partial_blocks: 0.0,
    turnover: 0.0,
};
/// As many pods end as arrive.
const CHANGING: PotentialWeights = PotentialWeights {
    host_demand: 0.0,
    fragments: 0.3,
    tie: 0.6,
    blocks: 0.3,
    partial_blocks: 1.0,
    turnover: 1.0,
};
/// As many pods end as get a place, and some get none.
const CROWDED: PotentialWeights = PotentialWeights {
    fragments: 1.0,
    tie: 0.1,
    ..CHANGING
};
/// This much of the demand is refused by chance.
const BY_CHANCE: f64 = 0.02;
/// From here on the capacity does not suffice for all.
const TOO_LITTLE: f64 = 0.08;
/// Pods that end per arrival in a cluster that is full and stays so; a few pods are refused, and never end.
const FULL_CHURN: f64 = 0.5;

impl PotentialWeights {
    /// Interpolates, by the number of pods that ended per arrival, and by the refused part of the demand.
    pub fn at(departures_per_arrival: f64, turned_away: f64) -> Self {
        let change = (departures_per_arrival / FULL_CHURN).clamp(0.0, 1.0);
        let crowd = ((turned_away - BY_CHANCE) / (TOO_LITTLE - BY_CHANCE)).clamp(0.0, 1.0);
        STAYING.towards(&CHANGING.towards(&CROWDED, crowd), change)
    }

    fn towards(&self, other: &Self, part: f64) -> Self {
        let between = |of: fn(&Self) -> f64| of(self) * (1.0 - part) + of(other) * part;
        Self {
            host_demand: between(|s| s.host_demand),
            fragments: between(|s| s.fragments),
            tie: between(|s| s.tie),
            blocks: between(|s| s.blocks),
            partial_blocks: between(|s| s.partial_blocks),
            turnover: between(|s| s.turnover),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_demand_has_weight_without_departures_and_fragments_with_many() {
        assert_eq!(PotentialWeights::at(0.0, 0.0), STAYING);
        assert_eq!(PotentialWeights::at(0.9, 0.01), CHANGING);
        let between = PotentialWeights::at(0.25, 0.0);
        assert!(
            between.host_demand < STAYING.host_demand && between.fragments < CHANGING.fragments
        );
    }

    #[test]
    fn excess_demand_raises_the_weight_of_fragments_only_if_pods_leave() {
        assert_eq!(PotentialWeights::at(0.9, 0.3), CROWDED);
        assert_eq!(PotentialWeights::at(0.0, 0.3), STAYING);
        let between = PotentialWeights::at(0.9, 0.05);
        assert!(between.fragments > CHANGING.fragments && between.fragments < CROWDED.fragments);
    }
}
