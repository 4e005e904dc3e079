//! One node as a search for victims sees it: its GPUs, who could leave them, who leaves anyway, and what it would take for the
//! pod to be placed there. Data; the ledger fills it in.

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
    /// Pods that may be evicted for the one who asks: of a preemptible class, of lower priority, placed, not protected, and
    /// not already leaving for someone else.
    pub candidates: Vec<PotentialVictim>,
    /// Pods that are being deleted: their room is on its way at no cost.
    pub awaited: Vec<PotentialVictim>,
    /// Groups of which candidates here are members: those leave together or not at all.
    pub gangs: Vec<VictimGroup>,
    /// Who keeps classes off which GPUs: a class is let in again when the last that bars it has left.
    pub class_exclusions: Vec<ClassExclusion>,
    /// How many pods each disruption budget that covers a candidate lets leave.
    pub budgets: Vec<u32>,
    /// Which budgets those are, by their places in the ledger's list.
    pub budget_places: Vec<usize>,
    /// False if budgets may stand that nobody could read.
    pub budgets_known: bool,
    /// What the tenant of the one who asks may have, and has beside it.
    pub tenant: TenantQuota,
    /// What the scheduler itself must see freed.
    pub shortfall: Shortfall,
    /// By how much disruption budgets are overdrawn on this node, whichever victims are chosen.
    pub violations: u32,
}

/// A tenant of some GPUs that does not share them with everyone.
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
    /// What its processes have beyond that, on each of its GPUs at least.
    pub used_beyond_grant: Bytes,
    pub sharing: Sharing,
    pub priority: i32,
    pub class: ClassId,
    /// Whose it is: its eviction counts as that tenant's.
    pub tenant: Option<TenantId>,
    pub host_resources: HostResources,
    /// How long it may take to leave.
    pub grace: Millis,
    pub eviction_cost: PodEvictionCost,
    pub deletion_cost: i32,
    pub standing: QuotaStatus,
    /// What it gives back of what the tenant of the one who asks may have.
    pub given_back: TenantUsage,
    /// The budgets that cover it, by their place in [`PreemptionCandidate::budgets`].
    pub budgets: Vec<u16>,
    /// Its group, by its place in [`PreemptionCandidate::gangs`].
    pub gang: Option<u16>,
}

/// Members of a group: those on this node are candidates, and with any of them all leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VictimGroup {
    /// Everyone who leaves with it, on whichever node, in order of UID.
    pub members: Arc<[PodUid]>,
    /// Of those on other nodes: their price, the longest that one may take to leave, what they give back, and the budgets that
    /// cover them.
    pub eviction_cost: EvictionCost,
    pub grace: Millis,
    pub given_back: TenantUsage,
    pub budgets: Vec<u16>,
    /// Where those on other nodes are, and whose they are.
    pub elsewhere: Vec<(NodeName, Option<TenantId>)>,
}

/// What a tenant may have, and has.
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
    /// A room in which nobody could leave.
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
    /// Whether it may have so much more, once it has given that much back.
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

/// Lets in whom nobody bars any more.
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

/// The resident leaves: what it was promised is free, what it had beyond that is given back, and where nobody is left no
/// engine is busy.
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
