//! The preemption candidate: one node as the search for victims sees it, with its GPUs, its potential victims, the pods that
//! leave anyway, and the shortfall to cover. Plain data; the ledger fills it in.

use super::eviction_cost::EvictionCost;
use crate::ids::{NodeName, PodUid};
use crate::ledger::{PotentialVictim, TenantQuota};
use crate::units::{Bytes, MilliCpu, Millis};
use crate::vocabulary::classification::TenantId;
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::HostResources;
use crate::vocabulary::gpu::{ClassExclusion, Gpu};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug, Clone)]
pub struct PreemptionCandidate {
    pub node: NodeName,
    pub gpus: Vec<Gpu>,
    /// Pods that may be evicted for the preemptor: of a preemptible class, of lower priority, placed, not protected, and not
    /// already a victim of another reservation.
    pub potential_victims: Vec<PotentialVictim>,
    /// Pods that are being deleted, and pods that have ended and whose memory is there still: their VRAM becomes free at no cost.
    pub awaited: Vec<PotentialVictim>,
    /// Groups with members among the potential victims: they are evicted whole or not at all.
    pub gangs: Vec<VictimGroup>,
    /// Class exclusions by GPU: a class is admitted again when the last pod that excludes it has left.
    pub class_exclusions: Vec<ClassExclusion>,
    /// How many pods may be disrupted, by disruption budget that covers one of the potential victims.
    pub budgets: Vec<u32>,
    /// The indices of those budgets in the ledger's list.
    pub budget_indices: Vec<usize>,
    /// False if budgets may exist that this process may not read.
    pub are_budgets_known: bool,
    /// The quota of the preemptor's tenant, and its use.
    pub tenant_quota: TenantQuota,
    /// CPU, memory and VRAM that the scheduler itself must see freed.
    pub shortfall: Shortfall,
    /// The number of pods by which disruption budgets are overdrawn on this node, whichever victims are chosen.
    pub violations: u32,
}

/// A pod group: its members on this node are candidates, and the eviction of one evicts all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VictimGroup {
    /// All members, on whichever node, in order of UID.
    pub members: Arc<[PodUid]>,
    /// Sums over the members on other nodes: their eviction cost, the longest grace period, the quota they give back, and the
    /// budgets that cover them.
    pub eviction_cost: EvictionCost,
    pub grace: Millis,
    pub given_back: TenantUsage,
    pub budgets: Vec<u16>,
    pub elsewhere: MembersElsewhere,
}

/// The nodes and tenants of a group's members on other nodes than one. A group may be on every node, and each of these may be
/// examined: all share one list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MembersElsewhere {
    /// The node and tenant of each member, in order of node.
    all: Arc<[(NodeName, Option<TenantId>)]>,
    here: Range<usize>,
}

impl MembersElsewhere {
    /// `here` are the members on the node itself.
    pub fn new(all: Arc<[(NodeName, Option<TenantId>)]>, here: Range<usize>) -> Self {
        Self { all, here }
    }

    pub fn iter(&self) -> impl Iterator<Item = &(NodeName, Option<TenantId>)> {
        self.all[..self.here.start]
            .iter()
            .chain(&self.all[self.here.end..])
    }
}

/// CPU, memory and VRAM that the scheduler must see freed on the node: the sum over the victims it proposed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shortfall {
    pub vram: Bytes,
    pub host_resources: HostResources,
}

impl PreemptionCandidate {
    /// A candidate without potential victims.
    pub fn new(node: NodeName, mut gpus: Vec<Gpu>) -> Self {
        // No pod is evicted so that another one can borrow.
        gpus.iter_mut().for_each(|gpu| gpu.lendable = Bytes::ZERO);
        Self {
            node,
            gpus,
            potential_victims: Vec::new(),
            awaited: Vec::new(),
            gangs: Vec::new(),
            class_exclusions: Vec::new(),
            budgets: Vec::new(),
            budget_indices: Vec::new(),
            are_budgets_known: true,
            tenant_quota: TenantQuota::default(),
            shortfall: Shortfall::default(),
            violations: 0,
        }
    }
}

impl Shortfall {
    pub fn from_victims<'a>(residents: impl Iterator<Item = &'a PotentialVictim>) -> Self {
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
