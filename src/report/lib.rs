//! A node agent's report: the wire form of `POST /v1/reports`. The agent writes it, the extender reads it.
//!
//! Shapes and their checks only: nothing here samples, sends or decides. Unknown fields are ignored, so that an agent may be
//! newer than the extender; an error names a missing field.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod engine_metrics;
mod engine_summary;
pub mod limits;
mod reading;

pub use engine_summary::EngineSummary;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuModel, GpuUuid, ModelId, NodeName, PodKey, PodUid};
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::health::{AnswerAges, ComputeMode, Health};
use stowage_scheduling::vocabulary::latency::Latency;
use stowage_scheduling::vocabulary::model_tier::ModelTier;
use stowage_scheduling::vocabulary::node_reading::{GpuActivity, NodeIsolation};

/// One sample of one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
// A field that may be null must still be present.
#[schemars(extend("required" = ["node", "bootId", "sequence", "gpus"]))]
pub struct NodeReport {
    /// The Node object's name.
    pub node: NodeName,
    /// Drawn again at each start of the agent.
    pub boot_id: String,
    /// Increases with each report of one boot.
    pub sequence: u64,
    /// Age of the GPU figures when the report was sent, by the agent's monotonic clock, in milliseconds.
    #[serde(default)]
    pub age_millis: Millis,
    /// The node's GPUs and MIG slices; `null` if they could not be read, with the reason under `missing`.
    #[serde(deserialize_with = "Option::deserialize")]
    pub gpus: Option<Vec<GpuReport>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engines: Vec<EngineReport>,
    /// Pods with a GPU of which no engine can be read: the load of their GPUs is unknown. Pods that are not ready are not listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unread: Vec<UnreadPod>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ModelReport>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<ReportFinding>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unrecorded: Vec<UnrecordedPod>,
    /// NVIDIA's container runtime is in legacy mode here: it takes bare UUIDs only, and no CDI names.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub legacy_runtime: bool,
    /// What keeps containers within VRAM limits here; missing if it could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<NodeIsolation>,
    /// Parts that could not be sampled this time, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<MissingPart>,
}

/// A GPU or MIG slice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    pub uuid: GpuUuid,
    /// NVML's index on its node; a slice has its parent's.
    pub index: u32,
    pub model: GpuModel,
    /// For a MIG slice, the UUID of the GPU it is cut from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<GpuUuid>,
    pub total_bytes: Bytes,
    /// VRAM that the driver keeps for itself.
    #[serde(default)]
    pub reserved_bytes: Bytes,
    /// VRAM allocated on it, without the driver's reserve.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<Bytes>,
    /// Busy time in the last sample, in percent; 0 to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u8>,
    /// How busy it was since the report before; missing if the driver does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity: Option<GpuActivity>,
    #[serde(default = "healthy")]
    pub health: Health,
    /// Why it is not healthy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health_reason: Option<String>,
    /// For how long NVML has answered for it in a way that is not known to be harmless; missing if its last answers were well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_millis: Option<Millis>,
    /// For how long it has answered well again; missing if it never failed since the agent's start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovered_millis: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// The compute mode, of a slice its GPU's. Missing if it has no such mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
    /// GPUs of one node with the same number reach each other over NVLink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink_island: Option<u32>,
    /// Processes with memory on it; `null` or missing if they could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<Vec<ProcessReport>>,
    /// What the cgroups of pods with processes on it say, in order of UID; of a pod of which they say nothing there is no entry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cgroups: Vec<CgroupReport>,
    /// Numbers by which others name the GPU; the agent alone needs them.
    #[serde(skip)]
    pub numbers: DeviceNumbers,
}

/// The numbers of a GPU or MIG slice beside its index, as far as they are known. Device plugins and DRA drivers name it by them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceNumbers {
    /// N of `/dev/nvidiaN`; a slice has its parent's.
    pub minor: Option<u32>,
    /// A MIG slice's place on its GPU.
    pub mig_index: Option<u32>,
    /// The GPU instance of a MIG slice. Only its processes show it.
    pub gpu_instance: Option<u32>,
    /// By it the kernel names the memory of a GPU.
    pub pci: Option<PciAddress>,
}

/// Where a GPU is on the PCI bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl PciAddress {
    /// From `0000:3b:00.0`, as the kernel writes it, or `00000000:3B:00.0`, as NVML does.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, function) = text.split_once('.')?;
        let mut parts = rest.split(':');
        let mut part = || u32::from_str_radix(parts.next()?, 16).ok();
        let (domain, bus, device) = (part()?, part()?, part()?);
        Some(Self {
            domain,
            bus: bus.try_into().ok()?,
            device: device.try_into().ok()?,
            function: u8::from_str_radix(function, 16).ok()?,
        })
        .filter(|_| parts.next().is_none())
    }
}

impl GpuReport {
    /// What a pod has on it by its cgroups; `None` if they do not say.
    pub fn used_by_cgroup(&self, pod: &PodUid) -> Option<Bytes> {
        let cgroup = self.cgroups.iter().find(|cgroup| cgroup.pod == *pod)?;
        cgroup.used_bytes
    }

    /// Its health under a policy: as reported, unless NVML's answers or its compute mode make it worse.
    pub fn health(&self, lost_after: Millis) -> Health {
        let ages = AnswerAges {
            failing: self.failing_millis,
            recovered: self.recovered_millis,
        };
        let by_mode = self
            .compute_mode
            .and_then(ComputeMode::fault)
            .map_or(Health::Healthy, |_| Health::Draining);
        self.health.max(by_mode).max(ages.health(lost_after))
    }
}

fn healthy() -> Health {
    Health::Healthy
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProcessReport {
    /// On the host.
    pub pid: u32,
    /// `null` or missing where the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<Bytes>,
    /// The pod it belongs to; missing if it belongs to no pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodUid>,
    /// The container that its cgroup names, by its id. Of the agent alone: it says which of a pod's engines runs where.
    #[serde(skip)]
    pub container: Option<Arc<str>>,
}

/// What the cgroups of a pod's containers say of a GPU, over all its containers with processes there. What one of them does not
/// say is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CgroupReport {
    pub pod: PodUid,
    /// What the kernel has charged to them. It counts where it is more than the pod's processes have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<Bytes>,
    /// The hard limit in force; the GPU's total if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<Bytes>,
    /// The soft limit: what nobody takes from them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guaranteed_bytes: Option<Bytes>,
    /// The hard limit that the pod's Binding wrote for this GPU; missing if it wrote none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_bytes: Option<Bytes>,
}

/// A limit in force may differ by that from the one that was written, in whole mebibytes.
const LIMIT_ROUNDING: Bytes = Bytes::mib(1);

impl CgroupReport {
    /// The limit in force, if it lets the pod have more than its Binding wrote.
    pub fn unkept_limit(&self) -> Option<Bytes> {
        let written = self.written_bytes?;
        self.limit_bytes
            .filter(|limit| *limit > written + LIMIT_ROUNDING)
    }
}

/// An inference engine, as its own metrics show it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineReport {
    pub pod: PodUid,
    /// Such as `vllm` or `sglang`; the pod contract lists all. `unknown` if its page could not be read.
    pub engine: String,
    /// The port of its metrics page: a pod may have several engines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The GPUs it runs on.
    pub gpus: Vec<GpuUuid>,
    pub state: EngineState,
    /// While it sleeps: 1 keeps the weights in host memory, 2 drops them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sleep_level: Option<u8>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelId>,
    /// Share of its KV cache in use, 0 to 1: the fullest of its data-parallel ranks. Missing if it does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_usage: Option<f64>,
    /// Tokens its KV cache holds, over all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_tokens: Option<u64>,
    /// Requests waiting in its queue, over all ranks. If the engine says what they wait for, those that wait for capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u64>,
    /// It interrupted requests of its own for lack of KV cache a moment ago: it is full, whatever `kvCacheUsage` says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub preempting: bool,
    /// Requests being processed, over all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<u64>,
    /// Tokens that it generated per second over the last half minute, over all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Tokens of prompts that it processed per second, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_per_second: Option<f64>,
    /// The share of the last half minute in which it worked on requests, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// From one output token of a request to the next; missing if it does not report it or had no request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_per_token: Option<Latency>,
    /// From a request's arrival to its first token; missing if it does not report it or had no request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_to_first_token: Option<Latency>,
    /// Age of these figures when the report was sent.
    #[serde(default)]
    pub age_millis: Millis,
    /// The namespace whose new pods may wake it while it sleeps, in place of a start of their own; missing if its pod's labels do
    /// not allow that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub reusable_in: Option<Arc<str>>,
    /// Why figures are missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A pod that has a GPU, and of which no engine can be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnreadPod {
    pub pod: PodUid,
    /// The GPUs it runs on.
    pub gpus: Vec<GpuUuid>,
    /// A container declares a port: it serves something.
    #[serde(default)]
    pub declares_port: bool,
    pub reason: String,
}

#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "kebab-case", const_into_str)]
#[serde(rename_all = "kebab-case")]
pub enum EngineState {
    /// Its process runs, and its port does not answer yet.
    Starting,
    /// It answers, and its model is not loaded yet.
    Loading,
    Serving,
    /// Its KV cache is gone, and its weights are off the GPU.
    Sleeping,
    /// Its pod is being deleted; it finishes its requests.
    Draining,
    /// It answered before, and does not now.
    Unreachable,
    /// A state of a later version that this one does not know.
    #[serde(other)]
    Other,
}

/// A model of which files are on the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelReport {
    pub model: ModelId,
    pub tier: ModelTier,
    /// Bytes of weights on the node; 0 if unknown.
    #[serde(default)]
    pub bytes: Bytes,
    /// Where it was found: `huggingface`, `kserve`, `image`, `engine`.
    pub source: String,
}

/// A deviation from what Stowage assigned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(
    rename_all = "kebab-case",
    rename_all_fields = "camelCase",
    tag = "kind"
)]
pub enum ReportFinding {
    /// A pod's processes run on other GPUs than its Binding recorded.
    Drift {
        pod: PodUid,
        recorded: Vec<GpuUuid>,
        actual: Vec<GpuUuid>,
    },
    /// A pod's processes use more VRAM than it was granted.
    OverGrant {
        pod: PodUid,
        granted_bytes: Bytes,
        used_bytes: Bytes,
    },
}

/// A pod with processes on GPUs, and without a record of Stowage's of any. Another allocator may have given it what it uses.
// No finding: a version that does not know its kind would reject the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnrecordedPod {
    pub pod: PodUid,
    pub namespace: String,
    pub name: String,
    pub gpus: Vec<GpuUuid>,
}

impl UnrecordedPod {
    /// As an API server may have it: it becomes part of a request's path.
    pub fn key(&self) -> Option<PodKey> {
        let is_dns = |text: &str| {
            text.bytes()
                .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'))
        };
        let key = PodKey::parse(&self.namespace, &self.name).ok()?;
        (is_dns(&key.namespace) && is_dns(&key.name)).then_some(key)
    }
}

/// A part of the report that could not be sampled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MissingPart {
    pub part: ReportPart,
    pub reason: String,
}

#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "kebab-case", const_into_str)]
#[serde(rename_all = "kebab-case")]
pub enum ReportPart {
    /// NVML.
    Gpus,
    /// Which process is on which GPU.
    Processes,
    /// Which pod a process belongs to.
    Owners,
    /// Which pods are on the node.
    Pods,
    Engines,
    Models,
    /// VRAM limits of containers, and what their cgroups use.
    Limits,
    /// A part that only a later version knows.
    #[serde(other)]
    Other,
}
