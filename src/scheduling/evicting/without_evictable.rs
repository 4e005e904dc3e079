//! A node as it would be without its evictable pods. For a pod that stays long, this scores a node better than what is free now:
//! later pods that stay will preempt the evictable ones, and need CPU and memory beside their GPUs.
//!
//! Used to place pods without a GPU, so far in the simulator only. No search and no order is here: [`super::survey`] finds the
//! victims for one preemptor.

use super::Shortfall;
use crate::ids::{NodeName, PodUid};
use crate::ledger::Ledger;
use crate::ledger::PodState;
use crate::ledger::{PotentialVictim, discharge};
use crate::placing::learned::NodeGpus;
use crate::policy::Preemptibility;
use crate::units::MilliCpu;
use crate::vocabulary::demand::HostResources;
use crate::vocabulary::gpu::Gpu;
use crate::vocabulary::node::Node;

/// A node's GPUs, CPU and memory once its evictable pods have left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WithoutEvictable {
    /// In the order of the node's GPUs.
    pub gpus: Vec<Gpu>,
    /// The CPU and memory that those pods give back.
    pub freed: HostResources,
}

impl WithoutEvictable {
    /// Adds the CPU and memory of evictable pods without a GPU.
    pub fn and_freed(self, others: HostResources) -> Self {
        Self {
            freed: sum(self.freed, others),
            ..self
        }
    }

    /// The node with these GPUs in place of its own, and the freed CPU and memory added.
    pub fn node_gpus<'a>(&'a self, node: &'a Node) -> NodeGpus<'a> {
        NodeGpus {
            gpus: &self.gpus,
            free_host: node.free_host.map(|free_host| sum(free_host, self.freed)),
            ..node.node_gpus()
        }
    }
}

impl Ledger {
    /// The node without all pods that a preemptor of this priority could evict sooner or later. `None` for an unknown node, and
    /// for one with a reservation: its victims are leaving already, and part of what it reserves is what they still use.
    pub fn without_evictable(&self, node: &NodeName, priority: i32) -> Option<WithoutEvictable> {
        let node_state = self.node_state(node)?;
        let has_reservation_here = |uid: &PodUid| {
            self.expect_pod(uid)
                .reservation()
                .is_some_and(|reservation| reservation.node == *node)
        };
        if node_state.pods().iter().any(has_reservation_here) {
            return None;
        }
        let lower = node_state
            .residents()
            .iter()
            .filter(|resident| resident.priority < priority);
        let pod_states = lower.map(|resident| (&resident.uid, self.expect_pod(&resident.uid)));
        let movable = pod_states.filter(|(_, pod_state)| self.may_leave_some_day(pod_state));
        let gone: Vec<PotentialVictim> = movable
            .filter_map(|(uid, pod_state)| self.potential_victim(uid, pod_state, node_state))
            .collect();
        let mut gpus = node_state.view().gpus.to_vec();
        gone.iter()
            .for_each(|resident| discharge(&mut gpus, resident));
        Some(WithoutEvictable {
            gpus,
            freed: Shortfall::from_victims(gone.iter()).host_resources,
        })
    }

    /// Whether the pod may be evicted at some time; how long it has run so far does not matter.
    fn may_leave_some_day(&self, pod_state: &PodState) -> bool {
        let class = self.policy().class(pod_state.demand.class);
        let is_protected = class.eviction == Preemptibility::Never
            || pod_state.disruption_info.is_static()
            || self.is_left_to_kueue(pod_state)
            || (pod_state.disruption_info.do_not_disrupt && class.honors_do_not_disrupt());
        !is_protected
    }
}

fn sum(one: HostResources, other: HostResources) -> HostResources {
    HostResources {
        cpu: MilliCpu(one.cpu.0.saturating_add(other.cpu.0)),
        memory: one.memory + other.memory,
    }
}
