//! Remedies: what would have to change for a pod that fits nowhere; and [`mod@impasse`], where no wait and no eviction helps.
//! Each was found by changing one thing and asking the core again. [`request`] changes what the pod requests,
//! [`lift_one_obstacle`] what excludes it, [`victims`] which pods are there; [`sentence`] writes the text. For a pod that fits or
//! has a reservation, the remedies say what to check next. Nothing here is guessed from an error's code.

mod devices;
mod impasse;
mod lift_one_obstacle;
mod request;
pub(super) mod sentence;
mod victims;

pub(crate) use impasse::Impasse;
pub use impasse::{ImpasseKind, impasse};

use super::explanation::{OthersPart, PodVerdict, Reason, ShareAmount};
use super::facts::Facts;
use super::nodes::NodeOutline;
use super::units::{format_quantity, format_share, human_duration};
use crate::coded::coded;
use crate::ids::{NodeName, PodKey};
use crate::ledger::PodEvictionCost;
use crate::ledger::PodPhase;
use crate::ledger::evictions::EvictionLimit;
use crate::placing::fit::fit;
use crate::placing::fit::is_allowed;
use crate::placing::rank::shortlist;
use crate::reasons::{LIFTS, list_names};
use crate::units::{Bytes, Millis, Percent};
use crate::verbs::ClusterCopy;
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::node::Node;
use crate::vocabulary::node_reading::Freshness;
use sentence::{
    DESCRIBE, add_gpu_text, engine_load_text, gpu_count_text, more_nodes_text, not_bound, preempt,
    requeued, start_agent, start_gate_wait_text, victims_left_text,
};
use serde::{Deserialize, Serialize};

/// One change that would help, and its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Remedy {
    #[serde(flatten)]
    pub change: RemedyChange,
    pub text: String,
}

/// GPUs of one node, by their indices there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RemedyPlacement {
    pub node: NodeName,
    pub gpus: Vec<u32>,
}

coded! {
    /// Every change but the first seven and [`Self::LabelGpuNodes`] makes the pod fit on its candidate, if it names one. With its effort,
    /// by the role that has to act: none, the pod's owner, the policy's owner (12 to 14), or the cluster's owner (from 15 on).
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "change")]
    pub enum RemedyChange: (u8, Option<&RemedyPlacement>) {
        /// The pod fits, and the scheduler has not asked about it since this process observed it.
        "not-asked" NotAsked,
            "it fits, and kube-scheduler has not asked: check that spec.schedulerName is the profile with Stowage's extender, and look for \
             scheduling gates, unbound volumes and quotas; {DESCRIBE}"
            => (0, None);
        /// The pod fits, and was offered a node that it was not bound to.
        "not-bound" NotBound { node: NodeName, attempts: u32 },
            "{}", not_bound(node, *attempts)
            => (0, None);
        /// The pod fits now; it was refused before that.
        "requeued" Requeued { woken: u32, ago_millis: Millis },
            "{}", requeued(*woken, *ago_millis)
            => (0, None);
        /// The pod fits only on nodes that the scheduler did not ask about when it was refused.
        "rejected-by-others" RejectedByOthers { node: NodeName, nodes: u32 },
            "it fits on {node}{}, and kube-scheduler does not ask about it: another plugin rejects it, for taints, affinity, CPU, memory or \
             volumes; {DESCRIBE}", more_nodes_text(*nodes)
            => (1, None);
        /// The pod fits there by Stowage alone: kube-scheduler's own filters refuse the node, for `reason`.
        "rejected-by-kube-scheduler" RejectedByKubeScheduler { node: NodeName, nodes: u32, reason: Reason },
            "Stowage would place it on {node}{}, and kube-scheduler refuses that; of {node}: {}", more_nodes_text(*nodes), reason.text
            => (1, None);
        /// In a rolling update, the pod that it replaces has what it needs, and leaves only when this one is ready.
        "let-predecessor-leave" LetPredecessorLeave { node: NodeName, pod: String },
            "it replaces {pod}, which has what it needs on {node} and is removed only when this pod is ready: set maxSurge to 0 and \
             maxUnavailable to 1 in the Deployment's strategy, or delete that pod"
            => (1, None);
        /// The pod has a reservation, and these victims have not left yet.
        "wait-for-victims" WaitForVictims { node: NodeName, victims: Vec<String>, left: u32, deadline_in_millis: Millis },
            "wait: {}; the reservation lasts for {} more", victims_left_text(node, victims, *left), human_duration(*deadline_in_millis)
            => (0, None);
        /// A starting engine is the only obstacle.
        "wait-for-start-gate" WaitForStartGate { gpu_candidate: RemedyPlacement, by: Vec<String>, opens_in_millis: Option<Millis> },
            "wait: the engine of {} is starting on {gpu_candidate}; {}", list_names(by), start_gate_wait_text(*opens_in_millis)
            => (2, Some(gpu_candidate));
        /// Other pods are evicted for it: `victims`, and `others` that the reader may not see.
        "preempt" Preempt { gpu_candidate: RemedyPlacement, victims: Vec<Victim>, others: Option<OthersPart>, needs: PreemptionNeeds },
            "{}", preempt(gpu_candidate, victims, *others, *needs)
            => (if matches!(needs, PreemptionNeeds::Nothing | PreemptionNeeds::Allowance(_)) { 3 } else { 8 }, Some(gpu_candidate));
        /// The engines there have less load.
        "wait-for-engines" WaitForEngines {
            gpu_candidate: RemedyPlacement, by: Vec<String>,
            kv_cache_percent: Option<Percent>, kv_cache_limit_percent: Option<Percent>, queue: Option<u32>, queue_limit: Option<u32>
        },
            "no VRAM is missing on {gpu_candidate}, but {} (the engine of {}): wait until it has less to do, or give it another replica",
            engine_load_text((*kv_cache_percent, *kv_cache_limit_percent), (*queue, *queue_limit)), list_names(by)
            => (4, Some(gpu_candidate));
        /// The pod asks for less VRAM.
        "request-less" RequestLess { gpu_candidate: RemedyPlacement, vram_bytes: Bytes, instead_of_bytes: Bytes },
            "request {} of stowage.dev/vram instead of {}: {} then",
            format_quantity(*vram_bytes), format_quantity(*instead_of_bytes), gpu_candidate.fits()
            => (if vram_bytes.times(2) >= *instead_of_bytes { 5 } else { REQUEST_MUCH_LESS_EFFORT }, Some(gpu_candidate));
        /// The pod is spread over more GPUs, or fewer.
        "change-gpu-count" ChangeGpuCount { gpu_candidate: RemedyPlacement, gpus: u32, instead_of: u32 },
            "{}: {} then", gpu_count_text(*gpus), gpu_candidate.fits()
            => (6, Some(gpu_candidate));
        /// The pod does not require exclusive GPUs.
        "share" Share { gpu_candidate: RemedyPlacement },
            "let it share its GPU (leave the annotation stowage.dev/exclusive out): {} then", gpu_candidate.fits()
            => (7, Some(gpu_candidate));
        /// Its tenant may use more, by so much.
        "raise-limit" RaiseLimit { gpu_candidate: RemedyPlacement, tenant: String, by: ShareAmount },
            "raise the limit of tenant {tenant} by {} (tenants in the policy), or wait until pods of its own have terminated: {} then",
            format_share(*by, "nothing"), gpu_candidate.fits()
            => (10, Some(gpu_candidate));
        /// Such nodes have no report; their GPUs are unknown, so it is unknown whether the pod fits there.
        "start-agent" StartAgent { node: NodeName, nodes: u32, freshness: Freshness },
            "{}{}", start_agent(node, *freshness), more_nodes_text(*nodes)
            => (11, None);
        /// No node is known to have a GPU, and none says by its labels that it has one.
        "label-gpu-nodes" LabelGpuNodes,
            "no node is known to have a GPU: label those that have one nvidia.com/gpu.present=true, so that the agent starts there and \
             reports its GPUs"
            => (11, None);
        /// A reason goes away, as the entry of this code in the list of reasons says; `by` are the pods that the action names.
        "lift" Lift { reason: String, action: String, gpu_candidate: RemedyPlacement, by: Vec<String>, nodes: u32 },
            "{action}{}", more_nodes_text(*nodes)
            => (effort_of(reason), Some(gpu_candidate));
        /// This much more VRAM is free there.
        "free-vram" FreeVram { gpu_candidate: RemedyPlacement, short_bytes: Bytes },
            "free {short_bytes} more on {gpu_candidate}: nothing else is missing there"
            => (9, Some(gpu_candidate));
        /// The pod requests fewer devices.
        "fewer-devices" FewerDevices { gpu_candidate: RemedyPlacement, resource: String, devices: u32, instead_of: u32 },
            "request {devices} of {resource} instead of {instead_of}: {gpu_candidate} fits then"
            => (6, Some(gpu_candidate));
        /// This many more devices are free there.
        "free-devices" FreeDevices { gpu_candidate: RemedyPlacement, resource: String, missing: u32 },
            "wait until {missing} more of {resource} is free on {gpu_candidate}; kube-scheduler preempts pods for it as far as priorities and \
             the policy allow"
            => (9, Some(gpu_candidate));
        /// Another GPU is added.
        "add-gpu" AddGpu { needs_bytes: Bytes, total_bytes: Bytes, headroom_percent: Percent, gpus: u32 },
            "add a node {}", add_gpu_text(*needs_bytes, *total_bytes, *headroom_percent, *gpus)
            => (19, None);
    }
}

/// A pod that would have to be evicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Victim {
    pub pod: String,
    pub class: String,
    pub priority: i32,
    /// Over all its GPUs.
    pub vram_bytes: Bytes,
    /// What its eviction loses.
    pub eviction_cost: PodEvictionCost,
    /// The group that is evicted with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupRestart>,
    /// Kueue manages it: its Workload stays admitted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_kueues: bool,
}

/// A group that is evicted as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupRestart {
    pub name: String,
    pub pods: u32,
    /// What the eviction of all its pods loses, in thousandths of a GPU-second.
    pub cost: u64,
}

/// What the pod lacks to evict others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PreemptionNeeds {
    /// Nothing: the scheduler or the planner preempts by itself.
    Nothing,
    /// A minute in which the eviction limits leave enough.
    Allowance(EvictionLimit),
    /// `preemptionPolicy: Never` forbids it.
    PreemptionPolicy,
    /// At least this priority.
    Priority(i32),
}

/// All remedies, the easiest first.
pub fn remedies(
    cluster: &ClusterCopy,
    facts: &Facts,
    outline: &NodeOutline,
    verdict: PodVerdict,
) -> Vec<Remedy> {
    let mut changes = match verdict {
        PodVerdict::Bound | PodVerdict::Assumed => Vec::new(),
        PodVerdict::Fits if outline.fits_on_queried_node(facts) => {
            next_step(facts).into_iter().collect()
        }
        PodVerdict::Fits => rejected_by_other_plugins(cluster, facts, outline),
        PodVerdict::Reserved => wait_for_victims(facts).into_iter().collect(),
        // Only its group does not.
        PodVerdict::DoesNotFit if outline.counts.fit > 0 => Vec::new(),
        PodVerdict::DoesNotFit => possible_changes(cluster, facts, outline),
    };
    changes.sort_by_key(|change| change.entry().0);
    changes
        .into_iter()
        .map(|change| Remedy {
            text: change.to_string(),
            change,
        })
        .collect()
}

/// The pod fits only where the scheduler did not ask: another plugin would have to accept it there, or something must change
/// elsewhere.
fn rejected_by_other_plugins(
    cluster: &ClusterCopy,
    facts: &Facts,
    outline: &NodeOutline,
) -> Vec<RemedyChange> {
    let node = |node_index: usize| facts.snapshot.nodes()[node_index].name.clone();
    let nodes = outline.counts.fit;
    let best = outline
        .best()
        .map(|node_index| RemedyChange::RejectedByOthers {
            node: node(node_index),
            nodes,
        });
    best.into_iter()
        .chain(possible_changes(cluster, facts, outline))
        .collect()
}

fn possible_changes(
    cluster: &ClusterCopy,
    facts: &Facts,
    outline: &NodeOutline,
) -> Vec<RemedyChange> {
    let mut changes: Vec<RemedyChange> = victims::preempt(cluster, facts, outline)
        .into_iter()
        .collect();
    let by_kube_scheduler = outline.refused_by_kube_scheduler(facts).into_iter();
    changes.extend(by_kube_scheduler.map(|(node_index, reason, nodes)| {
        RemedyChange::RejectedByKubeScheduler {
            node: facts.snapshot.nodes()[node_index].name.clone(),
            nodes,
            reason,
        }
    }));
    changes.extend(
        cluster
            .ledger()
            .blocking_predecessor(&facts.uid)
            .map(|(pod, node)| RemedyChange::LetPredecessorLeave {
                node: node.clone(),
                pod: facts.names([pod]).concat(),
            }),
    );
    changes.extend(request::other_requests(facts));
    changes.extend(devices::other_devices(facts, outline));
    changes.extend(raise_limit(facts));
    changes.extend(lift_one_obstacle::single_obstacle_remedies(
        cluster, facts, outline,
    ));
    let makes_pod_fit =
        |change: &RemedyChange| matches!(change.entry(), (..REQUEST_MUCH_LESS_EFFORT, Some(_)));
    if !changes.iter().any(makes_pod_fit) && !facts.demand().is_allocated_externally() {
        changes.push(add_gpu(facts));
    }
    // Emptying a GPU is proposed only where nothing smaller helps there.
    let is_smaller = |change: &RemedyChange| {
        use RemedyChange::{FreeVram, Lift, Preempt, WaitForEngines, WaitForStartGate};
        match change {
            Lift { reason, .. } => reason == "class-excluded",
            FreeVram { .. } | Preempt { .. } | WaitForEngines { .. } | WaitForStartGate { .. } => {
                true
            }
            _ => false,
        }
    };
    if changes.iter().any(is_smaller) {
        changes.retain(|change| change.entry().0 != EMPTY_GPU_EFFORT);
    }
    changes
}

/// The effort of requesting less than half of the VRAM: that takes another engine or model.
const REQUEST_MUCH_LESS_EFFORT: u8 = 18;
/// The effort of waiting until all pods have left a GPU.
const EMPTY_GPU_EFFORT: u8 = 17;

/// The effort of the change that removes this reason.
fn effort_of(reason: &str) -> u8 {
    LIFTS
        .iter()
        .find(|(code, _)| *code == reason)
        .map_or(REQUEST_MUCH_LESS_EFFORT, |(_, removal)| removal.effort)
}

impl RemedyChange {
    /// The change for a predecessor that is in the way on its node.
    pub fn from_predecessor((pod, node): (&PodKey, &NodeName)) -> Self {
        Self::LetPredecessorLeave {
            node: node.clone(),
            pod: pod.to_string(),
        }
    }
}

fn candidate_on(node: &Node, gpus: GpuSet) -> RemedyPlacement {
    let index = |gpu_index: usize| {
        node.devices
            .get(gpu_index)
            .map_or(gpu_index as u32, |device| device.index)
    };
    RemedyPlacement {
        node: node.name.clone(),
        gpus: gpus.iter().map(index).collect(),
    }
}

/// The GPUs that this demand would get on a node, within the tenant's limit.
fn fitting_gpus(node: &Node, demand: &Demand, allowance: TenantLimit) -> Option<GpuSet> {
    fit(node, demand)
        .ok()
        .filter(|gpus| is_allowed(allowance, &node.gpus, demand, *gpus))
}

/// The node (by index) and the GPUs that the filter would rank first for this demand.
fn best_placement(
    facts: &Facts,
    demand: &Demand,
    allowance: TenantLimit,
) -> Option<(usize, GpuSet)> {
    let attempt = crate::placing::rank::ScheduleAttempt {
        allowance,
        reserved_placement: None,
        ..facts.attempt(1)
    };
    let names: Vec<&str> = facts
        .queried_indices()
        .map(|node_index| facts.snapshot.nodes()[node_index].name.as_str())
        .collect();
    let candidates = shortlist(&facts.snapshot, demand, names.into_iter(), attempt);
    candidates
        .best
        .first()
        .map(|candidate| (candidate.node_index, candidate.gpus))
}

fn next_step(facts: &Facts) -> Option<RemedyChange> {
    let PodPhase::Waiting(waiting) = &facts.entry.phase else {
        return None;
    };
    Some(match (&waiting.refused, &waiting.offered) {
        (Some(refused), _) if refused.is_supposed && refused.requeues == 0 => {
            RemedyChange::NotAsked
        }
        (Some(refused), _) => RemedyChange::Requeued {
            woken: refused.requeues,
            ago_millis: facts.now.since(refused.at),
        },
        (None, Some(node)) => RemedyChange::NotBound {
            node: node.clone(),
            attempts: waiting.tries,
        },
        (None, None) => RemedyChange::NotAsked,
    })
}

fn wait_for_victims(facts: &Facts) -> Option<RemedyChange> {
    let reservation = facts.entry.reservation()?;
    Some(RemedyChange::WaitForVictims {
        node: reservation.node.clone(),
        victims: facts.names(&facts.victims),
        left: facts.victims_left,
        deadline_in_millis: reservation.deadline.since(facts.now),
    })
}

/// The higher limit with which the pod would fit on some node.
fn raise_limit(facts: &Facts) -> Option<RemedyChange> {
    let demand = facts.demand();
    if facts.allowance == TenantLimit::default() {
        return None;
    }
    let (node_index, gpus) = best_placement(facts, demand, TenantLimit::default())?;
    let node = &facts.snapshot.nodes()[node_index];
    // It is unknown which devices a device plugin picks: each counts as a whole GPU.
    let devices = TenantUsage {
        vram: demand.vram(),
        milli_gpus: u64::from(demand.gpus) * 1000,
    };
    let wanted: TenantUsage = if gpus.is_empty() {
        devices
    } else {
        gpus.iter()
            .map(|gpu_index| node.gpus[gpu_index].usage_of(demand))
            .sum()
    };
    let beyond = |wanted: u64, left: Option<u64>| {
        left.map(|left| wanted.saturating_sub(left))
            .filter(|by| *by > 0)
    };
    let by = ShareAmount {
        vram_bytes: beyond(wanted.vram.0, facts.allowance.vram.map(|left| left.0)).map(Bytes),
        milli_gpus: beyond(wanted.milli_gpus, facts.allowance.milli_gpus),
    };
    let tenant = facts.policy.tenant(demand.tenant?)?.name.clone();
    (by != ShareAmount::default()).then(|| RemedyChange::RaiseLimit {
        gpu_candidate: candidate_on(node, gpus),
        tenant,
        by,
    })
}

fn add_gpu(facts: &Facts) -> RemedyChange {
    let (demand, headroom) = (facts.demand(), facts.policy.headroom.default);
    let allocatable_percent = u128::from(100 - headroom.get().min(99));
    let total = (u128::from(demand.per_gpu.0) * 100).div_ceil(allocatable_percent);
    RemedyChange::AddGpu {
        needs_bytes: demand.per_gpu,
        total_bytes: Bytes(u64::try_from(total).unwrap_or(u64::MAX)),
        headroom_percent: headroom,
        gpus: demand.gpus,
    }
}

/// Whether the pod needs GPUs without other pods.
fn needs_empty_gpus(demand: &Demand) -> bool {
    demand.sharing == Sharing::Exclusive
}
