//! The limit because of which pods are not evicted for another one now, as a figure of a reason.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What one limit of `preemption.evictionsPerMinute` counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvictionScope {
    Cluster,
    Tenant,
    Node,
}

/// The limit because of which a set of pods is not evicted now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EvictionLimit {
    pub scope: EvictionScope,
    pub per_minute: u32,
    pub because: LimitedBecause,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LimitedBecause {
    /// Others were evicted within the minute.
    UsedUp,
    /// The set is larger than the limit, and the minute is not empty.
    SetIsLarger,
    /// A pod of the same or higher priority waits for an empty minute, because its set is larger than the limit.
    Reserved,
}

impl EvictionLimit {
    /// Whether it must wait for a minute without other evictions: the set is larger than the limit.
    pub(crate) fn needs_empty_minute(&self) -> bool {
        self.because == LimitedBecause::SetIsLarger
    }
}

impl fmt::Display for EvictionLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (field, what) = match self.scope {
            EvictionScope::Cluster => ("cluster", "in the cluster"),
            EvictionScope::Tenant => ("tenant", "of one tenant's pods"),
            EvictionScope::Node => ("node", "on one node"),
        };
        let limit = format!(
            "{} a minute {what} (preemption.evictionsPerMinute.{field})",
            self.per_minute
        );
        match self.because {
            LimitedBecause::UsedUp => {
                write!(
                    f,
                    "the eviction allowance of this minute is used up: {limit}"
                )
            }
            LimitedBecause::SetIsLarger => write!(
                f,
                "more pods have to be evicted at once than the eviction allowance of {limit}; they are evicted in a minute in \
                 which nothing else is evicted there"
            ),
            LimitedBecause::Reserved => write!(
                f,
                "the eviction allowance of {limit} is reserved for another pod, which needs more than one minute's"
            ),
        }
    }
}
