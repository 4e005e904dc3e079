//! Which of the nodes that fit is best, and how that order travels in the few score steps an extender has.
//!
//! [`EngineLoadCost`] is what the load of the engines on a GPU costs a demand: nothing up to half of a limit of the demand's class,
//! the whole part at the limit, and ever more steeply between them.

use super::fit::{Misfit, fit_by, is_allowed};
use super::pack::{GpuChoice, NodeEvaluation, PackingCost};
use super::score_cache::CachedScore;
use super::snapshot::{NO_INDEX, Snapshot};
use super::start_model::StartModel;
pub use super::start_model::estimate_start;
use super::{pack, whole_nodes};
use crate::ids::NodeName;
use crate::policy::Policy;
pub(crate) use crate::policy::ScoreParts;
use crate::units::Bytes;
use crate::vocabulary::classification::ClassTerms;
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::GpuRequest;
use crate::vocabulary::gpu::{Gpu, GpuSet};
use crate::vocabulary::model_tier;
use crate::vocabulary::node::Node;
use serde::Serialize;

/// The top of the extender's score range.
const MAX_SCORE: u8 = 10;

/// How good a place is for a demand; less is better. The order of the fields is the policy, the first that differs decides. What
/// a pod's attempt brings along goes before it, and its node's name after it: see [`Candidate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Score {
    /// Another pod was just offered these GPUs.
    pub contended: bool,
    /// The weighted sum of [`ScoreParts`].
    pub cost: u64,
    /// The exact packing cost: it decides between equal sums.
    pub packing_cost: PackingCost,
    /// The exact load of the engines there: of two places that are packed equally well, the one with more KV cache to spare wins.
    pub engine_load: EngineLoadCost,
    /// VRAM free on the whole node: of two equal places the one on the fuller node is better.
    pub node_free: Bytes,
}

/// The largest part of a score.
pub(crate) const WHOLE_PART: u32 = 1000;

/// A node that fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The index of its name in the request.
    pub query_index: usize,
    /// Its index in the snapshot.
    pub node_index: usize,
    pub gpus: GpuSet,
    /// The pod has a reservation, for which others may have been evicted, on another node than this.
    pub outside_reserved_placement: bool,
    /// The pod came back unbound from there a moment ago.
    pub just_failed: bool,
    pub score: Score,
}

impl Candidate {
    /// Less is better. A snapshot's nodes are in order of name, so their indices break ties by name.
    fn order(&self) -> (bool, bool, Score, usize) {
        (
            self.outside_reserved_placement,
            self.just_failed,
            self.score,
            self.node_index,
        )
    }
}

/// The result of a filter.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Shortlist {
    /// The best candidates, best first.
    pub best: Vec<Candidate>,
    /// Why each other node does not fit, by the index of its name in the request.
    pub rejected: Vec<(usize, Misfit)>,
    /// The index in the snapshot of each requested name, in the order of the names; [`NO_INDEX`] if it has none.
    pub node_indices: Vec<u32>,
}

impl Shortlist {
    /// The indices in the snapshot of the requested nodes, of those that it has.
    pub(crate) fn known_node_indices(&self) -> impl Iterator<Item = usize> {
        self.node_indices
            .iter()
            .filter(|index| **index != NO_INDEX)
            .map(|index| *index as usize)
    }

    /// The rejected nodes by reason: each reason's code, how many nodes it excludes, and the first of them; in order of code.
    pub fn rejected_by_code(&self) -> Vec<RejectedNodes> {
        let mut all: Vec<RejectedNodes> = Vec::new();
        for (query_index, misfit) in &self.rejected {
            let code = misfit.code();
            // There are few: all of tens of thousands of nodes lack the same.
            match all.iter_mut().find(|group| group.code == code) {
                Some(group) => group.count += 1,
                None => all.push(RejectedNodes {
                    code,
                    count: 1,
                    first_query_index: *query_index,
                    misfit: *misfit,
                }),
            }
        }
        all.sort_unstable_by_key(|group| group.code);
        all
    }
}

/// Nodes that are rejected for the same reason.
#[derive(Debug, Clone, Copy)]
pub struct RejectedNodes {
    pub code: &'static str,
    pub count: u32,
    /// The index of the first node's name in the request; `misfit` is what that node lacks.
    pub first_query_index: usize,
    pub misfit: Misfit,
}

/// A pod's scheduling attempt: what it brings along from earlier ones.
#[derive(Debug, Clone, Copy)]
pub struct ScheduleAttempt<'a> {
    /// How many candidates to keep at most.
    pub limit: usize,
    pub just_failed: Option<&'a NodeName>,
    pub reserved_placement: Option<ReservedPlacement<'a>>,
    pub policy: &'a Policy,
    /// What the pod's tenant may still take.
    pub allowance: TenantLimit,
}

impl<'a> ScheduleAttempt<'a> {
    /// A first attempt, with the policy's shortlist.
    pub fn new(
        policy: &'a Policy,
        reserved_placement: Option<&'a (NodeName, Result<GpuSet, Misfit>)>,
        allowance: TenantLimit,
    ) -> Self {
        let reserved_placement = reserved_placement.map(|(node, verdict)| ReservedPlacement {
            node,
            verdict: *verdict,
        });
        Self {
            limit: usize::from(policy.scoring.shortlist),
            just_failed: None,
            reserved_placement,
            policy,
            allowance,
        }
    }

    /// A first attempt of a pod without a reservation, whose tenant has no limit.
    pub fn unreserved(policy: &'a Policy) -> Self {
        Self::new(policy, None, TenantLimit::default())
    }
}

/// The placement that is the pod's already, by a reservation or by an earlier bind. On that node the ledger decides, not the
/// snapshot, in which the pod's own VRAM looks like any other pod's.
#[derive(Debug, Clone, Copy)]
pub struct ReservedPlacement<'a> {
    pub node: &'a NodeName,
    pub verdict: Result<GpuSet, Misfit>,
}

/// The best `attempt.limit` of the named nodes.
pub fn shortlist<'a>(
    snapshot: &Snapshot,
    demand: &Demand,
    names: impl ExactSizeIterator<Item = &'a str>,
    attempt: ScheduleAttempt<'_>,
) -> Shortlist {
    shortlist_with(snapshot, demand, names, attempt, |index| {
        score_node(snapshot, index, demand, attempt.policy)
    })
}

/// [`shortlist`] with another source of results: `score_node` returns what [`score_node`] returns for the node at an index.
pub(crate) fn shortlist_with<'a>(
    snapshot: &Snapshot,
    demand: &Demand,
    names: impl ExactSizeIterator<Item = &'a str>,
    attempt: ScheduleAttempt<'_>,
    mut score_node: impl FnMut(usize) -> CachedScore,
) -> Shortlist {
    let mut list = Shortlist {
        best: Vec::with_capacity(attempt.limit + 1),
        rejected: Vec::with_capacity(names.len()),
        node_indices: snapshot.indices_of(names),
    };
    if let Some(misfit) = tenant_limit_misfit(demand, attempt) {
        list.rejected = (0..list.node_indices.len())
            .map(|query_index| (query_index, misfit))
            .collect();
        return list;
    }
    let attempt_nodes = AttemptNodes::new(snapshot, attempt);
    for (query_index, index) in list.node_indices.iter().enumerate() {
        let index = (*index != NO_INDEX).then_some(*index as usize);
        match evaluate_candidate(
            snapshot,
            demand,
            (query_index, index),
            (attempt, attempt_nodes),
            &mut score_node,
        ) {
            Ok(candidate) => insert_candidate(&mut list.best, candidate, attempt.limit),
            Err(misfit) => list.rejected.push((query_index, misfit)),
        }
    }
    // A place that pods were evicted for goes before any other, and a node that just failed goes last.
    if attempt.reserved_placement.is_some()
        && list
            .best
            .first()
            .is_some_and(|best| !best.outside_reserved_placement)
    {
        list.best.truncate(1);
    }
    if list.best.len() > 1 {
        list.best.retain(|candidate| !candidate.just_failed);
    }
    list
}

/// The 0 to 10 an extender may answer, for candidates in order: one has the top step, each after it less, and all
/// beyond the tenth nothing. A scale that followed the figures would put near equals on one step, where the scheduler
/// tosses a coin.
pub fn score_steps() -> impl Iterator<Item = u8> {
    (0..=MAX_SCORE).rev().chain(std::iter::repeat(0))
}

/// The indices in a snapshot of the nodes that an attempt names.
#[derive(Clone, Copy)]
struct AttemptNodes {
    reserved: Option<usize>,
    just_failed: Option<usize>,
}

impl AttemptNodes {
    fn new(snapshot: &Snapshot, attempt: ScheduleAttempt<'_>) -> Self {
        let index_of = |name: &NodeName| snapshot.index_of(name.as_str());
        Self {
            reserved: attempt
                .reserved_placement
                .and_then(|reserved| index_of(reserved.node)),
            just_failed: attempt.just_failed.and_then(index_of),
        }
    }
}

/// The candidate that a node is, or why it is none. The node itself is read only if its score is not enough: the scores of tens of
/// thousands of nodes lie side by side in memory, the nodes do not.
fn evaluate_candidate(
    snapshot: &Snapshot,
    demand: &Demand,
    (query_index, index): (usize, Option<usize>),
    (attempt, attempt_nodes): (ScheduleAttempt<'_>, AttemptNodes),
    score_node: &mut impl FnMut(usize) -> CachedScore,
) -> Result<Candidate, Misfit> {
    let index = index.ok_or(Misfit::UnknownNode)?;
    let reserved_here = attempt
        .reserved_placement
        .filter(|_| attempt_nodes.reserved == Some(index));
    let (score, gpus) = match reserved_here {
        Some(reserved) => {
            let (gpus, evaluation) = (reserved.verdict?, snapshot.evaluate(index, demand));
            let (choice, node) = (
                GpuChoice::for_gpus(&evaluation, gpus),
                &snapshot.nodes()[index],
            );
            (
                score(
                    &evaluation,
                    node,
                    choice,
                    snapshot.start_model(),
                    attempt.policy,
                ),
                gpus,
            )
        }
        None => score_node(index)?,
    };
    let is_limited = reserved_here.is_none() && attempt.allowance != TenantLimit::default();
    if is_limited
        && !is_allowed(
            attempt.allowance,
            &snapshot.nodes()[index].gpus,
            demand,
            gpus,
        )
    {
        return Err(Misfit::TenantLimitOnNode {
            left: attempt.allowance,
        });
    }
    Ok(Candidate {
        query_index,
        node_index: index,
        gpus,
        outside_reserved_placement: attempt.reserved_placement.is_some() && reserved_here.is_none(),
        just_failed: attempt_nodes.just_failed == Some(index),
        score,
    })
}

/// The GPUs that a demand would get on the node at `index`, and their score.
pub fn score_node(
    snapshot: &Snapshot,
    index: usize,
    demand: &Demand,
    policy: &Policy,
) -> CachedScore {
    let (evaluation, node) = (snapshot.evaluate(index, demand), &snapshot.nodes()[index]);
    let choice = fit_by(&evaluation, node)?;
    Ok((
        score(&evaluation, node, choice, snapshot.start_model(), policy),
        choice.gpus,
    ))
}

/// Whether the pod takes more than its tenant's limit leaves wherever it goes. A reserved placement is counted already.
fn tenant_limit_misfit(demand: &Demand, attempt: ScheduleAttempt<'_>) -> Option<Misfit> {
    let milli_gpus = match demand.sharing {
        Sharing::Exclusive => u64::from(demand.gpus) * 1000,
        // At least something; how much depends on the GPU.
        Sharing::Shared => u64::from(demand.gpus),
    };
    let least = TenantUsage {
        vram: demand.vram(),
        milli_gpus,
    };
    let is_refused = attempt.reserved_placement.is_none() && !attempt.allowance.allows(least);
    is_refused.then(|| Misfit::TenantLimit {
        vram: demand.vram(),
        left: attempt.allowance,
    })
}

fn score(
    evaluation: &NodeEvaluation<'_>,
    node: &Node,
    choice: GpuChoice,
    starts: &StartModel,
    policy: &Policy,
) -> Score {
    Score {
        contended: choice.contended,
        cost: score_parts(evaluation, node, choice, starts, policy)
            .weighted(&policy.scoring.weights),
        packing_cost: choice.packing_cost,
        engine_load: match evaluation.demand().ask {
            GpuRequest::Vram => choice.engine_load,
            GpuRequest::Plugin { .. } => whole_nodes::plugin_least_load(node, evaluation.demand()),
            GpuRequest::Claims => whole_nodes::claims_least_load(node, evaluation.demand()),
        },
        node_free: if evaluation.demand().ask == GpuRequest::Vram {
            evaluation.gpus().free()
        } else {
            Bytes::ZERO
        },
    }
}

/// The weighted parts of the score of these GPUs of a node: what speaks against them.
pub fn score_parts(
    evaluation: &NodeEvaluation<'_>,
    node: &Node,
    choice: GpuChoice,
    starts: &StartModel,
    policy: &Policy,
) -> ScoreParts {
    let demand = evaluation.demand();
    match demand.ask {
        GpuRequest::Plugin { .. } => {
            return whole_nodes::plugin_score_parts(node, demand, starts, policy);
        }
        GpuRequest::Claims => return whole_nodes::claims_score_parts(node, demand, starts, policy),
        GpuRequest::Vram => {}
    }
    ScoreParts {
        packing: evaluation.scaled_cost(choice.gpus, choice.packing_cost),
        kv_headroom: choice.engine_load.score_part(),
        time_to_ready: time_to_ready_part(node, choice.gpus, demand, starts, policy),
        interference: interference_part(choice.busy),
        topology: if choice.crosses_islands {
            WHOLE_PART
        } else {
            0
        },
        spread: match &demand.model {
            Some(model) if policy.scoring.weights.spread > 0 => {
                crowding_part(node.replicas_of(model))
            }
            _ => 0,
        },
    }
}

/// Sixteen doublings of a second are eighteen hours: nothing takes longer to load.
const READY_STEPS: u32 = 16;

/// The share of its time that a pod waits for others that have work for so many per cent of theirs, one after the other.
fn interference_part(busy: u16) -> u32 {
    WHOLE_PART * u32::from(busy) / (u32::from(busy) + 100)
}

pub(crate) fn crowding_part(n: u16) -> u32 {
    WHOLE_PART * u32::from(n) / (u32::from(n) + 1)
}

/// How long until the pod answers on these GPUs of a node, in doublings of a second.
pub(super) fn time_to_ready_part(
    node: &Node,
    gpus: GpuSet,
    demand: &Demand,
    starts: &StartModel,
    policy: &Policy,
) -> u32 {
    let wake_time =
        pack::estimate_wake(node, gpus, demand, starts, &policy.loading).map(|wake| wake.wake_time);
    let ready = wake_time.or_else(|| {
        estimate_start(node, demand, starts, &policy.loading).map(|found| found.total())
    });
    let step = ready.map_or(0, model_tier::duration_bucket);
    (u32::from(step) * WHOLE_PART / READY_STEPS).min(WHOLE_PART)
}

/// Inserts in order and drops the worst beyond `limit`. A node that was named twice counts once.
fn insert_candidate(best: &mut Vec<Candidate>, candidate: Candidate, limit: usize) {
    if best.len() == limit
        && best
            .last()
            .is_some_and(|worst| worst.order() <= candidate.order())
    {
        return;
    }
    if let Err(index) = best.binary_search_by_key(&candidate.order(), Candidate::order) {
        best.insert(index, candidate);
        best.truncate(limit);
    }
}

/// How near the engines of a GPU are to a limit of the demand's class, in thousandths of that limit. Less is better.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct EngineLoadCost(u16);

/// Thousandths of a limit.
const AT_LIMIT: u16 = 1000;
/// The weight of one step in [`ScoreParts::kv_headroom`](super::rank::ScoreParts).
const STEP: u32 = WHOLE_PART / 8;

impl EngineLoadCost {
    /// The cost of joining GPUs without engines, and of every GPU for classes without limits.
    pub const NONE: Self = Self(0);

    /// Some engine does not say how busy it is: half of the whole part, as at six sevenths of a limit.
    pub const UNKNOWN: Self = Self(854);

    /// The cost of joining the engines on the calmest of these GPUs, whichever it will be. Without GPUs nothing is known.
    pub fn least<'a>(gpus: impl Iterator<Item = &'a Gpu>, demand: &Demand) -> Self {
        let unknown = if has_limits(demand) {
            Self::UNKNOWN
        } else {
            Self::NONE
        };
        gpus.map(|gpu| Self::for_gpu(gpu, demand))
            .min()
            .unwrap_or(unknown)
    }

    /// The cost of joining the engines on `gpu`. The fuller of KV cache and queue counts.
    #[inline]
    pub fn for_gpu(gpu: &Gpu, demand: &Demand) -> Self {
        if !has_limits(demand) {
            return Self::NONE;
        }
        let ClassTerms {
            kv_cache_limit,
            queue_limit,
            ..
        } = demand.terms;
        let load = gpu.engine_load;
        let full = load.occupancy().zip(kv_cache_limit);
        let long = load.queue.zip(queue_limit);
        let measured = full
            .map(|(kv, limit)| Self::share(kv.get().into(), limit.get().into()))
            .max(long.map(|(queue, limit)| Self::share(queue, limit)))
            .unwrap_or_default();
        let is_unmeasured =
            full.is_none() && kv_cache_limit.is_some() || long.is_none() && queue_limit.is_some();
        if is_unmeasured || load.partial {
            measured.max(Self::UNKNOWN)
        } else {
            measured
        }
    }

    fn share(measured: u32, limit: u32) -> Self {
        let thousandths =
            (u64::from(measured) * u64::from(AT_LIMIT)).div_ceil(u64::from(limit.max(1)));
        Self(thousandths.min(AT_LIMIT.into()) as u16)
    }

    /// What is to be said against the GPU, up to [`WHOLE_PART`]: the square of the share of the limit's upper half that is in
    /// use. Up to half of the limit packing decides, and the exact load only between places that are packed equally well.
    pub fn score_part(self) -> u32 {
        let beyond = u32::from(self.0.saturating_sub(AT_LIMIT / 2));
        beyond.pow(2) / (u32::from(AT_LIMIT / 2).pow(2) / WHOLE_PART)
    }

    /// The part in eighths. Between GPUs of one node a step outweighs the packing cost; within a step the packing cost decides
    /// first. The first step ends at two thirds of the limit.
    pub fn step(self) -> u8 {
        (self.score_part() / STEP) as u8
    }
}

#[inline]
fn has_limits(demand: &Demand) -> bool {
    demand.terms.kv_cache_limit.is_some() || demand.terms.queue_limit.is_some()
}

#[cfg(test)]
mod engine_load_cost_tests {
    use super::*;

    #[test]
    fn the_cost_rises_ever_more_steeply_to_the_limit() {
        let part = |kv: u32| EngineLoadCost::share(kv, 90).score_part();
        assert_eq!(
            [0, 2, 22, 45, 66, 81, 90, 97].map(part),
            [0, 0, 0, 0, 219, 640, 1000, 1000]
        );
        let steps = [0, 45, 60, 61, 66, 90].map(|kv| EngineLoadCost::share(kv, 90).step());
        assert_eq!(steps, [0, 0, 0, 1, 1, 8]);
        assert!((0..100).all(|kv| part(kv) <= part(kv + 1)));
        let rise: Vec<u32> = (0..9)
            .map(|ten| part(10 * ten + 10) - part(10 * ten))
            .collect();
        assert!(rise.is_sorted(), "{rise:?}");
        assert!(
            EngineLoadCost::UNKNOWN
                .score_part()
                .abs_diff(WHOLE_PART / 2)
                <= 1
        );
        assert_eq!(EngineLoadCost::share(u32::MAX, 1).score_part(), WHOLE_PART);
        assert_eq!(
            [
                EngineLoadCost::share(0, 0).score_part(),
                EngineLoadCost::share(1, 0).score_part()
            ],
            [0, WHOLE_PART]
        );
    }
}
