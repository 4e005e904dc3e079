//! Settings that hold for the whole cluster.

use super::{Duration, Percentage, Speed};
use crate::scheduling::policy::{ExpiredRule, LearningMode, PackingPolicy, ViolateBudgets};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The share of every GPU that is never handed out: what CUDA contexts and fragmentation take beyond what engines ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HeadroomSpec {
    /// Of every GPU that `models` says nothing of.
    pub default: Option<Percentage<90>>,
    /// A part of a GPU model's name, in any case, to its headroom. The longest that matches wins.
    pub models: Option<BTreeMap<String, Percentage<90>>>,
}

/// How far the agents' readings are believed as they age.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Telemetry {
    /// Younger than this, a reading is used as it is.
    pub fresh: Option<Duration>,
    /// Younger than this, the books decide, less `margin`. Older, it has expired.
    pub stale: Option<Duration>,
    /// The part of a GPU that nobody is promised while nobody sees what is on it.
    pub margin: Option<Percentage<90>>,
    /// What to do with a node whose agent has fallen silent.
    pub expired: Option<ExpiredRule>,
}

/// How fast weights come to a GPU, to estimate when an engine will be ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Loading {
    /// From a registry or object store to the node's disk.
    pub network: Option<Speed>,
    /// From the node's disk.
    pub disk: Option<Speed>,
    /// From the kernel's page cache.
    pub page_cache: Option<Speed>,
    /// What an engine's start takes beside loading.
    pub init: Option<Duration>,
}

/// How long an engine that starts may keep others from starting on its GPU. The gate opens earlier when it is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StartGateSpec {
    pub at_most: Option<Duration>,
}

/// How fitting nodes are put in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Scoring {
    /// How many nodes a filter's answer passes on.
    #[schemars(range(min = 1, max = 256))]
    pub shortlist: Option<u16>,
    /// How long other pods are steered around GPUs that were just offered to someone.
    pub soft_reservation_lifetime: Option<Duration>,
    pub weights: Option<WeightsSpec>,
}

/// What counts how much when nodes are compared. Only the proportions matter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WeightsSpec {
    /// Keep what is free useful for the pods to come; see `packing`.
    #[schemars(range(min = 0, max = 1000))]
    pub packing: Option<u16>,
    /// Prefer GPUs whose engines have KV cache to spare.
    #[schemars(range(min = 0, max = 1000))]
    pub kv_headroom: Option<u16>,
    /// Prefer nodes where the model is ready soonest.
    #[schemars(range(min = 0, max = 1000))]
    pub time_to_ready: Option<u16>,
    /// Have few others on the chosen GPUs.
    #[schemars(range(min = 0, max = 1000))]
    pub interference: Option<u16>,
    /// Give a pod GPUs that reach each other over NVLink.
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
    /// What makes one place fill the cluster better than another.
    pub policy: Option<PackingPolicy>,
    /// Whether what free VRAM is worth follows the pods that come.
    pub learning: Option<LearningMode>,
    /// How many of the last pods count as the demand to come.
    #[schemars(range(min = 100, max = 10000))]
    pub window: Option<u16>,
}

/// Making room by eviction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Preemption {
    /// How long freed room is held beyond the victims' grace period.
    pub reservation_slack: Option<Duration>,
    pub costs: Option<Costs>,
    /// Whether the scheduler's preemption may evict more pods of a disruption budget than it allows.
    pub violate_budgets: Option<ViolateBudgets>,
    pub evictions_per_minute: Option<EvictionRatesSpec>,
}

/// How many pods may be evicted within a minute, by Stowage itself or by the scheduler because Stowage named them. A set of pods
/// that is larger than a limit is evicted alone, in a minute without any other eviction there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EvictionRatesSpec {
    pub cluster: Option<u32>,
    /// On one node.
    pub node: Option<u32>,
    /// Of one tenant's pods. Where the policy has tenants, pods that belong to none count as one tenant's.
    pub tenant: Option<u32>,
}

/// What an eviction is taken to cost, in time on a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Costs {
    /// For a victim's restart.
    pub per_pod: Option<Duration>,
    /// The most that work lost since a victim's last checkpoint counts, where its class says nothing else.
    pub work_at_most: Option<Duration>,
    /// For each request that a victim's engine works on.
    pub per_request: Option<Duration>,
    /// For so long an eviction makes the next one from the same owner dearer.
    pub again_within: Option<Duration>,
}
