//! The policy file format: every setting may be missing. The JSON Schema is generated from these types, files are checked
//! against it, and editors show the doc comments.
//!
//! Nothing here decides anything. [`parse`](super::parse) fills in defaults.

mod classes;
mod planning;
mod pools;
mod settings;
mod tenants;
mod test;
mod texts;

pub use classes::{ClassSpec, EngineLimitsSpec, KeptRange, MatchSpec, PriorityRange};
pub use planning::{
    ConsolidationSpec, CountThreshold, Groups, PercentageThreshold, PlanningSpec, PressureSpec,
};
pub use pools::{NodePool, PoolCapacitySpec};
pub use settings::{
    Costs, EvictionRatesSpec, HeadroomSpec, Loading, PackingSpec, Preemption, Scoring, StartGateSpec,
    Telemetry, WeightsSpec,
};
pub use tenants::{AmountSpec, TenantSpec};
pub use test::{
    ExistingPod, Expectation, PodSketch, PolicyTest, TestCase, TestCluster, TestGpu, TestKind, TestNode,
};
pub use texts::{
    Cel, Duration, LabelValue, MemoryQuantity, MigProfile, Name, Percentage, QualifiedName, Speed, Subdomain,
};

use crate::scheduling::policy::{ConflictRule, Mode};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the owner of a cluster decides about its GPUs. Everything is optional: the empty policy is a good policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PolicySpec {
    /// The version of this format.
    pub api_version: Option<ApiVersion>,
    /// The kind of this file.
    pub kind: Option<PolicyKind>,
    /// Whether decisions are enforced, or only recorded and counted.
    pub mode: Option<Mode>,
    pub headroom: Option<HeadroomSpec>,
    pub telemetry: Option<Telemetry>,
    pub loading: Option<Loading>,
    /// For every class that does not set it.
    pub start_gate: Option<StartGateSpec>,
    pub scoring: Option<Scoring>,
    pub packing: Option<PackingSpec>,
    pub preemption: Option<Preemption>,
    /// What happens to pods for which the continuous audit finds conflicting allocations of one GPU.
    pub conflicts: Option<ConflictRule>,
    pub planning: Option<PlanningSpec>,
    /// Tried in this order; a pod belongs to the first class that matches. The built-in classes `dedicated`, `opportunistic`,
    /// `batch` and `serving` follow them. A class named like a built-in one changes it.
    pub classes: Option<Vec<ClassSpec>>,
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
