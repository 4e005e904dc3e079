//! Test cases next to a policy: a small cluster in shorthand, pods, and the expected decisions.

use super::{
    ApiVersion, Duration, LabelValue, MemoryQuantity, MigProfile, Name, Percentage, QualifiedName,
    Subdomain, Timestamp,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::model_tier::ModelTier;

/// Cases of a policy, run by `stowage policy test`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PolicyTest {
    /// The version of this format.
    pub api_version: Option<ApiVersion>,
    /// The kind of this file.
    pub kind: TestKind,
    pub cluster: Option<TestCluster>,
    pub cases: Option<Vec<TestCase>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TestKind {
    PolicyTest,
}

/// The nodes and pods that exist before a case's pod arrives. Each case starts with a fresh copy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TestCluster {
    /// Namespaces with their labels, for selectors.
    #[schemars(extend("propertyNames" = {"format": "name"}))]
    pub namespaces: Option<BTreeMap<String, BTreeMap<String, LabelValue>>>,
    pub nodes: Option<Vec<TestNode>>,
    pub pods: Option<Vec<ExistingPod>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TestNode {
    pub name: Subdomain,
    #[schemars(extend("propertyNames" = {"format": "qualified-name"}))]
    pub labels: Option<BTreeMap<String, LabelValue>>,
    /// In order of their index on the node.
    pub gpus: Option<Vec<TestGpu>>,
    /// What a device plugin advertises there, such as `nvidia.com/gpu: 8`. Its pods request it under `resources`, as many as
    /// their `gpus`.
    #[schemars(extend("propertyNames" = {"format": "qualified-name"}))]
    pub plugin: Option<BTreeMap<String, u32>>,
    /// Models, and where their weights are on the node.
    pub models: Option<BTreeMap<String, ModelTier>>,
    /// How old its agent's last report is. Default: it has just come.
    pub report_age: Option<Duration>,
    /// Whether the driver keeps VRAM limits there, which `isolation: required` of a class asks for.
    #[serde(
        default,
        rename = "vramLimits",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub keeps_vram_limits: bool,
}

/// One GPU, or `count` alike.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TestGpu {
    /// Its product name.
    pub model: Option<String>,
    pub memory: Option<MemoryQuantity>,
    /// How many of them. Default: one.
    #[schemars(range(min = 1, max = 64))]
    pub count: Option<u16>,
    /// The profile, if this is a MIG slice.
    pub mig: Option<MigProfile>,
    /// KV cache usage of the engines on it.
    pub kv_cache: Option<Percentage<100>>,
    /// Number of requests that wait for engines on it.
    pub queue: Option<u32>,
    /// VRAM in use that an agent measured on it. Default: the VRAM allocated to its pods.
    pub used: Option<MemoryQuantity>,
    pub health: Option<Health>,
}

/// What a pod's manifest says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodSketch {
    pub name: Subdomain,
    pub namespace: Option<Name>,
    #[schemars(extend("propertyNames" = {"format": "qualified-name"}))]
    pub labels: Option<BTreeMap<String, LabelValue>>,
    pub priority: Option<i32>,
    pub priority_class: Option<Subdomain>,
    pub service_account: Option<Subdomain>,
    /// Resources that its containers request.
    pub resources: Option<Vec<QualifiedName>>,
    /// The memory it requests, over all its GPUs.
    pub vram: Option<MemoryQuantity>,
    pub gpus: Option<u32>,
    /// Whether it requires exclusive GPUs.
    pub exclusive: Option<bool>,
    pub model: Option<String>,
    pub kv_cache: Option<MemoryQuantity>,
    /// Its grace period.
    pub grace: Option<Duration>,
    /// How long it has been running.
    pub running_for: Option<Duration>,
}

/// A pod that is on a node already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExistingPod {
    #[serde(flatten)]
    pub pod: PodSketch,
    pub node: Subdomain,
    /// Which of the node's GPUs, by index; none if a device plugin allocates them.
    #[serde(default)]
    pub on: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TestCase {
    /// A sentence that says what the case shows.
    pub name: String,
    /// The time, which decides which windows of the policy are open. Default: none is.
    pub at: Option<Timestamp>,
    pub pod: PodSketch,
    pub expect: Expectation,
}

/// Fields that are left out are not checked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Expectation {
    pub class: Option<Name>,
    pub tenant: Option<Name>,
    /// Nodes that fit, best first. `[]`: none.
    pub nodes: Option<Vec<Subdomain>>,
    /// On the best node, by index.
    pub gpus: Option<Vec<u32>>,
    /// Nodes that do not fit, each with the reason's code.
    pub refused: Option<BTreeMap<String, String>>,
    /// Pods that would be evicted. `[]`: none.
    pub victims: Option<Vec<Subdomain>>,
}
