//! How much each part of the potential counts, by how many pods end and how many never get a place.
//!
//! Where pods come and stay, a place is spoilt for good: what a node lacks of CPU will be lacking for ever. Where as many end as
//! come, everything comes free again, and whole GPUs are worth keeping for the largest: nodes are kept empty as long as there are
//! any. Where more is asked for than there is, no node stays empty; all that counts then is how much of what is free could be used
//! at once. Each setting is worse than simpler policies at the others' ends, so what is seen decides.

/// Factors of the potential's parts; see [`super::potential`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PotentialWeights {
    /// κ: what lack of CPU and memory wastes.
    pub host_demand: f64,
    /// f: what the pods seen lately could not use now.
    pub fragments: f64,
    /// t: what is left on the node. To settle ties, or, where pods end, to keep some nodes empty for the largest.
    pub tie: f64,
    /// B: whole GPUs for pods of several.
    pub blocks: f64,
    /// Credit for blocks that are nearly whole.
    pub partial_blocks: f64,
    /// c: the part of what is taken that comes free again.
    pub turnover: f64,
}

/// Nobody leaves: found by trial on openb, as are the others.
const STAYING: PotentialWeights = PotentialWeights {
    host_demand: 1.0,
    fragments: 0.1,
    tie: 0.02,
    blocks: 0.1,
    partial_blocks: 0.0,
    turnover: 0.0,
};
/// As many leave as come.
const CHANGING: PotentialWeights = PotentialWeights {
    host_demand: 0.0,
    fragments: 0.3,
    tie: 0.6,
    blocks: 0.3,
    partial_blocks: 1.0,
    turnover: 1.0,
};
/// As many leave as get a place, and not all do.
const CROWDED: PotentialWeights = PotentialWeights { fragments: 1.0, tie: 0.1, ..CHANGING };
/// Of what is asked for, so much is turned away by chance.
const BY_CHANCE: f64 = 0.02;
/// From here on there is too little for all.
const TOO_LITTLE: f64 = 0.08;
/// Of pods that come, as many end in a cluster that is full and stays so; a few are refused, and never end.
const FULL_CHURN: f64 = 0.5;

impl PotentialWeights {
    /// Between them, by how many pods ended for each that came, and by the part of what was asked for that was turned away.
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
        assert!(between.host_demand < STAYING.host_demand && between.fragments < CHANGING.fragments);
    }

    #[test]
    fn excess_demand_raises_the_weight_of_fragments_only_if_pods_leave() {
        assert_eq!(PotentialWeights::at(0.9, 0.3), CROWDED);
        assert_eq!(PotentialWeights::at(0.0, 0.3), STAYING);
        let between = PotentialWeights::at(0.9, 0.05);
        assert!(between.fragments > CHANGING.fragments && between.fragments < CROWDED.fragments);
    }
}
