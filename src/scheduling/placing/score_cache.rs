//! The score cache: for each demand seen recently, the result of fit and score on every node when it was last examined.
//!
//! Replicas ask for the same, and between two of them one node has changed. A result follows from the node, the demand, the
//! policy and the packing model; it is remembered with the generations of those and looked up by them, so it cannot be stale,
//! only missing. What depends on the attempt is not in it: `rank` adds that to what it finds here.

use super::fit::Misfit;
use super::rank::{self, ScheduleAttempt, Score, Shortlist};
use super::snapshot::Snapshot;
use super::start_model::StartModelKey;
use crate::policy::Policy;
use crate::vocabulary::demand::{Demand, DemandKey};
use crate::vocabulary::gpu::GpuSet;
use std::ops::RangeInclusive;

/// Results that are kept at most, of all demands together, unless the fewest demands have more: twenty megabytes. That is all
/// demands on 5,000 nodes: fifty demands that take turns find their results.
const MAX_RESULTS: usize = 320_000;
/// Demands of which results are kept. A cluster serves a handful of kinds of pods at a time; to look through more than this would
/// take longer than it saves.
const DEMAND_LIMITS: RangeInclusive<usize> = 16..=64;

/// A request about no more nodes than these, such as one about a pod's nominated node, computes what is not remembered, and
/// remembers nothing: to make room for all nodes would take longer.
const FEW_NODES: usize = 16;

/// Demands of which results are made before requests ask for them: until they are in force, they take memory beside the others.
const PRECOMPUTED_DEMANDS: usize = 4;

/// The cached scores of the demands that came last.
#[derive(Debug, Default)]
pub struct ScoreCache {
    /// The latest last.
    entries: Vec<CachedScores>,
}

/// The result of one demand on each node.
#[derive(Debug)]
pub struct CachedScores {
    key: ScoreKey,
    /// Whether a request has asked for these scores.
    is_requested: bool,
    /// The demand that the results are for; `None` while there are none.
    demand: Option<Box<Demand>>,
    /// The node generation that each result was computed from, by the node's index in the snapshot. Empty, as the results are,
    /// until a request asks about many nodes.
    generations: Vec<u64>,
    results: Vec<CachedScore>,
}

/// A generation that no node reaches.
const NEVER: u64 = u64::MAX;

pub(crate) type CachedScore = Result<(Score, GpuSet), Misfit>;

/// All that a node's result follows from beside the node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ScoreKey {
    /// The snapshot's: nodes have the indices they had.
    node_list_generation: u64,
    model_generation: u64,
    policy_version: u64,
    starts: StartModelKey,
    demand: DemandKey,
}

impl ScoreKey {
    fn new(snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Self {
        Self {
            node_list_generation: snapshot.node_list_generation(),
            model_generation: snapshot.packing_model().generation(),
            policy_version: policy.version,
            starts: snapshot.start_model().key_of(demand),
            demand: DemandKey::from_demand(demand),
        }
    }

    fn has_same_versions(&self, other: &Self) -> bool {
        (
            self.node_list_generation,
            self.model_generation,
            self.policy_version,
        ) == (
            other.node_list_generation,
            other.model_generation,
            other.policy_version,
        )
    }
}

impl ScoreCache {
    /// The cached scores of this demand, or none. The caller puts them back; a concurrent request for the same demand gets none.
    pub fn take(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> CachedScores {
        let key = ScoreKey::new(snapshot, demand, policy);
        // Generations only rise: older results are of no more use.
        self.entries
            .retain(|entry| entry.key.has_same_versions(&key));
        match self.entries.iter().position(|entry| entry.key == key) {
            Some(index) => self.entries.remove(index),
            None => CachedScores::empty(key),
        }
    }

    /// Keeps these scores, and forgets those that were used longest ago if there are too many.
    pub fn put(&mut self, scores: CachedScores) {
        if scores.results.is_empty() {
            return;
        }
        self.entries.retain(|entry| entry.key != scores.key);
        let most = (MAX_RESULTS / scores.results.len().max(1))
            .clamp(*DEMAND_LIMITS.start(), *DEMAND_LIMITS.end());
        self.entries.push(scores);
        self.entries
            .drain(..self.entries.len().saturating_sub(most));
    }

    /// The demands whose results requests have asked for last: those to have results of beforehand.
    pub fn demands(&self) -> Vec<Demand> {
        let requested = self.entries.iter().rev().filter(|entry| entry.is_requested);
        requested
            .filter_map(|entry| entry.demand.as_deref().cloned())
            .take(PRECOMPUTED_DEMANDS)
            .collect()
    }

    /// [`rank::shortlist`] from the cache.
    pub fn shortlist<'a>(
        &mut self,
        snapshot: &Snapshot,
        demand: &Demand,
        names: impl ExactSizeIterator<Item = &'a str>,
        attempt: ScheduleAttempt<'_>,
    ) -> Shortlist {
        let mut scores = self.take(snapshot, demand, attempt.policy);
        let list = scores.shortlist(snapshot, demand, names, attempt);
        self.put(scores);
        list
    }

    /// The index of the best of all nodes.
    pub fn best(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Option<usize> {
        let mut scores = self.take(snapshot, demand, policy);
        let best = scores.best(snapshot, demand, policy);
        self.put(scores);
        best
    }
}

impl CachedScores {
    fn empty(key: ScoreKey) -> Self {
        Self {
            key,
            is_requested: false,
            demand: None,
            generations: Vec::new(),
            results: Vec::new(),
        }
    }

    /// The scores of all nodes before a request asks for them, such as those by another packing model before it is in force.
    pub fn for_all_nodes(snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Self {
        let mut scores = Self::empty(ScoreKey::new(snapshot, demand, policy));
        scores.resize(snapshot, demand);
        scores.refresh_changed(snapshot, demand, policy);
        scores
    }

    /// The scores once the ledger has given their packing model this generation.
    pub fn with_model_generation(mut self, generation: u64) -> Self {
        self.key.model_generation = generation;
        self
    }

    /// [`rank::shortlist`] from the cache. The scores must be of this snapshot, this demand and the attempt's policy.
    pub fn shortlist<'a>(
        &mut self,
        snapshot: &Snapshot,
        demand: &Demand,
        names: impl ExactSizeIterator<Item = &'a str>,
        attempt: ScheduleAttempt<'_>,
    ) -> Shortlist {
        debug_assert_eq!(self.key, ScoreKey::new(snapshot, demand, attempt.policy));
        if names.len() > FEW_NODES {
            self.is_requested = true;
            self.resize(snapshot, demand);
        }
        let result = |index| self.result(snapshot, index, demand, attempt.policy);
        rank::shortlist_with(snapshot, demand, names, attempt, result)
    }

    /// The index of the best of all nodes.
    fn best(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Option<usize> {
        self.resize(snapshot, demand);
        self.refresh_changed(snapshot, demand, policy);
        let scores = self.results.iter().enumerate();
        let scores = scores.filter_map(|(index, result)| Some((&result.as_ref().ok()?.0, index)));
        scores.min().map(|(_, index)| index)
    }

    fn resize(&mut self, snapshot: &Snapshot, demand: &Demand) {
        let nodes = snapshot.nodes().len();
        self.demand.get_or_insert_with(|| Box::new(demand.clone()));
        self.generations.resize(nodes, NEVER);
        self.results.resize(nodes, Err(Misfit::UnknownNode));
    }

    fn result(
        &mut self,
        snapshot: &Snapshot,
        index: usize,
        demand: &Demand,
        policy: &Policy,
    ) -> CachedScore {
        match self.generations.get(index) {
            None => rank::score_node(snapshot, index, demand, policy),
            Some(generation) if *generation == snapshot.generations()[index] => self.results[index],
            Some(_) => {
                self.refresh(snapshot, index, demand, policy);
                self.results[index]
            }
        }
    }

    /// Brings the results of all nodes to this snapshot.
    fn refresh_changed(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) {
        for (index, generation) in snapshot.generations().iter().enumerate() {
            if self.generations[index] != *generation {
                self.refresh(snapshot, index, demand, policy);
            }
        }
    }

    fn refresh(&mut self, snapshot: &Snapshot, index: usize, demand: &Demand, policy: &Policy) {
        self.results[index] = rank::score_node(snapshot, index, demand, policy);
        self.generations[index] = snapshot.generations()[index];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placing::learned::PackingModel;
    use crate::proptests::cluster_of;
    use crate::testkit::demand_of;
    use crate::vocabulary::demand::Sharing;
    use crate::vocabulary::node::Node;
    use std::sync::Arc;

    fn attempt(policy: &Policy) -> ScheduleAttempt<'_> {
        ScheduleAttempt {
            limit: 4,
            ..ScheduleAttempt::unreserved(policy)
        }
    }

    #[test]
    fn an_unchanged_node_keeps_its_cached_score() {
        let (policy, mut snapshot) = (Policy::default(), cluster_of(3));
        let demand = demand_of(10, 1, Sharing::Shared, 0);
        let mut scores = ScoreCache::default().take(&snapshot, &demand, &policy);
        assert_eq!(scores.best(&snapshot, &demand, &policy), Some(0));
        // A result that the node does not give.
        scores.results[0] = Err(Misfit::NoFreshReport);
        assert_eq!(
            scores.result(&snapshot, 0, &demand, &policy),
            Err(Misfit::NoFreshReport)
        );
        assert_eq!(scores.best(&snapshot, &demand, &policy), Some(1));
        let changed = Node {
            generation: 9,
            ..snapshot.nodes()[0].clone()
        };
        snapshot.update(9, [changed]);
        assert!(scores.result(&snapshot, 0, &demand, &policy).is_ok());
        assert_eq!(scores.best(&snapshot, &demand, &policy), Some(0));
    }

    #[test]
    fn precomputed_scores_are_used_and_count_as_recent_only_once_requested() {
        let (policy, before) = (Policy::default(), cluster_of(FEW_NODES as u8 + 1));
        let model_of = |generation| Arc::new(PackingModel::default().with_generation(generation));
        let after = before.clone().with_packing_model(model_of(7));
        let demand = demand_of(10, 1, Sharing::Shared, 0);
        let names: Vec<&str> = before
            .nodes()
            .iter()
            .map(|node| node.name.as_str())
            .collect();
        let mut score_cache = ScoreCache::default();
        let ask = |score_cache: &mut ScoreCache, snapshot: &Snapshot| {
            score_cache.shortlist(snapshot, &demand, names.iter().copied(), attempt(&policy))
        };
        ask(&mut score_cache, &before);
        assert_eq!(score_cache.demands(), std::slice::from_ref(&demand));
        let not_taken = before.clone().with_packing_model(model_of(0));
        let mut beforehand =
            CachedScores::for_all_nodes(&not_taken, &demand, &policy).with_model_generation(7);
        // A result that the node does not give.
        beforehand.results[0] = Err(Misfit::NoFreshReport);
        score_cache.put(beforehand);
        assert_eq!(
            score_cache.demands().len(),
            1,
            "nobody has asked for what was made beforehand"
        );
        assert_eq!(
            ask(&mut score_cache, &after).rejected,
            [(0, Misfit::NoFreshReport)],
            "it is found"
        );
        assert_eq!(score_cache.demands(), [demand]);
    }

    #[test]
    fn the_demand_that_was_asked_for_longest_ago_is_forgotten() {
        let (policy, snapshot) = (Policy::default(), cluster_of(1));
        let mut score_cache = ScoreCache::default();
        let demand = |size: usize| demand_of(size as u64 + 1, 1, Sharing::Shared, 0);
        let mut ask = |size: usize| score_cache.best(&snapshot, &demand(size), &policy);
        let most = *DEMAND_LIMITS.end();
        (0..most).for_each(|size| assert_eq!(ask(size), Some(0)));
        ask(0);
        ask(most);
        let is_kept = |size: usize| {
            let key = ScoreKey::new(&snapshot, &demand(size), &policy);
            score_cache.entries.iter().any(|entry| entry.key == key)
        };
        assert_eq!(score_cache.entries.len(), most);
        assert!(is_kept(0) && !is_kept(1) && (2..=most).all(is_kept));
    }

    #[test]
    fn a_request_for_few_nodes_reads_the_cache_and_does_not_grow_it() {
        let (policy, snapshot) = (Policy::default(), cluster_of(FEW_NODES as u8 + 1));
        let demand = demand_of(10, 1, Sharing::Shared, 0);
        let names: Vec<&str> = snapshot
            .nodes()
            .iter()
            .map(|node| node.name.as_str())
            .collect();
        let mut score_cache = ScoreCache::default();
        let mut ask = |names: &[&str]| {
            let best = score_cache
                .shortlist(&snapshot, &demand, names.iter().copied(), attempt(&policy))
                .best;
            (
                score_cache.entries.first().map(|entry| entry.results.len()),
                best.len(),
            )
        };
        assert_eq!(ask(&names[..FEW_NODES]), (None, 4));
        assert_eq!(ask(&names), (Some(FEW_NODES + 1), 4));
        assert_eq!(
            ask(&names[..1]),
            (Some(FEW_NODES + 1), 1),
            "what is remembered stays"
        );
    }
}
