//! A lower bound of the cost of a victim set. Because of it, the search examines few sets.
//!
//! Victims must cover every shortfall (VRAM on a GPU, or of the node's sum). The fields of the cost are bounded in their order:
//! victims that cost more by an earlier field are ignored while cheaper ones suffice. Among the cheaper ones, those with the best
//! ratio of freed VRAM to cost are taken first, and the last one fractionally (the linear relaxation of the knapsack problem,
//! Dantzig 1957).

use super::candidate::{PreemptionCandidate, Shortfall};
use super::eviction_cost::EvictionCost;
use super::victim_unit::VictimUnit;
use crate::ledger::PotentialVictim;
use crate::placing::fit::is_usable;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::gpu::Gpu;
use std::cmp::Reverse;

/// A shortfall of VRAM, CPU or memory, and which units relieve it by how much.
#[derive(Debug)]
pub(crate) struct GpuShortfall {
    /// The GPU's index; unused for a sum.
    pub index: usize,
    pub need: u64,
    /// The units that relieve it, the best relief for its cost first.
    by_value: Vec<FreedShare>,
    /// Those units, the lowest priority first, and the least spared first.
    by_priority: Vec<FreedShare>,
    by_spared: Vec<FreedShare>,
    pub least: EvictionCost,
}

/// The shortfalls of sums over the node.
#[derive(Debug, Default)]
pub(crate) struct SumShortfalls {
    pub all: Vec<GpuShortfall>,
}

#[derive(Debug, Clone, Copy)]
struct FreedShare {
    unit: u32,
    amount: u64,
    from_guarantee: bool,
    priority: u32,
    spared: u32,
    cost: u64,
}

impl GpuShortfall {
    /// `None` if all units together are not enough.
    pub fn for_gpu(
        index: usize,
        gpu: &Gpu,
        demand: &Demand,
        units: &[VictimUnit<'_>],
        base: EvictionCost,
    ) -> Option<Self> {
        Self::new(index, gpu_need(gpu, demand), units, base, |unit| {
            let there = unit
                .residents
                .iter()
                .filter(|resident| resident.gpus.contains(index));
            there
                .map(|resident| freed_on(resident, gpu, demand))
                .fold(0, u64::saturating_add)
        })
    }

    fn new(
        index: usize,
        need: u64,
        units: &[VictimUnit<'_>],
        base: EvictionCost,
        amount: impl Fn(&VictimUnit<'_>) -> u64,
    ) -> Option<Self> {
        let freed_share = |(unit_index, unit): (usize, &VictimUnit<'_>)| {
            let EvictionCost {
                from_guarantee,
                priority,
                spared,
                cost,
                ..
            } = unit.eviction_cost;
            FreedShare {
                unit: unit_index as u32,
                amount: amount(unit),
                from_guarantee,
                priority,
                spared,
                cost,
            }
        };
        let relieves = |relief: &FreedShare| relief.amount > 0;
        let by_priority: Vec<FreedShare> = units
            .iter()
            .enumerate()
            .map(freed_share)
            .filter(relieves)
            .collect();
        let (mut by_priority, mut by_value, mut by_spared) =
            (by_priority.clone(), by_priority.clone(), by_priority);
        by_priority.sort_by_key(|relief| relief.priority);
        by_spared.sort_by_key(|relief| relief.spared);
        by_value.sort_by(|a, b| {
            let value = |a: &FreedShare, b: &FreedShare| u128::from(a.amount) * u128::from(b.cost);
            value(b, a)
                .cmp(&value(a, b))
                .then(Reverse(a.amount).cmp(&Reverse(b.amount)))
        });
        let mut shortfall = Self {
            index,
            need,
            by_value,
            by_priority,
            by_spared,
            least: base,
        };
        shortfall.least = shortfall.least(need, base, |_| true)?;
        Some(shortfall)
    }

    /// The least cost of a set that covers `need`, if the chosen victims already cost `base` and only units that are `open` may
    /// still be chosen. `None` if they are not enough.
    pub fn least(
        &self,
        need: u64,
        base: EvictionCost,
        open: impl Fn(usize) -> bool,
    ) -> Option<EvictionCost> {
        if need == 0 {
            return Some(base);
        }
        let open = |relief: &&FreedShare| open(relief.unit as usize);
        let borrowed = |relief: &&FreedShare| base.from_guarantee || !relief.from_guarantee;
        let from_guarantee = base.from_guarantee
            || !covers(self.by_value.iter().filter(open).filter(borrowed), need);
        let allowed = |relief: &&FreedShare| from_guarantee || !relief.from_guarantee;
        let in_order = self.by_priority.iter().filter(open).filter(allowed);
        let priority = threshold(in_order, need, base.priority, |relief| relief.priority)?;
        let allowed = |relief: &&FreedShare| allowed(relief) && relief.priority <= priority;
        let in_order = self.by_spared.iter().filter(open).filter(allowed);
        let spared = threshold(in_order, need, base.spared, |relief| relief.spared)?;
        let allowed = |relief: &&FreedShare| allowed(relief) && relief.spared <= spared;
        let cost = base.cost.saturating_add(least_cost(
            self.by_value.iter().filter(open).filter(allowed),
            need,
        ));
        Some(EvictionCost {
            from_guarantee,
            priority,
            spared,
            cost,
            ..base
        })
    }
}

impl GpuShortfall {
    /// The least number of pods evicted from the GPU to cover `need`, if only units that are `open` may be chosen (the relaxation
    /// again: the largest relief per pod first, the last one in part).
    pub(crate) fn least_pods(
        &self,
        units: &[VictimUnit<'_>],
        need: u64,
        open: impl Fn(usize) -> bool,
    ) -> u32 {
        if need == 0 {
            return 0;
        }
        let pods_on_gpu = |unit: &VictimUnit<'_>| {
            let there = unit
                .residents
                .iter()
                .filter(|resident| resident.gpus.contains(self.index));
            if unit.is_awaited {
                0
            } else {
                there.count() as u64
            }
        };
        let open = self
            .by_value
            .iter()
            .filter(|relief| open(relief.unit as usize));
        let mut by_ratio: Vec<(u64, u64)> = open
            .map(|relief| (relief.amount, pods_on_gpu(&units[relief.unit as usize])))
            .collect();
        // By relief per pod; for pods that leave anyway it is infinite.
        by_ratio.sort_unstable_by(|a, b| {
            let value = |a: &(u64, u64), b: &(u64, u64)| u128::from(a.0) * u128::from(b.1);
            value(b, a).cmp(&value(a, b))
        });
        let (mut left, mut pods) = (need, 0u64);
        for (amount, count) in by_ratio {
            if amount >= left {
                let part = u128::from(count) * u128::from(left);
                return u32::try_from(pods + part.div_ceil(u128::from(amount)) as u64)
                    .unwrap_or(u32::MAX);
            }
            left -= amount;
            pods += count;
        }
        u32::try_from(pods).unwrap_or(u32::MAX)
    }
}

impl SumShortfalls {
    /// `None` if all units together are not enough.
    pub(crate) fn from_shortfall(
        missing: &Shortfall,
        units: &[VictimUnit<'_>],
        base: EvictionCost,
    ) -> Option<Self> {
        let sums = sums(missing)
            .into_iter()
            .enumerate()
            .filter(|(_, need)| *need > 0);
        let all = sums.map(|(index, need)| {
            GpuShortfall::new(index, need, units, base, |unit| sums_of(unit)[index])
        });
        Some(Self {
            all: all.collect::<Option<_>>()?,
        })
    }
}

fn sums(shortfall: &Shortfall) -> [u64; 3] {
    [
        shortfall.vram.0,
        shortfall.host_resources.cpu.0,
        shortfall.host_resources.memory.0,
    ]
}

fn sums_of(unit: &VictimUnit<'_>) -> [u64; 3] {
    sums(&unit.freed)
}

/// The amount of a sum that is still missing once `freed` is given back.
pub(crate) fn sum_need(sum: &GpuShortfall, freed: &Shortfall) -> u64 {
    sum.need.saturating_sub(sums(freed)[sum.index])
}

/// The amount that must be freed on a GPU: bytes, or the number of residents for a pod that wants the GPU exclusively.
pub(crate) fn gpu_need(gpu: &Gpu, demand: &Demand) -> u64 {
    match demand.sharing {
        Sharing::Exclusive => gpu.residents.into(),
        Sharing::Shared if demand.per_gpu.0 == 0 => 0,
        Sharing::Shared => {
            (gpu.charged + gpu.unaccounted_vram + demand.per_gpu)
                .minus(gpu.capacity)
                .0
        }
    }
}

/// A lower bound of the cost of a candidate's cheapest set, found without regard to groups: the unit with the best value on a GPU
/// is assumed to be there as often as needed. `None` if even all of them are not enough.
pub fn cost_floor(candidate: &PreemptionCandidate, demand: &Demand) -> Option<EvictionCost> {
    let usable_gpus =
        (0..candidate.gpus.len()).filter(|index| is_usable(&candidate.gpus[*index], demand));
    let mut floors: Vec<EvictionCost> = usable_gpus
        .filter_map(|index| gpu_cost_floor(candidate, index, demand))
        .collect();
    floors.sort_unstable();
    let last = *floors.get((demand.gpus as usize).checked_sub(1)?)?;
    Some(EvictionCost {
        violations: candidate.violations,
        ..last
    })
}

fn gpu_cost_floor(
    candidate: &PreemptionCandidate,
    index: usize,
    demand: &Demand,
) -> Option<EvictionCost> {
    let gpu = &candidate.gpus[index];
    let awaited = candidate
        .awaited
        .iter()
        .map(|resident| (resident, EvictionCost::default(), true));
    let candidates = candidate
        .potential_victims
        .iter()
        .map(|resident| (resident, EvictionCost::default().plus(resident), false));
    let mut floor = GpuFloor::new(gpu_need(gpu, demand));
    for (resident, eviction_cost, leaves_anyway) in awaited.chain(candidates) {
        if resident.gpus.contains(index) {
            floor.add(
                freed_on(resident, gpu, demand),
                eviction_cost,
                leaves_anyway,
            );
        }
    }
    floor.cost()
}

/// Lower bounds of what it takes to cover the need on a GPU, from one pod that leaves to the next: of the cost, and of the number
/// of evicted pods. The pod with the best value is assumed to be there as often as needed.
#[derive(Debug, Clone)]
pub(crate) struct GpuFloor {
    need: u64,
    /// The part of the need that all of them together do not cover.
    left: u64,
    best: Option<EvictionCost>,
    /// The part of the need that those that leave anyway do not cover.
    left_to_evict: u64,
    largest: u64,
}

impl GpuFloor {
    pub fn new(need: u64) -> Self {
        Self {
            need,
            left: need,
            best: None,
            left_to_evict: need,
            largest: 1,
        }
    }

    /// A pod that may leave gives back this amount. One that leaves anyway is not evicted.
    pub fn add(&mut self, amount: u64, eviction_cost: EvictionCost, leaves_anyway: bool) {
        self.left = self.left.saturating_sub(amount);
        match leaves_anyway {
            true => self.left_to_evict = self.left_to_evict.saturating_sub(amount),
            false => self.largest = self.largest.max(amount),
        }
        let cost =
            u128::from(eviction_cost.cost) * u128::from(self.need) / u128::from(amount.max(1));
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        self.best = Some(self.best.map_or(
            EvictionCost {
                cost,
                ..eviction_cost
            },
            |best| EvictionCost {
                from_guarantee: best.from_guarantee && eviction_cost.from_guarantee,
                priority: best.priority.min(eviction_cost.priority),
                spared: best.spared.min(eviction_cost.spared),
                cost: best.cost.min(cost),
                ..best
            },
        ));
    }

    /// The lower bound of the cost; `None` if even all of them are not enough.
    pub fn cost(&self) -> Option<EvictionCost> {
        if self.need == 0 {
            return Some(EvictionCost::default());
        }
        let EvictionCost {
            from_guarantee,
            priority,
            spared,
            cost,
            ..
        } = self.best.filter(|_| self.left == 0)?;
        Some(EvictionCost {
            from_guarantee,
            priority,
            spared,
            cost,
            ..EvictionCost::default()
        })
    }

    pub fn min_evicted(&self) -> u32 {
        u32::try_from(self.left_to_evict.div_ceil(self.largest)).unwrap_or(u32::MAX)
    }
}

/// The amount that one pod gives back on a GPU.
fn freed_on(resident: &PotentialVictim, gpu: &Gpu, demand: &Demand) -> u64 {
    match demand.sharing {
        // It is no resident any more.
        Sharing::Exclusive if resident.has_ended => 0,
        Sharing::Exclusive => 1,
        Sharing::Shared => {
            (gpu.charge_for(resident.per_gpu, resident.sharing) + resident.used_beyond_grant).0
        }
    }
}

fn covers<'a>(reliefs: impl Iterator<Item = &'a FreedShare>, need: u64) -> bool {
    last_needed(reliefs, need, |_| ()).is_some()
}

/// The field of the unit that finally covers the need.
fn last_needed<'a, T>(
    reliefs: impl Iterator<Item = &'a FreedShare>,
    need: u64,
    field: impl Fn(&FreedShare) -> T,
) -> Option<T> {
    let mut left = need;
    for relief in reliefs {
        left = left.saturating_sub(relief.amount);
        if left == 0 {
            return Some(field(relief));
        }
    }
    None
}

/// How far to go through the reliefs in order of `key` to cover the need, but no less far than before.
fn threshold<'a>(
    in_order: impl Iterator<Item = &'a FreedShare>,
    need: u64,
    already: u32,
    key: impl Fn(&FreedShare) -> u32,
) -> Option<u32> {
    last_needed(in_order, need, key).map(|last| last.max(already))
}

fn least_cost<'a>(by_value: impl Iterator<Item = &'a FreedShare>, need: u64) -> u64 {
    let (mut left, mut cost) = (need, 0u64);
    for relief in by_value {
        if relief.amount >= left {
            let part = u128::from(relief.cost) * u128::from(left);
            return cost.saturating_add(part.div_ceil(u128::from(relief.amount)) as u64);
        }
        left -= relief.amount;
        cost = cost.saturating_add(relief.cost);
    }
    cost
}
