//! The search over many nodes of which little is known yet: each is looked at closely only when it could be cheaper than what
//! was found. The answer is that of a close look at all of them.

use super::branch_and_bound::Search;
use super::candidate::PreemptionCandidate;
use super::eviction_cost::EvictionCost;
use super::lower_bound::floor;
use super::victim_unit::{NoVictimSet, VictimProblem};
use super::{BudgetRules, SearchEffort, VictimSet};
use crate::ids::NodeName;
use crate::scheduling::ledger::eviction_allowance::EvictionAllowance;
use crate::scheduling::vocabulary::demand::Demand;
use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A node, and no more than what the cheapest set of victims costs there. In order, the one that could be cheapest comes first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeCostBound {
    pub floor: EvictionCost,
    pub node: NodeName,
    /// No set there has fewer pods that are evicted.
    pub least_evicted: u32,
}

/// A room that has been looked at, and no more than what the cheapest set of victims costs in it.
pub type ExaminedCandidate<R> = (EvictionCost, R);

/// What a search came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VictimSearchResult {
    pub set: Option<VictimSet>,
    /// Some set was left out because of a limit on evictions.
    pub is_limited: bool,
}

/// The source of a search's preemption candidates and of its limits. A source that keeps candidates for the next search can keep
/// what this search learns about them.
pub trait CandidateSource {
    type Candidate: Borrow<PreemptionCandidate>;

    /// `None` if nobody's leaving would be enough.
    fn look(&mut self, node: &NodeName) -> Option<ExaminedCandidate<Self::Candidate>>;

    /// No set of the node's room costs less; `None` as above.
    fn learn(&mut self, _node: &NodeName, _least: Option<EvictionCost>) {}

    /// How many pods may be evicted; `None` if that does not matter.
    fn allowance(&self) -> Option<EvictionAllowance<'_>> {
        None
    }

    /// Whether the best set of a room can be had. If not, none of that room is.
    fn accepts(&mut self, _set: &VictimSet) -> bool {
        true
    }

    /// Whether to go on, after so many steps more. A search that does not has found nothing.
    fn goes_on(&mut self, _steps: u32) -> bool {
        true
    }
}

impl<R: Borrow<PreemptionCandidate>, F: FnMut(&NodeName) -> Option<ExaminedCandidate<R>>> CandidateSource
    for F
{
    type Candidate = R;

    fn look(&mut self, node: &NodeName) -> Option<ExaminedCandidate<R>> {
        self(node)
    }
}

/// `None` if nobody's leaving would be enough.
pub fn seen(
    candidate: PreemptionCandidate,
    demand: &Demand,
) -> Option<ExaminedCandidate<PreemptionCandidate>> {
    Some((floor(&candidate, demand)?, candidate))
}

/// Of all sets of candidates of one room whose leaving makes `demand` fit there, the cheapest; of rooms that cost the same, the
/// first by name. `cost_bounds` stand in order; only those that could be cheapest are looked at.
pub fn cheapest_among<R: CandidateSource>(
    cost_bounds: impl IntoIterator<Item = NodeCostBound>,
    demand: &Demand,
    rules: BudgetRules,
    effort: SearchEffort,
    candidates: R,
) -> Option<VictimSet> {
    find_among(cost_bounds, demand, rules, effort, candidates).set
}

/// The same, with what was left out.
pub fn find_among<R: CandidateSource>(
    cost_bounds: impl IntoIterator<Item = NodeCostBound>,
    demand: &Demand,
    rules: BudgetRules,
    effort: SearchEffort,
    mut candidates: R,
) -> VictimSearchResult {
    let mut search = Search::new(effort);
    let mut distant = cost_bounds.into_iter().peekable();
    // Rooms that have been looked at, and what they cost at least by what is known now.
    let mut seen: Vec<Option<R::Candidate>> = Vec::new();
    let mut near: BinaryHeap<Reverse<(NodeCostBound, usize)>> = BinaryHeap::new();
    loop {
        let next = near.peek().map(|Reverse((cost_bound, _))| cost_bound);
        if let Some(cost_bound) = distant.next_if(|cost_bound| next.is_none_or(|next| cost_bound <= next)) {
            if !search.beats(cost_bound.floor, &cost_bound.node) {
                // All others could only be dearer.
                break;
            }
            if candidates.allowance().is_some_and(|allowance| !is_within(&cost_bound, &allowance)) {
                search.note_limited();
                continue;
            }
            if !candidates.goes_on(LOOK) {
                return VictimSearchResult { set: None, is_limited: false };
            }
            let Some((floor, candidate)) = candidates.look(&cost_bound.node) else { continue };
            debug_assert!(cost_bound.floor <= floor, "{cost_bound:?} {floor:?}");
            near.push(Reverse((NodeCostBound { floor, ..cost_bound }, seen.len())));
            seen.push(Some(candidate));
            continue;
        }
        let Some(Reverse((cost_bound, place))) = near.pop() else { break };
        let candidate = seen[place].take().expect("each room stands in the queue once");
        if !search.beats(cost_bound.floor, &cost_bound.node) {
            break;
        }
        let before = search.steps();
        try_candidate(&mut search, candidate.borrow(), demand, rules, &mut candidates);
        if !candidates.goes_on(search.steps() - before) {
            return VictimSearchResult { set: None, is_limited: false };
        }
    }
    VictimSearchResult { is_limited: search.is_limited(), set: search.best() }
}

/// Steps that the first look at a room counts for: it asks the entry of each pod there.
const LOOK: u32 = 16;

/// Whether as many may be evicted as each set of the node has at least.
fn is_within(cost_bound: &NodeCostBound, allowance: &EvictionAllowance<'_>) -> bool {
    let least = cost_bound.least_evicted;
    least == 0 || (least <= allowance.left_in_cluster() && least <= allowance.left_on(&cost_bound.node))
}

fn try_candidate<R: CandidateSource>(
    search: &mut Search,
    candidate: &PreemptionCandidate,
    demand: &Demand,
    rules: BudgetRules,
    candidates: &mut R,
) {
    match VictimProblem::new(candidate, demand, rules, candidates.allowance()) {
        Err(NoVictimSet::Ever) => candidates.learn(&candidate.node, None),
        // Without a limit, or later, it has one.
        Err(NoVictimSet::Now) => search.note_limited(),
        Ok(case) => {
            if !case.is_limited {
                candidates.learn(&candidate.node, Some(case.least));
            }
            search.try_candidate(&case);
            if search.best_on(&candidate.node).is_some_and(|set| !candidates.accepts(set)) {
                search.reject_best();
            }
        }
    }
}

/// The same of rooms that are all known, each of another node.
pub fn cheapest(
    candidates: &[PreemptionCandidate],
    demand: &Demand,
    rules: BudgetRules,
    effort: SearchEffort,
) -> Option<VictimSet> {
    let known = candidates
        .iter()
        .filter_map(|candidate| Some((&candidate.node, (floor(candidate, demand)?, candidate))));
    let known: BTreeMap<&NodeName, ExaminedCandidate<&PreemptionCandidate>> = known.collect();
    let mut cost_bounds: Vec<NodeCostBound> =
        known.iter().map(|(node, (floor, _))| cost_bound(node, *floor)).collect();
    cost_bounds.sort_unstable();
    cheapest_among(cost_bounds, demand, rules, effort, |node: &NodeName| known.get(node).copied())
}

fn cost_bound(node: &NodeName, floor: EvictionCost) -> NodeCostBound {
    NodeCostBound { floor, node: node.clone(), least_evicted: 0 }
}
