//! A node as it would be without its evictable pods. A pod that stays long is better scored by that than by what is free
//! now: where others can make room, those who come later and stay will take it, and need CPU and memory beside it.
//!
//! For who places pods that have no GPU: in the simulator, so far. No search is here, and no order: what one pod's coming would
//! take from whom is for [`super::survey`].

use super::Shortfall;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::ledger::Ledger;
use crate::scheduling::ledger::PodState;
use crate::scheduling::ledger::{PotentialVictim, discharge};
use crate::scheduling::placing::learned::NodeGpus;
use crate::scheduling::policy::Preemptibility;
use crate::scheduling::vocabulary::demand::HostResources;
use crate::scheduling::vocabulary::gpu::Gpu;
use crate::scheduling::vocabulary::node::Node;
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
    pub fn node_gpus<'a>(&'a self, node: &'a Node) -> NodeGpus<'a> {
        NodeGpus {
            gpus: &self.gpus,
            free_host: node.free_host.map(|free_host| sum(free_host, self.freed)),
            ..node.node_gpus()
        }
    }
}

impl Ledger {
    /// Without all pods that one of this priority could have evicted sooner or later; `None` for a node that nobody knows, and for
    /// one where room is held: somebody is leaving it already, and part of the hold is in what they have.
    pub fn without_evictable(&self, node: &NodeName, priority: i32) -> Option<WithoutEvictable> {
        let node_state = self.node_state(node)?;
        let reservations = |uid: &PodUid| {
            self.known_pod(uid).reservation().is_some_and(|reservation| reservation.node == *node)
        };
        if node_state.pods().iter().any(reservations) {
            return None;
        }
        let lower = node_state.residents().iter().filter(|tenant| tenant.priority < priority);
        let pod_states = lower.map(|tenant| (&tenant.uid, self.known_pod(&tenant.uid)));
        let movable = pod_states.filter(|(_, pod_state)| self.may_leave_some_day(pod_state));
        let gone: Vec<PotentialVictim> =
            movable.filter_map(|(uid, pod_state)| self.resident(uid, pod_state, node_state)).collect();
        let mut gpus = node_state.view().gpus.to_vec();
        gone.iter().for_each(|resident| discharge(&mut gpus, resident));
        Some(WithoutEvictable { gpus, freed: Shortfall::of(gone.iter()).host_resources })
    }

    /// Not whether it may leave now: how long it has run so far does not matter.
    fn may_leave_some_day(&self, pod_state: &PodState) -> bool {
        let class = self.policy().class(pod_state.demand.class);
        let keep_reason = class.eviction == Preemptibility::Never
            || pod_state.disruption_info.queue_managed
            || (pod_state.disruption_info.do_not_disrupt && class.honors_do_not_disrupt());
        !keep_reason
    }
}

fn sum(one: HostResources, other: HostResources) -> HostResources {
    HostResources { cpu: MilliCpu(one.cpu.0.saturating_add(other.cpu.0)), memory: one.memory + other.memory }
}
