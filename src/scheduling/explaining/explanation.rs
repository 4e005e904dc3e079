//! An explanation as data: what `/v1/explain` answers and `stowage explain` prints. Sums of memory are bytes, lengths of time
//! are milliseconds, GPUs are counted in thousandths, and every name says so. Nothing is computed here.

use super::obstacle::Obstacle;
use super::remedy::Remedy;
use crate::ids::{GpuModel, GpuUuid, ModelId, NodeName, PodKey, PodUid};
use crate::scheduling::audit::conflicts::GpuConflict;
use crate::scheduling::ledger::{OccupantPhase, SchedulingGate};
use crate::scheduling::policy::{Borrowing, Mode};
use crate::scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::scheduling::vocabulary::demand::Sharing;
use crate::scheduling::vocabulary::gpu::Health;
use crate::scheduling::vocabulary::model_tier::ModelTier;
use crate::scheduling::vocabulary::node_reading::Freshness;
use crate::units::{Bytes, Millis, Percent};
use serde::{Deserialize, Serialize};

/// Why one pod is where it is, and what would have to change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    pub pod: PodKey,
    pub uid: PodUid,
    pub verdict: PodVerdict,
    pub asks: RequestPart,
    pub class: ClassPart,
    /// `None` if no tenant has its namespace.
    pub tenant: Option<TenantPart>,
    pub policy: PolicyPart,
    pub place: PodStage,
    pub counts: Counts,
    /// In detail: the nodes that fit, best first; then the nearest of those that do not.
    pub nodes: Vec<NodePart>,
    /// The nodes that do not fit and are not all in `nodes`, by reason.
    pub groups: Vec<RefusalGroup>,
    /// What would have to change, the easiest first; or, for a pod that fits, what to look at next.
    pub remedies: Vec<Remedy>,
    /// What the continuous audit finds: promises of a GPU of its that cannot all be kept. The books do not know of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<ConflictPart>,
}

/// One GPU in conflict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConflictPart {
    #[serde(flatten)]
    pub conflict: GpuConflict,
    pub text: String,
}

impl From<&GpuConflict> for ConflictPart {
    fn from(conflict: &GpuConflict) -> Self {
        Self { conflict: conflict.clone(), text: conflict.to_string() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PodVerdict {
    /// It is on its node.
    Bound,
    /// Its GPUs are promised, and its Binding is on its way.
    Assumed,
    /// It has room of its own, which others have not left yet.
    Holding,
    /// It waits, and some node fits.
    Fits,
    /// It waits, and no node fits.
    DoesNotFit,
}

/// What the pod asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestPart {
    /// Over all its GPUs.
    pub vram_bytes: Bytes,
    pub bytes_per_gpu: Bytes,
    pub gpus: u32,
    /// What it asks a device plugin for, such as `nvidia.com/gpu`; `None` if it asks for VRAM.
    pub device_resource: Option<String>,
    pub sharing: Sharing,
    pub kv_cache_bytes: Option<Bytes>,
    pub model: Option<ModelId>,
    pub priority: i32,
    /// False for `preemptionPolicy: Never`.
    pub may_preempt: bool,
}

/// What the policy says the pod is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClassPart {
    pub name: String,
    /// The conditions of its class, all of which the pod meets; none, if the class takes every pod.
    pub because: Vec<Condition>,
    /// The classes tried before it, each with the first condition that the pod does not meet.
    pub passed_over: Vec<PassedOver>,
    pub engine: bool,
    pub kv_cache_limit_percent: Option<Percent>,
    pub queue_limit: Option<u32>,
    /// `None`: with every class.
    pub shares_with: Option<Vec<String>>,
    pub preemptible: bool,
}

/// One condition of a class's match, held against the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Its field under `match`.
    pub field: String,
    pub wants: String,
    /// What the pod has instead, or what meets it.
    pub has: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PassedOver {
    pub class: String,
    pub unmet: Condition,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantPart {
    pub name: String,
    pub used: ShareAmount,
    pub guarantee: ShareAmount,
    /// What it may use at most, with what its borrowing says.
    pub limit: ShareAmount,
    /// What this pod may still take of it.
    pub left: ShareAmount,
    pub borrowing: Borrowing,
    pub weight: u32,
    /// The weighted dominant share of what it borrows, in millionths of the cluster.
    pub share_millionths: u64,
}

/// A part of the cluster; `None` where nothing is said of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareAmount {
    pub vram_bytes: Option<Bytes>,
    pub milli_gpus: Option<u64>,
}

impl From<TenantLimit> for ShareAmount {
    fn from(TenantLimit { vram, milli_gpus }: TenantLimit) -> Self {
        Self { vram_bytes: vram, milli_gpus }.where_bounded()
    }
}

impl From<TenantUsage> for ShareAmount {
    fn from(TenantUsage { vram, milli_gpus }: TenantUsage) -> Self {
        Self { vram_bytes: Some(vram), milli_gpus: Some(milli_gpus) }.where_bounded()
    }
}

impl ShareAmount {
    /// `u64::MAX` stands for no bound in the policy.
    fn where_bounded(self) -> Self {
        Self {
            vram_bytes: self.vram_bytes.filter(|vram| vram.0 < u64::MAX),
            milli_gpus: self.milli_gpus.filter(|gpus| *gpus < u64::MAX),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyPart {
    pub digest: String,
    pub version: u64,
    pub mode: Mode,
}

/// Where the pod stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "state")]
pub enum PodStage {
    Bound {
        node: NodeName,
        /// `None` if nobody knows on which GPUs it is.
        gpus: Option<Vec<GpuUuid>>,
        granted_bytes: Bytes,
        running_for_millis: Millis,
        /// While its engine starts: how long it still keeps others from starting there, at most.
        start_gate_opens_in_millis: Option<Millis>,
    },
    Assumed {
        node: NodeName,
        gpus: Vec<GpuUuid>,
        granted_bytes: Bytes,
    },
    Holding {
        node: NodeName,
        gpus: Vec<GpuUuid>,
        /// Those who were told to leave for it.
        victims: Vec<String>,
        /// How many of them still take room.
        victims_left: u32,
        deadline_in_millis: Millis,
    },
    Waiting {
        /// The node that was ranked first when it last asked and something fitted.
        offered: Option<NodeName>,
        /// How much longer others steer around what it was offered.
        offer_lasts_millis: Option<Millis>,
        /// How often it was offered nodes and came back unbound.
        tries: u32,
        /// When no node fitted.
        refused: Option<RefusedPart>,
        /// On how many nodes the scheduler last asked who could leave for it.
        offered_to_preempt: Option<u32>,
        /// What keeps the scheduler from it.
        gate: SchedulingGate,
        /// How often in a row the planner looked for a place for it and found none.
        failed_attempts: u32,
    },
}

/// The latest time that no node fitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusedPart {
    /// Since it was refused, or woken after that.
    pub ago_millis: Millis,
    /// How many nodes the scheduler asked about; other plugins had ruled out the rest.
    pub asked_about: u32,
    /// How often it was woken since it last asked.
    pub woken: u32,
    /// How often in a row it was woken, asked, and was refused again.
    pub unanswered_wakes: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    pub nodes: u32,
    pub gpus: u32,
    pub fit: u32,
    pub refused: u32,
}

/// One node, as the pod meets it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePart {
    pub name: NodeName,
    /// Why it does not fit; `None` if it does.
    pub misfit: Option<Reason>,
    /// The pod is here, or has room of its own here.
    pub is_own: bool,
    /// Whether the scheduler asked about it when the pod was last refused; `None` if that is not known.
    pub was_asked: Option<bool>,
    /// Of the resource that the pod asks a device plugin for; `None` if the node has none or the pod asks for VRAM.
    pub devices: Option<DevicesPart>,
    pub pool: Option<String>,
    /// How far what was measured here can be believed.
    pub freshness: Freshness,
    /// Since the latest report's figures were sampled.
    pub report_age_millis: Option<Millis>,
    /// Where the pod's model is on this node; `None` if it is not, or the pod names none.
    pub tier: Option<ModelTier>,
    /// From binding until the model answers; `None` for a pod that names no model.
    pub ready_in_millis: Option<Millis>,
    pub score: Option<ScorePart>,
    pub gpus: Vec<GpuPart>,
}

/// What a device plugin has on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DevicesPart {
    pub allocatable: u32,
    pub used: u32,
    pub left: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reason {
    /// As in metrics.
    pub code: String,
    pub text: String,
}

/// What is to be said against a node that fits; the least cost wins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScorePart {
    /// 1 for the best node.
    pub rank: u32,
    /// Another pod was just offered these GPUs; counts before the cost.
    pub contended: bool,
    /// The weighted sum of the parts.
    pub cost: u64,
    pub parts: Vec<WeightedPart>,
    /// What would stay free on the chosen GPUs.
    pub leftover_bytes: Bytes,
    /// What of that is of no use to the pods seen lately; absent until enough of them were seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub useless_bytes: Option<Bytes>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WeightedPart {
    /// As under `scoring.weights`.
    pub name: String,
    /// 0 to 1,000.
    pub part: u32,
    pub weight: u32,
    pub weighted: u64,
}

/// One GPU or MIG slice. `free = capacity − promised − beyond`, `capacity = total − reserved − headroom`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPart {
    pub uuid: GpuUuid,
    pub index: u32,
    pub model: GpuModel,
    /// The GPU a MIG slice is cut from.
    pub parent: Option<GpuUuid>,
    pub health: Health,
    pub total_bytes: Bytes,
    /// What the driver keeps for itself.
    pub reserved_bytes: Bytes,
    pub headroom_bytes: Bytes,
    pub capacity_bytes: Bytes,
    pub promised_bytes: Bytes,
    /// What is used beyond what was promised, or a margin where nobody looks.
    pub unaccounted_bytes: Bytes,
    /// What other pods were just offered.
    pub offered_bytes: Bytes,
    pub free_bytes: Bytes,
    /// Of the fullest engine on it; `None` if nobody says.
    pub kv_cache_percent: Option<Percent>,
    /// Requests that wait for the engines on it; `None` if nobody says.
    pub queue: Option<u32>,
    /// An engine is starting on it.
    pub starting: bool,
    pub occupants: Vec<OccupantPart>,
    /// The pod would get it, or has it.
    pub chosen: bool,
    /// What keeps the pod off it; empty if nothing does.
    pub obstacles: Vec<Obstacle>,
}

/// Someone who has, holds or was offered a part of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OccupantPart {
    pub pod: PodKey,
    pub class: String,
    pub priority: i32,
    pub presence: OccupantPhase,
    /// What it counts for on this GPU.
    pub bytes: Bytes,
    /// While its engine starts: how long it still keeps others from starting here, at most.
    pub start_gate_opens_in_millis: Option<Millis>,
    /// Why it does not leave for the pod; `None` if it could, or if the pod does not wait.
    #[serde(default)]
    pub keep_reason: Option<String>,
}

/// Nodes that do not fit for the same reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusalGroup {
    pub code: String,
    pub count: u32,
    /// The nearest of them to fitting, and its reason with figures.
    pub example: NodeName,
    pub text: String,
}
