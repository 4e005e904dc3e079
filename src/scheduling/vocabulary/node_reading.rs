//! What an agent measured on one node, and how far it may be believed by its age.
//!
//! A reading is a fact about the past. The ledger knows what is allocated; here is what was found, and together they say
//! what is free on a GPU right now (`ledger::node_state`).

use super::engine_model::EngineReading;
use super::latency::EngineLatency;
use super::model_tier::NodeModelSet;
use crate::ids::{GpuUuid, PodKey, PodUid};
use crate::units::{Bytes, Moment, Percent};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One node, measured once.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReading {
    /// On the receiver's clock: when the report came, less the age its sender measured.
    pub sampled: Moment,
    pub gpus: Vec<GpuReading>,
    /// How busy GPUs are; only those of which the driver says it. No decision depends on it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub activities: BTreeMap<GpuUuid, GpuActivity>,
    pub holdings: NodeModelSet,
    /// Engines and their models, in order of their pods' UIDs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engines: Vec<EngineReading>,
    /// How many requests the engines of each pod work on, in order of UID; only of those that say so.
    pub in_flight: Vec<(PodUid, u32)>,
    /// How long the requests of each pod's engines take, in order of UID; only of those that serve and say something of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub latencies: Vec<EngineLatency>,
    /// Whether the engines of each pod sleep, in order of UID; only of those of which it is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sleep: Vec<(PodUid, SleepState)>,
    /// Pods with a process whose use is unknown, in order of UID.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unmeasured: Vec<PodUid>,
    /// Pods of which no engine can be read, each once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unread: Vec<UnreadPod>,
    /// Pods whose processes use more than they were granted, each once.
    #[serde(default)]
    pub over_grant: Vec<OverGrant>,
    /// `None` if the agent does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<NodeIsolation>,
    /// NVIDIA's container runtime is in legacy mode: nothing sets VRAM limits.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_legacy_runtime: bool,
    /// Limits of pods that have processes on a GPU, of those of which any is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<VramLimit>,
}

/// What keeps containers within VRAM limits on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeIsolation {
    /// The version of its cgroups: 1 or 2.
    pub cgroup_version: u8,
    /// The kernel counts the memory of devices by cgroup: the controller `dmem`.
    pub dmem: bool,
}

/// The limits in force of a pod's containers on one GPU, as their cgroups say. What the pod uses there is what the reading
/// attributes to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VramLimit {
    pub pod: PodUid,
    pub gpu: GpuUuid,
    /// The GPU's total if there is none; `None` if it is unknown.
    pub limit: Option<Bytes>,
    /// What nobody takes from it; `None` if it is unknown.
    pub guaranteed: Option<Bytes>,
}

/// Whether a pod's engines sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepState {
    /// All of them, and it is known what each of their processes uses.
    Asleep,
    /// One at least does not, and none is starting.
    Awake,
    /// One at least has not loaded its model yet.
    Starting,
}

/// A pod that has GPUs, and of which no engine can be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnreadPod {
    pub pod: PodUid,
    pub gpus: Arc<[GpuUuid]>,
    /// A container declares a port: it serves something, whatever its class.
    pub declares_port: bool,
}

/// What an agent found of a pod that uses more VRAM than it was granted, over all its GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverGrant {
    pub pod: PodUid,
    pub granted: Bytes,
    pub used: Bytes,
    /// The pod's name, if the agent knows of no GPU that it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ungranted: Option<PodKey>,
}

/// One GPU or MIG slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReading {
    pub uuid: GpuUuid,
    /// VRAM in use on it, without the driver's reserve; `None` if the driver does not say.
    pub used: Option<Bytes>,
    /// What the processes of each pod have, in order of UID.
    pub attributed: Vec<(PodUid, Bytes)>,
    pub engine_load: EngineLoad,
}

/// How busy a GPU was, over the time between its last two samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuActivity {
    /// The share of time in which an SM had work, on average over its SMs; `null` or missing if unknown.
    pub sm_percent: Option<Percent>,
    /// The share of its memory bandwidth; likewise.
    pub memory_bandwidth_percent: Option<Percent>,
}

impl GpuActivity {
    /// `None` if both are unknown.
    pub fn new(
        sm_percent: Option<Percent>,
        memory_bandwidth_percent: Option<Percent>,
    ) -> Option<Self> {
        sm_percent.or(memory_bandwidth_percent)?;
        Some(Self {
            sm_percent,
            memory_bandwidth_percent,
        })
    }

    pub fn percents(self) -> [Option<Percent>; 2] {
        [self.sm_percent, self.memory_bandwidth_percent]
    }
}

/// How busy the engines on a GPU are.
///
/// **Unknown is never zero.** A GPU reads as idle only if it is known that no engine serves there, or if each that does says that
/// it is idle. An engine that is silent, a metrics page that is not recognised, a figure that is impossible or missing, and a pod that may
/// run an engine of which nothing can be read make its load unknown: `partial`, beside what is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineLoad {
    /// KV cache in use, of the fullest engine serving there; rounded up.
    pub kv_cache: Option<Percent>,
    /// Requests waiting in the engines' queues, over all engines serving there.
    pub queue: Option<u32>,
    /// Some engine there does not say: the figures are the least that it is.
    pub partial: bool,
    /// An engine there interrupts its own requests for lack of KV cache.
    #[serde(default)]
    pub preempting: bool,
}

impl EngineLoad {
    /// A GPU on which no engine serves.
    pub const NONE: Self = Self {
        kv_cache: Percent::new(0),
        queue: Some(0),
        partial: false,
        preempting: false,
    };

    /// An engine is there, or may be, that does not say how busy it is.
    pub const UNKNOWN: Self = Self {
        kv_cache: None,
        queue: None,
        partial: true,
        preempting: false,
    };

    /// The load that one engine reports; partial if it lacks either figure.
    pub fn new(kv_cache: Option<Percent>, queue: Option<u32>) -> Self {
        Self {
            kv_cache,
            queue,
            partial: kv_cache.is_none() || queue.is_none(),
            preempting: false,
        }
    }

    /// KV cache in use as decisions count it: an engine that preempts its own requests is full, whatever its gauge says.
    pub fn occupancy(self) -> Option<Percent> {
        if self.preempting {
            Some(Percent::FULL)
        } else {
            self.kv_cache
        }
    }

    /// The load where some pod may have an engine that says nothing.
    pub fn with_unread_engine(self) -> Self {
        if self == Self::NONE {
            Self::UNKNOWN
        } else {
            Self {
                partial: true,
                ..self
            }
        }
    }

    /// Two engines on one GPU: the fullest cache counts, queues add up. What only one of them says is the least that it is:
    /// an engine that is known to be full is full, even if the other engine reports nothing.
    pub fn combined_with(self, other: Self) -> Self {
        Self {
            kv_cache: self.kv_cache.max(other.kv_cache),
            queue: match (self.queue, other.queue) {
                (Some(a), Some(b)) => Some(a.saturating_add(b)),
                (one, other) => one.or(other),
            },
            partial: self.partial || other.partial,
            preempting: self.preempting || other.preempting,
        }
    }
}

/// How far a node's reading may be believed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Freshness {
    /// No agent has reported since this ledger began.
    #[default]
    Unreported,
    Fresh,
    /// Too old to act on; still a hint of what else is there.
    Stale,
    Expired,
}

impl NodeReading {
    /// Roughly how much memory it takes.
    pub fn approximate_bytes(&self) -> usize {
        /// Bytes of a UID, or of a model's name.
        const TEXT: usize = 64;
        let attributed: usize = self.gpus.iter().map(|gpu| gpu.attributed.len()).sum();
        let per_pod = attributed
            + self.in_flight.len()
            + self.sleep.len()
            + self.latencies.len()
            + self.over_grant.len()
            + self.unread.len()
            + 2 * self.limits.len();
        size_of::<Self>()
            + self.gpus.len() * size_of::<GpuReading>()
            + self.activities.len() * size_of::<(GpuUuid, GpuActivity)>()
            + self.engines.len() * (size_of::<EngineReading>() + 2 * TEXT)
            + self.holdings.approximate_bytes()
            + per_pod * (size_of::<OverGrant>() + TEXT)
    }

    /// The limits in force of a pod on a GPU; `None` if nothing of them is known.
    pub fn limit_of(&self, pod: &PodUid, gpu: &GpuUuid) -> Option<&VramLimit> {
        self.limits
            .iter()
            .find(|limit| limit.pod == *pod && limit.gpu == *gpu)
    }

    pub fn gpu(&self, uuid: &GpuUuid) -> Option<&GpuReading> {
        self.gpus.iter().find(|gpu| gpu.uuid == *uuid)
    }

    /// Requests that the pod's engines work on; `None` if they do not say.
    pub fn in_flight_of(&self, pod: &PodUid) -> Option<u32> {
        let index = self
            .in_flight
            .binary_search_by(|(uid, _)| uid.cmp(pod))
            .ok()?;
        Some(self.in_flight[index].1)
    }

    /// How long the requests of the pod's engines take; `None` if they do not serve or say nothing of it.
    pub fn latency_of(&self, pod: &PodUid) -> Option<&EngineLatency> {
        let index = self
            .latencies
            .binary_search_by(|latency| latency.pod.cmp(pod))
            .ok()?;
        Some(&self.latencies[index])
    }

    /// Whether the pod's engines sleep; `None` if that is unknown.
    pub fn sleep_of(&self, pod: &PodUid) -> Option<SleepState> {
        let index = self.sleep.binary_search_by(|(uid, _)| uid.cmp(pod)).ok()?;
        Some(self.sleep[index].1)
    }

    /// Whether processes of the pod were seen on any of its GPUs.
    pub fn has_processes_of(&self, pod: &PodUid) -> bool {
        self.gpus.iter().any(|gpu| gpu.attributed_to(pod).is_some())
    }
}

impl NodeReading {
    /// Whether no container here can have a VRAM limit, whatever the node's condition says.
    pub(crate) fn rules_out_vram_limits(&self) -> bool {
        let cgroup_version = self.isolation.map(|isolation| isolation.cgroup_version);
        self.has_legacy_runtime || cgroup_version == Some(1)
    }
}

impl GpuReading {
    pub fn attributed_to(&self, pod: &PodUid) -> Option<Bytes> {
        let index = self
            .attributed
            .binary_search_by(|(uid, _)| uid.cmp(pod))
            .ok()?;
        Some(self.attributed[index].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_engine_says_stands_beside_one_that_is_silent() {
        let said = |kv, queue| EngineLoad::new(Percent::new(kv), Some(queue));
        assert_eq!(said(40, 2).combined_with(said(70, 3)), said(70, 5));
        let silent = EngineLoad::new(None, None);
        assert_eq!(
            said(97, 40).combined_with(silent),
            EngineLoad {
                partial: true,
                ..said(97, 40)
            }
        );
        assert_eq!(silent.combined_with(silent), silent);
    }
}
