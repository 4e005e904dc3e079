//! Node pools: kinds of nodes, told apart by their labels.

use super::{LabelValue, MemoryQuantity, MigProfile, Name};
use crate::scheduling::vocabulary::node::NodeKind;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Nodes that are treated alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodePool {
    /// Shown in decisions and metrics.
    pub name: Name,
    /// Labels that its nodes have, all of them. Left out: every node that reaches it.
    #[schemars(extend("propertyNames" = {"format": "qualified-name"}))]
    pub selector: Option<BTreeMap<String, LabelValue>>,
    /// Who hands out its GPUs.
    pub nodes: Option<NodeKind>,
    /// Classes whose pods may go there. Left out: all.
    pub classes: Option<Vec<Name>>,
    /// What each of its GPUs is cut into. `[]`: whole; left out: anything.
    pub mig: Option<Vec<MigProfile>>,
    pub capacity: Option<PoolCapacitySpec>,
}

/// What the pool has in all, to check that guarantees can be kept.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PoolCapacitySpec {
    pub gpus: Option<u32>,
    pub vram: Option<MemoryQuantity>,
}
