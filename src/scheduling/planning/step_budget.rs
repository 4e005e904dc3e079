//! The step budget of one plan, and whether it has been told to stop.
//!
//! The budget counts steps, not time: the same ledger, queue and bounds give the same plan. One step is about a microsecond: the
//! examination of one node, or of one branch of a search.

use std::cell::Cell;

/// The bounds of a plan. The two kinds of work have separate bounds, so that neither is left out because of the other.
#[derive(Clone, Copy)]
pub struct PlanBounds<'a> {
    /// Steps for free GPUs and for pods to requeue; they come first.
    pub free_steps: u64,
    /// Steps for evictions.
    pub eviction_steps: u64,
    /// Pods that are placed, or requeued for a placement.
    pub max_placements: usize,
    /// Checked at every node and every candidate. Once it returns true, the plan ends with what it has.
    pub is_stopped: &'a dyn Fn() -> bool,
}

impl PlanBounds<'static> {
    pub const NONE: Self = Self {
        free_steps: u64::MAX,
        eviction_steps: u64::MAX,
        max_placements: usize::MAX,
        is_stopped: &|| false,
    };
}

/// Steps of one run of a service for each kind of work; a step is one to two microseconds. A run with both takes about a quarter
/// of a second at 5,000 nodes, however many pods are pending, and in proportion longer with more: there each pod needs more
/// steps, too.
pub fn steps_of_run(nodes: usize) -> u64 {
    MIN_STEPS.max(STEPS_PER_NODE * nodes as u64)
}

const MIN_STEPS: u64 = 50_000;
const STEPS_PER_NODE: u64 = 10;

/// Cost of a placement: the reservation is checked and taken, and its node examined again.
pub(super) const PLACEMENT_STEPS: u64 = 150;
/// Cost of planning a pod, whatever the result.
pub(super) const POD_STEPS: u64 = 2;

pub(super) struct StepBudget<'a> {
    bounds: PlanBounds<'a>,
    spent: Cell<u64>,
    is_stopped: Cell<bool>,
}

impl<'a> StepBudget<'a> {
    pub fn new(bounds: PlanBounds<'a>) -> Self {
        Self {
            bounds,
            spent: Cell::new(0),
            is_stopped: Cell::new(false),
        }
    }

    pub(crate) fn spend(&self, steps: u64) {
        self.spent.set(self.spent.get().saturating_add(steps));
    }

    /// Spends these steps, and says whether to continue with the current pod: only a stop ends it, a bound does not.
    pub fn spend_unless_stopped(&self, steps: u64) -> bool {
        self.spend(steps);
        if !self.is_stopped.get() && (self.bounds.is_stopped)() {
            self.is_stopped.set(true);
        }
        !self.is_stopped.get()
    }

    pub fn spent(&self) -> u64 {
        self.spent.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_steps_in_proportion_to_the_nodes_and_enough_for_few() {
        assert_eq!(
            [0, 100, 5000, 65_000].map(steps_of_run),
            [50_000, 50_000, 50_000, 650_000]
        );
    }
}
