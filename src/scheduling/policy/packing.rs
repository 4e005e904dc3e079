//! How GPUs are filled: by what free VRAM is worth to the pods seen lately, or by best fit.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Pods that are remembered unless the policy says otherwise: a size that makes up one per cent of the demand occurs about twenty
/// times among them, and a workload that changed a day ago is forgotten in most clusters.
pub const WINDOW: u16 = 2000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PackingRules {
    pub policy: PackingPolicy,
    pub learning: LearningMode,
    /// How many of the last pods count as the demand to come.
    pub window: u16,
}

/// What makes one place fill the cluster better than another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PackingPolicy {
    /// That least is lost of what free VRAM is worth to the pods seen lately. Best fit until some were seen.
    #[default]
    Learned,
    /// That least stays free on the GPU.
    BestFit,
}

/// Whether what free VRAM is worth follows the pods that come. Not "on" and "off": to many YAML parsers those are booleans.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LearningMode {
    #[default]
    Continuous,
    /// What was learned so far stays.
    Frozen,
}

impl Default for PackingRules {
    fn default() -> Self {
        Self { policy: PackingPolicy::default(), learning: LearningMode::default(), window: WINDOW }
    }
}
