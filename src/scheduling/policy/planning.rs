//! The planner: pods behind its gate, groups, engines under pressure, moves that make pods fit, and GPUs kept free.

use super::window::Window;
use crate::ids::GpuModel;
use crate::units::{Bytes, Millis, Percent, setting};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Placement of gated pods and groups, and evictions that serve no pending pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Planning {
    /// How long a pod that cannot be placed stays behind the gate `stowage.dev/plan` before the scheduler sees it.
    #[serde(with = "setting::Duration")]
    pub max_gated_time: Millis,
    /// The profiles of kube-scheduler that ask Stowage: pods of other schedulers stay behind the gate.
    #[schemars(extend("items" = {"format": "subdomain", "type": "string"}))]
    pub scheduler_names: Vec<String>,
    pub groups: GroupRules,
    // `None`: no pod is evicted because an engine is busy.
    #[serde(with = "setting::Switch::<PressureRules, true>")]
    pub pressure: Option<PressureRules>,
    // `None`: no pod is moved.
    #[serde(with = "setting::Switch::<Consolidation, false>")]
    pub consolidation: Option<Consolidation>,
    /// GPUs that stay free of preemptible pods.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub spare: Vec<SpareRule>,
    pub lending: LendingRules,
}

/// When an engine of a class with `sleeping: lend` or `unused: lend` lends, and how much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct LendingRules {
    /// How long an engine sleeps before it lends. Each loan that it ended within the last hour doubles this.
    #[serde(with = "setting::Duration")]
    pub after: Millis,
    /// VRAM on each GPU that it keeps beyond what it uses.
    #[serde(with = "setting::MemoryQuantity")]
    pub margin: Bytes,
    /// It gets back what it lent before it asks, when the engines that serve its model are as busy as `pressure` says.
    pub reclaim_on_load: bool,
    /// How long an engine of a class with `unused: lend` uses no more before it lends. Each loan that it ended within the last
    /// hour doubles this.
    #[serde(with = "setting::Duration")]
    pub unused_after: Millis,
    /// VRAM on each GPU that it keeps beyond what it uses and what it grew by within a minute.
    #[serde(with = "setting::MemoryQuantity")]
    pub unused_margin: Bytes,
}

/// Pods that are useful only together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct GroupRules {
    /// How close together they are placed.
    pub placement: GroupPlacement,
    /// What happens to the bound pods of a group if the others could not be bound in time.
    pub when_incomplete: WhenIncomplete,
}

/// How close together a group's pods are placed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupPlacement {
    /// Each where it is best by itself.
    #[default]
    Anywhere,
    /// On as few nodes as have enough free VRAM now.
    FewestNodes,
    /// All on GPUs of one node that reach each other over NVLink, or not at all.
    OneIsland,
}

/// What happens to a group's bound pods if the others could not be bound in time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WhenIncomplete {
    /// They stay.
    #[default]
    Keep,
    /// They are evicted: a part of a group that keeps GPUs and does no work is waste.
    Evict,
}

/// Preemptible pods are evicted from a GPU whose engine is this busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PressureRules {
    /// An engine's KV cache usage.
    pub kv_cache: PercentageThreshold,
    /// Number of waiting requests.
    pub queue: CountThreshold,
    /// How long the pressure must last before a pod is evicted, and before the next one is.
    #[serde(with = "setting::Duration")]
    pub evict_after: Millis,
}

/// Two thresholds, so that it does not begin and end with each report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PercentageThreshold {
    /// At this value or more it begins.
    #[serde(with = "setting::Percentage::<100>")]
    pub high: Percent,
    /// At this value or less it ends.
    #[serde(with = "setting::Percentage::<100>")]
    pub low: Percent,
}

/// Two thresholds, so that it does not begin and end with each report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct CountThreshold {
    /// At this value or more it begins.
    pub high: u32,
    /// At this value or less it ends.
    pub low: u32,
}

/// Preemptible pods are evicted to run elsewhere if that makes a pod fit that did not fit before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Consolidation {
    /// The value of making a pod fit, in time on its GPUs. Moves that cost more are not made.
    #[serde(with = "setting::Duration")]
    pub gain: Millis,
}

impl Default for Planning {
    /// Autoscalers check pending pods every thirty seconds or less, and see only those that the scheduler refused.
    fn default() -> Self {
        Self {
            max_gated_time: Millis::seconds(30),
            // The second is what the API server writes where a user wrote none.
            scheduler_names: ["stowage", "default-scheduler"].map(str::to_owned).into(),
            groups: GroupRules::default(),
            pressure: Some(PressureRules::default()),
            consolidation: None,
            lending: LendingRules::default(),
            spare: Vec::new(),
        }
    }
}

impl Default for LendingRules {
    /// An engine that sleeps for a minute will sleep for longer; a gibibyte is more than a CUDA context and its growth.
    fn default() -> Self {
        Self {
            after: Millis::seconds(60),
            margin: Bytes::gib(1),
            reclaim_on_load: true,
            // What an engine allocates late (graphs, longer prompts, adapters) comes with its first requests.
            unused_after: Millis::seconds(600),
            unused_margin: Bytes::gib(2),
        }
    }
}

impl Default for PressureRules {
    /// Ten reports in a row are no spike.
    fn default() -> Self {
        Self {
            kv_cache: PercentageThreshold::default(),
            queue: CountThreshold::default(),
            evict_after: Millis::seconds(10),
        }
    }
}

impl Default for PercentageThreshold {
    /// A KV cache's limits: an engine preempts its own requests when the cache is full; just before that its neighbors are evicted.
    fn default() -> Self {
        Self {
            high: const { Percent::new(95).unwrap() },
            low: const { Percent::new(80).unwrap() },
        }
    }
}

impl Default for CountThreshold {
    /// Limits of waiting requests.
    fn default() -> Self {
        Self { high: 64, low: 16 }
    }
}

impl Default for Consolidation {
    fn default() -> Self {
        Self {
            gain: Millis::seconds(3600),
        }
    }
}

/// GPUs that stay wholly free of preemptible pods, so that a pod that is not preemptible starts without an eviction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SpareRule {
    /// How many.
    #[schemars(range(min = 1, max = 1000000))]
    pub gpus: u32,
    /// A part of the GPU model's name, case-insensitive. Default: any model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String", extend("format" = "gpu-model"))]
    pub model: Option<String>,
    /// The node pool. Default: any node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String", extend("format" = "name"))]
    pub pool: Option<String>,
    /// The windows in which it holds. Default: always.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub when: Vec<Window>,
}

impl SpareRule {
    /// Whether GPUs of that model on nodes of that pool count for it.
    pub fn covers(&self, pool: Option<&str>, model: &GpuModel) -> bool {
        let is_of_pool = self
            .pool
            .as_deref()
            .is_none_or(|wanted| pool == Some(wanted));
        is_of_pool
            && self
                .model
                .as_deref()
                .is_none_or(|part| contains(model.as_str(), part))
    }
}

impl fmt::Display for SpareRule {
    /// Its GPUs: `GPUs`, `GPUs of model H100 in pool inference`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPUs")?;
        self.model
            .iter()
            .try_for_each(|model| write!(f, " of model {model}"))?;
        self.pool
            .iter()
            .try_for_each(|pool| write!(f, " in pool {pool}"))
    }
}

/// Case does not count.
fn contains(name: &str, part: &str) -> bool {
    part.is_empty()
        || name
            .as_bytes()
            .windows(part.len())
            .any(|bytes| bytes.eq_ignore_ascii_case(part.as_bytes()))
}
