//! What the planner does of itself, as it is written.

use super::{Duration, Percentage};
use crate::scheduling::policy::{GroupPlacement, WhenBroken};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Pods that are placed before the scheduler sees them, groups, and evictions that no pod asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PlanningSpec {
    /// How long a pod stays behind the gate `stowage.dev/plan` without a place before the scheduler gets to see it.
    pub gated_at_most: Option<Duration>,
    pub groups: Option<Groups>,
    pub pressure: Option<PressureSpec>,
    pub consolidation: Option<ConsolidationSpec>,
}

/// Pods that are of use only together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Groups {
    /// How close together they go.
    pub placement: Option<GroupPlacement>,
    /// What becomes of those that are bound when others of their group could not be bound in time.
    pub when_broken: Option<WhenBroken>,
}

/// Preemptible pods leave a GPU whose engine is this busy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PressureSpec {
    /// Left out: yes.
    pub enabled: Option<bool>,
    /// How full an engine's KV cache is.
    pub kv_cache: Option<PercentageThreshold>,
    /// How many requests wait.
    pub queue: Option<CountThreshold>,
    /// How long it lasts before anyone leaves, and before the next leaves.
    pub lasts: Option<Duration>,
}

/// Two figures, so that it does not begin and end with each report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PercentageThreshold {
    /// At this or more it begins.
    pub from: Option<Percentage<100>>,
    /// At this or less it is over.
    pub to: Option<Percentage<100>>,
}

/// Two figures, so that it does not begin and end with each report.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CountThreshold {
    /// At this or more it begins.
    pub from: Option<u32>,
    /// At this or less it is over.
    pub to: Option<u32>,
}

/// Preemptible pods are evicted to run elsewhere where that lets a pod fit that could not.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConsolidationSpec {
    /// Left out: no.
    pub enabled: Option<bool>,
    /// What a pod that fits is worth, in time on its GPUs. Moves that cost more are not made.
    pub gain: Option<Duration>,
}
