//! Settings for the whole cluster.

use super::{Duration, Percentage, Speed};
use crate::scheduling::policy::{ExpiredRule, LearningMode, PackingPolicy, ViolateBudgets};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The share of every GPU that is never allocated: what CUDA contexts and fragmentation use beyond the engines' requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HeadroomSpec {
    /// For every GPU that `models` does not cover.
    pub default: Option<Percentage<90>>,
    /// A part of a GPU model's name, case-insensitive, and its headroom. The longest match wins.
    pub models: Option<BTreeMap<String, Percentage<90>>>,
}

/// How far the agents' readings are trusted as they age.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Telemetry {
    /// A reading younger than this is used as it is.
    pub fresh: Option<Duration>,
    /// For a reading younger than this, the ledger is used, less `margin`. An older one has expired.
    pub stale: Option<Duration>,
    /// The share of a GPU that is not allocated without a fresh reading.
    pub margin: Option<Percentage<90>>,
    /// What to do with a node whose agent has stopped reporting.
    pub expired: Option<ExpiredRule>,
}

/// How fast weights are loaded onto a GPU, to estimate when an engine will be ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Loading {
    /// From a registry or object store to the node's disk.
    pub network: Option<Speed>,
    /// From the node's disk.
    pub disk: Option<Speed>,
    /// From the kernel's page cache.
    pub page_cache: Option<Speed>,
    /// The time that an engine's start takes besides loading.
    pub init: Option<Duration>,
}

/// How long a starting engine may keep others from starting on its GPU. The gate opens earlier when the engine is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StartGateSpec {
    pub max: Option<Duration>,
}

/// How the nodes that fit are ranked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Scoring {
    /// How many nodes filter returns.
    #[schemars(range(min = 1, max = 256))]
    pub shortlist: Option<u16>,
    /// How long other pods avoid GPUs that were just offered to a pod.
    pub soft_reservation_lifetime: Option<Duration>,
    pub weights: Option<WeightsSpec>,
}

/// Weights in the comparison of nodes. Only their proportions matter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WeightsSpec {
    /// Keep free VRAM useful for later pods; see `packing`.
    #[schemars(range(min = 0, max = 1000))]
    pub packing: Option<u16>,
    /// Prefer GPUs whose engines have KV cache to spare.
    #[schemars(range(min = 0, max = 1000))]
    pub kv_headroom: Option<u16>,
    /// Prefer nodes where the model is ready soonest.
    #[schemars(range(min = 0, max = 1000))]
    pub time_to_ready: Option<u16>,
    /// Prefer GPUs with few other pods.
    #[schemars(range(min = 0, max = 1000))]
    pub interference: Option<u16>,
    /// Prefer GPUs that reach each other over NVLink.
    #[schemars(range(min = 0, max = 1000))]
    pub topology: Option<u16>,
    /// Put pods of the same model on different nodes.
    #[schemars(range(min = 0, max = 1000))]
    pub spread: Option<u16>,
}

/// How GPUs are filled.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PackingSpec {
    /// What makes one placement better than another for the packing of the cluster.
    pub policy: Option<PackingPolicy>,
    /// Whether the value of free VRAM is learned from the pods that arrive.
    pub learning: Option<LearningMode>,
    /// How many of the latest pods count as expected demand.
    #[schemars(range(min = 100, max = 10000))]
    pub window: Option<u16>,
}

/// Preemption by eviction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Preemption {
    /// How long a reservation lasts beyond the victims' grace period.
    pub reservation_slack: Option<Duration>,
    pub costs: Option<Costs>,
    /// Whether kube-scheduler's preemption may evict more pods of a disruption budget than it allows.
    pub violate_budgets: Option<ViolateBudgets>,
    pub evictions_per_minute: Option<EvictionRatesSpec>,
}

/// How many pods may be evicted within a minute, by Stowage itself or by the scheduler because Stowage chose them. A set of
/// pods that is larger than a limit is evicted alone, in a minute without any other eviction there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EvictionRatesSpec {
    pub cluster: Option<u32>,
    /// On one node.
    pub node: Option<u32>,
    /// Of one tenant's pods. If the policy has tenants, pods without a tenant count as one tenant's.
    pub tenant: Option<u32>,
}

/// The cost of an eviction, in time on a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Costs {
    /// For a victim's restart.
    pub per_pod: Option<Duration>,
    /// The maximum cost of the work lost since a victim's last checkpoint, unless its class sets one.
    pub max_lost_work: Option<Duration>,
    /// For each request that a victim's engine is processing.
    pub per_request: Option<Duration>,
    /// For this long an eviction makes the next one from the same owner more expensive.
    pub again_within: Option<Duration>,
}
