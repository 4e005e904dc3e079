//! What the planner does of itself: pods behind its gate, groups, engines under pressure, and moves that make pods fit.

use crate::units::{Millis, Percent};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Planning {
    /// How long a single pod stays behind the planner's gate without a place, before it goes the scheduler's ordinary way:
    /// autoscalers and people see only what the scheduler has refused.
    pub max_gated_time: Millis,
    pub groups: GroupRules,
    /// `None`: nobody leaves an engine's GPU because the engine is busy.
    pub pressure: Option<PressureRules>,
    /// `None`: nobody is moved.
    pub consolidation: Option<Consolidation>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct GroupRules {
    pub placement: GroupPlacement,
    pub when_incomplete: WhenIncomplete,
}

/// How close together a group's pods go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupPlacement {
    /// Each where it is best by itself.
    #[default]
    Anywhere,
    /// On as few nodes as there is room on now.
    FewestNodes,
    /// All on GPUs of one node that reach each other over NVLink, or not at all.
    OneIsland,
}

/// What becomes of a group's bound pods when others of it could not be bound in time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WhenIncomplete {
    /// They stay.
    #[default]
    Keep,
    /// They are evicted: a part of a group that keeps GPUs and does no work is waste.
    Evict,
}

/// When an engine is so busy that its preemptible neighbours leave its GPU, and when it is not any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PressureRules {
    pub kv_cache: Threshold<Percent>,
    pub queue: Threshold<u32>,
    /// For how long, before anyone leaves; and how long the leaving of one has time to help before the next leaves.
    pub evict_after: Millis,
}

/// Pressure begins at one figure and ends at another, so that it does not come and go with each report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Threshold<T> {
    /// At this or more it begins.
    pub high: T,
    /// At this or less it is over.
    pub low: T,
}

/// Pods of preemptible classes may be evicted to run elsewhere, where that lets a pod fit that could not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Consolidation {
    /// What a pod that fits is worth: that much time on its GPUs. Nobody moves for less than the moves cost.
    pub gain: Millis,
}

impl Default for Planning {
    /// Thirty seconds is what autoscalers wait between looks at pending pods, or less.
    fn default() -> Self {
        Self {
            max_gated_time: Millis::seconds(30),
            groups: GroupRules::default(),
            pressure: Some(PressureRules::default()),
            consolidation: None,
        }
    }
}

impl Default for PressureRules {
    /// An engine preempts requests of its own when its cache is full; just before that its neighbours leave. Ten reports in a
    /// row are no spike.
    fn default() -> Self {
        Self {
            kv_cache: Threshold {
                high: const { Percent::new(95).unwrap() },
                low: const { Percent::new(80).unwrap() },
            },
            queue: Threshold { high: 64, low: 16 },
            evict_after: Millis::seconds(10),
        }
    }
}

impl Default for Consolidation {
    fn default() -> Self {
        Self { gain: Millis::seconds(3600) }
    }
}
