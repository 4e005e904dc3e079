//! The search for victims: candidate by candidate, the potentially cheapest first, and in each a branch and bound over the
//! victims for each set of GPUs. The best set found so far bounds all later work, in its own candidate and in the next ones.
//!
//! The cost only grows as victims are added, so a branch that cannot become cheaper than the best set is cut.

use super::candidate::Shortfall;
use super::eviction_cost::EvictionCost;
use super::lower_bound::{GpuShortfall, gpu_need, sum_need};
use super::victim_unit::{VictimProblem, VictimUnit};
use super::{BudgetRules, SearchEffort, VictimSet};
use crate::ids::{NodeName, PodUid};
use crate::ledger::recompute_class_exclusions;
use crate::placing::fit::tenant_usage_on;
use crate::units::Millis;
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::gpu::{Gpu, GpuSet};
use std::ops::ControlFlow;

pub struct Search {
    effort: SearchEffort,
    steps: u32,
    /// The search of a candidate, or the whole search, ended early.
    is_cut_short: bool,
    /// A set was left out because of an eviction limit.
    is_limited: bool,
    best: Option<VictimSet>,
    /// The best set of the candidates before the one that `best` belongs to.
    before: Option<VictimSet>,
}

/// The search in one candidate.
struct CandidateSearch<'s, 'a> {
    search: &'s mut Search,
    problem: &'a VictimProblem<'a>,
    steps: u32,
}

/// A search for one set of GPUs: the possible victims (those on these GPUs first), the chosen ones, and what is free then.
struct SearchBranch<'a> {
    gpus: GpuSet,
    shortfalls: Vec<&'a GpuShortfall>,
    order: Vec<u32>,
    /// How many of `order` are on the chosen GPUs.
    on_gpus: usize,
    /// Whether each unit is undecided.
    open: Vec<bool>,
    chosen: Vec<u32>,
    state: Vec<Gpu>,
    /// The changed GPUs, as they were before.
    before: Vec<(usize, Gpu)>,
    eviction_cost: EvictionCost,
    sums: ChosenSums,
}

/// The sums over the chosen victims.
#[derive(Default, Clone)]
struct ChosenSums {
    freed: Shortfall,
    given_back: TenantUsage,
    /// The number of evicted pods, by budget.
    covered: Vec<u32>,
    /// The number of evicted pods, by eviction limit; and of those on this node.
    evicted: Vec<u32>,
    evicted_here: u32,
}

impl Search {
    pub fn new(effort: SearchEffort) -> Self {
        Self {
            effort,
            steps: 0,
            is_cut_short: false,
            is_limited: false,
            best: None,
            before: None,
        }
    }

    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Whether a set was left out because of an eviction limit.
    pub fn is_limited(&self) -> bool {
        self.is_limited
    }

    pub(crate) fn set_limited(&mut self) {
        self.is_limited = true;
    }

    /// The best set so far, if it is on this node.
    pub(crate) fn best_on(&self, node: &NodeName) -> Option<&VictimSet> {
        self.best.as_ref().filter(|best| best.node == *node)
    }

    /// Rejects the best set: the best of the candidates before it counts.
    pub(crate) fn reject_best(&mut self) {
        self.best = self.before.take();
    }

    pub(crate) fn try_candidate(&mut self, problem: &VictimProblem<'_>) {
        self.is_limited |= problem.is_limited;
        if self.beats(problem.least, &problem.candidate.node) {
            let mut visit = CandidateSearch {
                search: self,
                problem,
                steps: 0,
            };
            let _ = visit.for_each_gpu_set(&problem.gpu_shortfalls, &mut Vec::new());
        }
    }

    pub fn best(self) -> Option<VictimSet> {
        let exact = !self.is_cut_short;
        self.best.map(|best| VictimSet { exact, ..best })
    }

    /// Whether a set of that cost on this node would replace the best. Among equals the first node by name wins, and on one node
    /// the first set that is found, which is always the same.
    pub(crate) fn beats(&self, eviction_cost: EvictionCost, node: &NodeName) -> bool {
        self.best
            .as_ref()
            .is_none_or(|best| (eviction_cost, node) < (best.eviction_cost, &best.node))
    }
}

impl<'a> CandidateSearch<'_, 'a> {
    /// Tries `chosen` with each subset of the GPUs that completes it, in order of their lower bounds.
    fn for_each_gpu_set(
        &mut self,
        shortfalls: &'a [GpuShortfall],
        chosen: &mut Vec<&'a GpuShortfall>,
    ) -> ControlFlow<()> {
        let missing = self.problem.demand.gpus as usize - chosen.len();
        if missing == 0 {
            return self.try_gpu_set(chosen);
        }
        for (index, shortfall) in shortfalls
            .iter()
            .enumerate()
            .take((shortfalls.len() + 1).saturating_sub(missing))
        {
            if !self
                .search
                .beats(shortfall.least, &self.problem.candidate.node)
            {
                break;
            }
            chosen.push(shortfall);
            let flow = self.for_each_gpu_set(&shortfalls[index + 1..], chosen);
            chosen.pop();
            flow?;
        }
        ControlFlow::Continue(())
    }

    fn try_gpu_set(&mut self, shortfalls: &[&'a GpuShortfall]) -> ControlFlow<()> {
        let mut branch = SearchBranch::new(self.problem, shortfalls);
        self.descend(&mut branch, 0);
        if self.is_spent() {
            self.search.is_cut_short = true;
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    fn is_spent(&self) -> bool {
        let SearchEffort {
            per_node,
            per_search: in_all,
        } = self.search.effort;
        self.steps >= per_node || self.search.steps >= in_all
    }

    /// Decides about `branch.order[next]` and all after it.
    fn descend(&mut self, branch: &mut SearchBranch<'a>, next: usize) {
        if self.is_spent() {
            self.search.is_cut_short = true;
            return;
        }
        self.steps += 1;
        self.search.steps += 1;
        if branch.is_enough(self.problem) {
            return self.record_set(branch);
        }
        if branch.least_evicted(self.problem) > self.problem.evictions_left_here {
            self.search.is_limited = true;
            return;
        }
        let least = branch.least(self.problem);
        if least.is_none_or(|least| !self.search.beats(least, &self.problem.candidate.node)) {
            return;
        }
        if next == branch.order.len() || !branch.could_be_enough(self.problem, next) {
            return;
        }
        // After the units on these GPUs, the rest can only help to cover sums.
        if next >= branch.on_gpus && !branch.gpus_fit(self.problem, &branch.state) {
            return;
        }
        self.take(branch, next);
        self.skip(branch, next);
    }

    fn take(&mut self, branch: &mut SearchBranch<'a>, next: usize) {
        let unit = branch.order[next];
        let before = (
            branch.eviction_cost,
            branch.sums.clone(),
            branch.before.len(),
        );
        branch.open[unit as usize] = false;
        branch.take(self.problem, unit);
        let is_within = branch.is_within_limits(self.problem);
        self.search.is_limited |= !is_within;
        let keeps_budgets =
            self.problem.rules == BudgetRules::Violate || branch.eviction_cost.violations == 0;
        if is_within
            && keeps_budgets
            && self
                .search
                .beats(branch.eviction_cost, &self.problem.candidate.node)
        {
            self.descend(branch, next + 1);
        }
        branch.undo(self.problem, before);
        branch.open[unit as usize] = true;
    }

    /// Without this unit its equals are no better: it would have been chosen in their place.
    fn skip(&mut self, branch: &mut SearchBranch<'a>, next: usize) {
        let units = &self.problem.units;
        let first = &units[branch.order[next] as usize];
        let is_like = |unit: &&u32| units[**unit as usize].is_like(first);
        let equals = branch.order[next..].iter().take_while(is_like).count();
        let mark = |branch: &mut SearchBranch<'_>, is_open| {
            for unit in &branch.order[next..next + equals] {
                branch.open[*unit as usize] = is_open;
            }
        };
        mark(branch, false);
        self.descend(branch, next + equals);
        mark(branch, true);
    }

    /// Records a set that is better than the best so far. Victims that turn out to be unnecessary are removed from it first.
    fn record_set(&mut self, branch: &SearchBranch<'a>) {
        let needed = self.without_unnecessary(branch);
        let eviction_cost = needed.eviction_cost;
        if self
            .search
            .beats(eviction_cost, &self.problem.candidate.node)
        {
            let found = needed.victim_set(self.problem);
            let before = self.search.best.replace(found);
            if before
                .as_ref()
                .is_none_or(|before| before.node != self.problem.candidate.node)
            {
                self.search.before = before;
            }
        }
    }

    /// The branch without unnecessary victims; the dearest are removed first.
    fn without_unnecessary(&self, branch: &SearchBranch<'a>) -> SearchBranch<'a> {
        let mut chosen = branch.chosen.clone();
        chosen.sort_unstable();
        let mut index = chosen.len();
        while index > 0 {
            index -= 1;
            let spared = chosen.remove(index);
            if !branch
                .with_exactly(self.problem, &chosen)
                .is_enough(self.problem)
            {
                chosen.insert(index, spared);
            }
        }
        branch.with_exactly(self.problem, &chosen)
    }
}

impl<'a> SearchBranch<'a> {
    fn new(problem: &'a VictimProblem<'a>, shortfalls: &[&'a GpuShortfall]) -> Self {
        let gpus: GpuSet = shortfalls.iter().map(|shortfall| shortfall.index).collect();
        let all = 0..problem.units.len() as u32;
        let (mut order, mut others): (Vec<u32>, Vec<u32>) =
            all.partition(|unit| problem.units[*unit as usize].gpus.intersects(gpus));
        let on_gpus = order.len();
        order.append(&mut others);
        Self {
            gpus,
            shortfalls: shortfalls.to_vec(),
            order,
            on_gpus,
            open: vec![true; problem.units.len()],
            chosen: Vec::new(),
            state: problem.candidate.gpus.clone(),
            before: Vec::new(),
            eviction_cost: EvictionCost {
                violations: problem.candidate.violations,
                ..EvictionCost::default()
            },
            sums: ChosenSums {
                covered: vec![0; problem.candidate.budgets.len()],
                evicted: vec![0; problem.limits_left.len()],
                ..ChosenSums::default()
            },
        }
    }

    /// The branch with the same GPUs and exactly these victims.
    fn with_exactly(&self, problem: &'a VictimProblem<'a>, chosen: &[u32]) -> Self {
        let mut branch = Self::new(problem, &self.shortfalls);
        chosen.iter().for_each(|unit| branch.take(problem, *unit));
        branch
    }

    fn take(&mut self, problem: &VictimProblem<'_>, unit_index: u32) {
        let unit = &problem.units[unit_index as usize];
        self.before
            .extend(unit.gpus.iter().map(|gpu| (gpu, self.state[gpu])));
        unit.discharge(&mut self.state);
        self.chosen.push(unit_index);
        let ChosenSums {
            freed,
            given_back,
            covered,
            evicted,
            evicted_here,
        } = &mut self.sums;
        *freed = unit
            .residents
            .iter()
            .fold(*freed, |sum, resident| sum.plus(resident));
        *given_back += unit.given_back;
        unit.budgets
            .iter()
            .for_each(|budget| covered[usize::from(*budget)] += 1);
        unit.limits
            .iter()
            .for_each(|limit| evicted[usize::from(*limit)] += 1);
        *evicted_here += unit.evicted_here();
        self.eviction_cost = EvictionCost {
            violations: problem.violations(covered),
            ..self.eviction_cost.and(unit.eviction_cost)
        };
        self.settle_class_exclusions(problem);
    }

    fn undo(
        &mut self,
        problem: &VictimProblem<'_>,
        (eviction_cost, sums, changes): (EvictionCost, ChosenSums, usize),
    ) {
        for (gpu, before) in self.before.drain(changes..).rev() {
            self.state[gpu] = before;
        }
        self.chosen.pop();
        (self.eviction_cost, self.sums) = (eviction_cost, sums);
        self.settle_class_exclusions(problem);
    }

    fn settle_class_exclusions(&mut self, problem: &VictimProblem<'_>) {
        let Self { chosen, state, .. } = self;
        let leaves = |uid: &PodUid| {
            chosen
                .iter()
                .any(|unit| problem.units[*unit as usize].has(uid))
        };
        recompute_class_exclusions(&problem.candidate.class_exclusions, state, leaves);
    }

    fn is_enough(&self, problem: &VictimProblem<'_>) -> bool {
        self.gpus_fit(problem, &self.state)
            && problem.candidate.shortfall.is_covered_by(&self.sums.freed)
            && self.is_allowed(problem, self.sums.given_back)
    }

    fn gpus_fit(&self, problem: &VictimProblem<'_>, state: &[Gpu]) -> bool {
        self.gpus
            .iter()
            .all(|index| state[index].can_take(problem.demand))
    }

    /// Whether the pod's tenant may have these GPUs once this usage is given back.
    fn is_allowed(&self, problem: &VictimProblem<'_>, given_back: TenantUsage) -> bool {
        problem.candidate.tenant_quota.allows(
            tenant_usage_on(&problem.candidate.gpus, problem.demand, self.gpus),
            given_back,
        )
    }

    /// The lower bound of the cost of every set that extends this branch; `None` if no such set is enough.
    fn least(&self, problem: &VictimProblem<'_>) -> Option<EvictionCost> {
        let open = |unit: usize| self.open[unit];
        let of_gpu = |shortfall: &&GpuShortfall| {
            shortfall.least(
                gpu_need(&self.state[shortfall.index], problem.demand),
                self.eviction_cost,
                open,
            )
        };
        let of_sum = |sum: &GpuShortfall| {
            sum.least(sum_need(sum, &self.sums.freed), self.eviction_cost, open)
        };
        let mut least = self.eviction_cost;
        for shortfall in &self.shortfalls {
            least = least.max(of_gpu(shortfall)?);
        }
        for sum in &problem.sums.all {
            least = least.max(of_sum(sum)?);
        }
        Some(least)
    }

    /// The least number of this node's pods that any set extending this branch evicts.
    fn least_evicted(&self, problem: &VictimProblem<'_>) -> u32 {
        if problem.evictions_left_here == u32::MAX {
            return 0;
        }
        let open = |unit: usize| self.open[unit];
        let need =
            |shortfall: &GpuShortfall| gpu_need(&self.state[shortfall.index], problem.demand);
        let more = self
            .shortfalls
            .iter()
            .map(|shortfall| shortfall.least_pods(&problem.units, need(shortfall), open))
            .sum();
        self.sums.evicted_here + problem.spread(more)
    }

    fn is_within_limits(&self, problem: &VictimProblem<'_>) -> bool {
        self.sums
            .evicted
            .iter()
            .zip(&problem.limits_left)
            .all(|(evicted, left)| evicted <= left)
    }

    /// Whether evicting all undecided units would be enough.
    fn could_be_enough(&self, problem: &VictimProblem<'_>, next: usize) -> bool {
        let mut state = self.state.clone();
        let (mut freed, mut given_back) = (self.sums.freed, self.sums.given_back);
        let undecided = || {
            self.order[next..]
                .iter()
                .map(|unit| &problem.units[*unit as usize])
        };
        for unit in undecided() {
            unit.discharge(&mut state);
            freed = unit
                .residents
                .iter()
                .fold(freed, |sum, resident| sum.plus(resident));
            given_back += unit.given_back;
        }
        let chosen = || {
            self.chosen
                .iter()
                .map(|unit| &problem.units[*unit as usize])
        };
        recompute_class_exclusions(&problem.candidate.class_exclusions, &mut state, |uid| {
            chosen().chain(undecided()).any(|unit| unit.has(uid))
        });
        self.gpus_fit(problem, &state)
            && problem.candidate.shortfall.is_covered_by(&freed)
            && self.is_allowed(problem, given_back)
    }

    fn victim_set(&self, problem: &VictimProblem<'_>) -> VictimSet {
        let chosen = || {
            self.chosen
                .iter()
                .map(|unit| &problem.units[*unit as usize])
        };
        let here = |is_awaited: bool| {
            let units = chosen().filter(move |unit| unit.is_awaited == is_awaited);
            sorted(
                units
                    .flat_map(|unit| &unit.residents)
                    .map(|resident| resident.uid.clone()),
            )
        };
        let victims = here(false);
        let members = chosen()
            .filter_map(|unit| unit.gang)
            .flat_map(|gang| gang.members.iter());
        let elsewhere = sorted(
            members
                .filter(|uid| victims.binary_search(uid).is_err())
                .cloned(),
        );
        VictimSet {
            node: problem.candidate.node.clone(),
            gpus: self.gpus,
            elsewhere,
            awaited: here(true),
            victims,
            eviction_cost: self.eviction_cost,
            longest_grace: chosen().map(|unit| unit.grace).max().unwrap_or(Millis(0)),
            // The caller of the search sets this at the end.
            exact: true,
        }
    }
}

impl VictimUnit<'_> {
    fn has(&self, uid: &PodUid) -> bool {
        self.residents.iter().any(|resident| resident.uid == *uid)
    }
}

fn sorted(uids: impl Iterator<Item = PodUid>) -> Vec<PodUid> {
    let mut uids: Vec<PodUid> = uids.collect();
    uids.sort_unstable();
    uids
}
