//! Whether a demand fits on a node, and if not, why not.

use super::affinity;
use super::device_plugin;
use super::pack::GpuChoice;
use super::packing::NodeEvaluation;
use crate::scheduling::vocabulary::classification::ClassSet;
use crate::scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::scheduling::vocabulary::demand::{Demand, Sharing};
use crate::scheduling::vocabulary::device_plugin::Ask;
use crate::scheduling::vocabulary::gpu::{Gpu, GpuSet, Health};
use crate::scheduling::vocabulary::node::{Node, NodeKind};
use crate::scheduling::vocabulary::node_reading::EngineLoad;
use crate::scheduling::vocabulary::spare::SpareSet;
use crate::units::{Bytes, Percent, are, have, plural};
use serde::Serialize;

/// Why a node does not fit, with the numbers. "Does not fit" is an answer, not a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", tag = "code")]
pub enum Misfit {
    #[error("Stowage knows no node with this name")]
    UnknownNode,
    #[error(
        "a device plugin allocates this node's GPUs (nvidia.com/* is allocatable there); remove the plugin from the node to let Stowage place pods there"
    )]
    DevicePluginNode,
    #[error(
        "Stowage allocates this node's GPUs, and the pod requests devices of a device plugin; request stowage.dev/vram, or return the node to the plugin"
    )]
    StowageNode,
    #[error(
        "a DRA driver publishes this node's GPUs as ResourceSlices, and kube-scheduler allocates them to claims; remove the driver from the node to let Stowage place pods there"
    )]
    DraNode,
    #[error("the pod requests {} of one node's device plugin; this node has {allocatable}", plural(*asked, "device"))]
    TooFewDevices { allocatable: u32, asked: u32 },
    #[error(
        "the pod requests {} of the device plugin; of the node's {allocatable} {left} {} free", plural(*asked, "device"), are(*left)
    )]
    DevicesInUse { left: u32, allocatable: u32, asked: u32 },
    #[error("the node has no GPU that Stowage knows of: no agent report, no GPU feature discovery labels")]
    NoGpus,
    #[error("{}", none_healthy(*gpus))]
    NoHealthyGpu { gpus: u32 },
    #[error("the pod requests {} of one node; this one has {usable} that it can use", plural(*asked, "GPU"))]
    TooFewGpus { usable: u32, asked: u32 },
    #[error(
        "the pod requests {per_gpu} on {}; {} of this node can allocate that much, the largest {largest}", each_of(*asked), plural(*large_enough, "GPU")
    )]
    TooLarge { per_gpu: Bytes, asked: u32, large_enough: u32, largest: Bytes },
    #[error(
        "the node's agent has not reported recently, and the policy refuses such nodes (telemetry.expired); is the agent running?"
    )]
    NoFreshReport,
    #[error(
        "the pod requests {per_gpu} on {}; unaccounted VRAM in use leaves that much on {}, {most} at most", each_of(*asked), plural(*large_enough, "GPU")
    )]
    Occupied { per_gpu: Bytes, asked: u32, large_enough: u32, most: Bytes },
    #[error(
        "an engine is starting on {} that the pod could use, and only one may start on a GPU at a time; the pod requests {asked}", plural(*starting, "GPU")
    )]
    EngineStarting { starting: u32, asked: u32 },
    #[error(
        "the engines on {} that the pod could use are busier than its class allows (KV cache {kv_cache}, {queue} waiting on the least busy); the pod requests {asked}", plural(*busy, "GPU")
    )]
    EnginesBusy { busy: u32, asked: u32, kv_cache: Percent, queue: u32 },
    #[error("the pod requests {} exclusively; {empty} on this node are empty", plural(*asked, "GPU"))]
    NoEmptyGpu { empty: u32, asked: u32 },
    #[error(
        "the pod requests {per_gpu} on {}; {} of this node {} that much free, the most is {most_free}", each_of(*asked), plural(*fitting, "GPU"), have(*fitting)
    )]
    InsufficientVram { per_gpu: Bytes, asked: u32, fitting: u32, most_free: Bytes },
    #[error("the node's pool does not admit the pod's class; see nodePools in the policy")]
    ClassNotAdmitted,
    #[error(
        "the pod's class is kept in node pools, and this node is in none of them; see `pools` of the class in the policy"
    )]
    ClassKeptInPools,
    #[error("the node's GPUs do not have the MIG layout of its pool; see nodePools in the policy")]
    MigLayoutMismatch,
    #[error(
        "on {excluded_classes} of {} with enough free VRAM are pods whose classes share no GPU with the pod's; the pod requests {asked}", plural(*usable, "GPU")
    )]
    ClassExcluded { usable: u32, excluded_classes: u32, asked: u32 },
    #[error("the pod requests {vram}, and its tenant's limit leaves {}", said(*left))]
    TenantLimit { vram: Bytes, left: TenantLimit },
    #[error("on this node's GPUs the pod would use more than the {} that its tenant's limit leaves", said(*left))]
    TenantLimitOnNode { left: TenantLimit },
    #[error(
        "{} with enough free VRAM {} among the last free ones, which the policy keeps from preemptible classes (planning.spare); the pod requests {asked}", plural(*kept, "GPU"), are(*kept)
    )]
    KeptSpare { kept: u32, asked: u32 },
    #[error("GPUs of this node are reserved for the pod; waiting for {} to terminate", plural(*remaining, "victim"))]
    VictimsLeaving { remaining: u32 },
}

fn each_of(gpus: u32) -> String {
    if gpus == 1 { "1 GPU".into() } else { format!("each of {gpus} GPUs") }
}

fn none_healthy(gpus: u32) -> String {
    match gpus {
        1 => "the node's GPU is not healthy".into(),
        _ => format!("none of the node's {gpus} GPUs is healthy"),
    }
}

impl Misfit {
    /// All codes, so that a metric has each from the start.
    pub const CODES: [&'static str; 24] = [
        "unknown-node",
        "device-plugin-node",
        "stowage-node",
        "dra-node",
        "too-few-devices",
        "devices-in-use",
        "no-gpus",
        "no-healthy-gpu",
        "too-few-gpus",
        "too-large",
        "no-fresh-report",
        "occupied",
        "engine-starting",
        "engines-busy",
        "no-empty-gpu",
        "insufficient-vram",
        "class-not-admitted",
        "class-kept-in-pools",
        "mig-layout-mismatch",
        "class-excluded",
        "tenant-limit",
        "tenant-limit-on-node",
        "spare",
        "victims-leaving",
    ];

    /// A short name for metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownNode => "unknown-node",
            Self::DevicePluginNode => "device-plugin-node",
            Self::StowageNode => "stowage-node",
            Self::DraNode => "dra-node",
            Self::TooFewDevices { .. } => "too-few-devices",
            Self::DevicesInUse { .. } => "devices-in-use",
            Self::NoGpus => "no-gpus",
            Self::NoHealthyGpu { .. } => "no-healthy-gpu",
            Self::TooFewGpus { .. } => "too-few-gpus",
            Self::TooLarge { .. } => "too-large",
            Self::NoFreshReport => "no-fresh-report",
            Self::Occupied { .. } => "occupied",
            Self::EngineStarting { .. } => "engine-starting",
            Self::EnginesBusy { .. } => "engines-busy",
            Self::NoEmptyGpu { .. } => "no-empty-gpu",
            Self::InsufficientVram { .. } => "insufficient-vram",
            Self::ClassNotAdmitted => "class-not-admitted",
            Self::ClassKeptInPools => "class-kept-in-pools",
            Self::MigLayoutMismatch => "mig-layout-mismatch",
            Self::ClassExcluded { .. } => "class-excluded",
            Self::TenantLimit { .. } => "tenant-limit",
            Self::TenantLimitOnNode { .. } => "tenant-limit-on-node",
            Self::KeptSpare { .. } => "spare",
            Self::VictimsLeaving { .. } => "victims-leaving",
        }
    }

    /// What goes on the wire. Without figures: the scheduler writes the text into the pod's condition, and a text
    /// that changed with the free VRAM would wake the pod each time (1,415 filter calls in 10 s were measured).
    pub fn phrase(&self) -> &'static str {
        match self {
            Self::UnknownNode => "node unknown to Stowage",
            Self::DevicePluginNode => "a device plugin allocates the node's GPUs",
            Self::StowageNode => "Stowage allocates the node's GPUs",
            Self::DraNode => "a DRA driver allocates the node's GPUs",
            Self::TooFewDevices { .. } => "the device plugin offers too few GPUs on the node",
            Self::DevicesInUse { .. } => "the device plugin has no GPU left on the node now",
            Self::NoGpus => "no GPU known on the node",
            Self::NoHealthyGpu { .. } => "no healthy GPU",
            Self::TooFewGpus { .. } => "too few GPUs on the node",
            Self::TooLarge { .. } => "no GPU is large enough",
            Self::ClassNotAdmitted => "the node's pool does not admit the pod's class",
            Self::ClassKeptInPools => "the node is in no pool of the pod's class",
            // Of all nodes or of none, so that it mixes with no other.
            Self::TenantLimit { .. } => "the limit of the pod's tenant is reached",
            // One phrase for all that comes and goes: the scheduler counts nodes by phrase, and a count that changed
            // would wake the pod as a figure would.
            Self::NoFreshReport
            | Self::MigLayoutMismatch
            | Self::ClassExcluded { .. }
            | Self::TenantLimitOnNode { .. }
            | Self::Occupied { .. }
            | Self::EngineStarting { .. }
            | Self::EnginesBusy { .. }
            | Self::KeptSpare { .. }
            | Self::NoEmptyGpu { .. }
            | Self::InsufficientVram { .. } => "no GPU can take the pod now",
            Self::VictimsLeaving { .. } => "waiting for preempted pods to terminate",
        }
    }
}

/// The GPUs `demand` would get on `node` by best fit, or why it gets none. Of a device plugin it gets none that could be named:
/// the empty set. For callers that ask whether it fits; [`fit_by`] says which GPUs are best.
pub fn fit(node: &Node, demand: &Demand) -> Result<GpuSet, Misfit> {
    fit_by(&NodeEvaluation::by_best_fit(&node.gpus, demand), node).map(|choice| choice.gpus)
}

/// The same, by an evaluation of this node.
pub fn fit_by(evaluation: &NodeEvaluation<'_>, node: &Node) -> Result<GpuChoice, Misfit> {
    let demand = evaluation.demand();
    check_node_admission(node, demand)?;
    match &demand.ask {
        Ask::Plugin { resource, count } => {
            return device_plugin::has_devices(node, resource, *count, 0).map(|()| GpuChoice::default());
        }
        // kube-scheduler has found the devices, or would not ask.
        Ask::Claims => return Ok(GpuChoice::default()),
        Ask::Vram => {}
    }
    affinity::choose(evaluation, &node.reusable, GpuSet::ALL).ok_or_else(|| misfit(&node.gpus, demand))
}

/// Whether nothing of this demand's kind goes to the node at all, whatever is free there.
pub fn check_node_admission(node: &Node, demand: &Demand) -> Result<(), Misfit> {
    match (&demand.ask, node.kind) {
        (Ask::Claims, _) => return Ok(()),
        (Ask::Vram, NodeKind::DevicePlugin) => return Err(Misfit::DevicePluginNode),
        (Ask::Vram, NodeKind::Dra) => return Err(Misfit::DraNode),
        (Ask::Plugin { .. }, NodeKind::Stowage) => return Err(Misfit::StowageNode),
        _ => {}
    }
    if !node.classes.contains(demand.class) {
        return Err(if demand.terms.confined { Misfit::ClassKeptInPools } else { Misfit::ClassNotAdmitted });
    }
    match (&demand.ask, node.closed, node.miscut) {
        // The kubelet counts the plugin's devices, whether or not an agent sees them.
        (Ask::Plugin { .. } | Ask::Claims, ..) => Ok(()),
        (Ask::Vram, true, _) => Err(Misfit::NoFreshReport),
        (Ask::Vram, _, true) => Err(Misfit::MigLayoutMismatch),
        (Ask::Vram, false, false) => Ok(()),
    }
}

/// Why `demand` does not fit on `gpus`; the most lasting reason first.
pub fn misfit(gpus: &[Gpu], demand: &Demand) -> Misfit {
    let asked = demand.gpus;
    if !demand.kept.is_empty() {
        return without_spare(gpus, demand);
    }
    let count = |test: &dyn Fn(&Gpu) -> bool| {
        gpus.iter().filter(|gpu| usable(gpu, demand) && test(gpu)).count() as u32
    };
    if gpus.is_empty() {
        return Misfit::NoGpus;
    }
    if gpus.iter().all(|gpu| gpu.health != Health::Healthy) {
        return Misfit::NoHealthyGpu { gpus: gpus.len() as u32 };
    }
    let usable_gpus = count(&|_| true);
    if usable_gpus < asked {
        return Misfit::TooFewGpus { usable: usable_gpus, asked };
    }
    let large_enough = count(&|gpu| gpu.capacity >= demand.per_gpu);
    if large_enough < asked {
        let largest = gpus.iter().map(|gpu| gpu.capacity).max().unwrap_or_default();
        return Misfit::TooLarge { per_gpu: demand.per_gpu, asked, large_enough, largest };
    }
    if let Some(in_the_way) = in_the_way(gpus, demand) {
        return in_the_way;
    }
    if demand.sharing == Sharing::Exclusive {
        return Misfit::NoEmptyGpu { empty: count(&|gpu| gpu.tenants == 0), asked };
    }
    let most_free = gpus
        .iter()
        .filter(|gpu| !gpu.exclusive && usable(gpu, demand))
        .map(|gpu| gpu.free_for(demand))
        .max()
        .unwrap_or_default();
    let fitting = count(&|gpu| gpu.can_take(demand));
    Misfit::InsufficientVram { per_gpu: demand.per_gpu, asked, fitting, most_free }
}

/// The same for a demand that may not take the last free GPUs: whether these are what it lacks.
fn without_spare(gpus: &[Gpu], demand: &Demand) -> Misfit {
    let freely = Demand { kept: SpareSet::NONE, ..demand.clone() };
    let fitting = gpus.iter().filter(|gpu| usable(gpu, &freely) && gpu.can_take(&freely));
    let kept = fitting.clone().filter(|gpu| gpu.is_kept_from(demand)).count() as u32;
    match fitting.count() as u32 >= demand.gpus {
        true => Misfit::KeptSpare { kept, asked: demand.gpus },
        false => misfit(gpus, &freely),
    }
}

/// Whether the node would fit if every pod left it, as far as what was measured allows.
pub fn evictions_could_resolve(gpus: &[Gpu], demand: &Demand) -> bool {
    let emptied = gpus.iter().filter(|gpu| could_fit(gpu, demand)).map(not_excluded);
    emptied.filter(|gpu| gpu.admits(demand)).count() >= demand.gpus as usize
}

/// What keeps the demand out beside other pods' VRAM: what was measured, what is under way, and which classes share a GPU.
fn in_the_way(gpus: &[Gpu], demand: &Demand) -> Option<Misfit> {
    let (per_gpu, asked) = (demand.per_gpu, demand.gpus);
    let spacious = |gpu: &&Gpu| usable(gpu, demand) && gpu.has_free_vram(demand);
    let spacious = gpus.iter().filter(spacious).copied();
    if spacious.clone().count() >= asked as usize {
        return not_admitted(spacious, demand);
    }
    // Others must leave anyway, and a pod that excludes a class leaves with them.
    let large = gpus.iter().filter(|gpu| could_fit(gpu, demand)).map(not_excluded);
    let large_enough = large.clone().count() as u32;
    if large_enough < asked {
        let most = gpus.iter().filter(|gpu| usable(gpu, demand)).map(Gpu::most).max().unwrap_or_default();
        return Some(Misfit::Occupied { per_gpu, asked, large_enough, most });
    }
    not_admitted(large, demand)
}

fn not_excluded(gpu: &Gpu) -> Gpu {
    Gpu { excluded_classes: ClassSet::NONE, ..*gpu }
}

/// Why too few of these GPUs let the demand join, if they are too few.
fn not_admitted(gpus: impl Iterator<Item = Gpu> + Clone, demand: &Demand) -> Option<Misfit> {
    let asked = demand.gpus;
    let count = |test: &dyn Fn(&Gpu) -> bool| gpus.clone().filter(test).count() as u32;
    if count(&|gpu| gpu.admits(demand)) >= asked {
        return None;
    }
    let pressures = gpus.clone().map(|gpu| gpu.engine_load);
    let busy = pressures.filter(|engine_load| demand.terms.exceeded_by(*engine_load));
    let (usable, are_busy) = (count(&|_| true), busy.clone().count() as u32);
    if usable - are_busy < asked {
        let kv_cache = busy.clone().filter_map(EngineLoad::occupancy).min().unwrap_or_default();
        let queue = busy.filter_map(|engine_load| engine_load.queue).min().unwrap_or_default();
        return Some(Misfit::EnginesBusy { busy: are_busy, asked, kv_cache, queue });
    }
    let excluded_classes = count(&|gpu| gpu.excluded_classes.contains(demand.class));
    if usable - excluded_classes < asked {
        return Some(Misfit::ClassExcluded { usable, excluded_classes, asked });
    }
    Some(Misfit::EngineStarting { starting: count(&|gpu| gpu.starting), asked })
}

/// `2.0 GiB of VRAM and 0.500 GPUs`.
fn said(left: TenantLimit) -> String {
    let vram = left.vram.map(|vram| format!("{vram} of VRAM"));
    let gpus = left.milli_gpus.map(|milli| format!("{}.{:03} GPUs", milli / 1000, milli % 1000));
    let parts: Vec<String> = vram.into_iter().chain(gpus).collect();
    parts.join(" and ")
}

/// Whether the demand would fit on a GPU if its pods left.
fn could_fit(gpu: &Gpu, demand: &Demand) -> bool {
    usable(gpu, demand) && gpu.most() >= demand.per_gpu
}

/// Whether a GPU may serve the demand at all, however full it is. A process cannot span MIG slices, so a pod over
/// several GPUs gets whole ones. One that is kept free serves it as little as one that is out of order.
pub fn usable(gpu: &Gpu, demand: &Demand) -> bool {
    gpu.health == Health::Healthy && !(gpu.slice && demand.gpus > 1) && !gpu.is_kept_from(demand)
}

/// What a demand takes of these GPUs, as its tenant is charged for it.
pub fn used_on(gpus: &[Gpu], demand: &Demand, chosen: GpuSet) -> TenantUsage {
    if chosen.is_empty() {
        return TenantUsage { vram: demand.vram(), milli_gpus: u64::from(demand.gpus) * 1000 };
    }
    chosen.iter().map(|place| gpus[place].part_of(demand)).sum()
}

/// Whether these GPUs are within what the demand's tenant may still take.
pub fn is_allowed(allowance: TenantLimit, gpus: &[Gpu], demand: &Demand, chosen: GpuSet) -> bool {
    allowance == TenantLimit::default() || allowance.allows(used_on(gpus, demand, chosen))
}
