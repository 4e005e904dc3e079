//! Cases that live beside a policy: a small cluster in shorthand, pods, and what is expected of them.

use super::{
    ApiVersion, Duration, LabelValue, MemoryQuantity, MigProfile, Name, Percentage, QualifiedName, Subdomain,
};
use crate::scheduling::vocabulary::gpu::Health;
use crate::scheduling::vocabulary::model_tier::ModelTier;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Cases of a policy, run by `stowage policy test`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PolicyTest {
    /// Which version of this format the file is written in.
    pub api_version: Option<ApiVersion>,
    /// What the file is.
    pub kind: TestKind,
    pub cluster: Option<TestCluster>,
    pub cases: Option<Vec<TestCase>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TestKind {
    PolicyTest,
}

/// The nodes and pods that are there before a case's pod comes. Each case begins with it anew.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TestCluster {
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
    /// What a device plugin offers there, such as `nvidia.com/gpu: 8`. Its pods ask for it under `resources`, as many as
    /// their `gpus`.
    #[schemars(extend("propertyNames" = {"format": "qualified-name"}))]
    pub plugin: Option<BTreeMap<String, u32>>,
    /// Models to where their weights are on the node.
    pub models: Option<BTreeMap<String, ModelTier>>,
}

/// One GPU, or `count` alike.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TestGpu {
    /// Its product name.
    pub model: Option<String>,
    pub memory: Option<MemoryQuantity>,
    /// How many like it. Left out: one.
    #[schemars(range(min = 1, max = 64))]
    pub count: Option<u16>,
    /// The profile, if this is a MIG slice.
    pub mig: Option<MigProfile>,
    /// How full the engines' KV cache on it is.
    pub kv_cache: Option<Percentage<100>>,
    /// How many requests wait for engines on it.
    pub queue: Option<u32>,
    /// What an agent measured on it. Left out: what its pods were promised.
    pub used: Option<MemoryQuantity>,
    pub health: Option<Health>,
}

/// What a pod shows of itself.
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
    /// Resources that its containers ask for.
    pub resources: Option<Vec<QualifiedName>>,
    /// The memory it asks for, over all its GPUs.
    pub vram: Option<MemoryQuantity>,
    pub gpus: Option<u32>,
    /// Whether it wants its GPUs to itself.
    pub exclusive: Option<bool>,
    pub model: Option<String>,
    pub kv_cache: Option<MemoryQuantity>,
    /// How long it is given to end.
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
    /// Which of the node's GPUs, by index; none where a device plugin hands them out.
    #[serde(default)]
    pub on: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TestCase {
    /// A sentence that says what holds.
    pub name: String,
    pub pod: PodSketch,
    pub expect: Expectation,
}

/// What is left out is not checked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Expectation {
    pub class: Option<Name>,
    pub tenant: Option<Name>,
    /// Nodes that fit, best first. `[]`: none.
    pub nodes: Option<Vec<Subdomain>>,
    /// On the best node, by index.
    pub gpus: Option<Vec<u32>>,
    /// Nodes that do not fit, each to the reason's code.
    pub refused: Option<BTreeMap<String, String>>,
    /// Pods that would have to leave. `[]`: none.
    pub victims: Option<Vec<Subdomain>>,
}
