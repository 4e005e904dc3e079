//! Tenants: who has a part of the cluster of its own, and what happens to parts that lie idle.

use super::{MemoryQuantity, Name};
use crate::scheduling::policy::{Borrowing, Reclaim};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Namespaces that share one part of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TenantSpec {
    /// Shown in decisions and metrics.
    pub name: Name,
    /// Whose pods count for it.
    pub namespaces: Option<Vec<Name>>,
    /// What it can always have. Of memory and GPUs, the one left out does not bound it.
    pub guarantee: Option<AmountSpec>,
    /// What it can never exceed.
    pub limit: Option<AmountSpec>,
    /// Whether it may use, beyond its guarantee, what others leave idle.
    pub borrowing: Option<Borrowing>,
    /// Whether it may take back, by eviction, what others borrowed of its guarantee.
    pub reclaim: Option<Reclaim>,
    /// Its part of what is borrowed, in proportion to the others'.
    #[schemars(range(min = 1, max = 1000))]
    pub weight: Option<u16>,
}

/// A part of the cluster. What is left out is not bounded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AmountSpec {
    /// GPU memory.
    pub vram: Option<MemoryQuantity>,
    /// GPUs, whole ones; a part of a GPU counts as that part.
    pub gpus: Option<u32>,
}
