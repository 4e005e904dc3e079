//! Classes: which pods there are, and how each is treated.

use super::{Cel, Duration, LabelValue, Name, Percentage, QualifiedName, Subdomain};
use crate::scheduling::policy::Protection;
use crate::scheduling::vocabulary::demand::Sharing;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Pods that are treated alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClassSpec {
    /// Shown in every decision and metric.
    pub name: Name,
    /// Which pods belong to it. Default: all that no earlier class has.
    #[serde(rename = "match")]
    pub matches: Option<MatchSpec>,
    /// Whether its pods run an engine that profiles GPU memory at its start. Two that do so at the same time break each other,
    /// so they start one by one.
    pub engine: Option<bool>,
    /// Classes it shares a GPU with, if they allow it too. Default: all; `[]`: none.
    pub may_share_with: Option<Vec<Name>>,
    pub limits: Option<EngineLimitsSpec>,
    /// How long one of its engines may keep others from starting on its GPU.
    pub start_gate: Option<KeptRange>,
    /// Whether pods of higher priority may evict its pods.
    pub preemptible: Option<bool>,
    /// How long a pod runs before it may be evicted.
    pub min_runtime: Option<Duration>,
    /// How long its pods need to finish beyond their grace period.
    pub drain_time: Option<Duration>,
    /// Whether `karpenter.sh/do-not-disrupt: "true"` protects its pods from eviction. Any user who can annotate the pod can set
    /// this.
    pub do_not_disrupt: Option<Protection>,
    /// Whether disruption budgets protect its pods from eviction. Any user who can create a budget in the pod's namespace can
    /// use this.
    pub disruption_budgets: Option<Protection>,
    /// The maximum cost of the work that one of its pods loses since its last checkpoint.
    pub max_lost_work: Option<Duration>,
}

/// Which pods: all given conditions must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MatchSpec {
    /// In any of these.
    pub namespaces: Option<Vec<Name>>,
    /// With all of these.
    #[schemars(extend("propertyNames" = {"format": "qualified-name"}))]
    pub labels: Option<BTreeMap<String, LabelValue>>,
    /// With any of these.
    pub priority_classes: Option<Vec<Subdomain>>,
    pub priority: Option<PriorityRange>,
    /// With a container that requests any of these.
    pub resources: Option<Vec<QualifiedName>>,
    /// Whether the pod requires exclusive GPUs.
    pub sharing: Option<Sharing>,
    /// A condition in CEL over `pod`: `namespace`, `labels`, `priority`, `priorityClass`, `resources`, `gpus`, `vram` and
    /// `kvCache` in MiB, `exclusive`, `model`, `serviceAccount`.
    #[schemars(length(max = 1024))]
    pub expression: Option<Cel>,
}

/// Inclusive at both ends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PriorityRange {
    pub min: Option<i32>,
    pub max: Option<i32>,
}

/// The maximum load of the engines on a GPU for a pod of this class to be placed there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineLimitsSpec {
    /// Maximum KV cache usage.
    pub kv_cache: Option<Percentage<100>>,
    /// Maximum number of waiting requests.
    pub queue: Option<u32>,
}

/// Bounds of the start gate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeptRange {
    /// It stays closed at least this long, however soon the engine is ready.
    pub min: Option<Duration>,
    /// It opens at the latest then, whatever the engine does.
    pub max: Option<Duration>,
}
