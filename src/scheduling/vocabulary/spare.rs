//! Spare GPUs: such as are kept wholly free for classes that are not preemptible. A policy has rules for them; here are sets of
//! rules, and how many free GPUs count for each.

use serde::{Deserialize, Serialize};

/// The most rules that a policy may have: sets of them are masks on every GPU.
pub const MAX_SPARE_RULES: usize = 16;

/// A set of a policy's rules, by their index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SpareSet(u16);

/// Number of wholly free GPUs that count for each rule, by its index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SpareCounts([u32; MAX_SPARE_RULES]);

impl SpareSet {
    pub const NONE: Self = Self(0);

    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    pub fn contains(self, rule: usize) -> bool {
        rule < MAX_SPARE_RULES && self.0 >> rule & 1 == 1
    }

    pub fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl FromIterator<usize> for SpareSet {
    /// Indices beyond [`MAX_SPARE_RULES`] are left out.
    fn from_iter<I: IntoIterator<Item = usize>>(rules: I) -> Self {
        let rules = rules.into_iter().filter(|rule| *rule < MAX_SPARE_RULES);
        Self(rules.fold(0, |set, rule| set | 1 << rule))
    }
}

impl SpareCounts {
    pub fn get(&self, rule: usize) -> u32 {
        self.0.get(rule).copied().unwrap_or(0)
    }

    /// Counts a free GPU for these rules.
    pub fn add(&mut self, rules: SpareSet) {
        for (rule, count) in self.0.iter_mut().enumerate() {
            *count += u32::from(rules.contains(rule));
        }
    }

    /// Stops counting a free GPU for these rules.
    pub(crate) fn remove(&mut self, rules: SpareSet) {
        for (rule, count) in self.0.iter_mut().enumerate() {
            *count = count.saturating_sub(u32::from(rules.contains(rule)));
        }
    }

    /// Puts what a node counts now in place of what it counted before.
    pub fn replace(&mut self, before: &Self, now: &Self) {
        for (rule, count) in self.0.iter_mut().enumerate() {
            *count = *count - before.0[rule] + now.0[rule];
        }
    }
}
