//! The policy file format: every setting may be missing. The JSON Schema is generated from these types, files are checked
//! against it, and editors show the doc comments.
//!
//! The [`Settings`] and [`Class`] are the core's own types. Tenants and node pools have types of the file format, because the
//! core computes with other quantities. [`parse`](super::parse) fills in what a class, a tenant or a pool leaves out.

mod pools;
mod tenants;
mod test;
mod texts;

pub(crate) use pools::{NodePool, PoolCapacitySpec};
pub(crate) use tenants::{AmountSpec, TenantSpec};
pub(crate) use test::{
    ExistingPod, Expectation, PodSketch, TestCase, TestCluster, TestGpu, TestNode,
};
pub use test::{PolicyTest, TestKind};
pub use texts::{
    Cel, Duration, LabelValue, MemoryQuantity, MigProfile, Name, NamePattern, Percentage,
    QualifiedName, Subdomain, Timestamp,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use stowage_scheduling::policy::{Class, Settings};

/// What a class of a file says; the rest is that of the class that it changes.
pub(crate) type WrittenClass = Map<String, Json>;

/// What the owner of a cluster decides about its GPUs. Everything is optional: the empty policy is a good policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("additionalProperties" = false))]
pub struct PolicySpec<C = WrittenClass> {
    /// The version of this format.
    pub api_version: Option<ApiVersion>,
    /// The kind of this file.
    #[schemars(required)]
    pub kind: Option<PolicyKind>,
    #[serde(flatten)]
    pub settings: Settings,
    /// For every class that does not set it.
    pub start_gate: Option<StartGateSpec>,
    /// Tried in this order; a pod belongs to the first class that matches. The built-in classes `dedicated`, `opportunistic`,
    /// `batch` and `serving` follow them. A class named like a built-in one changes it.
    #[schemars(with = "Option<Vec<Class>>")]
    pub classes: Option<Vec<C>>,
    /// Tenants with a share of the cluster.
    pub tenants: Option<Vec<TenantSpec>>,
    /// Kinds of nodes. A node belongs to the first pool whose selector matches.
    pub node_pools: Option<Vec<NodePool>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApiVersion {
    #[serde(rename = "stowage.dev/v1alpha1")]
    V1Alpha1,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PolicyKind {
    SchedulingPolicy,
}

/// How long a starting engine may keep others from starting on its GPU. The gate opens earlier when the engine is ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StartGateSpec {
    pub max: Option<Duration>,
}
