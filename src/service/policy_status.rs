//! Where the policy in force comes from, since when, and what was refused after it: for operators to read. No decision
//! reads it, and it reads no files.

use crate::units::Moment;
use parking_lot::Mutex;
use std::sync::Arc;

/// Where a policy comes from whose owner named none.
const BUILT_IN: &str = "built in";

#[derive(Debug)]
pub struct PolicyStanding {
    state: Mutex<PolicyStatus>,
}

/// What stands at one moment.
#[derive(Debug, Clone)]
pub struct PolicyStatus {
    /// The path of the policy's files.
    pub source: Arc<str>,
    pub in_force_since: Moment,
    pub refused: Option<RefusedPolicy>,
}

/// A change of the policy's files that was not taken over.
#[derive(Debug, Clone)]
pub struct RefusedPolicy {
    pub since: Moment,
    /// One line: the first thing that is wrong, and where.
    pub headline: Arc<str>,
    /// All that is wrong, over several lines.
    pub problems: Arc<str>,
}

impl PolicyStanding {
    pub fn new(now: Moment) -> Self {
        let standing = PolicyStatus { source: BUILT_IN.into(), in_force_since: now, refused: None };
        Self { state: Mutex::new(standing) }
    }

    pub fn get(&self) -> PolicyStatus {
        self.state.lock().clone()
    }

    pub fn set_source(&self, source: &str) {
        self.state.lock().source = source.into();
    }

    pub fn set_in_force(&self, now: Moment) {
        self.state.lock().in_force_since = now;
    }

    /// What is wrong with the files now; `None` if nothing is.
    pub fn set_refused(&self, refused: Option<RefusedPolicy>) {
        self.state.lock().refused = refused;
    }
}
