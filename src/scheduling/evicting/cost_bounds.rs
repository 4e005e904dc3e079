//! Lower bounds of the eviction cost, by node: computed from the node states alone, without reading each pod's state. Most nodes
//! need no closer examination.

use super::{EvictionCost, GpuFloor, NodeCostBound, gpu_need};
use crate::ids::NodeName;
use crate::ledger::Ledger;
use crate::ledger::Preemptor;
use crate::ledger::{NodeState, ResidentPod};
use crate::placing::fit::is_usable;
use crate::policy::Preemptibility;
use crate::units::Bytes;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::gpu::{Gpu, GpuSet};

/// The lower bounds of one node's GPUs; kept from one node to the next, which needs the same memory.
#[derive(Debug, Default)]
struct GpuFloors {
    /// The floor of each GPU, by index; `None` for one that the demand cannot use.
    on_gpus: Vec<Option<GpuFloor>>,
    costs: Vec<EvictionCost>,
    evicted: Vec<u32>,
}

impl Ledger {
    /// The nodes where a demand would fit without the pods that might be evicted for it, the potentially cheapest first, and those
    /// alike in order of name. Only priority and class exclude a pod here; reasons that need the pod's own state are checked
    /// later.
    pub fn cost_bounds(&self, preemptor: &Preemptor, demand: &Demand) -> Vec<NodeCostBound> {
        self.bounds_of(self.all_node_states(), preemptor, demand)
    }

    /// [`Self::cost_bounds`] on some nodes, which are in order of name.
    pub(crate) fn cost_bounds_on<'n>(
        &self,
        nodes: impl Iterator<Item = &'n NodeName>,
        preemptor: &Preemptor,
        demand: &Demand,
    ) -> Vec<NodeCostBound> {
        self.bounds_of(
            nodes.filter_map(|node| self.node_state(node)),
            preemptor,
            demand,
        )
    }

    /// The cost bounds of nodes that are in order of name.
    fn bounds_of<'s>(
        &'s self,
        node_states: impl Iterator<Item = &'s NodeState>,
        preemptor: &Preemptor,
        demand: &Demand,
    ) -> Vec<NodeCostBound> {
        let mut floors = GpuFloors::default();
        let node_states = node_states.filter(|node_state| node_state.can_be_emptied_for(demand));
        let mut cost_bounds: Vec<NodeCostBound> = node_states
            .filter_map(|node_state| {
                let (floor, least_evicted) =
                    self.floor(node_state, preemptor, demand, &mut floors)?;
                Some(NodeCostBound {
                    floor,
                    node: node_state.view().name.clone(),
                    least_evicted,
                })
            })
            .collect();
        // They are in order of name.
        cost_bounds.sort_by_key(|bound| bound.floor);
        cost_bounds
    }

    /// Lower bounds on this node: of the cost, and of the number of evicted pods.
    fn floor(
        &self,
        node_state: &NodeState,
        preemptor: &Preemptor,
        demand: &Demand,
        floors: &mut GpuFloors,
    ) -> Option<(EvictionCost, u32)> {
        let preemptor_uid = preemptor.uid()?;
        let gpus_without_preemptor;
        let gpus = match node_state.pods().contains(preemptor_uid) {
            true => {
                gpus_without_preemptor = self.gpus_without(node_state, preemptor_uid);
                gpus_without_preemptor.as_slice()
            }
            false => &node_state.view().gpus,
        };
        self.fill_floors(node_state, gpus, demand, floors);
        let wanted = demand.gpus as usize;
        let last = *floors.costs.get(wanted.checked_sub(1)?)?;
        // One pod may be on several of these GPUs.
        let widest = node_state
            .residents()
            .iter()
            .map(|resident| resident.gpus.len())
            .max()
            .unwrap_or(1)
            .max(1);
        let on_gpus: u32 = floors.evicted.iter().take(wanted).sum();
        Some((last, on_gpus.div_ceil(widest)))
    }

    /// Fills `floors` in one pass over the residents: the results of the GPUs that can be emptied for the demand, the lowest first.
    fn fill_floors(
        &self,
        node_state: &NodeState,
        gpus: &[Gpu],
        demand: &Demand,
        floors: &mut GpuFloors,
    ) {
        let GpuFloors {
            on_gpus,
            costs,
            evicted,
        } = floors;
        on_gpus.clear();
        on_gpus.extend(
            gpus.iter()
                .map(|gpu| is_usable(gpu, demand).then(|| GpuFloor::new(gpu_need(gpu, demand)))),
        );
        for resident in node_state
            .residents()
            .iter()
            .filter(|resident| resident.is_placed)
        {
            let Some(eviction_cost) = self.lowest_cost(resident, demand) else {
                continue;
            };
            for index in resident.gpus.iter() {
                if let Some(Some(floor)) = on_gpus.get_mut(index) {
                    floor.add(
                        max_freed(resident, &gpus[index], demand),
                        eviction_cost,
                        resident.is_leaving,
                    );
                }
            }
        }
        let ended: GpuSet = self
            .ended_victims(node_state)
            .flat_map(|ended| ended.gpus.iter())
            .collect();
        for index in ended.iter() {
            if let Some(Some(floor)) = on_gpus.get_mut(index) {
                // The memory of pods that have ended is no more than all unaccounted VRAM.
                floor.add(
                    gpus[index].unaccounted_vram.0,
                    EvictionCost::default(),
                    true,
                );
            }
        }
        costs.clear();
        evicted.clear();
        for floor in on_gpus.iter().flatten() {
            if let Some(cost) = floor.cost() {
                costs.push(cost);
                evicted.push(floor.min_evicted());
            }
        }
        costs.sort_unstable();
        evicted.sort_unstable();
    }

    /// A lower bound of the cost of one pod's eviction; `None` if its priority or class excludes it.
    fn lowest_cost(&self, resident: &ResidentPod, demand: &Demand) -> Option<EvictionCost> {
        if resident.is_leaving {
            return Some(EvictionCost::default());
        }
        let class = self.policy().class(resident.class);
        let since = resident.unsaved_since?;
        let is_protected = !demand.may_preempt
            || class.eviction == Preemptibility::Never
            || resident.priority >= demand.priority;
        if is_protected {
            return None;
        }
        let work = self.work_lost(since, class);
        let drain = resident.grace + class.drain_time;
        let of_its_gpus = |seconds: u64| resident.milli_gpus.saturating_mul(seconds);
        let cost = self.policy().preemption.costs.per_pod.0;
        let cost = cost
            .saturating_add(of_its_gpus(work.0 / 1000))
            .saturating_add(of_its_gpus(drain.0 / 1000));
        Some(EvictionCost {
            priority: resident.priority.abs_diff(i32::MIN),
            cost,
            ..EvictionCost::default()
        })
    }
}

/// The most that becomes free on a GPU when the pod leaves: its allocation, and all unaccounted VRAM.
fn max_freed(resident: &ResidentPod, gpu: &Gpu, demand: &Demand) -> u64 {
    match demand.sharing {
        Sharing::Exclusive => 1,
        Sharing::Shared => {
            let reserved: Bytes = gpu.charge_for(resident.per_gpu, resident.sharing);
            (reserved + gpu.unaccounted_vram).0
        }
    }
}
