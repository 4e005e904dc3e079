//! Pods and nodes of which a device plugin hands out the GPUs: what is in use there, and whom the scheduler may evict there.
//!
//! The books count whole devices per node. Nothing of a single GPU is promised to such a pod, so it is charged on none, holds
//! none and is hinted none.

use super::Ledger;
use super::copy_on_write::PodStates;
use super::node_state::NodeState;
use super::pod_state::{PodPhase, PodState};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::policy::Mode;
use crate::scheduling::vocabulary::demand::Demand;
use crate::scheduling::vocabulary::device_plugin::{Ask, PluginDevices, PluginShare};

impl Ledger {
    /// What device plugins offer on a node that exists.
    pub(in crate::scheduling) fn set_plugin_devices(&mut self, name: &NodeName, offered: PluginDevices) {
        let Some(node_state) =
            self.node_states.get_mut(name).filter(|node_state| node_state.offered != offered)
        else {
            return;
        };
        node_state.offered = offered;
        self.refresh(name);
    }

    /// Whether a member of its group would stay behind.
    pub(in crate::scheduling) fn would_break(&self, leaver: &PodState, group_victims: &[PodUid]) -> bool {
        let Some(group) = &leaver.disruption_info.group else { return false };
        let keep_reason = |uid: &&PodUid| {
            let pod_state = &self.pod_states[*uid];
            let is_there =
                !matches!(pod_state.phase, PodPhase::Waiting(_)) && self.departure_of(pod_state).is_none();
            is_there && !group_victims.contains(uid)
        };
        self.members_of(group).any(|uid| keep_reason(&uid))
    }

    /// Whether the scheduler's choice stands for such a pod, whatever the books say.
    pub(in crate::scheduling) fn passes_through(&self, demand: &Demand) -> bool {
        self.policy.mode == Mode::Shadow && demand.asks_plugin()
    }
}

impl NodeState {
    /// What device plugins offer here, beside what pods that are here or on their way use.
    pub(super) fn plugin_shares(&self, pod_states: &PodStates) -> Vec<PluginShare> {
        let mut used = PluginDevices::new();
        for pod_state in self.pods.iter().map(|uid| &pod_states[uid]) {
            if let (Ask::Plugin { resource, count }, Some(_)) =
                (&pod_state.demand.ask, self.charge_of(pod_state))
            {
                let sum = used.entry(resource.clone()).or_default();
                *sum = sum.saturating_add(*count);
            }
        }
        PluginShare::all(&self.offered, &used)
    }
}
