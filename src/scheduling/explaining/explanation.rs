//! An explanation as data: what `/v1/explain` answers and `stowage explain` prints. Memory is in bytes, durations are in
//! milliseconds, GPUs are in thousandths, and every name says so. Nothing is computed here.

use super::PodAccess;
use super::obstacle::Obstacle;
use super::remedy::{Impasse, Remedy};
pub use super::unsupported::UnsupportedPart;
use crate::audit::conflicts::OverAllocation;
use crate::ids::{GpuModel, GpuUuid, ModelId, NodeName, PodKey, PodUid};
use crate::ledger::{LoanStage, OccupantPhase, SchedulingGate};
use crate::placing::start_model::FactorSource;
use crate::policy::{Borrowing, Mode};
use crate::units::{Bytes, Micros, Millis, Percent, plural};
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::Health;
use crate::vocabulary::model_tier::ModelTier;
use crate::vocabulary::node_reading::{Freshness, GpuActivity, NodeIsolation};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why one pod is where it is, and what would have to change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    pub pod: PodKey,
    pub uid: PodUid,
    pub verdict: PodVerdict,
    pub request: RequestPart,
    pub class: ClassPart,
    /// `None` if no tenant has the pod's namespace.
    pub tenant: Option<TenantPart>,
    /// Spare GPUs, one entry a rule of `planning.spare`; empty for a class that is not preemptible.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spare: Vec<SparePart>,
    /// `None` unless the pod waits and its class may borrow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub borrowing: Option<BorrowingPart>,
    pub policy: PolicyPart,
    pub stage: PodStage,
    /// Why the group of a pod that waits is not placed; `None` if it may be, or if the planner plans no group of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<Reason>,
    /// Rules of kube-scheduler of which the planner does not know what they say; of a pending pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unsupported: Vec<UnsupportedPart>,
    pub counts: Counts,
    /// What the answer of a replica on standby lacks, and which replica leads. The edge adds it; `None` by the leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<StandbyPart>,
    /// In detail: the nodes that fit, by Stowage and by kube-scheduler, best first; then, of the others, the nearest to fitting.
    pub nodes: Vec<NodePart>,
    /// The nodes that do not fit and are not listed in `nodes`, by reason.
    pub groups: Vec<RefusalGroup>,
    /// Why neither time nor an eviction helps a pod that does not fit; `None` if one may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub impasse: Option<Impasse>,
    /// What would have to change, the easiest first; or, for a pod that fits, what to check next.
    pub remedies: Vec<Remedy>,
    /// Findings of the continuous audit: GPU conflicts that the pod takes part in. The ledger does not know of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "conflicts")]
    pub over_allocations: Vec<OverAllocationPart>,
}

/// The replica that answers is on standby: kube-scheduler asks the leader, and only the leader knows what it asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StandbyPart {
    /// The leader's pod; `None` if no replica holds the Lease, or the Lease has not been read.
    pub leader: Option<String>,
    pub text: String,
}

/// One GPU in conflict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OverAllocationPart {
    #[serde(flatten)]
    pub over_allocation: OverAllocation,
    pub text: String,
}

impl OverAllocationPart {
    /// The conflict as the reader of an explanation of the pod `explained` may see it.
    pub fn for_reader(
        reader: PodAccess,
        explained: &PodKey,
        over_allocation: &OverAllocation,
    ) -> Self {
        let text = over_allocation.text_naming(&|pod| reader.may_see(explained, pod));
        let mut over_allocation = over_allocation.clone();
        over_allocation
            .parties
            .retain(|party| reader.may_see(explained, &party.key));
        Self {
            over_allocation,
            text,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PodVerdict {
    /// The pod is on its node.
    Bound,
    /// GPUs are allocated to the pod, and its Binding is being written.
    Assumed,
    /// The pod has a reservation whose victims have not left yet.
    Reserved,
    /// The pod waits, and a node fits.
    Fits,
    /// The pod waits, and no node fits, or its group does not.
    DoesNotFit,
}

/// What the pod requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestPart {
    /// Over all its GPUs.
    pub vram_bytes: Bytes,
    pub bytes_per_gpu: Bytes,
    pub gpus: u32,
    /// The device plugin resource that it requests, such as `nvidia.com/gpu`; `None` if it requests VRAM.
    pub device_resource: Option<String>,
    pub sharing: Sharing,
    pub kv_cache_bytes: Option<Bytes>,
    pub model: Option<ModelId>,
    pub priority: i32,
    /// False for `preemptionPolicy: Never`.
    pub may_preempt: bool,
}

/// How the policy classifies the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClassPart {
    pub name: String,
    /// The conditions of its class, all of which the pod meets; empty if the class accepts every pod.
    pub because: Vec<Condition>,
    /// The classes tried before it, each with the first condition that the pod does not meet.
    pub passed_over: Vec<PassedOver>,
    pub engine: bool,
    pub kv_cache_limit_percent: Option<Percent>,
    pub queue_limit: Option<u32>,
    /// `None`: with every class.
    pub shares_with: Option<Vec<String>>,
    /// The node pools that it is kept in; `None`: in none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pools: Option<Vec<String>>,
    pub preemptible: bool,
}

/// One condition of a class's match, compared with the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// The name of its field under `match`, or `when` for the class's windows.
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
    /// The most that it may use, including what it may borrow.
    pub limit: ShareAmount,
    /// How much of it this pod may still use.
    pub left: ShareAmount,
    pub borrowing: Borrowing,
    pub weight: u32,
    /// The weighted dominant share of its borrowed capacity, in millionths of the cluster.
    pub share_millionths: u64,
}

/// GPUs that stay free of pods of preemptible classes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SparePart {
    /// The GPUs that the rule covers, in words.
    pub rule: String,
    /// How many stay free.
    pub keeps: u32,
    /// How many are free now; `None` if the rule does not hold now.
    pub free: Option<u32>,
    /// The pod may take none of them now.
    pub kept_from_pod: bool,
    /// The window in which it holds: the open one, or else the first; `None` if it always does.
    pub window: Option<String>,
}

/// A part of the cluster; `None` where there is no bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareAmount {
    pub vram_bytes: Option<Bytes>,
    pub milli_gpus: Option<u64>,
}

impl From<TenantLimit> for ShareAmount {
    fn from(TenantLimit { vram, milli_gpus }: TenantLimit) -> Self {
        Self {
            vram_bytes: vram,
            milli_gpus,
        }
        .without_unbounded()
    }
}

impl From<TenantUsage> for ShareAmount {
    fn from(TenantUsage { vram, milli_gpus }: TenantUsage) -> Self {
        Self {
            vram_bytes: Some(vram),
            milli_gpus: Some(milli_gpus),
        }
        .without_unbounded()
    }
}

impl ShareAmount {
    /// `u64::MAX` stands for no bound in the policy.
    fn without_unbounded(self) -> Self {
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

/// The stage the pod is at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    rename_all_fields = "camelCase",
    tag = "state"
)]
pub enum PodStage {
    Bound {
        node: NodeName,
        /// `None` if it is unknown on which GPUs the pod is.
        gpus: Option<Vec<GpuUuid>>,
        granted_bytes: Bytes,
        running_for_millis: Millis,
        /// While its engine starts: how long the start gate still excludes other starting engines, at most.
        start_gate_opens_in_millis: Option<Millis>,
        /// What its tenant has taken in an hour of the time for which its starts keep others from starting there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gate_time_taken_millis: Option<Millis>,
        /// `None` unless this process saw the pod being bound, and the start of its engine can be timed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        start: Option<BoundStartPart>,
        /// `None` if it has nothing to do with VRAM that is lent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        loan: Option<PodLoanPart>,
        /// `None` if its class asks for no limits, and none is in force.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limits: Option<LimitsPart>,
    },
    Assumed {
        node: NodeName,
        gpus: Vec<GpuUuid>,
        granted_bytes: Bytes,
    },
    Reserved {
        node: NodeName,
        gpus: Vec<GpuUuid>,
        /// The pods that were evicted for it.
        victims: Vec<String>,
        /// How many of them still use VRAM.
        victims_left: u32,
        deadline_in_millis: Millis,
    },
    Waiting {
        /// The node that was ranked first when the pod was last filtered and a node fitted.
        offered_node: Option<NodeName>,
        /// How much longer its soft reservation steers other pods away.
        soft_reservation_ends_in_millis: Option<Millis>,
        /// How often the pod was offered nodes and came back unbound.
        attempts: u32,
        /// The latest refusal, when no node fitted.
        refused: Option<RefusedPart>,
        /// On how many nodes the scheduler last asked for victims.
        preemption_candidates: Option<u32>,
        /// The scheduling gate that keeps the pod from the scheduler.
        gate: SchedulingGate,
        /// How many times in a row the planner found no place for it.
        failed_attempts: u32,
    },
}

/// The VRAM limits of a bound pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitsPart {
    /// Its class asks for limits, and its node says that it keeps none.
    pub node_keeps_none: bool,
    /// None of them if the node keeps none, and none is known.
    pub gpus: Vec<GpuLimitPart>,
}

/// What a pod has on one of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuLimitPart {
    pub uuid: GpuUuid,
    /// NVML's index on its node.
    pub index: u32,
    pub granted_bytes: Bytes,
    /// The size of the GPU.
    pub total_bytes: Bytes,
    /// The hard limit in force, by its cgroups: the GPU's size if there is none, `None` if it is unknown.
    pub limit_bytes: Option<Bytes>,
    /// The soft limit: what nobody takes from it; `None` if it is unknown.
    pub guaranteed_bytes: Option<Bytes>,
    /// By its cgroups or its processes, whichever is more; `None` if neither says.
    pub used_bytes: Option<Bytes>,
}

/// The latest time that no node fitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusedPart {
    /// Time since the pod was refused, or requeued after that.
    pub ago_millis: Millis,
    /// How many nodes the scheduler asked about; other plugins had ruled out the rest.
    pub asked_about: u32,
    /// How often it was requeued since the scheduler last asked.
    #[serde(rename = "woken")]
    pub requeues: u32,
    /// How many times in a row it was requeued and refused again.
    #[serde(rename = "unansweredWakes")]
    pub failed_requeues: u32,
    /// Nobody has asked about it since this process began to act: an earlier one may have refused it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub supposed: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    pub nodes: u32,
    pub gpus: u32,
    pub fit: u32,
    pub refused: u32,
}

/// One node, as it suits the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePart {
    pub name: NodeName,
    /// Why Stowage refuses it; `None` if it does not.
    pub misfit: Option<Reason>,
    /// Why kube-scheduler's own filters refuse it; `None` if they do not, or if that is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kube_scheduler: Option<Reason>,
    /// The pod is here, or has a reservation here.
    pub is_own: bool,
    /// Whether the scheduler asked about it when the pod was last refused; `None` if that is unknown.
    pub was_asked: Option<bool>,
    /// Devices of the resource that the pod requests; `None` if the node has none or the pod requests VRAM.
    pub devices: Option<DevicesPart>,
    pub pool: Option<String>,
    /// Warnings about its GPUs that follow from its Node object.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The driver keeps the pod's containers within their VRAM here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_vram_limits: bool,
    /// What it has to keep them, as its agent says; `None` if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<NodeIsolation>,
    /// How current the measurements of this node are.
    pub freshness: Freshness,
    /// The age of the latest report's figures.
    pub report_age_millis: Option<Millis>,
    /// The nearest tier of the pod's model on this node; `None` if it is not there, or the pod names no model.
    pub tier: Option<ModelTier>,
    /// The time from binding until the model answers; `None` for a pod that names no model.
    pub ready_in_millis: Option<Millis>,
    /// The parts of that time, and the policy's speeds against what was learned; `None` if the pod names no model and the node
    /// has its images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartPart>,
    pub score: Option<ScorePart>,
    pub gpus: Vec<GpuPart>,
}

/// What a device plugin offers on a node.
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
    /// The code that metrics use.
    pub code: String,
    pub text: String,
}

/// The cost of a node that fits; the lowest wins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScorePart {
    /// 1 for the best node.
    pub rank: u32,
    /// These GPUs have a soft reservation of another pod; compared before the cost.
    pub contended: bool,
    /// The weighted sum of the parts.
    pub cost: u64,
    pub parts: Vec<WeightedPart>,
    /// The VRAM that would stay free on the chosen GPUs.
    pub free_after_bytes: Bytes,
    /// The part of it that recently seen pods could not use; absent until enough pods were seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unusable_after_bytes: Option<Bytes>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WeightedPart {
    /// The name under `scoring.weights`.
    pub name: String,
    /// 0 to 1,000.
    pub part: u32,
    pub weight: u32,
    pub weighted: u64,
}

/// One GPU or MIG slice. `free = allocatable − allocated − unaccounted`, `allocatable = total − driver reserved − headroom`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPart {
    pub uuid: GpuUuid,
    pub index: u32,
    pub model: GpuModel,
    /// The GPU of a MIG slice.
    pub parent: Option<GpuUuid>,
    pub health: Health,
    /// The agent's last report does not list it: it is shown because of the pods that were on it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gone: bool,
    pub total_bytes: Bytes,
    /// What the driver keeps for itself.
    pub driver_reserved_bytes: Bytes,
    pub headroom_bytes: Bytes,
    pub allocatable_bytes: Bytes,
    pub allocated_bytes: Bytes,
    /// VRAM in use beyond what is allocated, or a margin where no agent reports.
    pub unaccounted_bytes: Bytes,
    /// VRAM in soft reservations of other pods.
    pub soft_reserved_bytes: Bytes,
    pub free_bytes: Bytes,
    /// `None` if no pod here lends or borrows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loans: Option<GpuLoansPart>,
    /// KV cache usage of the fullest engine on it, as it was last read; `None` if unknown.
    pub kv_cache_percent: Option<Percent>,
    /// Requests that wait for the engines on it; `None` if unknown.
    pub queue: Option<u32>,
    /// What decisions count of that; `None` without a fresh report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_load: Option<EngineLoadPart>,
    /// How busy it is, by a fresh report; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity: Option<GpuActivity>,
    /// How much of the time one more pod may have work, so that the engines here keep the limits of their classes; negative if as much
    /// has to leave before, and -32768 if that helps as little. `None` if any pod may come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room_percent: Option<i16>,
    /// What the pod is expected to take for a token here; `None` if that is unknown, or no limit of its class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_time_per_token_micros: Option<Micros>,
    /// An engine is starting on it.
    pub starting: bool,
    /// The pods here that the reader may see.
    pub occupants: Vec<OccupantPart>,
    /// The pods here that the reader may not see; `None` without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub others: Option<OthersPart>,
    /// The pod would get the GPU, or has it.
    pub chosen: bool,
    /// What excludes the pod from the GPU; empty if nothing does.
    #[serde(serialize_with = "super::obstacle::with_texts")]
    pub obstacles: Vec<Obstacle>,
    /// What the pod gains here by waking an engine of its model that sleeps; `None` if none does, or the pod would not get the
    /// GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake: Option<WakePart>,
}

/// Pods that the reader may not see.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OthersPart {
    pub pods: u32,
    /// The VRAM that counts on this GPU; of victims, over all their GPUs.
    pub bytes: Bytes,
}

impl OthersPart {
    /// Number of pods and sum of their VRAM, one item a pod; `None` without any.
    pub fn sum(each: impl IntoIterator<Item = Bytes>) -> Option<Self> {
        let add = |sum: Option<Self>, one| {
            let Self { pods, bytes } = sum.unwrap_or_default();
            Some(Self {
                pods: pods + 1,
                bytes: bytes + one,
            })
        };
        each.into_iter().fold(None, add)
    }
}

impl fmt::Display for OthersPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of others ({})", plural(self.pods, "pod"), self.bytes)
    }
}

/// A wake in place of a start, from binding until the model answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WakePart {
    pub woken_in_millis: Millis,
    pub loaded_in_millis: Millis,
}

/// How busy the engines on a GPU are over the last readings, and what that costs the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EngineLoadPart {
    /// KV cache in use, averaged over the policy's `telemetry.smoothing`; `None` if unknown.
    pub average_percent: Option<Percent>,
    /// Change of the average a minute, in points of KV cache.
    pub trend_per_minute: Option<i32>,
    /// What decisions count: it follows the average in steps.
    pub counted_percent: Option<Percent>,
    pub counted_queue: Option<u32>,
    /// An engine interrupts its own requests for lack of KV cache, which counts as a full one.
    pub preempting: bool,
    /// The age of the latest reading.
    pub age_millis: Millis,
    /// The part of the score that it is, 0 to 1,000.
    pub part: u32,
}

/// A pod that has, reserves or was offered a part of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OccupantPart {
    pub pod: PodKey,
    pub class: String,
    pub priority: i32,
    pub presence: OccupantPhase,
    /// The VRAM that counts on this GPU.
    pub bytes: Bytes,
    /// While its engine starts: how long the start gate still excludes other starting engines here, at most.
    pub start_gate_opens_in_millis: Option<Millis>,
    /// VRAM that its processes use beyond its grant, over all its GPUs, once several reports in a row have shown it.
    #[serde(default)]
    pub over_grant_bytes: Bytes,
    /// It may run an engine, and none can be read: that makes the load of its GPUs unknown.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unread: bool,
    /// `None` if it has nothing to do with VRAM that is lent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loan: Option<LoanStage>,
    /// `None` if its agent says nothing of its requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<OccupantLatencyPart>,
    /// Why it may not be evicted for the pod; `None` if it may, or if the pod does not wait.
    #[serde(default)]
    pub keep_reason: Option<String>,
}

/// How long the requests of a pod's engines take, as last said, and the limits of its class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OccupantLatencyPart {
    /// `None` if it is unknown: it had no request, or does not say it.
    pub time_per_token_micros: Option<Micros>,
    /// What it is expected to take beside those that have work now; `None` if that is unknown, or no class has limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_time_per_token_micros: Option<Micros>,
    pub max_time_per_token_micros: Option<Micros>,
    pub time_to_first_token_micros: Option<Micros>,
    pub max_time_to_first_token_micros: Option<Micros>,
    /// The share of time for which it has requests.
    pub busy_percent: Option<Percent>,
}

/// Nodes that do not fit for the same reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusalGroup {
    pub code: String,
    pub count: u32,
    /// The node nearest to fitting, and its reason with figures.
    pub example: NodeName,
    pub text: String,
}

/// What the explained pod, which is bound, has to do with VRAM that is lent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodLoanPart {
    #[serde(flatten)]
    pub stage: LoanStage,
    /// What `stowage.dev/wake-requested` says.
    pub request: Option<String>,
    /// For a pod that borrows, the pods on its GPUs that lend; for any other, the pods that borrow there.
    pub others: Vec<String>,
    /// VRAM that pods borrow on its GPUs.
    pub borrowed_bytes: Bytes,
    /// All of its grant is free, and stays so.
    pub is_free: bool,
}

/// Whether a pod that waits may have VRAM that engines lend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BorrowingPart {
    /// Why it may not; `None` if it may.
    pub kept_out_because: Option<String>,
}

/// VRAM that is lent on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuLoansPart {
    /// What engines lend here now, used or not.
    pub lent_bytes: Bytes,
    pub borrowed_bytes: Bytes,
    /// They lend to pods of a lower priority than this.
    pub below_priority: i32,
    /// What such pods may still have.
    pub free_to_borrowers_bytes: Bytes,
}

/// The time from binding until the pod answers, in parts that follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartPart {
    pub pull_millis: Millis,
    pub fetch_millis: Millis,
    pub load_millis: Millis,
    pub init_millis: Millis,
    /// The whole time by the policy's speeds alone.
    pub policy_millis: Millis,
    pub missing_images: u32,
    pub missing_image_bytes: Bytes,
    /// No node lists some of the missing images: the policy's size counts.
    pub is_image_size_assumed: bool,
    /// How the pull was calibrated.
    pub pull: CalibrationPart,
    /// How the rest was calibrated.
    pub engine: CalibrationPart,
}

/// How many times as long something takes as the policy says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CalibrationPart {
    /// Where that was learned.
    pub source: FactorSource,
    /// Number of starts that it was learned from; 0 if none.
    pub starts: u16,
    /// Factor of the part that depends on bytes, in thousandths.
    pub transfer_thousandths: u32,
    pub init_thousandths: u32,
}

/// When a bound pod's engine was expected to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoundStartPart {
    /// Expected time from binding until the engine answers.
    pub expected_millis: Millis,
    /// Time from binding until the engine answers, by the policy's speeds alone.
    pub policy_millis: Millis,
    /// Time from binding until the engine answered; `None` while it starts.
    pub took_millis: Option<Millis>,
}
