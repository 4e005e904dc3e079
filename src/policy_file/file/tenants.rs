//! Tenants: their shares of the cluster, and the use of idle shares.

use super::{MemoryQuantity, Name, NamePattern};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stowage_scheduling::policy::{Borrowing, NamespaceSelector, Reclaim};

/// Namespaces that share one part of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TenantSpec {
    /// Shown in decisions and metrics.
    pub name: Name,
    /// Namespaces whose pods count for it, or patterns: `team-*`. A namespace that is named counts for the tenant that names it,
    /// before any pattern and selector.
    pub namespaces: Option<Vec<NamePattern>>,
    /// Namespaces whose pods count for it, too, by their labels.
    pub namespace_selector: Option<NamespaceSelector>,
    /// What it can always have. Memory or GPUs that are left out are not limited.
    pub guarantee: Option<AmountSpec>,
    /// What it can never exceed.
    pub limit: Option<AmountSpec>,
    /// Whether it may use other tenants' idle shares beyond its guarantee.
    pub borrowing: Option<Borrowing>,
    /// Whether it may reclaim its guarantee from borrowers, by eviction.
    pub reclaim: Option<Reclaim>,
    /// Its part of the borrowed capacity, in proportion to other tenants' weights.
    #[schemars(range(min = 1, max = 1000))]
    pub weight: Option<u16>,
}

/// A share of the cluster. What is left out is not limited.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AmountSpec {
    /// GPU memory.
    pub vram: Option<MemoryQuantity>,
    /// Whole GPUs; a part of a GPU counts as that part.
    pub gpus: Option<u32>,
}
