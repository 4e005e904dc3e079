//! A policy as it is written: every setting may be missing. These types are the format: the JSON Schema is made from
//! them, files are checked against that schema, and their comments are what an editor shows.
//!
//! Nothing here decides anything. What is missing gets its default in [`parse`](super::lower).

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

/// What the owner of a cluster decides about its GPUs. Everything may be left out: the empty policy is a good policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PolicySpec {
    /// Which version of this format the file is written in.
    pub api_version: Option<ApiVersion>,
    /// What the file is.
    pub kind: Option<PolicyKind>,
    /// Whether decisions are put into force or only recorded and counted.
    pub mode: Option<Mode>,
    pub headroom: Option<HeadroomSpec>,
    pub telemetry: Option<Telemetry>,
    pub loading: Option<Loading>,
    /// For every class that does not say otherwise.
    pub start_gate: Option<StartGateSpec>,
    pub scoring: Option<Scoring>,
    pub packing: Option<PackingSpec>,
    pub preemption: Option<Preemption>,
    /// What becomes of pods of which the continuous audit finds that their promises of one GPU cannot all be kept.
    pub conflicts: Option<ConflictRule>,
    pub planning: Option<PlanningSpec>,
    /// Tried in this order; the first that matches takes the pod. The built-in classes `dedicated`, `opportunistic`,
    /// `batch` and `serving` stand behind them. One named like a built-in class changes that.
    pub classes: Option<Vec<ClassSpec>>,
    /// Who has a part of the cluster of its own.
    pub tenants: Option<Vec<TenantSpec>>,
    /// Kinds of nodes. A node belongs to the first whose selector matches.
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
