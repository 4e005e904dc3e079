//! One node as a search for victims sees it: its GPUs, who could leave them, who leaves anyway, and what it would take for the
//! pod to be placed there. Data; the ledger fills it in.

use super::eviction_cost::EvictionCost;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::ledger::{PotentialVictim, TenantQuota};
use crate::scheduling::vocabulary::classification::TenantId;
use crate::scheduling::vocabulary::cluster_share::TenantUsage;
use crate::scheduling::vocabulary::demand::HostResources;
use crate::scheduling::vocabulary::gpu::{ClassExclusion, Gpu};
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
    /// By how much budgets are overdrawn here whoever of the candidates leaves.
    pub violations: u32,
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
