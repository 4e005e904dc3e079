//! A preemption candidate prepared for the search: units of pods that are evicted together, in the order in which they are tried,
//! and the GPUs that the preemptor could get.

use super::BudgetRules;
use super::candidate::{PreemptionCandidate, Shortfall, VictimGroup};
use super::eviction_cost::EvictionCost;
use super::lower_bound::{GpuShortfall, SumShortfalls};
use crate::ids::PodUid;
use crate::ledger::evictions::{EvictionAllowance, ScopeKey};
use crate::ledger::{PotentialVictim, discharge, recompute_class_exclusions};
use crate::placing::fit::is_usable;
use crate::units::Millis;
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::gpu::{Gpu, GpuSet};
use std::collections::BTreeMap;

/// Pods that are evicted together: one pod, or the members of a group.
#[derive(Debug)]
pub(crate) struct VictimUnit<'a> {
    /// Its pods on this node, in order of UID.
    pub residents: Vec<&'a PotentialVictim>,
    pub gang: Option<&'a VictimGroup>,
    /// The pod leaves anyway.
    pub is_awaited: bool,
    /// The cost of all of them, without overdrawn budgets.
    pub eviction_cost: EvictionCost,
    pub gpus: GpuSet,
    pub freed: Shortfall,
    pub given_back: TenantUsage,
    /// A budget is listed once for each pod that it covers.
    pub budgets: Vec<u16>,
    /// Eviction limits that a set of this candidate could exceed: indices into [`VictimProblem::limits_left`], one for each pod.
    pub limits: Vec<u16>,
    pub grace: Millis,
}

/// The victim search of one candidate for one demand.
#[derive(Debug)]
pub(crate) struct VictimProblem<'a> {
    pub candidate: &'a PreemptionCandidate,
    pub demand: &'a Demand,
    pub rules: BudgetRules,
    /// The cheapest first; units of the same effect and cost are adjacent.
    pub units: Vec<VictimUnit<'a>>,
    /// The GPUs that the pod could get without all units, with their shortfalls; the cheapest first.
    pub gpu_shortfalls: Vec<GpuShortfall>,
    /// The shortfalls of kube-scheduler's own sums.
    pub sums: SumShortfalls,
    /// No set of this candidate costs less.
    pub least: EvictionCost,
    /// How many more pods may be evicted, by eviction limit that a set could exceed.
    pub limits_left: Vec<u32>,
    /// How many pods of this node may be evicted at most.
    pub evictions_left_here: u32,
    /// The greatest number of GPUs that one evictable pod is on.
    pub max_gpus_per_pod: u32,
    /// Some units were left out because of the limits: without the limits another set might be found.
    pub is_limited: bool,
}

/// Why a candidate has no victim set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoVictimSet {
    /// Evicting every pod would not be enough.
    Ever,
    /// The evictions allowed now are not enough.
    Now,
}

impl<'a> VictimProblem<'a> {
    pub fn new(
        candidate: &'a PreemptionCandidate,
        demand: &'a Demand,
        rules: BudgetRules,
        allowance: Option<EvictionAllowance<'_>>,
    ) -> Result<Self, NoVictimSet> {
        if rules == BudgetRules::Keep && candidate.violations > 0 {
            return Err(NoVictimSet::Ever);
        }
        let mut units = units(candidate, rules);
        let all = units.len();
        let (left, left_here) = match allowance {
            Some(allowance) => apply_limits(&mut units, candidate, &allowance),
            None => (Vec::new(), u32::MAX),
        };
        let is_limited = units.len() < all;
        let no_set = if is_limited {
            NoVictimSet::Now
        } else {
            NoVictimSet::Ever
        };
        let problem = Self::from_units(candidate, demand, rules, units).ok_or(no_set)?;
        let problem = Self {
            limits_left: left,
            evictions_left_here: left_here,
            is_limited,
            ..problem
        };
        if problem.least_evicted() > left_here {
            Err(NoVictimSet::Now)
        } else {
            Ok(problem)
        }
    }

    fn from_units(
        candidate: &'a PreemptionCandidate,
        demand: &'a Demand,
        rules: BudgetRules,
        units: Vec<VictimUnit<'a>>,
    ) -> Option<Self> {
        let base = EvictionCost {
            violations: candidate.violations,
            ..EvictionCost::default()
        };
        let emptied = emptied(candidate, &units);
        let could_fit =
            |index: &usize| is_usable(&emptied[*index], demand) && emptied[*index].can_take(demand);
        let fitting = (0..emptied.len()).filter(could_fit);
        let mut gpu_shortfalls: Vec<GpuShortfall> = fitting
            .filter_map(|index| {
                GpuShortfall::for_gpu(index, &candidate.gpus[index], demand, &units, base)
            })
            .collect();
        gpu_shortfalls.sort_by_key(|shortfall| (shortfall.least, shortfall.index));
        let sums = SumShortfalls::from_shortfall(&candidate.shortfall, &units, base)?;
        // A set of this many GPUs has one that is at least as dear as the last of the cheapest.
        let last = gpu_shortfalls.get((demand.gpus as usize).checked_sub(1)?)?;
        let least = sums
            .all
            .iter()
            .map(|shortfall| shortfall.least)
            .fold(last.least, EvictionCost::max);
        let evicted = units
            .iter()
            .filter(|unit| !unit.is_awaited)
            .flat_map(|unit| &unit.residents);
        let max_gpus_per_pod = evicted
            .map(|resident| resident.gpus.len())
            .max()
            .unwrap_or(1)
            .max(1);
        let (left, left_here, is_limited) = (Vec::new(), u32::MAX, false);
        Some(Self {
            candidate,
            demand,
            rules,
            units,
            gpu_shortfalls,
            sums,
            least,
            limits_left: left,
            evictions_left_here: left_here,
            max_gpus_per_pod,
            is_limited,
        })
    }

    /// The least number of this node's pods that any set of this candidate evicts.
    fn least_evicted(&self) -> u32 {
        if self.evictions_left_here == u32::MAX {
            return 0;
        }
        let mut on_gpus: Vec<u32> = self
            .gpu_shortfalls
            .iter()
            .map(|shortfall| shortfall.least_pods(&self.units, shortfall.need, |_| true))
            .collect();
        on_gpus.sort_unstable();
        self.spread(on_gpus.iter().take(self.demand.gpus as usize).sum())
    }

    /// The least number of pods to evict, if so many must leave each of some GPUs: one pod may be on several.
    pub fn spread(&self, on_gpus: u32) -> u32 {
        on_gpus.div_ceil(self.max_gpus_per_pod)
    }

    /// The number of pods by which budgets are overdrawn, given how many covered pods of each are evicted.
    pub fn violations(&self, covered: &[u32]) -> u32 {
        let over = covered
            .iter()
            .zip(&self.candidate.budgets)
            .map(|(n, allowed)| n.saturating_sub(*allowed));
        over.fold(self.candidate.violations, u32::saturating_add)
    }
}

impl<'a> VictimUnit<'a> {
    fn single(resident: &'a PotentialVictim) -> Self {
        Self {
            residents: vec![resident],
            gang: None,
            is_awaited: false,
            eviction_cost: EvictionCost::default().plus(resident),
            gpus: resident.gpus,
            freed: Shortfall::from_victims(std::iter::once(resident)),
            given_back: resident.returned_quota,
            budgets: resident.budgets.clone(),
            limits: Vec::new(),
            grace: resident.grace,
        }
    }

    fn awaited(resident: &'a PotentialVictim) -> Self {
        let eviction_cost = EvictionCost {
            awaited: 1,
            ..EvictionCost::default()
        };
        Self {
            is_awaited: true,
            eviction_cost,
            budgets: Vec::new(),
            ..Self::single(resident)
        }
    }

    fn gang(gang: &'a VictimGroup, residents: Vec<&'a PotentialVictim>) -> Self {
        let all = || residents.iter().copied();
        Self {
            gang: Some(gang),
            is_awaited: false,
            eviction_cost: all().fold(gang.eviction_cost, |eviction_cost, resident| {
                eviction_cost.plus(resident)
            }),
            gpus: all().flat_map(|resident| resident.gpus.iter()).collect(),
            freed: Shortfall::from_victims(all()),
            given_back: all()
                .map(|resident| resident.returned_quota)
                .fold(gang.given_back, |a, b| a + b),
            budgets: all()
                .flat_map(|resident| &resident.budgets)
                .chain(&gang.budgets)
                .copied()
                .collect(),
            limits: Vec::new(),
            grace: all()
                .map(|resident| resident.grace)
                .fold(gang.grace, Millis::max),
            residents,
        }
    }

    /// Its first pod on this node, which identifies it.
    pub fn name(&self) -> &'a PodUid {
        &self.residents[0].uid
    }

    /// What makes it interchangeable with an adjacent unit. A group equals no other unit.
    fn likeness(&self) -> impl Ord + use<'_, 'a> {
        let resident = self.residents[0];
        let group = self.gang.map(|gang| &gang.members);
        let PotentialVictim {
            gpus,
            per_gpu,
            used_beyond_grant,
            sharing,
            class,
            tenant,
            ..
        } = *resident;
        let sums = (
            self.freed.host_resources.cpu,
            self.freed.host_resources.memory,
        );
        let given_back = (self.given_back.vram, self.given_back.milli_gpus);
        (
            gpus,
            per_gpu,
            used_beyond_grant,
            sharing,
            (class, tenant),
            sums,
            given_back,
            &self.budgets,
            group,
        )
    }

    /// The scopes in which its eviction counts, and how often.
    fn scopes(&self, candidate: &PreemptionCandidate) -> BTreeMap<ScopeKey, u32> {
        let mut scopes = BTreeMap::new();
        if self.is_awaited {
            return scopes;
        }
        let here = self
            .residents
            .iter()
            .map(|resident| ScopeKey::scopes_of(&candidate.node, resident.tenant));
        let elsewhere = self.gang.into_iter().flat_map(|gang| gang.elsewhere.iter());
        let elsewhere = elsewhere.map(|(node, tenant)| ScopeKey::scopes_of(node, *tenant));
        here.chain(elsewhere)
            .flatten()
            .for_each(|key| *scopes.entry(key).or_default() += 1);
        scopes
    }

    /// Pods of this node that are evicted with it.
    pub(crate) fn evicted_here(&self) -> u32 {
        if self.is_awaited {
            0
        } else {
            self.residents.len() as u32
        }
    }

    pub fn is_like(&self, other: &Self) -> bool {
        self.eviction_cost == other.eviction_cost && self.likeness() == other.likeness()
    }

    pub fn discharge(&self, state: &mut [Gpu]) {
        self.residents
            .iter()
            .for_each(|resident| discharge(state, resident));
    }
}

fn units<'a>(candidate: &'a PreemptionCandidate, rules: BudgetRules) -> Vec<VictimUnit<'a>> {
    let is_protected = |unit: &VictimUnit<'_>| {
        rules == BudgetRules::Keep && (!candidate.are_budgets_known || overdraws(candidate, unit))
    };
    let alone = candidate
        .potential_victims
        .iter()
        .filter(|resident| resident.gang.is_none())
        .map(VictimUnit::single);
    let gangs = candidate
        .gangs
        .iter()
        .enumerate()
        .filter_map(|(index, gang)| {
            let of_gang = |resident: &&PotentialVictim| resident.gang == Some(index as u16);
            let mut here: Vec<&PotentialVictim> =
                candidate.potential_victims.iter().filter(of_gang).collect();
            here.sort_unstable_by(|a, b| a.uid.cmp(&b.uid));
            (!here.is_empty()).then(|| VictimUnit::gang(gang, here))
        });
    let evicted = alone.chain(gangs).filter(|unit| !is_protected(unit));
    let mut units: Vec<VictimUnit<'a>> = evicted
        .chain(candidate.awaited.iter().map(VictimUnit::awaited))
        .collect();
    units.sort_by(|a, b| {
        let by_cost = a.eviction_cost.cmp(&b.eviction_cost);
        by_cost
            .then_with(|| a.likeness().cmp(&b.likeness()))
            .then_with(|| a.name().cmp(b.name()))
    });
    units
}

/// Removes the units that exceed an eviction limit alone. Returns what is left of each limit that the remaining ones could exceed
/// together, and how many pods of this node may be evicted.
fn apply_limits(
    units: &mut Vec<VictimUnit<'_>>,
    candidate: &PreemptionCandidate,
    allowance: &EvictionAllowance<'_>,
) -> (Vec<u32>, u32) {
    let left_here = allowance
        .remaining_in_cluster()
        .min(allowance.remaining_on(&candidate.node));
    let mut scopes: Vec<BTreeMap<ScopeKey, u32>> =
        units.iter().map(|unit| unit.scopes(candidate)).collect();
    let is_within = |scopes: &BTreeMap<ScopeKey, u32>| {
        scopes.iter().all(|(key, n)| *n <= allowance.remaining(key))
    };
    let mut kept = scopes.iter().map(is_within).collect::<Vec<_>>().into_iter();
    units.retain(|_| kept.next().unwrap_or(true));
    scopes.retain(is_within);
    let mut wanted: BTreeMap<&ScopeKey, u32> = BTreeMap::new();
    scopes
        .iter()
        .flatten()
        .for_each(|(key, n)| *wanted.entry(key).or_default() += n);
    let binding: Vec<(&ScopeKey, u32)> = wanted
        .keys()
        .map(|key| (*key, allowance.remaining(key)))
        .filter(|(key, left)| wanted[key] > *left)
        .collect();
    for (unit, scopes) in units.iter_mut().zip(&scopes) {
        let limits = (0u16..)
            .zip(&binding)
            .filter_map(|(index, (key, _))| Some((index, *scopes.get(*key)?)));
        unit.limits = limits
            .flat_map(|(index, n)| std::iter::repeat_n(index, n as usize))
            .collect();
    }
    let evictable: u32 = units.iter().map(VictimUnit::evicted_here).sum();
    let left_here = if evictable > left_here {
        left_here
    } else {
        u32::MAX
    };
    (
        binding.into_iter().map(|(_, left)| left).collect(),
        left_here,
    )
}

/// Whether budgets forbid its eviction even alone.
fn overdraws(candidate: &PreemptionCandidate, unit: &VictimUnit<'_>) -> bool {
    // A group may have thousands of members, each under a budget of its own.
    let mut left = candidate.budgets.clone();
    let is_beyond = |budget: &u16| {
        let left = &mut left[usize::from(*budget)];
        std::mem::replace(left, left.saturating_sub(1)) == 0
    };
    unit.budgets.iter().any(is_beyond)
}

/// The node's GPUs without any of these units.
fn emptied(candidate: &PreemptionCandidate, units: &[VictimUnit<'_>]) -> Vec<Gpu> {
    let mut state = candidate.gpus.clone();
    units.iter().for_each(|unit| unit.discharge(&mut state));
    let leaves = |uid: &PodUid| {
        units
            .iter()
            .any(|unit| unit.residents.iter().any(|r| r.uid == *uid))
    };
    recompute_class_exclusions(&candidate.class_exclusions, &mut state, leaves);
    state
}
