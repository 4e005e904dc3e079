//! Node pools: kinds of nodes, distinguished by their labels.

use super::{LabelValue, MemoryQuantity, MigProfile, Name};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use stowage_scheduling::vocabulary::node::NodeKind;

/// Nodes that are treated alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodePool {
    /// Shown in decisions and metrics.
    pub name: Name,
    /// Labels that its nodes have, all of them. Default: every node that no earlier pool has.
    #[schemars(extend("propertyNames" = {"format": "qualified-name"}))]
    pub selector: Option<BTreeMap<String, LabelValue>>,
    /// What allocates its GPUs.
    pub allocator: Option<NodeKind>,
    /// Classes whose pods may be placed there. Default: all.
    pub classes: Option<Vec<Name>>,
    /// The MIG layout of each of its GPUs. `[]`: whole GPUs; default: any.
    pub mig: Option<Vec<MigProfile>>,
    pub capacity: Option<PoolCapacitySpec>,
}

/// The pool's total capacity, to check that guarantees can be kept.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolCapacitySpec {
    pub gpus: Option<u32>,
    pub vram: Option<MemoryQuantity>,
}
