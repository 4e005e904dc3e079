//! Status of the policy for operators: its source, since when it is current, and which later change was rejected. No decision
//! reads it, and it reads no files.

use parking_lot::Mutex;
use std::sync::Arc;
use stowage_scheduling::units::Moment;

/// Source of the built-in policy, if no path was given.
const BUILT_IN: &str = "built in";

#[derive(Debug)]
pub struct SharedPolicyStatus {
    state: Mutex<PolicyStatus>,
}

/// The status at one moment.
#[derive(Debug, Clone)]
pub struct PolicyStatus {
    /// The path of the policy's files.
    pub source: Arc<str>,
    pub in_force_since: Moment,
    pub rejected: Option<RejectedPolicy>,
}

/// A change of the policy's files that was rejected.
#[derive(Debug, Clone)]
pub struct RejectedPolicy {
    pub since: Moment,
    /// The first problem and its place, on one line.
    pub headline: Arc<str>,
    /// All problems, on several lines.
    pub problems: Arc<str>,
}

impl SharedPolicyStatus {
    pub fn new(now: Moment) -> Self {
        let status = PolicyStatus {
            source: BUILT_IN.into(),
            in_force_since: now,
            rejected: None,
        };
        Self {
            state: Mutex::new(status),
        }
    }

    pub fn get(&self) -> PolicyStatus {
        self.state.lock().clone()
    }

    pub(crate) fn set_source(&self, source: &str) {
        self.state.lock().source = source.into();
    }

    pub fn set_in_force(&self, now: Moment) {
        self.state.lock().in_force_since = now;
    }

    /// Sets the policy change that was rejected; `None` if the files are valid now.
    pub(crate) fn set_rejected(&self, rejected: Option<RejectedPolicy>) {
        self.state.lock().rejected = rejected;
    }
}
