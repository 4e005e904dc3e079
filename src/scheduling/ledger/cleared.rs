//! A node as it would be if all had left who may be evicted for a pod. Whoever stays is better judged by that than by what is free
//! now: where others can make room, those who come later and stay will take it, and need CPU and memory beside it.
//!
//! For who places pods that have no GPU: in the simulator, so far. No search is here, and no order: what one pod's coming would
//! take from whom is for [`super::room`] and `preempt`.

use super::Ledger;
use super::entry::PodState;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::device::Gpu;
use crate::scheduling::node::Node;
use crate::scheduling::policy::Preemptibility;
use crate::scheduling::preempt::{PotentialVictim, Shortfall, discharge};
use crate::scheduling::request::HostResources;
use crate::scheduling::worth::NodeGpus;
use crate::units::MilliCpu;

/// What a node has left when they have gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WithoutEvictable {
    /// By their places in the node's list.
    pub gpus: Vec<Gpu>,
    /// What they gave back beside GPUs.
    pub freed: HostResources,
}

impl WithoutEvictable {
    /// Others have gone, too, who had no GPU.
    pub fn and_freed(self, others: HostResources) -> Self {
        Self { freed: sum(self.freed, others), ..self }
    }

    /// In place of the node's own.
    pub fn site<'a>(&'a self, node: &'a Node) -> NodeGpus<'a> {
        NodeGpus { gpus: &self.gpus, spare: node.spare.map(|spare| sum(spare, self.freed)), ..node.site() }
    }
}

impl Ledger {
    /// Without all pods that one of this priority could have evicted sooner or later; `None` for a node that nobody knows, and for
    /// one where room is held: somebody is leaving it already, and part of the hold is in what they have.
    pub fn cleared(&self, node: &NodeName, priority: i32) -> Option<WithoutEvictable> {
        let book = self.books.get(node)?;
        let holds = |uid: &PodUid| self.entries[uid].hold().is_some_and(|hold| hold.node == *node);
        if book.pods.iter().any(holds) {
            return None;
        }
        let lower = book.tenants.iter().filter(|tenant| tenant.priority < priority);
        let entries = lower.map(|tenant| (&tenant.uid, &self.entries[&tenant.uid]));
        let movable = entries.filter(|(_, entry)| self.may_leave_some_day(entry));
        let gone: Vec<PotentialVictim> =
            movable.filter_map(|(uid, entry)| self.resident(uid, entry, book)).collect();
        let mut gpus = book.view.gpus.to_vec();
        gone.iter().for_each(|resident| discharge(&mut gpus, resident));
        Some(WithoutEvictable { gpus, freed: Shortfall::of(gone.iter()).companion })
    }

    /// Not whether it may leave now: how long it has run so far does not matter.
    fn may_leave_some_day(&self, entry: &PodState) -> bool {
        let class = self.policy.class(entry.demand.class);
        let stays = class.eviction == Preemptibility::Never
            || entry.stake.queue_managed
            || (entry.stake.do_not_disrupt && class.honors_do_not_disrupt());
        !stays
    }
}

fn sum(one: HostResources, other: HostResources) -> HostResources {
    HostResources { cpu: MilliCpu(one.cpu.0.saturating_add(other.cpu.0)), memory: one.memory + other.memory }
}
