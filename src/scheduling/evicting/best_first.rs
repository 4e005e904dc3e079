//! Best-first search over many nodes: a node is examined closely only when it could be cheaper than the best set found so far.
//! The result is the same as if all nodes were examined.

use super::branch_and_bound::Search;
use super::candidate::PreemptionCandidate;
use super::eviction_cost::EvictionCost;
use super::lower_bound::cost_floor;
use super::victim_unit::{NoVictimSet, VictimProblem};
use super::{BudgetRules, SearchEffort, VictimSet};
use crate::ids::NodeName;
use crate::ledger::evictions::EvictionAllowance;
use crate::vocabulary::demand::Demand;
use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A node, with a lower bound of the cost of its cheapest victim set. Ordered by that bound, the lowest first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeCostBound {
    pub floor: EvictionCost,
    pub node: NodeName,
    /// No victim set of the node evicts fewer pods.
    pub least_evicted: u32,
}

/// An examined preemption candidate, with a lower bound of the cost of its cheapest victim set.
pub(crate) type ExaminedCandidate<R> = (EvictionCost, R);

/// The result of a search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VictimSearchResult {
    pub set: Option<VictimSet>,
    /// A set was left out because of an eviction limit.
    pub is_limited: bool,
}

/// The source of a search's preemption candidates and of its limits. A source that keeps candidates for the next search can keep
/// what this search learns about them.
pub trait CandidateSource {
    type Candidate: Borrow<PreemptionCandidate>;

    /// `None` if evicting every pod would not be enough.
    fn examine(&mut self, node: &NodeName) -> Option<ExaminedCandidate<Self::Candidate>>;

    /// Records that no victim set of the candidate costs less than `least`; `None` if evicting every pod would not be enough.
    fn record_lower_bound(&mut self, _node: &NodeName, _least: Option<EvictionCost>) {}

    /// How many pods may be evicted; `None` if eviction limits do not matter.
    fn allowance(&self) -> Option<EvictionAllowance<'_>> {
        None
    }

    /// Whether the best set of a candidate is acceptable. If not, no set of that candidate is used.
    fn accepts(&mut self, _set: &VictimSet) -> bool {
        true
    }

    /// Whether to continue, after `steps` more steps. A search that is stopped has found nothing.
    fn may_continue(&mut self, _steps: u32) -> bool {
        true
    }
}

impl<R: Borrow<PreemptionCandidate>, F: FnMut(&NodeName) -> Option<ExaminedCandidate<R>>>
    CandidateSource for F
{
    type Candidate = R;

    fn examine(&mut self, node: &NodeName) -> Option<ExaminedCandidate<R>> {
        self(node)
    }
}

/// `None` if evicting every pod would not be enough.
pub fn examined(
    candidate: PreemptionCandidate,
    demand: &Demand,
) -> Option<ExaminedCandidate<PreemptionCandidate>> {
    Some((cost_floor(&candidate, demand)?, candidate))
}

/// The cheapest victim set of any candidate whose eviction makes `demand` fit there; among candidates of equal cost, the first by
/// node name. `cost_bounds` is sorted; only nodes that could be cheapest are examined.
pub fn cheapest_among<R: CandidateSource>(
    cost_bounds: impl IntoIterator<Item = NodeCostBound>,
    demand: &Demand,
    rules: BudgetRules,
    effort: SearchEffort,
    candidates: R,
) -> Option<VictimSet> {
    find_among(cost_bounds, demand, rules, effort, candidates).set
}

/// [`cheapest_among`], and whether a set was left out because of an eviction limit.
pub(crate) fn find_among<R: CandidateSource>(
    cost_bounds: impl IntoIterator<Item = NodeCostBound>,
    demand: &Demand,
    rules: BudgetRules,
    effort: SearchEffort,
    mut candidates: R,
) -> VictimSearchResult {
    let mut search = Search::new(effort);
    let mut unexamined = cost_bounds.into_iter().peekable();
    // Candidates that have been examined, with a lower bound of their cost by what is known now.
    let mut examined: Vec<Option<R::Candidate>> = Vec::new();
    let mut queue: BinaryHeap<Reverse<(NodeCostBound, usize)>> = BinaryHeap::new();
    loop {
        let next = queue.peek().map(|Reverse((cost_bound, _))| cost_bound);
        if let Some(cost_bound) =
            unexamined.next_if(|cost_bound| next.is_none_or(|next| cost_bound <= next))
        {
            if !search.beats(cost_bound.floor, &cost_bound.node) {
                // All others can only be more expensive.
                break;
            }
            if candidates
                .allowance()
                .is_some_and(|allowance| !is_within(&cost_bound, &allowance))
            {
                search.set_limited();
                continue;
            }
            if !candidates.may_continue(EXAMINATION_STEPS) {
                return VictimSearchResult {
                    set: None,
                    is_limited: false,
                };
            }
            let Some((floor, candidate)) = candidates.examine(&cost_bound.node) else {
                continue;
            };
            debug_assert!(cost_bound.floor <= floor, "{cost_bound:?} {floor:?}");
            queue.push(Reverse((
                NodeCostBound {
                    floor,
                    ..cost_bound
                },
                examined.len(),
            )));
            examined.push(Some(candidate));
            continue;
        }
        let Some(Reverse((cost_bound, index))) = queue.pop() else {
            break;
        };
        let candidate = examined[index]
            .take()
            .expect("each candidate stands in the queue once");
        if !search.beats(cost_bound.floor, &cost_bound.node) {
            break;
        }
        let before = search.steps();
        try_candidate(
            &mut search,
            candidate.borrow(),
            demand,
            rules,
            &mut candidates,
        );
        if !candidates.may_continue(search.steps() - before) {
            return VictimSearchResult {
                set: None,
                is_limited: false,
            };
        }
    }
    VictimSearchResult {
        is_limited: search.is_limited(),
        set: search.best(),
    }
}

/// The steps that the first examination of a candidate counts for, because it reads the state of each pod there.
const EXAMINATION_STEPS: u32 = 16;

/// Whether the limits allow as many evictions as every set of the node has at least.
fn is_within(cost_bound: &NodeCostBound, allowance: &EvictionAllowance<'_>) -> bool {
    let least = cost_bound.least_evicted;
    least == 0
        || (least <= allowance.remaining_in_cluster()
            && least <= allowance.remaining_on(&cost_bound.node))
}

fn try_candidate<R: CandidateSource>(
    search: &mut Search,
    candidate: &PreemptionCandidate,
    demand: &Demand,
    rules: BudgetRules,
    candidates: &mut R,
) {
    match VictimProblem::new(candidate, demand, rules, candidates.allowance()) {
        Err(NoVictimSet::Ever) => candidates.record_lower_bound(&candidate.node, None),
        // Without a limit, or later, it has one.
        Err(NoVictimSet::Now) => search.set_limited(),
        Ok(problem) => {
            if !problem.is_limited {
                candidates.record_lower_bound(&candidate.node, Some(problem.least));
            }
            search.try_candidate(&problem);
            if search
                .best_on(&candidate.node)
                .is_some_and(|set| !candidates.accepts(set))
            {
                search.reject_best();
            }
        }
    }
}

/// The search over candidates that are all known, each of another node.
pub fn cheapest(
    candidates: &[PreemptionCandidate],
    demand: &Demand,
    rules: BudgetRules,
    effort: SearchEffort,
) -> Option<VictimSet> {
    let examined = candidates.iter().filter_map(|candidate| {
        Some((&candidate.node, (cost_floor(candidate, demand)?, candidate)))
    });
    let examined: BTreeMap<&NodeName, ExaminedCandidate<&PreemptionCandidate>> = examined.collect();
    let mut cost_bounds: Vec<NodeCostBound> = examined
        .iter()
        .map(|(node, (floor, _))| cost_bound(node, *floor))
        .collect();
    cost_bounds.sort_unstable();
    cheapest_among(cost_bounds, demand, rules, effort, |node: &NodeName| {
        examined.get(node).copied()
    })
}

fn cost_bound(node: &NodeName, floor: EvictionCost) -> NodeCostBound {
    NodeCostBound {
        floor,
        node: node.clone(),
        least_evicted: 0,
    }
}
