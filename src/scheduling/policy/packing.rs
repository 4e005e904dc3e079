//! How GPUs are filled: by the learned value of free VRAM, or by best fit.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How GPUs are filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PackingRules {
    /// What makes one placement better than another for the packing of the cluster.
    pub policy: PackingPolicy,
    /// Whether the value of free VRAM is learned from the pods that arrive.
    pub learning: LearningMode,
    /// How many of the latest pods count as expected demand.
    #[schemars(range(min = 100, max = 10000))]
    pub window: u16,
}

/// What makes one placement better than another for the packing of the cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PackingPolicy {
    /// It loses the least of the learned value of free VRAM. Best fit until pods have arrived to learn from.
    #[default]
    Learned,
    /// It leaves the least VRAM free on the GPU.
    BestFit,
}

/// Whether the value of free VRAM is learned from the pods that arrive. Not "on" and "off": many YAML parsers read
/// those as booleans.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LearningMode {
    #[default]
    Continuous,
    /// What was learned so far stays.
    Frozen,
}

impl Default for PackingRules {
    /// A size that makes up one per cent of the demand occurs about twenty times among two thousand pods, and most clusters have
    /// forgotten a workload a day after it changed.
    fn default() -> Self {
        Self {
            policy: PackingPolicy::default(),
            learning: LearningMode::default(),
            window: WINDOW,
        }
    }
}

/// Pods that are remembered by default.
pub const WINDOW: u16 = 2000;
