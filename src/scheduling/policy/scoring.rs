//! How the nodes that fit are ranked, by the parts of a score and their weights; and how their GPUs are filled, by the learned value
//! of free VRAM or by best fit.

use crate::units::{Millis, setting};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the nodes that fit are ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Scoring {
    /// How many nodes filter returns.
    #[schemars(range(min = 1, max = 256))]
    pub shortlist: u16,
    /// How long other pods avoid GPUs that were just offered to a pod.
    #[serde(with = "setting::Duration")]
    pub soft_reservation_lifetime: Millis,
    pub weights: Weights,
}

/// Weights in the comparison of nodes. Only their proportions matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Weights {
    /// Keep free VRAM useful for later pods; see `packing`.
    #[schemars(range(min = 0, max = 1000))]
    pub packing: u16,
    /// Prefer GPUs whose engines have KV cache to spare.
    #[schemars(range(min = 0, max = 1000))]
    pub kv_headroom: u16,
    /// Prefer nodes where the model is ready soonest.
    #[schemars(range(min = 0, max = 1000))]
    pub time_to_ready: u16,
    /// Prefer GPUs whose pods have work for little of the time; one of which that is not known counts as always working.
    #[schemars(range(min = 0, max = 1000))]
    pub interference: u16,
    /// Prefer GPUs that reach each other over NVLink.
    #[schemars(range(min = 0, max = 1000))]
    pub topology: u16,
    /// Put pods of the same model on different nodes.
    #[schemars(range(min = 0, max = 1000))]
    pub spread: u16,
}

/// Penalties of a placement, one for each weight, from 0 to 1,000 (`WHOLE_PART`). The lowest weighted sum wins.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScoreParts {
    /// The VRAM that the placement makes useless for expected demand; as long as none is known, what of the GPUs stays free.
    pub packing: u32,
    /// How near the engines of the busiest GPU are to a limit of the pod's class; rises steeply towards it.
    pub kv_headroom: u32,
    /// How long until the pod's model answers there, in steps of a factor of two.
    pub time_to_ready: u32,
    /// b ÷ (b + 1) for the share of time b for which the pods of the busiest GPU have work, added up.
    pub interference: u32,
    /// The maximum, if several GPUs do not reach each other over NVLink, or no agent reports that they do; otherwise 0.
    pub topology: u32,
    /// n ÷ (n + 1) for n pods of the same model on the node.
    pub spread: u32,
}

/// One part of a score with its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartAndWeight {
    /// The weight's name in policies.
    pub name: &'static str,
    pub part: u32,
    pub weight: u16,
}

impl ScoreParts {
    /// Each part with its weight, in the order in which explanations list them.
    pub(crate) const fn with_weights(&self, weights: &Weights) -> [PartAndWeight; 6] {
        const fn pair(name: &'static str, part: u32, weight: u16) -> PartAndWeight {
            PartAndWeight { name, part, weight }
        }
        [
            pair("packing", self.packing, weights.packing),
            pair("kvHeadroom", self.kv_headroom, weights.kv_headroom),
            pair("timeToReady", self.time_to_ready, weights.time_to_ready),
            pair("interference", self.interference, weights.interference),
            pair("topology", self.topology, weights.topology),
            pair("spread", self.spread, weights.spread),
        ]
    }

    pub fn weighted(&self, weights: &Weights) -> u64 {
        self.with_weights(weights)
            .iter()
            .map(PartAndWeight::weighted)
            .sum()
    }
}

impl PartAndWeight {
    pub fn weighted(&self) -> u64 {
        u64::from(self.part) * u64::from(self.weight)
    }
}

impl Weights {
    /// Whether nothing is weighed, so that every place is as good as any other.
    pub fn are_all_zero(&self) -> bool {
        ScoreParts::default()
            .with_weights(self)
            .iter()
            .all(|one| one.weight == 0)
    }
}

impl Default for Scoring {
    /// Four nodes leave the scheduler's other plugins a choice and cost it four scorings instead of a thousand. Two seconds are
    /// longer than the way from filter to bind, and too short for anyone to notice.
    fn default() -> Self {
        Self {
            shortlist: 4,
            soft_reservation_lifetime: Millis::seconds(2),
            weights: Weights::default(),
        }
    }
}

impl Default for Weights {
    /// A step of one outweighs all of the next: first that no busy engine is disturbed, then how soon the model answers, then how
    /// well the GPU is filled.
    fn default() -> Self {
        Self {
            packing: 1,
            kv_headroom: 40,
            time_to_ready: 20,
            interference: 0,
            topology: 5,
            spread: 0,
        }
    }
}

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
            window: DEFAULT_DEMAND_WINDOW,
        }
    }
}

/// Pods that are remembered by default.
pub const DEFAULT_DEMAND_WINDOW: u16 = 2000;
