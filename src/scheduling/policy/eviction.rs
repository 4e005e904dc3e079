//! Preemption by eviction: what an eviction costs, how many there may be, and whether disruption budgets may be violated.

use crate::units::{Millis, setting};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Preemption by eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PreemptionRules {
    /// How long a reservation lasts beyond the victims' grace period.
    #[serde(with = "setting::Duration")]
    pub reservation_slack: Millis,
    pub costs: EvictionCosts,
    /// Whether kube-scheduler's preemption may evict more pods of a disruption budget than it allows.
    pub violate_budgets: ViolateBudgets,
    /// Whether pods that Kueue manages may be victims.
    pub kueue: KueueRule,
    pub evictions_per_minute: EvictionRates,
}

/// The cost of an eviction, in time on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct EvictionCosts {
    /// For a victim's restart.
    #[serde(with = "setting::Duration")]
    pub per_pod: Millis,
    /// The maximum cost of the work lost since a victim's last checkpoint, unless its class sets one.
    #[serde(with = "setting::Duration")]
    pub max_lost_work: Millis,
    /// For each request that a victim's engine is processing.
    #[serde(with = "setting::Duration")]
    pub per_request: Millis,
    /// For this long an eviction makes the next one from the same owner more expensive.
    #[serde(with = "setting::Duration")]
    pub again_within: Millis,
}

/// Whether kube-scheduler's preemption may violate a disruption budget. Stowage's own planner never does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ViolateBudgets {
    #[default]
    Never,
    /// Only if no other set of victims frees enough on any node.
    WhenNothingElse,
}

/// Whether pods that Kueue manages may be victims.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KueueRule {
    /// Never: preemption among them is Kueue's own.
    #[default]
    HandsOff,
    /// Like any other pod of their class, and all pods of a Workload together. The Workload stays admitted: the pods that replace
    /// them wait for GPUs inside the quota that it has.
    EvictPods,
}

/// What happens to pods with conflicting allocations: a GPU was allocated twice, or one that is exclusive is shared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ConflictRule {
    /// They are counted and reported, and stay.
    #[default]
    Report,
    /// A pod that has not started is evicted, within `evictionsPerMinute`, if the records of the Bindings prove the conflict. If
    /// all have started, they stay.
    EvictUnstarted,
}

/// What happens to a pod that uses more VRAM than it was granted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OveruseRule {
    /// It gets an Event and is counted, and stays.
    #[default]
    Report,
    /// Its owner is told after `overuseAfter`, and it is evicted as long after that, within `evictionsPerMinute`.
    Evict,
}

/// How many pods may be evicted within a minute, by Stowage itself or by the scheduler because Stowage chose them. A set of
/// pods that is larger than a limit is evicted alone, in a minute without any other eviction there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct EvictionRates {
    pub cluster: u32,
    /// On one node.
    pub node: u32,
    /// One tenant's pods. If the policy has tenants, pods without a tenant count as one tenant's.
    pub tenant: u32,
}

impl Default for PreemptionRules {
    /// Half a minute lets the driver release the memory and kube-scheduler retry the pod.
    fn default() -> Self {
        Self {
            reservation_slack: Millis::seconds(30),
            costs: EvictionCosts::default(),
            violate_budgets: ViolateBudgets::default(),
            kueue: KueueRule::default(),
            evictions_per_minute: EvictionRates::default(),
        }
    }
}

impl Default for EvictionCosts {
    /// A minute for a restart, and an hour of work: a pod that checkpoints less often can afford to lose it. A request takes a
    /// second to compute again. After an eviction other pods are preferred as victims for an hour.
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
    /// More than a cluster needs in normal operation, and few enough to stop a faulty policy before it evicts every pod.
    fn default() -> Self {
        Self {
            cluster: 60,
            node: 10,
            tenant: 30,
        }
    }
}
