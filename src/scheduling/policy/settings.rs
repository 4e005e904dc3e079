//! The settings of the whole policy. Each is declared once: the field has its type and its documentation, `Default` its default,
//! the attributes its limits and how it is written. Parsing, the JSON Schema and the output of `policy show` derive from that.

use super::{
    AutoscalingRules, ConflictRule, DraRules, NodeRules, OveruseRule, PackingRules, Planning,
    PreemptionRules, Scoring,
};
use crate::units::{Millis, Percent, setting};
use crate::vocabulary::headroom::Headroom;
use crate::vocabulary::model_tier::LoadingSpeeds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Everything that is set once for the whole cluster, in the order in which it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Settings {
    /// Whether decisions are enforced, or only recorded and counted.
    pub mode: Mode,
    pub headroom: Headroom,
    pub telemetry: TelemetryRules,
    pub loading: LoadingSpeeds,
    pub scoring: Scoring,
    pub packing: PackingRules,
    pub preemption: PreemptionRules,
    /// What happens to pods for which the continuous audit finds conflicting allocations of one GPU.
    pub conflicts: ConflictRule,
    /// What happens to pods of preemptible classes that use more VRAM than they were granted. A class may say otherwise; pods of
    /// other classes are only reported unless their class says otherwise.
    pub overuse: OveruseRule,
    /// How long a pod uses more than its grant before its owner is told that it will be evicted; it is evicted as long after that
    /// at the earliest.
    #[serde(with = "setting::Duration")]
    pub overuse_after: Millis,
    /// What happens to pods that use GPUs of a node of Stowage's and were given none, other than those of namespaces that may see
    /// all GPUs. Also after `overuseAfter`.
    pub ungranted: OveruseRule,
    pub planning: Planning,
    pub dra: DraRules,
    pub nodes: NodeRules,
    pub autoscaling: AutoscalingRules,
}

/// Whether decisions are enforced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// They are enforced.
    #[default]
    Enforce,
    /// They are only recorded and counted, and kube-scheduler's own decisions stand.
    Shadow,
}

/// How far the agents' readings are trusted as they age.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct TelemetryRules {
    /// A reading younger than this is used as it is.
    #[serde(with = "setting::Duration")]
    pub fresh: Millis,
    /// For a reading younger than this, the ledger is used, less `margin`. An older one has expired.
    #[serde(with = "setting::Duration")]
    pub stale: Millis,
    /// The time over which the KV cache use and the queues of engines are averaged. `0` counts each reading as it is.
    #[serde(with = "setting::Duration")]
    pub smoothing: Millis,
    /// The share of a GPU that is not allocated without a fresh reading.
    #[serde(with = "setting::Percentage::<90>")]
    pub margin: Percent,
    /// What to do with a node whose agent has stopped reporting.
    pub expired: ExpiredRule,
    /// How long a GPU for which NVML does not answer as it should is draining until it is lost, and how long it must answer well
    /// again before it takes pods.
    #[serde(with = "setting::Duration")]
    pub lost_after: Millis,
}

/// What to do with a node whose agent has stopped reporting, or never reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ExpiredRule {
    /// Place by what the ledger has allocated.
    LedgerOnly,
    /// Place nothing there.
    Refuse,
}

impl Default for Settings {
    /// A minute over the grant is no peak of an engine's start.
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            headroom: Headroom::default(),
            telemetry: TelemetryRules::default(),
            loading: LoadingSpeeds::default(),
            scoring: Scoring::default(),
            packing: PackingRules::default(),
            preemption: PreemptionRules::default(),
            conflicts: ConflictRule::default(),
            overuse: OveruseRule::default(),
            overuse_after: Millis::seconds(60),
            ungranted: OveruseRule::default(),
            planning: Planning::default(),
            dra: DraRules::default(),
            nodes: NodeRules::default(),
            autoscaling: AutoscalingRules::default(),
        }
    }
}

impl Default for TelemetryRules {
    /// Fresh for five samples, at one a second. Averaged over ten: a KV cache that is in use fills in minutes.
    fn default() -> Self {
        Self {
            fresh: Millis::seconds(5),
            stale: Millis::seconds(30),
            smoothing: Millis::seconds(10),
            margin: const { Percent::new(5).unwrap() },
            expired: ExpiredRule::LedgerOnly,
            lost_after: Millis::seconds(30),
        }
    }
}
