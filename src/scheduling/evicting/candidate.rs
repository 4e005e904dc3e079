//! The preemption candidate: one node as the search for victims sees it, with its GPUs, its potential victims, the pods that
//! leave anyway, and the shortfall to cover. Plain data; the ledger fills it in.

use super::eviction_cost::{EvictionCost, PodEvictionCost, QuotaStatus};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::policy::{ClassId, ClassSet, TenantId, TenantLimit, TenantUsage};
use crate::scheduling::vocabulary::demand::{HostResources, Sharing};
use crate::scheduling::vocabulary::gpu::{Gpu, GpuSet};
use crate::scheduling::vocabulary::node_reading::EngineLoad;
use crate::units::{Bytes, MilliCpu, Millis};
use std::sync::Arc;

#[derive(Debug, Clone)]
pub struct PreemptionCandidate {
    pub node: NodeName,
    pub gpus: Vec<Gpu>,
    /// Pods that may be evicted for the preemptor: of a preemptible class, of lower priority, placed, not protected, and not
    /// already a victim of another reservation.
    pub candidates: Vec<PotentialVictim>,
    /// Pods that are being deleted: their VRAM becomes free at no cost.
    pub awaited: Vec<PotentialVictim>,
    /// Groups with members among the candidates: they are evicted whole or not at all.
    pub gangs: Vec<VictimGroup>,
    /// Class exclusions by GPU: a class is admitted again when the last pod that excludes it has left.
    pub class_exclusions: Vec<ClassExclusion>,
    /// By disruption budget that covers a candidate: how many of its pods may be disrupted.
    pub budgets: Vec<u32>,
    /// Which budgets those are, as indices into the ledger's list.
    pub budget_places: Vec<usize>,
    /// False if budgets may exist that this process may not read.
    pub budgets_known: bool,
    /// What the preemptor's tenant may have, and has.
    pub tenant: TenantQuota,
    /// What the scheduler itself must see freed.
    pub shortfall: Shortfall,
    /// By how much disruption budgets are overdrawn on this node, whichever victims are chosen.
    pub violations: u32,
}

/// A resident pod that does not share its GPUs with every class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassExclusion {
    pub uid: PodUid,
    pub gpus: GpuSet,
    pub classes: ClassSet,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PotentialVictim {
    pub uid: PodUid,
    pub gpus: GpuSet,
    pub per_gpu: Bytes,
    /// VRAM that its processes use beyond its grant, on each of its GPUs at least.
    pub used_beyond_grant: Bytes,
    pub sharing: Sharing,
    pub priority: i32,
    pub class: ClassId,
    /// Its tenant: an eviction counts as that tenant's.
    pub tenant: Option<TenantId>,
    pub host_resources: HostResources,
    /// How long it may take to terminate.
    pub grace: Millis,
    pub eviction_cost: PodEvictionCost,
    pub deletion_cost: i32,
    pub standing: QuotaStatus,
    /// What its eviction gives back of the quota of the preemptor's tenant.
    pub given_back: TenantUsage,
    /// The budgets that cover it, as indices into [`PreemptionCandidate::budgets`].
    pub budgets: Vec<u16>,
    /// Its group, as an index into [`PreemptionCandidate::gangs`].
    pub gang: Option<u16>,
}

/// A pod group: its members on this node are candidates, and the eviction of one evicts all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VictimGroup {
    /// All members, on whichever node, in order of UID.
    pub members: Arc<[PodUid]>,
    /// Of the members on other nodes: their eviction cost, the longest grace period, the quota they give back, and the budgets
    /// that cover them.
    pub eviction_cost: EvictionCost,
    pub grace: Millis,
    pub given_back: TenantUsage,
    pub budgets: Vec<u16>,
    /// The nodes and tenants of the members on other nodes.
    pub elsewhere: Vec<(NodeName, Option<TenantId>)>,
}

/// A tenant's quota and its usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TenantQuota {
    pub ceiling: TenantLimit,
    pub used: TenantUsage,
}

/// What the scheduler itself must see freed on the node: the sum over the victims it proposed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shortfall {
    pub vram: Bytes,
    pub host_resources: HostResources,
}

impl PreemptionCandidate {
    /// A candidate without potential victims.
    pub fn new(node: NodeName, gpus: Vec<Gpu>) -> Self {
        Self {
            node,
            gpus,
            candidates: Vec::new(),
            awaited: Vec::new(),
            gangs: Vec::new(),
            class_exclusions: Vec::new(),
            budgets: Vec::new(),
            budget_places: Vec::new(),
            budgets_known: true,
            tenant: TenantQuota::default(),
            shortfall: Shortfall::default(),
            violations: 0,
        }
    }
}

impl PotentialVictim {
    pub fn vram(&self) -> Bytes {
        self.per_gpu.times(u64::from(self.gpus.len()))
    }
}

impl TenantQuota {
    /// Whether the tenant may use `wanted` more, once it has given `given_back` back.
    pub fn allows(&self, wanted: TenantUsage, given_back: TenantUsage) -> bool {
        self.ceiling == TenantLimit::default()
            || self.ceiling.left(self.used.minus(given_back)).allows(wanted)
    }
}

impl Shortfall {
    pub fn of<'a>(residents: impl Iterator<Item = &'a PotentialVictim>) -> Self {
        residents.fold(Self::default(), |sum, resident| sum.plus(resident))
    }

    pub(super) fn plus(self, resident: &PotentialVictim) -> Self {
        Self {
            vram: self.vram + resident.vram(),
            host_resources: HostResources {
                cpu: MilliCpu(self.host_resources.cpu.0 + resident.host_resources.cpu.0),
                memory: self.host_resources.memory + resident.host_resources.memory,
            },
        }
    }

    pub(super) fn is_covered_by(&self, freed: &Self) -> bool {
        self.vram <= freed.vram
            && self.host_resources.cpu <= freed.host_resources.cpu
            && self.host_resources.memory <= freed.host_resources.memory
    }
}

/// Admits the classes that no remaining pod excludes.
pub fn settle_class_exclusions(
    class_exclusions: &[ClassExclusion],
    state: &mut [Gpu],
    has_left: impl Fn(&PodUid) -> bool,
) {
    if class_exclusions.is_empty() {
        return;
    }
    state.iter_mut().for_each(|gpu| gpu.excluded_classes = ClassSet::NONE);
    for class_exclusion in class_exclusions.iter().filter(|class_exclusion| !has_left(&class_exclusion.uid)) {
        class_exclusion.gpus.iter().for_each(|place| {
            state[place].excluded_classes = state[place].excluded_classes.with(class_exclusion.classes)
        });
    }
}

/// Removes a pod: its allocation becomes free, its usage beyond that is given back, and a GPU without pods has no busy engine.
pub fn discharge(state: &mut [Gpu], resident: &PotentialVictim) {
    for place in resident.gpus.iter() {
        let gpu = &mut state[place];
        gpu.discharge(resident.per_gpu, resident.sharing);
        gpu.unaccounted_vram = gpu.unaccounted_vram.minus(resident.used_beyond_grant);
        if gpu.tenants == 0 {
            gpu.engine_load = EngineLoad::NONE;
            gpu.starting = false;
        }
    }
}
