//! Making room by eviction, as the owner wants it: what an eviction is taken to cost, how many there may be, and whether
//! disruption budgets bend.

use crate::units::Millis;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the eviction of a pod costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionCosts {
    /// On one GPU, for stopping and starting again.
    pub per_pod: Millis,
    /// The most that the work it loses counts for, on its part of its GPUs, where its class says nothing else.
    pub max_lost_work: Millis,
    /// On one GPU, for each request that its engine works on.
    pub per_request: Millis,
    /// For so long an eviction makes the next one from the same owner dearer.
    pub again_within: Millis,
}

/// Whether the scheduler's preemption may overdraw a disruption budget. Stowage's own planner never does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ViolateBudgets {
    #[default]
    Never,
    /// Only where no other set of victims makes room on any node.
    WhenNothingElse,
}

/// What becomes of pods whose promises cannot all be kept: one GPU was promised twice, or one that is exclusive is shared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ConflictRule {
    /// They are counted and told, and stay.
    #[default]
    Report,
    /// A pod that has not started is evicted, within `evictionsPerMinute`, where the records of the Bindings prove the
    /// conflict. Where all have started, they stay.
    EvictUnstarted,
}

/// The most pods that are evicted within a minute, by Stowage itself or by the scheduler because Stowage named them. A set of pods
/// that is larger than a limit is evicted alone: where nothing else was evicted within the minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionRates {
    pub cluster: u32,
    /// On one node.
    pub node: u32,
    /// Of one tenant. Where there are tenants, pods that have none count as one tenant's; where there are none, this limits nothing.
    pub tenant: u32,
}

impl Default for EvictionCosts {
    /// A minute to come and go, and an hour of work: who checkpoints less often than that does not mind losing it. A request
    /// takes a second to be computed again. Who was evicted is left in peace for an hour, if others do as well.
    fn default() -> Self {
        Self {
            per_pod: Millis::seconds(60),
            max_lost_work: Millis::seconds(3600),
            per_request: Millis::seconds(1),
            again_within: Millis::seconds(3600),
        }
    }
}

impl Default for EvictionRates {
    /// More than any cluster needs in peace, and a halt to a policy gone wrong before everyone is evicted.
    fn default() -> Self {
        Self { cluster: 60, node: 10, tenant: 30 }
    }
}
