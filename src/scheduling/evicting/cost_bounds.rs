//! Lower bounds of the eviction cost, by node: computed from the node states alone, without reading each pod's state. Most nodes
//! need no closer examination.

use super::{EvictionCost, NodeCostBound, gpu_need, least_on_gpu, least_pods_on_gpu};
use crate::scheduling::ledger::Ledger;
use crate::scheduling::ledger::Preemptor;
use crate::scheduling::ledger::{NodeState, ResidentPod};
use crate::scheduling::placing::fit::usable;
use crate::scheduling::policy::Preemptibility;
use crate::scheduling::vocabulary::demand::{Demand, Sharing};
use crate::scheduling::vocabulary::gpu::Gpu;
use crate::units::Bytes;

impl Ledger {
    /// The nodes where a demand would fit without the pods that might be evicted for it, the potentially cheapest first. Only
    /// priority and class exclude a pod here; reasons that need the pod's own state are checked later.
    pub fn cost_bounds(&self, claim: &Preemptor, demand: &Demand) -> Vec<NodeCostBound> {
        let node_states = self.all_node_states().filter(|node_state| node_state.can_be_emptied_for(demand));
        let mut cost_bounds: Vec<NodeCostBound> = node_states
            .filter_map(|node_state| {
                let (floor, least_evicted) = self.floor(node_state, claim, demand)?;
                Some(NodeCostBound { floor, node: node_state.view().name.clone(), least_evicted })
            })
            .collect();
        cost_bounds.sort_unstable();
        cost_bounds
    }

    /// Lower bounds on this node: of the cost, and of the number of evicted pods.
    fn floor(
        &self,
        node_state: &NodeState,
        claim: &Preemptor,
        demand: &Demand,
    ) -> Option<(EvictionCost, u32)> {
        let asks = claim.uid()?;
        let own_view;
        let gpus = match node_state.pods().contains(asks) {
            true => {
                own_view = self.gpus_without(node_state, asks);
                own_view.as_slice()
            }
            false => &node_state.view().gpus,
        };
        let places = (0..gpus.len()).filter(|place| usable(&gpus[*place], demand));
        let gpu_candidates = places.filter_map(|place| self.gpu_cost_floor(node_state, gpus, place, demand));
        let (mut floors, mut pods): (Vec<EvictionCost>, Vec<u32>) = gpu_candidates.unzip();
        floors.sort_unstable();
        pods.sort_unstable();
        let last = *floors.get((demand.gpus as usize).checked_sub(1)?)?;
        // One pod may be on several of these GPUs.
        let widest = node_state.residents().iter().map(|tenant| tenant.gpus.len()).max().unwrap_or(1).max(1);
        let on_gpus: u32 = pods.iter().take(demand.gpus as usize).sum();
        Some((last, on_gpus.div_ceil(widest)))
    }

    fn gpu_cost_floor(
        &self,
        node_state: &NodeState,
        gpus: &[Gpu],
        place: usize,
        demand: &Demand,
    ) -> Option<(EvictionCost, u32)> {
        let (gpu, need) = (&gpus[place], gpu_need(&gpus[place], demand));
        let there =
            node_state.residents().iter().filter(|tenant| tenant.placed && tenant.gpus.contains(place));
        let ended = self.ended_victims(node_state).any(|ended| ended.gpus.contains(place));
        let who_goes = || {
            let there = there.clone();
            let there = there.filter_map(|tenant| {
                let eviction_cost = self.lowest_cost(tenant, demand)?;
                Some((most_given_back(tenant, gpu, demand), eviction_cost, tenant.is_leaving))
            });
            // Their memory is no more than all unaccounted VRAM.
            there.chain(ended.then_some((gpu.unaccounted_vram.0, EvictionCost::default(), true)))
        };
        let floor = least_on_gpu(need, who_goes().map(|(amount, eviction_cost, _)| (amount, eviction_cost)))?;
        Some((floor, least_pods_on_gpu(need, who_goes().map(|(amount, _, is_leaving)| (amount, is_leaving)))))
    }

    /// A lower bound of the cost of one pod's eviction; `None` if its priority or class excludes it.
    fn lowest_cost(&self, tenant: &ResidentPod, preemptor: &Demand) -> Option<EvictionCost> {
        if tenant.is_leaving {
            return Some(EvictionCost::default());
        }
        let class = self.policy().class(tenant.class);
        let since = tenant.unsaved_since?;
        let keep_reason = !preemptor.may_preempt
            || class.eviction == Preemptibility::Never
            || tenant.priority >= preemptor.priority;
        if keep_reason {
            return None;
        }
        let work = self.work_lost(since, class);
        let drain = tenant.grace + class.drain_time;
        let of_its_gpus = |seconds: u64| tenant.milli_gpus.saturating_mul(seconds);
        let cost = self.policy().preemption.costs.per_pod.0;
        let cost =
            cost.saturating_add(of_its_gpus(work.0 / 1000)).saturating_add(of_its_gpus(drain.0 / 1000));
        Some(EvictionCost { priority: tenant.priority.abs_diff(i32::MIN), cost, ..EvictionCost::default() })
    }
}

/// The most that becomes free on a GPU when the pod leaves: its allocation, and all unaccounted VRAM.
fn most_given_back(tenant: &ResidentPod, gpu: &Gpu, demand: &Demand) -> u64 {
    match demand.sharing {
        Sharing::Exclusive => 1,
        Sharing::Shared => {
            let reserved: Bytes = gpu.charge_for(tenant.per_gpu, tenant.sharing);
            (reserved + gpu.unaccounted_vram).0
        }
    }
}
