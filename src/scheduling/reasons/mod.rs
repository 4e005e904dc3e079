//! Why a pod is not placed: the one list of reasons, each declared once, with its code, its sentences and what is answered by it.
//! A reason may concern a node ([`Misfit`]), one GPU ([`Obstacle`]), the pod wherever it goes ([`WaitReason`]) or one attempt to place it
//! ([`AllocationFailure`]), with other figures on each of these levels and one code on all.
//!
//! A new reason is an entry here, and the place where it is decided: [`fit`](super::placing::fit) for a node,
//! [`obstacles`](super::explaining::obstacle::obstacles) for a GPU. Metrics, answers, explanations and their remedies follow from the
//! entry; no arm of a `match` speaks for a reason that it does not name.

mod declaration;
mod eviction_limit;
mod lift;
mod words;

pub use eviction_limit::EvictionLimit;
pub(crate) use eviction_limit::{EvictionScope, LimitedBecause};
pub use lift::PodsToName;
pub(crate) use lift::{FitWithoutReason, Lift, without_gpu_reason, without_reason_if};
pub use words::{list_names, room_text};

use super::kube_filters::UnsupportedRule;
use super::vocabulary::classification::ClassSet;
use super::vocabulary::cluster_share::TenantLimit;
use super::vocabulary::gpu::Health;
use super::vocabulary::latency::NeighborRoom;
use super::vocabulary::spare::SpareSet;
use crate::coded::coded;
use crate::ids::NodeName;
use crate::units::{Bytes, Micros, Millis, Percent, has_or_have, is_or_are, plural};
use declaration::reasons;
use serde::{Deserialize, Serialize};
use words::{
    each_of, health_text, in_pool, nodes_matching, none_healthy, pods_have, start_gate_text,
    tenant_limit_text,
};

/// Texts that are answered where a node does not fit. Without figures: the scheduler writes the text into the pod's condition, and a text
/// that changed with the free VRAM would requeue the pod each time (1,415 filter calls in 10 s were measured).
#[derive(Debug, Clone, Copy)]
pub struct NodeAnswers {
    pub filter: &'static str,
    /// The answer of `bind`, if the reason came up after `filter` had accepted the node.
    pub bind: &'static str,
    /// The advice of `plan capacity`.
    pub plan: &'static str,
    /// Whether more nodes of the kind help in such a plan.
    pub more_nodes_help: bool,
}

const fn answers(filter: &'static str, bind: &'static str) -> NodeAnswers {
    NodeAnswers {
        filter,
        bind,
        plan: "give more nodes",
        more_nodes_help: false,
    }
}

const fn temporary(bind: &'static str) -> NodeAnswers {
    answers(NO_GPU_NOW, bind)
}

impl NodeAnswers {
    const fn in_plan(self, plan: &'static str) -> Self {
        Self { plan, ..self }
    }

    const fn or_more_nodes(self, plan: &'static str) -> Self {
        Self {
            plan,
            more_nodes_help: true,
            ..self
        }
    }
}

impl Misfit {
    /// What `filter` answers.
    pub fn phrase(&self) -> &'static str {
        self.entry().filter
    }
}

impl AllocationFailure {
    /// What `bind` answers; the same text each time.
    pub fn phrase(&self) -> &'static str {
        self.entry()
    }
}

impl WaitReason {
    /// The text of the pod's condition. Without figures, because it must not change with each run.
    pub fn condition(&self) -> String {
        self.entry().unwrap_or_else(|| self.to_string())
    }
}

/// The one phrase of all temporary reasons: the scheduler counts nodes by phrase, and a count that changed would requeue the pod
/// as a figure would.
const NO_GPU_NOW: &str = "no GPU can take the pod now";
const GPU_TAKEN: &str = "conflict: another pod took the GPU in the meantime";
const REPORT_CHANGED: &str = "conflict: what the node's agent reports has changed";
const GPUS_CHANGED: &str = "conflict: the node's GPUs have changed";
const POOL_CHANGED: &str = "conflict: the node's pool has changed";
const LIMIT_REACHED: &str = "conflict: the tenant's limit was reached";

const USE_OTHER_ALLOCATOR: &str =
    "ask for nvidia.com/gpu, or take the allocator out of the policy's node pool";
const RAISE_LIMIT: &str = "raise the limit of its tenant in the policy, or give more nodes where the limit is a share of the cluster";

impl From<Misfit> for AllocationFailure {
    fn from(misfit: Misfit) -> Self {
        Self::NoLongerFits(misfit)
    }
}

// Recordings keep a digest of reasons by their places in this list: a new one for nodes comes after the others.
reasons! {
    UnknownNode = "unknown-node" {
        node "Stowage knows no node with this name"
            => answers("node unknown to Stowage", "conflict: node unknown to Stowage");
    }
    DevicePluginNode = "device-plugin-node" {
        node "a device plugin allocates this node's GPUs (nvidia.com/* is allocatable there); remove the plugin from the node to let Stowage place pods there"
            => answers("a device plugin allocates the node's GPUs", "conflict: a device plugin allocates the node's GPUs").in_plan(USE_OTHER_ALLOCATOR);
    }
    StowageNode = "stowage-node" {
        node "Stowage allocates this node's GPUs, and the pod requests devices of a device plugin; request stowage.dev/vram, or return the node to the plugin"
            => answers("Stowage allocates the node's GPUs", "conflict: Stowage allocates the node's GPUs");
    }
    DraNode = "dra-node" {
        node "a DRA driver publishes this node's GPUs as ResourceSlices, and kube-scheduler allocates them to claims; remove the driver from the node to let Stowage place pods there"
            => answers("a DRA driver allocates the node's GPUs", "conflict: a DRA driver allocates the node's GPUs").in_plan(USE_OTHER_ALLOCATOR);
    }
    TooFewDevices = "too-few-devices" {
        node { allocatable: u32, asked: u32 }
            "the pod requests {} of one node's device plugin; this node has {allocatable}", plural(*asked, "device")
            => answers("the device plugin offers too few GPUs on the node", GPUS_CHANGED);
    }
    DevicesInUse = "devices-in-use" {
        node { left: u32, allocatable: u32, asked: u32 }
            "the pod requests {} of the device plugin; of the node's {allocatable} {left} {} free", plural(*asked, "device"), is_or_are(*left)
            => answers("the device plugin has no GPU left on the node now", GPU_TAKEN);
    }
    NoGpus = "no-gpus" {
        node "the node has no GPU that Stowage knows of: no agent report, no GPU feature discovery labels"
            => answers("no GPU known on the node", GPUS_CHANGED);
    }
    NoHealthyGpu = "no-healthy-gpu" {
        node { gpus: u32 } "{}", none_healthy(*gpus)
            => answers("no healthy GPU", GPUS_CHANGED);
        lift Lift::new(16, PodsToName::Nobody, |node, demand| without_gpu_reason(node, demand, |gpu| gpu.health = Health::Healthy),
            |at| format!("{} is {}; once healthy, the pod fits", at.gpus, at.state));
    }
    // The GPU accepts no pods.
    Unhealthy = "unhealthy" {
        gpu { health: Health } "it is {}", health_text(*health) => 7;
    }
    TooFewGpus = "too-few-gpus" {
        node { usable: u32, asked: u32 }
            "the pod requests {} of one node; this one has {usable} that it can use", plural(*asked, "GPU")
            => answers("too few GPUs on the node", GPUS_CHANGED);
    }
    // A process cannot span MIG slices, and the pod wants several GPUs.
    Slice = "slice" {
        gpu "it is a MIG slice, and a pod over several GPUs gets whole ones" => 8;
    }
    TooLarge = "too-large" {
        node { per_gpu: Bytes, asked: u32, large_enough: u32, largest: Bytes }
            "the pod requests {per_gpu} on {}; {} of this node can allocate that much, the largest {largest}", each_of(*asked), plural(*large_enough, "GPU")
            => answers("no GPU is large enough", GPUS_CHANGED);
    }
    // Too small even if it were empty.
    TooSmall = "too-small" {
        gpu { needs_bytes: Bytes, allocatable_bytes: Bytes, short_bytes: Bytes }
            "needs {needs_bytes}, and it has {allocatable_bytes} allocatable even if it is empty: {short_bytes} too small" => 8;
    }
    NoFreshReport = "no-fresh-report" {
        node "the node's agent has not reported recently, and the policy refuses such nodes (telemetry.expired); is the agent running?"
            => temporary(REPORT_CHANGED);
    }
    Occupied = "occupied" {
        node { per_gpu: Bytes, asked: u32, large_enough: u32, most: Bytes }
            "the pod requests {per_gpu} on {}; VRAM in use by processes of no known pod leaves that much on {}, {most} at most", each_of(*asked), plural(*large_enough, "GPU")
            => temporary(REPORT_CHANGED);
    }
    // Two engines that start at once break each other.
    EngineStarting = "engine-starting" {
        node { starting: u32, asked: u32 }
            "an engine is starting on {} that the pod could use, and only one may start on a GPU at a time; the pod requests {asked}", plural(*starting, "GPU")
            => temporary("conflict: another engine began to start");
        gpu { by: Vec<String>, opens_in_millis: Option<Millis> }
            "{} an engine that is starting there{}", pods_have(by), start_gate_text(*opens_in_millis) => 1;
    }
    EnginesBusy = "engines-busy" {
        node { busy: u32, asked: u32, kv_cache: Percent, queue: u32 }
            "the engines on {} that the pod could use are busier than its class allows (KV cache {kv_cache}, {queue} waiting on the least busy); the pod requests {asked}", plural(*busy, "GPU")
            => temporary(REPORT_CHANGED);
    }
    // The engines' KV cache is fuller than the pod's class allows.
    KvCacheFull = "kv-cache-full" {
        gpu { percent: Percent, limit_percent: Percent, above_points: u8 }
            "its engines' KV cache is at {percent}, {above_points} points above the class's limit of {limit_percent}" => 3;
    }
    // More requests wait than the pod's class allows.
    QueueLong = "queue-long" {
        gpu { queue: u32, limit: u32, above: u32 }
            "{} {} for its engines, {above} above the class's limit of {limit}", plural(*queue, "request"), if *queue == 1 { "waits" } else { "wait" } => 2;
    }
    NoEmptyGpu = "no-empty-gpu" {
        node { empty: u32, asked: u32 } "the pod requests {} exclusively; {empty} on this node are empty", plural(*asked, "GPU")
            => temporary(GPU_TAKEN);
        lift Lift::new(17, PodsToName::Residents, |node, demand| without_gpu_reason(node, demand, lift::remove_pods),
            |at| format!("wait until {} left {}: empty, {}", pods_have(at.by), at.gpus, if at.are_several { "they fit" } else { "it fits" }));
    }
    // A resident pod has the GPU exclusively.
    Exclusive = "exclusive" {
        gpu { by: Vec<String> } "{} it exclusively", pods_have(by) => 5;
    }
    // The pod wants the GPU exclusively, and other pods are on it.
    NotEmpty = "not-empty" {
        gpu { by: Vec<String> } "the pod requests it exclusively, and {} VRAM on it", pods_have(by) => 5;
    }
    // Too little is free.
    InsufficientVram = "insufficient-vram" {
        node { per_gpu: Bytes, asked: u32, fitting: u32, most_free: Bytes }
            "the pod requests {per_gpu} on {}; {} of this node {} that much free, the most is {most_free}", each_of(*asked), plural(*fitting, "GPU"), has_or_have(*fitting)
            => temporary(GPU_TAKEN);
        gpu { needs_bytes: Bytes, free_bytes: Bytes, short_bytes: Bytes } "needs {needs_bytes}, {free_bytes} free: {short_bytes} short" => 4;
        pod { nodes: u32, nearest: Misfit } "{} the pod's constraints, and none has enough free GPUs; on one of them {nearest}", nodes_matching(*nodes)
            => Some(format!("no node that matches the pod's constraints can take it: {}", nearest.phrase()));
    }
    ClassNotAdmitted = "class-not-admitted" {
        node "the node's pool does not admit the pod's class; see nodePools in the policy"
            => answers("the node's pool does not admit the pod's class", POOL_CHANGED);
        lift Lift::new(13, PodsToName::Nobody,
            |node, demand| without_reason_if(!demand.terms.confined && !node.classes.contains(demand.class), node, demand, |node, _| node.classes = ClassSet::ALL),
            |at| format!("admit class {} to {} (nodePools[].classes in the policy): {} then", at.class, in_pool(at.pool), at.fits));
    }
    ClassKeptInPools = "class-kept-in-pools" {
        node "the pod's class is kept in node pools, and this node is in none of them; see `pools` of the class in the policy"
            => answers("the node is in no pool of the pod's class", POOL_CHANGED);
        lift Lift::new(13, PodsToName::Nobody,
            |node, demand| without_reason_if(demand.terms.confined && !node.classes.contains(demand.class), node, demand, |node, _| node.classes = ClassSet::ALL),
            |at| match at.pool {
                Some(pool) => format!("add node pool {pool} to `pools` of class {} in the policy: {} then", at.class, at.fits),
                None => format!("add {} to a node pool that class {} is kept in in the policy: {} then", at.node, at.class, at.fits),
            });
    }
    MigLayoutMismatch = "mig-layout-mismatch" {
        node "the node's GPUs do not have the MIG layout of its pool; see nodePools in the policy"
            => temporary(POOL_CHANGED);
        lift Lift::new(15, PodsToName::Nobody, |node, demand| without_reason_if(node.miscut, node, demand, |node, _| node.miscut = false),
            |at| format!("partition the GPUs of {} as {} expects, or change its `mig` in the policy: {} then", at.node, in_pool(at.pool), at.fits));
    }
    // The resident pods' classes share no GPU with the pod's class, or the pod's class with theirs.
    ClassExcluded = "class-excluded" {
        node { usable: u32, excluded_classes: u32, asked: u32 }
            "on {excluded_classes} of {} with enough free VRAM are pods whose classes share no GPU with the pod's; the pod requests {asked}", plural(*usable, "GPU")
            => temporary(GPU_TAKEN);
        gpu { by: Vec<String> } "{} a class that shares no GPU with the pod's", pods_have(by) => 6;
        lift Lift::new(12, PodsToName::Excluding, |node, demand| without_gpu_reason(node, demand, |gpu| gpu.excluded_classes = ClassSet::NONE),
            |at| format!(
                "let class {} share a GPU with the class of {} (mayShareWith of both, in the policy), or wait until those pods have terminated: {} then",
                at.class, list_names(at.by), at.fits
            ));
    }
    TenantLimit = "tenant-limit" {
        node { vram: Bytes, left: TenantLimit } "the pod requests {vram}, and its tenant's limit leaves {}", tenant_limit_text(*left)
            => answers("the limit of the pod's tenant is reached", LIMIT_REACHED).or_more_nodes(RAISE_LIMIT);
        pod { vram: Bytes } "the pod requests {vram}, and its tenant has reached its limit" => None;
    }
    TenantLimitOnNode = "tenant-limit-on-node" {
        node { left: TenantLimit } "on this node's GPUs the pod would use more than the {} that its tenant's limit leaves", tenant_limit_text(*left)
            => temporary(LIMIT_REACHED).or_more_nodes(RAISE_LIMIT);
    }
    // One of the last free GPUs, which the policy keeps from the pod's class.
    KeptSpare = "spare" {
        node { kept: u32, asked: u32 }
            "{} with enough free VRAM {} among the last free ones, which the policy keeps from preemptible classes (planning.spare); the pod requests {asked}", plural(*kept, "GPU"), is_or_are(*kept)
            => temporary(GPU_TAKEN).or_more_nodes("planning.spare keeps the last free GPUs from preemptible pods: give more nodes, or keep fewer");
        gpu "it is one of the last free GPUs, which planning.spare keeps from preemptible classes" => 4;
        lift Lift::new(14, PodsToName::Nobody, |node, demand| without_reason_if(!demand.kept.is_empty(), node, demand, |_, demand| demand.kept = SpareSet::NONE),
            |at| format!("wait until more GPUs are free, or keep fewer of them from class {} (planning.spare in the policy): {} then", at.class, at.fits));
    }
    VictimsLeaving = "victims-leaving" {
        node { remaining: u32 } "GPUs of this node are reserved for the pod; waiting for {} to terminate", plural(*remaining, "victim")
            => answers("waiting for preempted pods to terminate", "conflict: preempted pods have not terminated yet");
    }
    // The node's GPUs are not alike, and the pod names GPUs by labels.
    OtherGpus = "other-gpus" {
        node { wanted: u32, asked: u32 }
            "the pod requests {} such as its node selector or node affinity names by labels; of this node's unlike GPUs {wanted} {}", plural(*asked, "GPU"), is_or_are(*wanted)
            => answers("too few GPUs such as the pod names on the node", GPUS_CHANGED);
        gpu "the pod's node selector or node affinity names other GPUs" => 8;
    }
    // Its compute mode lets one process use the GPU.
    ExclusiveProcess = "exclusive-process" {
        node { gpus: u32, asked: u32 }
            "{} of this node {} in compute mode exclusive-process, which takes only a pod that requests a GPU exclusively; the pod requests {asked}, shared", plural(*gpus, "GPU"), is_or_are(*gpus)
            => answers("no GPU of the node may be shared", GPUS_CHANGED);
        gpu "its compute mode is exclusive-process: it takes only a pod that requests it exclusively" => 7;
        lift Lift::new(13, PodsToName::Nobody, |node, demand| without_gpu_reason(node, demand, |gpu| gpu.exclusive_process = false),
            |at| format!("set the compute mode of {} to default (nvidia-smi -c DEFAULT): {} then", at.gpus, at.fits));
    }
    // Which resource or label it is, the node's warning says.
    OtherAllocator = "other-allocator" {
        node "a resource in the node's capacity stands for its GPUs, so something else than Stowage hands them out; see nodes in the policy"
            => answers("another allocator hands out the node's GPUs", "conflict: another allocator hands out the node's GPUs");
    }
    UnknownGpuResource = "unknown-gpu-resource" {
        node "a resource in the node's capacity may stand for its GPUs, and the policy does not say whose it is; see nodes in the policy"
            => answers("it is unknown who hands out the node's GPUs", "conflict: it is unknown who hands out the node's GPUs");
    }
    GpusChanging = "gpus-changing" {
        node "a label says that the node's GPUs or their driver are being changed" => temporary(GPUS_CHANGED);
    }
    UnreadableLabel = "unreadable-label" {
        node "a label of the node's GPUs cannot be right, and no agent has reported them"
            => answers("the node's GPU labels cannot be right", GPUS_CHANGED);
    }
    // Unknown is never idle: a class may keep away from it.
    UnknownLoad = "unknown-load" {
        node { unknown: u32, asked: u32 }
            "the load of the engines on {} that the pod could use is unknown, and its class joins no such engines (limits.unknownLoad); the pod requests {asked}", plural(*unknown, "GPU")
            => temporary(REPORT_CHANGED);
        gpu "an engine on it, or a pod that may be one, does not say how busy it is, and the pod's class joins no such engines" => 3;
        lift Lift::new(12, PodsToName::Residents,
            |node, demand| without_reason_if(node.gpus.iter().any(|gpu| demand.terms.rejects_unknown(gpu.engine_load)), node, demand, |_, demand| demand.terms.refuses_unknown_load = false),
            |at| format!(
                "say where {} the metrics of its engine (stowage.dev/metrics-port), or let class {} join engines whose load is unknown (limits.unknownLoad in the policy): {} then",
                pods_have(at.by), at.class, at.fits
            ));
    }
    NoVramLimits = "no-vram-limits" {
        node "the driver keeps no VRAM limits on this node, and the pod's class requires them (isolation: required): gpu-fractioning is not ready there, the agent reports none or a runtime or cgroups that keep no limit, its GPUs are MIG slices, or a container's name has more than 34 characters"
            => answers("the node keeps no VRAM limits", "conflict: the node keeps no VRAM limits any more");
    }
    // Beside the pod, engines would take longer than their classes allow.
    LatencyLimit = "latency-limit" {
        node { closed: u32, asked: u32 }
            "on {} that the pod could use, it or engines beside it would take longer than their classes allow, as far as that is known; the pod requests {asked}", plural(*closed, "GPU")
            => temporary(REPORT_CHANGED);
        gpu { busy: Percent, room: i16 }
            "its engines keep their classes' limits on latency {}; the pod is expected to have work for {busy} of the time", room_text(*room) => 3;
        lift Lift::new(13, PodsToName::Residents, |node, demand| without_gpu_reason(node, demand, |gpu| gpu.neighbors = NeighborRoom::EMPTY),
            |at| format!(
                "add a GPU, or raise the limit that {} (maxTimePerToken, maxTimeToFirstToken in the policy): {} then",
                pods_have(at.by), at.fits
            ));
    }

    // The pods there would make the pod's engine slower than its class allows.
    OwnLatencyLimit = "own-latency-limit" {
        gpu { expected: Micros, limit: Micros }
            "the pod is expected to take {expected} for a token here, and its class allows {limit}" => 3;
    }
    UnsupportedFilter = "unsupported-filter" {
        pod (rule: UnsupportedRule) "the planner does not support one of the pod's constraints: {rule}" => None;
    }
    DevicePlugin = "device-plugin" {
        pod "the pod requests devices of a device plugin, and the kubelet picks them" => None;
    }
    ShadowMode = "shadow-mode" {
        pod "in shadow mode Stowage places no pod" => None;
    }
    NoGpuRequested = "no-gpu-requested" {
        pod "the pod requests no GPU, and the planner places only pods that do" => None;
    }
    InvalidRequest = "invalid-request" {
        pod "the pod's request is invalid; the answer to its filter request says why" => None;
    }
    NoNode = "no-node" {
        pod "no node matches the pod's constraints, regardless of free VRAM" => None;
    }
    EvictionLimit = "eviction-limit" {
        pod (limit: EvictionLimit) "other pods could be evicted for the pod, but {limit}" => None;
    }
    GroupIncomplete = "group-incomplete" {
        pod { here: u32, wanted: u32 } "{here} of the group's {wanted} pods exist"
            => Some("not all pods of its group exist".into());
    }
    GroupTooLarge = "group-too-large" {
        pod { placed: u32, wanted: u32 } "{placed} of the group's {wanted} pods can be placed, and a group is placed whole or not at all"
            => Some("not all pods of its group can be placed".into());
    }
    PlanningFailed = "planning-failed" {
        pod "planning fails on the pod, which is a defect of Stowage; the log of its leader says where" => None;
    }

    UnknownPod = "unknown-pod" {
        bind "no pod with this UID is pending" => "conflict: pod unknown to Stowage or gone";
    }
    BoundElsewhere = "bound-elsewhere" {
        bind { node: NodeName } "the pod is already bound to {node}" => "conflict: pod is bound to another node";
    }
    // Of an earlier request.
    Unsettled = "unsettled" {
        bind { node: NodeName } "an earlier Binding of this pod to {node} is not settled yet" => "conflict: an earlier binding is not settled";
    }
    NoLongerFits = "no-longer-fits" {
        bind [misfit.code()] (misfit: Misfit) "the node no longer fits: {misfit}" => misfit.entry().bind;
    }
    VictimGone = "victim-gone" {
        bind "a victim is gone" => "conflict: a victim has terminated";
    }
    VictimProtected = "victim-protected" {
        bind "a victim may no longer be evicted for this pod" => "conflict: a victim is now protected";
    }
    AlreadyReserved = "already-reserved" {
        bind { node: NodeName } "the pod already has a reservation on {node}" => "conflict: the pod already has a reservation";
    }
    // The pod requests VRAM.
    InShadow = "shadow" {
        bind "shadow mode" => NO_VRAM_IN_SHADOW;
    }
    PodGone = "pod-gone" {
        bind "the pod is gone" => "conflict: pod is gone";
    }
    Refused = "refused" {
        bind "the API server refused the Binding" => "the API server refused the binding";
    }
    // The write of this request.
    Unanswered = "unsettled" {
        bind "the Binding is not settled yet" => "the API server did not say whether the pod is bound; it is being read";
    }
}

/// What `filter` and `bind` answer in shadow mode for a pod that requests VRAM.
pub const NO_VRAM_IN_SHADOW: &str = "Stowage is in shadow mode and allocates no stowage.dev/vram";

#[cfg(test)]
mod tests;
