//! The planner's settings in the file format.

use super::{Duration, Percentage};
use crate::scheduling::policy::{GroupPlacement, WhenIncomplete};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Placement of gated pods and groups, and evictions that serve no pending pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PlanningSpec {
    /// How long a pod that cannot be placed stays behind the gate `stowage.dev/plan` before the scheduler sees it.
    pub max_gated_time: Option<Duration>,
    pub groups: Option<Groups>,
    pub pressure: Option<PressureSpec>,
    pub consolidation: Option<ConsolidationSpec>,
}

/// Pods that are useful only together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Groups {
    /// How close together they are placed.
    pub placement: Option<GroupPlacement>,
    /// What happens to the bound pods of a group if the others could not be bound in time.
    pub when_incomplete: Option<WhenIncomplete>,
}

/// Preemptible pods are evicted from a GPU whose engine is this busy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PressureSpec {
    /// Default: yes.
    pub enabled: Option<bool>,
    /// An engine's KV cache usage.
    pub kv_cache: Option<PercentageThreshold>,
    /// Number of waiting requests.
    pub queue: Option<CountThreshold>,
    /// How long the pressure must last before a pod is evicted, and before the next one is.
    pub evict_after: Option<Duration>,
}

/// Two thresholds, so that it does not begin and end with each report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PercentageThreshold {
    /// At this value or more it begins.
    pub high: Option<Percentage<100>>,
    /// At this value or less it ends.
    pub low: Option<Percentage<100>>,
}

/// Two thresholds, so that it does not begin and end with each report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CountThreshold {
    /// At this value or more it begins.
    pub high: Option<u32>,
    /// At this value or less it ends.
    pub low: Option<u32>,
}

/// Preemptible pods are evicted to run elsewhere if that makes a pod fit that did not fit before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConsolidationSpec {
    /// Default: no.
    pub enabled: Option<bool>,
    /// The value of making a pod fit, in time on its GPUs. Moves that cost more are not made.
    pub gain: Option<Duration>,
}
