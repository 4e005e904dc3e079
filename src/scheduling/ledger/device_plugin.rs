//! Pods and nodes of which a device plugin hands out the GPUs: what is in use there, and whom the scheduler may evict there.
//!
//! The books count whole devices per node. Nothing of a single GPU is promised to such a pod, so it is charged on none, holds
//! none and is hinted none.

use super::Ledger;
use super::copy_on_write::PodStates;
use super::node_state::NodeState;
use super::pod_state::{PodPhase, PodState};
use super::preemptor::Preemptor;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::evicting::{EvictionCost, PotentialVictim};
use crate::scheduling::placing::device_plugin::has_devices;
use crate::scheduling::placing::fit::check_node_admission;
use crate::scheduling::policy::Mode;
use crate::scheduling::vocabulary::cluster_share::TenantUsage;
use crate::scheduling::vocabulary::demand::Demand;
use crate::scheduling::vocabulary::device_plugin::{Ask, PluginDevices, PluginShare};

impl Ledger {
    /// What device plugins offer on a node that exists.
    pub fn set_plugin_devices(&mut self, name: &NodeName, offered: PluginDevices) {
        let Some(node_state) =
            self.node_states.get_mut(name).filter(|node_state| node_state.offered != offered)
        else {
            return;
        };
        node_state.offered = offered;
        self.refresh(name);
    }

    /// What it costs if exactly these pods leave `node`, so that the pod whose claim it is, which asks a device plugin, goes there.
    /// `None` if one of them may not be evicted for it, or if it would not fit afterwards.
    pub fn eviction_cost_of(
        &self,
        claim: &Preemptor,
        node: &NodeName,
        victims: &[PodUid],
    ) -> Option<EvictionCost> {
        let uid = claim.uid.as_ref()?;
        let preemptor = &self.pod_states.get(uid)?.demand;
        let node_state = self.node_states.get(node).filter(|node_state| node_state.exists)?;
        let mut eviction_cost = EvictionCost::default();
        let mut leaving = Vec::new();
        for victim in victims {
            match self.leaver(victim, preemptor, node_state, claim) {
                ProposedVictim::Stays => return None,
                ProposedVictim::Unknown => {}
                ProposedVictim::Goes(pod_state, resident) => {
                    if self.would_break(pod_state, victims) {
                        return None;
                    }
                    eviction_cost = eviction_cost.plus(&resident);
                    leaving.push(pod_state);
                }
            }
        }
        self.fits_without(uid, preemptor, node_state, &leaving).then_some(eviction_cost)
    }

    fn leaver(
        &self,
        victim: &PodUid,
        preemptor: &Demand,
        node_state: &NodeState,
        claim: &Preemptor,
    ) -> ProposedVictim<'_> {
        // One that asks for no GPU is the scheduler's own affair: it needs its CPU or memory.
        let Some(pod_state) = self.pod_states.get(victim) else { return ProposedVictim::Unknown };
        let keep_reason =
            self.keep_reason(victim, pod_state, preemptor, node_state.most_used_by(preemptor), claim);
        let resident = || self.with_eviction_cost(victim, pod_state, node_state, preemptor, claim);
        match keep_reason.is_none().then(resident).flatten() {
            Some(resident) => ProposedVictim::Goes(pod_state, Box::new(resident)),
            None => ProposedVictim::Stays,
        }
    }

    /// Whether a member of its group would stay behind.
    pub(super) fn would_break(&self, leaver: &PodState, group_victims: &[PodUid]) -> bool {
        let Some(group) = &leaver.disruption_info.group else { return false };
        let keep_reason = |uid: &&PodUid| {
            let pod_state = &self.pod_states[*uid];
            let is_there =
                !matches!(pod_state.phase, PodPhase::Waiting(_)) && self.departure_of(pod_state).is_none();
            is_there && !group_victims.contains(uid)
        };
        self.members_of(group).any(|uid| keep_reason(&uid))
    }

    fn fits_without(
        &self,
        uid: &PodUid,
        demand: &Demand,
        node_state: &NodeState,
        leaving: &[&PodState],
    ) -> bool {
        let Ask::Plugin { resource, count } = &demand.ask else { return false };
        let freed = leaving.iter().map(|pod_state| match &pod_state.demand.ask {
            Ask::Plugin { resource: other, count } if other == resource => *count,
            _ => 0,
        });
        let own = leaving.iter().filter(|pod_state| pod_state.demand.tenant == demand.tenant);
        let given_back: TenantUsage = own.filter_map(|pod_state| node_state.use_of(pod_state)).sum();
        let wanted = TenantUsage { vram: demand.vram(), milli_gpus: u64::from(*count) * 1000 };
        check_node_admission(&node_state.view, demand).is_ok()
            && has_devices(&node_state.view, resource, *count, freed.fold(0, u32::saturating_add)).is_ok()
            && self.allowance_beside(uid, demand, given_back).allows(wanted)
    }

    /// Whether the scheduler's choice stands for such a pod, whatever the books say.
    pub(super) fn passes_through(&self, demand: &Demand) -> bool {
        self.policy.mode == Mode::Shadow && demand.asks_plugin()
    }
}

/// A pod the scheduler would evict.
enum ProposedVictim<'a> {
    /// The policy or its tenant keeps it, or it is not there.
    Stays,
    /// The scheduler knows why it should go, and Stowage nothing.
    Unknown,
    Goes(&'a PodState, Box<PotentialVictim>),
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
