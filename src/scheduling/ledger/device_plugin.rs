//! Pods and nodes of which a device plugin hands out the GPUs: what is in use there, and which pods the scheduler may evict
//! there.
//!
//! The ledger counts whole devices per node. Nothing of a single GPU is allocated to such a pod, so it is charged on none and
//! neither reserves nor softly reserves any.

use super::Ledger;
use super::pod_state::PodState;
use crate::ids::{NodeName, PodUid};
use crate::policy::Mode;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::device_plugin::{Ask, PluginDevices};

impl Ledger {
    /// What device plugins offer on a node that exists.
    pub(crate) fn set_plugin_devices(&mut self, name: &NodeName, offered: PluginDevices) {
        if self
            .node_states
            .get_mut(name)
            .is_some_and(|node_state| node_state.set_offered(offered))
        {
            self.refresh(name);
        }
    }

    /// Whether a member of its group would stay behind.
    pub(crate) fn would_break(&self, leaver: &PodState, group_victims: &[PodUid]) -> bool {
        let Some(group) = &leaver.disruption_info.group else {
            return false;
        };
        let stays = |uid: &PodUid| {
            let pod_state = &self.pod_states[uid];
            let is_there = pod_state.waiting().is_none() && self.departure_of(pod_state).is_none();
            is_there && !group_victims.contains(uid)
        };
        self.members_of(group).any(stays)
    }

    /// Whether the scheduler's choice stands for such a pod, whatever the ledger says: it asks for nothing that is counted here, or
    /// nothing is decided here.
    pub(super) fn passes_through(&self, demand: &Demand) -> bool {
        demand.ask == Ask::Claims || self.policy.mode == Mode::Shadow && demand.asks_plugin()
    }
}
