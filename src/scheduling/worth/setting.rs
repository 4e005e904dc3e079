//! How much each part of the potential counts, by how many pods end.
//!
//! Where pods come and stay, a place is spoilt for good: what a node lacks of CPU will be lacking for ever. Where as many end as
//! come, everything comes free again, what counts is how much of what is free now could be used at once, and whole GPUs are
//! worth keeping. Each setting is worse than simpler policies at the other's end, so what is seen decides.

/// Factors of the potential's parts; see [`super::potential`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setting {
    /// κ: what lack of CPU and memory wastes.
    pub company: f64,
    /// f: what the pods seen lately could not use now.
    pub fragments: f64,
    /// t: what is left on the node, to settle ties.
    pub tie: f64,
    /// B: whole GPUs for pods of several.
    pub blocks: f64,
    /// Credit for blocks that are nearly whole.
    pub partial_blocks: f64,
}

/// Nobody leaves: found by trial on openb, as is the other.
const STAYING: Setting =
    Setting { company: 1.0, fragments: 0.1, tie: 0.02, blocks: 0.1, partial_blocks: 0.0 };
/// As many leave as come.
const CHANGING: Setting =
    Setting { company: 0.0, fragments: 1.0, tie: 0.1, blocks: 0.3, partial_blocks: 1.0 };
/// Of pods that come, as many end in a cluster that is full and stays so; a few are refused, and never end.
const FULL_CHURN: f64 = 0.5;

impl Setting {
    /// Between the two, by how many pods ended for each that came.
    pub fn at(departures_per_arrival: f64) -> Self {
        let change = (departures_per_arrival / FULL_CHURN).clamp(0.0, 1.0);
        let between = |part: fn(&Self) -> f64| part(&STAYING) * (1.0 - change) + part(&CHANGING) * change;
        Self {
            company: between(|s| s.company),
            fragments: between(|s| s.fragments),
            tie: between(|s| s.tie),
            blocks: between(|s| s.blocks),
            partial_blocks: between(|s| s.partial_blocks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_nobody_leaves_company_counts_and_where_many_leave_fragments_do() {
        assert_eq!(Setting::at(0.0), STAYING);
        assert_eq!(Setting::at(0.9), CHANGING);
        let between = Setting::at(0.25);
        assert!(between.company < STAYING.company && between.fragments < CHANGING.fragments);
    }
}
