//! Victims for a pod that requests devices of a device plugin: kube-scheduler proposes sets of them, and this file computes what
//! each costs.

use super::eviction_cost::EvictionCost;
use crate::ids::{NodeName, PodUid};
use crate::ledger::{Ledger, NodeState, PodState, PotentialVictim, Preemptor};
use crate::placing::fit::check_node_admission;
use crate::placing::whole_nodes::check_devices;
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::device_plugin::GpuRequest;

impl Ledger {
    /// The cost of evicting exactly these pods from `node` for a preemptor that requests devices. `None` if one of them may not
    /// be evicted for it, or if it would not fit afterwards.
    pub(crate) fn eviction_cost_of(
        &self,
        preemptor: &Preemptor,
        node: &NodeName,
        victims: &[PodUid],
    ) -> Option<EvictionCost> {
        let uid = preemptor.uid()?;
        let demand = &self.pod_state(uid)?.demand;
        let node_state = self
            .node_state(node)
            .filter(|node_state| node_state.exists())?;
        let mut eviction_cost = EvictionCost::default();
        let mut leaving = Vec::new();
        for victim in victims {
            match self.classify_victim(victim, demand, node_state, preemptor) {
                ProposedVictim::Stays => return None,
                ProposedVictim::Unknown => {}
                ProposedVictim::Goes(pod_state, resident) => {
                    if self.would_break_group(pod_state, victims) {
                        return None;
                    }
                    eviction_cost = eviction_cost.plus(&resident);
                    leaving.push(pod_state);
                }
            }
        }
        self.fits_without(uid, demand, node_state, &leaving)
            .then_some(eviction_cost)
    }

    fn classify_victim(
        &self,
        victim: &PodUid,
        demand: &Demand,
        node_state: &NodeState,
        preemptor: &Preemptor,
    ) -> ProposedVictim<'_> {
        // A pod without a GPU is kube-scheduler's own concern: the preemptor needs its CPU or memory.
        let Some(pod_state) = self.pod_state(victim) else {
            return ProposedVictim::Unknown;
        };
        let keep_reason = self.keep_reason(
            victim,
            pod_state,
            demand,
            node_state.max_usage_of(demand),
            preemptor,
        );
        let resident = || self.with_eviction_cost(victim, pod_state, node_state, demand, preemptor);
        match keep_reason.is_none().then(resident).flatten() {
            Some(resident) => ProposedVictim::Goes(pod_state, Box::new(resident)),
            None => ProposedVictim::Stays,
        }
    }

    fn fits_without(
        &self,
        uid: &PodUid,
        demand: &Demand,
        node_state: &NodeState,
        leaving: &[&PodState],
    ) -> bool {
        let GpuRequest::Plugin { resource, count } = &demand.ask else {
            return false;
        };
        let freed = leaving.iter().map(|pod_state| match &pod_state.demand.ask {
            GpuRequest::Plugin {
                resource: other,
                count,
            } if other == resource => *count,
            _ => 0,
        });
        let same_tenant = leaving
            .iter()
            .filter(|pod_state| pod_state.demand.tenant == demand.tenant);
        let given_back: TenantUsage = same_tenant
            .filter_map(|pod_state| node_state.usage_of(pod_state))
            .sum();
        let wanted = TenantUsage {
            vram: demand.vram(),
            milli_gpus: u64::from(*count) * 1000,
        };
        check_node_admission(node_state.view(), demand).is_ok()
            && check_devices(
                node_state.view(),
                resource,
                *count,
                freed.fold(0, u32::saturating_add),
            )
            .is_ok()
            && self
                .tenant_allowance_after(uid, demand, given_back)
                .allows(wanted)
    }
}

/// A pod that kube-scheduler would evict.
enum ProposedVictim<'a> {
    /// The policy or its tenant's guarantee protects it, or it has no place on the node.
    Stays,
    /// The ledger does not have it: kube-scheduler alone knows why it proposes this pod.
    Unknown,
    Goes(&'a PodState, Box<PotentialVictim>),
}
