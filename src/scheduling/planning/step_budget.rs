//! How much one plan may look at, and whether it has been told to stop.
//!
//! What is spent are steps, not time: the same ledger, queue and bounds give the same plan. One step is about a microsecond: a
//! look at one node, or at one branch of a search.

use std::cell::Cell;

/// What a plan keeps to. The two kinds of work have bounds of their own, so that neither is left out for the other.
#[derive(Clone, Copy)]
pub struct PlanBounds<'a> {
    /// Steps on free places and on pods to be woken; they come first.
    pub free: u64,
    /// Steps on evictions.
    pub evictions: u64,
    /// Pods that get a place, or are woken for one.
    pub places: usize,
    /// Asked at every node and every candidate. Once it says yes, the plan ends with what it has.
    pub is_stopped: &'a dyn Fn() -> bool,
}

impl PlanBounds<'static> {
    pub const NONE: Self =
        Self { free: u64::MAX, evictions: u64::MAX, places: usize::MAX, is_stopped: &|| false };
}

/// Of a placement: the hold is checked and taken, and its node looked at again.
pub(super) const PLACEMENT: u64 = 150;
/// Of a pod that is looked at, whatever comes of it.
pub(super) const POD: u64 = 2;

pub(super) struct StepBudget<'a> {
    bounds: PlanBounds<'a>,
    spent: Cell<u64>,
    is_stopped: Cell<bool>,
}

impl<'a> StepBudget<'a> {
    pub fn new(bounds: PlanBounds<'a>) -> Self {
        Self { bounds, spent: Cell::new(0), is_stopped: Cell::new(false) }
    }

    pub fn spend(&self, steps: u64) {
        self.spent.set(self.spent.get().saturating_add(steps));
    }

    /// The same, and whether to go on with the pod at hand: a bound does not end it, only being stopped does.
    pub fn goes_on(&self, steps: u64) -> bool {
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
