//! Whether a demand fits on a node, and if not, why not.

use super::pack;
use super::pack::GpuChoice;
use super::pack::NodeEvaluation;
use super::whole_nodes;
pub use crate::reasons::Misfit;
use crate::vocabulary::classification::{ClassSet, ClassTerms, Isolation};
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::GpuRequest;
use crate::vocabulary::gpu::{Gpu, GpuSet, Health};
use crate::vocabulary::latency::NeighborRoom;
use crate::vocabulary::node::{Node, NodeKind};
use crate::vocabulary::node_reading::EngineLoad;
use crate::vocabulary::node_signs::NodeWarning;
use crate::vocabulary::spare::SpareSet;

/// The GPUs `demand` would get on `node` by best fit, or why it gets none. Of a device plugin it gets none that could be named:
/// the empty set. For callers that ask whether it fits; [`fit_by`] says which GPUs are best.
pub fn fit(node: &Node, demand: &Demand) -> Result<GpuSet, Misfit> {
    fit_by(&NodeEvaluation::by_best_fit(&node.gpus, demand), node).map(|choice| choice.gpus)
}

/// The choice of GPUs by an evaluation of this node, or why the demand does not fit.
pub(crate) fn fit_by(evaluation: &NodeEvaluation<'_>, node: &Node) -> Result<GpuChoice, Misfit> {
    let demand = evaluation.demand();
    check_node_admission(node, demand)?;
    match &demand.ask {
        GpuRequest::Plugin { resource, count } => {
            return whole_nodes::check_devices(node, resource, *count, 0)
                .map(|()| GpuChoice::default());
        }
        // kube-scheduler has found the devices, or would not ask.
        GpuRequest::Claims => return Ok(GpuChoice::default()),
        GpuRequest::Vram => {}
    }
    pack::choose(evaluation, &node.reusable, GpuSet::ALL).ok_or_else(|| misfit(&node.gpus, demand))
}

/// The reason on the Node object that keeps pods away which request VRAM; `None` if there is none.
pub fn node_exclusion(node: &Node) -> Option<Misfit> {
    node.warnings.iter().find_map(misfit_of_warning)
}

fn misfit_of_warning(warning: &NodeWarning) -> Option<Misfit> {
    match warning {
        NodeWarning::OtherAllocator { .. } => Some(Misfit::OtherAllocator),
        NodeWarning::UnknownResource { .. } => Some(Misfit::UnknownGpuResource),
        NodeWarning::GpusChanging { .. } => Some(Misfit::GpusChanging),
        NodeWarning::UnreadableLabel { .. } => Some(Misfit::UnreadableLabel),
        NodeWarning::IgnoredLabel { .. } | NodeWarning::ContradictedLabels { .. } => None,
    }
}

/// Why the node does not fit, in a sentence. Reasons have figures and no names; this one names what the Node object shows.
pub fn sentence(misfit: &Misfit, node: Option<&Node>) -> String {
    let warning = node.and_then(|node| {
        node.warnings
            .iter()
            .find(|warning| misfit_of_warning(warning) == Some(*misfit))
    });
    warning.map_or_else(|| misfit.to_string(), ToString::to_string)
}

/// Whether nothing of this demand's kind goes to the node at all, whatever is free there.
pub(crate) fn check_node_admission(node: &Node, demand: &Demand) -> Result<(), Misfit> {
    if demand.ask == GpuRequest::Vram
        && let Some(misfit) = node_exclusion(node)
    {
        return Err(misfit);
    }
    match (&demand.ask, node.kind) {
        (GpuRequest::Claims, _) => return Ok(()),
        (GpuRequest::Vram, NodeKind::DevicePlugin) => return Err(Misfit::DevicePluginNode),
        (GpuRequest::Vram, NodeKind::Dra) => return Err(Misfit::DraNode),
        (GpuRequest::Plugin { .. }, NodeKind::Stowage) if node.gpus.is_empty() => {
            return Err(Misfit::NoGpus);
        }
        (GpuRequest::Plugin { .. }, NodeKind::Stowage) => return Err(Misfit::StowageNode),
        _ => {}
    }
    if !node.classes.contains(demand.class) {
        return Err(if demand.terms.confined {
            Misfit::ClassKeptInPools
        } else {
            Misfit::ClassNotAdmitted
        });
    }
    if needs_vram_limits(demand) && !writes_vram_limits(node, demand) {
        return Err(Misfit::NoVramLimits);
    }
    match (&demand.ask, node.closed, node.miscut) {
        // The kubelet counts the plugin's devices, whether or not an agent sees them.
        (GpuRequest::Plugin { .. } | GpuRequest::Claims, ..) => Ok(()),
        (GpuRequest::Vram, true, _) => Err(Misfit::NoFreshReport),
        (GpuRequest::Vram, _, true) => Err(Misfit::MigLayoutMismatch),
        (GpuRequest::Vram, false, false) => Ok(()),
    }
}

/// Whether the pod may run only where the driver keeps it within its VRAM. One that has its GPUs exclusively has no neighbour.
fn needs_vram_limits(demand: &Demand) -> bool {
    demand.terms.isolation == Isolation::Required
        && demand.sharing == Sharing::Shared
        && demand.ask == GpuRequest::Vram
}

/// Whether the Binding says for each container how much VRAM the driver lets it have on this node.
pub(crate) fn writes_vram_limits(node: &Node, demand: &Demand) -> bool {
    node.keeps_vram_limits && demand.can_have_vram_limits()
}

/// Why `demand` does not fit on `gpus`; the most lasting reason first.
pub fn misfit(gpus: &[Gpu], demand: &Demand) -> Misfit {
    let asked = demand.gpus;
    if !demand.kept.is_empty() {
        return spare_misfit(gpus, demand);
    }
    let count = |test: &dyn Fn(&Gpu) -> bool| {
        gpus.iter()
            .filter(|gpu| is_usable(gpu, demand) && test(gpu))
            .count() as u32
    };
    if gpus.is_empty() {
        return Misfit::NoGpus;
    }
    if gpus.iter().all(|gpu| gpu.health != Health::Healthy) {
        return Misfit::NoHealthyGpu {
            gpus: gpus.len() as u32,
        };
    }
    let usable_gpus = count(&|_| true);
    if usable_gpus < asked {
        return too_few_usable(gpus, demand, usable_gpus);
    }
    let large_enough = count(&|gpu| gpu.capacity >= demand.per_gpu);
    if large_enough < asked {
        let largest = gpus
            .iter()
            .map(|gpu| gpu.capacity)
            .max()
            .unwrap_or_default();
        return Misfit::TooLarge {
            per_gpu: demand.per_gpu,
            asked,
            large_enough,
            largest,
        };
    }
    if let Some(misfit) = misfit_beyond_vram(gpus, demand) {
        return misfit;
    }
    if demand.sharing == Sharing::Exclusive {
        return Misfit::NoEmptyGpu {
            empty: count(&|gpu| gpu.residents == 0),
            asked,
        };
    }
    let most_free = gpus
        .iter()
        .filter(|gpu| !gpu.exclusive && is_usable(gpu, demand))
        .map(|gpu| gpu.free_for(demand))
        .max()
        .unwrap_or_default();
    let fitting = count(&|gpu| gpu.can_take(demand));
    Misfit::InsufficientVram {
        per_gpu: demand.per_gpu,
        asked,
        fitting,
        most_free,
    }
}

/// Why too few GPUs of the node can ever serve the demand.
fn too_few_usable(gpus: &[Gpu], demand: &Demand, usable: u32) -> Misfit {
    let asked = demand.gpus;
    let wanted = gpus
        .iter()
        .filter(|gpu| gpu.matches_selector_of(demand))
        .count() as u32;
    if wanted < asked.min(gpus.len() as u32) {
        return Misfit::OtherGpus { wanted, asked };
    }
    let is_kept_whole =
        |gpu: &&Gpu| gpu.health == Health::Healthy && !gpu.compute_mode_allows(demand.sharing);
    let kept_whole = gpus.iter().filter(is_kept_whole).count() as u32;
    if usable + kept_whole >= asked {
        return Misfit::ExclusiveProcess {
            gpus: kept_whole,
            asked,
        };
    }
    Misfit::TooFewGpus { usable, asked }
}

/// Why a demand that may not take the spare GPUs does not fit: because they are kept from it, or for another reason.
fn spare_misfit(gpus: &[Gpu], demand: &Demand) -> Misfit {
    let with_spare = Demand {
        kept: SpareSet::NONE,
        ..demand.clone()
    };
    let fitting = gpus
        .iter()
        .filter(|gpu| is_usable(gpu, &with_spare) && gpu.can_take(&with_spare));
    let kept = fitting
        .clone()
        .filter(|gpu| gpu.is_kept_spare_from(demand))
        .count() as u32;
    match fitting.count() as u32 >= demand.gpus {
        true => Misfit::KeptSpare {
            kept,
            asked: demand.gpus,
        },
        false => misfit(gpus, &with_spare),
    }
}

/// Whether the node would fit if every pod left it, as far as what was measured allows.
pub(crate) fn evictions_could_resolve(gpus: &[Gpu], demand: &Demand) -> bool {
    let emptied = gpus
        .iter()
        .filter(|gpu| could_fit(gpu, demand))
        .map(without_rules_of_pods);
    emptied.filter(|gpu| gpu.admits(demand)).count() >= demand.gpus as usize
}

/// Why the demand does not fit beside other pods' VRAM: measured use, an engine that starts, or the classes on a GPU.
fn misfit_beyond_vram(gpus: &[Gpu], demand: &Demand) -> Option<Misfit> {
    let (per_gpu, asked) = (demand.per_gpu, demand.gpus);
    let spacious = |gpu: &&Gpu| is_usable(gpu, demand) && gpu.has_free_vram(demand);
    let spacious = gpus.iter().filter(spacious).copied();
    if spacious.clone().count() >= asked as usize {
        return admission_misfit(spacious, demand);
    }
    // Others must leave anyway, and pods that exclude a class or leave no room to others leave with them.
    let large = gpus
        .iter()
        .filter(|gpu| could_fit(gpu, demand))
        .map(without_rules_of_pods);
    let large_enough = large.clone().count() as u32;
    if large_enough < asked {
        let most = gpus
            .iter()
            .filter(|gpu| is_usable(gpu, demand))
            .map(Gpu::free_without_pods)
            .max()
            .unwrap_or_default();
        return Some(Misfit::Occupied {
            per_gpu,
            asked,
            large_enough,
            most,
        });
    }
    admission_misfit(large, demand)
}

fn without_rules_of_pods(gpu: &Gpu) -> Gpu {
    Gpu {
        excluded_classes: ClassSet::NONE,
        neighbors: NeighborRoom::EMPTY,
        ..*gpu
    }
}

/// Why too few of these GPUs let the demand join, if they are too few.
fn admission_misfit(gpus: impl Iterator<Item = Gpu> + Clone, demand: &Demand) -> Option<Misfit> {
    let asked = demand.gpus;
    let count = |test: &dyn Fn(&Gpu) -> bool| gpus.clone().filter(test).count() as u32;
    if count(&|gpu| gpu.admits(demand)) >= asked {
        return None;
    }
    let loads = gpus.clone().map(|gpu| gpu.engine_load);
    let limits = ClassTerms {
        refuses_unknown_load: false,
        ..demand.terms
    };
    let busy_loads = loads.filter(|engine_load| limits.is_exceeded_by(*engine_load));
    let (usable, busy) = (count(&|_| true), busy_loads.clone().count() as u32);
    if usable - busy < asked {
        let kv_cache = busy_loads
            .clone()
            .filter_map(EngineLoad::occupancy)
            .min()
            .unwrap_or_default();
        let queue = busy_loads
            .filter_map(|engine_load| engine_load.queue)
            .min()
            .unwrap_or_default();
        return Some(Misfit::EnginesBusy {
            busy,
            asked,
            kv_cache,
            queue,
        });
    }
    if usable - count(&|gpu| demand.terms.is_exceeded_by(gpu.engine_load)) < asked {
        let unknown = count(&|gpu| demand.terms.rejects_unknown(gpu.engine_load));
        return Some(Misfit::UnknownLoad { unknown, asked });
    }
    let closed = count(&|gpu| !gpu.leaves_time_to(demand));
    if usable - closed < asked {
        return Some(Misfit::LatencyLimit { closed, asked });
    }
    let excluded_classes = count(&|gpu| gpu.excluded_classes.contains(demand.class));
    if usable - excluded_classes < asked {
        return Some(Misfit::ClassExcluded {
            usable,
            excluded_classes,
            asked,
        });
    }
    Some(Misfit::EngineStarting {
        starting: count(&|gpu| gpu.starting),
        asked,
    })
}

/// Whether the demand would fit on a GPU if its pods left.
fn could_fit(gpu: &Gpu, demand: &Demand) -> bool {
    is_usable(gpu, demand) && gpu.free_without_pods() >= demand.per_gpu
}

/// Whether a GPU may serve the demand at all, however full it is. A process cannot span MIG slices, so a pod over
/// several GPUs gets whole ones. One that is kept free serves it as little as one that is out of order.
pub fn is_usable(gpu: &Gpu, demand: &Demand) -> bool {
    let is_open = gpu.health == Health::Healthy && gpu.compute_mode_allows(demand.sharing);
    is_open
        && !(gpu.slice && demand.gpus > 1)
        && !gpu.is_kept_spare_from(demand)
        && gpu.matches_selector_of(demand)
}

/// The usage of a demand on these GPUs, as its tenant is charged for it.
pub fn tenant_usage_on(gpus: &[Gpu], demand: &Demand, chosen: GpuSet) -> TenantUsage {
    if chosen.is_empty() {
        return TenantUsage {
            vram: demand.vram(),
            milli_gpus: u64::from(demand.gpus) * 1000,
        };
    }
    chosen
        .iter()
        .map(|index| gpus[index].usage_of(demand))
        .sum()
}

/// Whether these GPUs are within what the demand's tenant may still take.
pub fn is_allowed(allowance: TenantLimit, gpus: &[Gpu], demand: &Demand, chosen: GpuSet) -> bool {
    allowance == TenantLimit::default() || allowance.allows(tenant_usage_on(gpus, demand, chosen))
}
