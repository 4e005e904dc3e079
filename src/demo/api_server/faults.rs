//! Faults a test orders in advance: the next bindings, evictions, writes of pods or status, token reviews, or lists of
//! disruption budgets go wrong.

use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// What can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    Binding,
    Eviction,
    /// A patch or update of a pod itself.
    Pod,
    /// A patch or update of `pods/…/status`.
    PodStatus,
    /// A patch or update of `nodes/…/status`.
    NodeStatus,
    TokenReview,
    ListBudgets,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Written at once, answered after this long: the client that gave up does not know it succeeded.
    AnswersLate(Duration),
    /// 500, nothing written.
    Fails,
    /// 409, nothing written.
    Conflicts,
    /// 403, nothing written.
    Forbids,
    /// 429 that names no time, nothing written.
    TooMany,
    /// Nothing written, and no answer until the server stops.
    Hangs,
}

/// Faults still to be met, first ordered first.
#[derive(Debug, Default)]
pub struct Faults(Mutex<BTreeMap<Operation, VecDeque<Fault>>>);

impl Faults {
    /// Makes the next `count` requests of this kind go wrong, after those ordered before.
    pub fn next(&self, operation: Operation, count: usize, fault: Fault) {
        self.0.lock().entry(operation).or_default().extend(std::iter::repeat_n(fault, count));
    }

    pub fn clear(&self) {
        self.0.lock().clear();
    }

    pub(super) fn take(&self, operation: Operation) -> Option<Fault> {
        self.0.lock().get_mut(&operation)?.pop_front()
    }
}
