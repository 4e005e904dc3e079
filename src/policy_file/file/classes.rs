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
    /// Which pods it takes. Left out: all that reach it.
    #[serde(rename = "match")]
    pub matches: Option<MatchSpec>,
    /// Whether its pods run an engine that profiles GPU memory at its start. Two that do so at once break each other, so
    /// they start one by one.
    pub engine: Option<bool>,
    /// Classes it shares a GPU with, if they do too. Left out: all; `[]`: none.
    pub may_share_with: Option<Vec<Name>>,
    pub limits: Option<EngineLimitsSpec>,
    /// How long one of its engines may keep others from starting on its GPU.
    pub start_gate: Option<KeptRange>,
    /// Whether pods of higher priority may take its pods' place.
    pub preemptible: Option<bool>,
    /// How long a pod runs before it may be evicted.
    pub min_runtime: Option<Duration>,
    /// How long its pods need to finish beyond their grace period.
    pub drain_time: Option<Duration>,
    /// Whether `karpenter.sh/do-not-disrupt: "true"` keeps its pods from being evicted. Whoever may annotate a pod may say so.
    pub do_not_disrupt: Option<Protection>,
    /// Whether disruption budgets keep its pods from being evicted. Whoever may create a budget in a pod's namespace may say so.
    pub disruption_budgets: Option<Protection>,
    /// The most that work counts which one of its pods loses since its last checkpoint.
    pub lost_work_at_most: Option<Duration>,
}

/// Which pods: all that is said must hold.
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
    /// With a container that asks for any of these.
    pub resources: Option<Vec<QualifiedName>>,
    /// Whether the pod wants its GPUs to itself.
    pub sharing: Option<Sharing>,
    /// A condition in CEL over `pod`: `namespace`, `labels`, `priority`, `priorityClass`, `resources`, `gpus`, `vram` and
    /// `kvCache` in MiB, `exclusive`, `model`, `serviceAccount`.
    #[schemars(length(max = 1024))]
    pub expression: Option<Cel>,
}

/// Both ends belong to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PriorityRange {
    pub at_least: Option<i32>,
    pub at_most: Option<i32>,
}

/// How busy engines on a GPU may be for a pod of this class to join them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EngineLimitsSpec {
    /// How full their KV cache may be.
    pub kv_cache: Option<Percentage<100>>,
    /// How many requests may wait.
    pub queue: Option<u32>,
}

/// Bounds of the start gate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeptRange {
    /// It stays closed that long, however soon the engine is ready.
    pub at_least: Option<Duration>,
    /// It opens then, whatever the engine does.
    pub at_most: Option<Duration>,
}
