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
const RESULTS: usize = 320_000;
/// Demands of which results are kept. A cluster serves a handful of kinds of pods at a time; to look through more than this would
/// take longer than it saves.
const DEMANDS: RangeInclusive<usize> = 16..=64;

/// A request about no more nodes than these, such as one about a pod's nominated node, computes what is not remembered, and
/// remembers nothing: to make room for all nodes would take longer.
const FEW: usize = 16;

/// Demands of which results are made before requests ask for them: until they are in force, they take memory beside the others.
const BEFOREHAND: usize = 4;

/// The cached scores of the demands that came last.
#[derive(Debug, Default)]
pub struct ScoreCache {
    /// The latest last.
    pages: Vec<CachedScores>,
}

/// The result of one demand on each node.
#[derive(Debug)]
pub struct CachedScores {
    key: ScoreKey,
    /// Whether a request has asked for these scores.
    is_asked_for: bool,
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
    epoch: u64,
    packing_model: u64,
    policy: u64,
    starts: StartModelKey,
    demand: DemandKey,
}

impl ScoreKey {
    fn of(snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Self {
        Self {
            epoch: snapshot.epoch(),
            packing_model: snapshot.packing_model().generation(),
            policy: policy.version,
            starts: snapshot.start_model().key_of(demand),
            demand: DemandKey::of(demand),
        }
    }

    fn is_of_the_time_of(&self, other: &Self) -> bool {
        (self.epoch, self.packing_model, self.policy)
            == (other.epoch, other.packing_model, other.policy)
    }
}

impl ScoreCache {
    /// The cached scores of this demand, or none. The caller puts them back; a concurrent request for the same demand gets none.
    pub fn take(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> CachedScores {
        let key = ScoreKey::of(snapshot, demand, policy);
        // Generations only rise: older results are of no more use.
        self.pages.retain(|page| page.key.is_of_the_time_of(&key));
        match self.pages.iter().position(|page| page.key == key) {
            Some(place) => self.pages.remove(place),
            None => CachedScores::without_results(key),
        }
    }

    /// Keeps these scores, and forgets those that were used longest ago if there are too many.
    pub fn put(&mut self, page: CachedScores) {
        if page.results.is_empty() {
            return;
        }
        self.pages.retain(|known| known.key != page.key);
        let most = (RESULTS / page.results.len().max(1)).clamp(*DEMANDS.start(), *DEMANDS.end());
        self.pages.push(page);
        self.pages.drain(..self.pages.len().saturating_sub(most));
    }

    /// The demands whose results requests have asked for last: those to have results of beforehand.
    pub fn demands(&self) -> Vec<Demand> {
        let asked_for = self.pages.iter().rev().filter(|page| page.is_asked_for);
        asked_for
            .filter_map(|page| page.demand.as_deref().cloned())
            .take(BEFOREHAND)
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
        let mut page = self.take(snapshot, demand, attempt.policy);
        let list = page.shortlist(snapshot, demand, names, attempt);
        self.put(page);
        list
    }

    /// The index of the best of all nodes.
    pub fn best(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Option<usize> {
        let mut page = self.take(snapshot, demand, policy);
        let best = page.best(snapshot, demand, policy);
        self.put(page);
        best
    }
}

impl CachedScores {
    fn without_results(key: ScoreKey) -> Self {
        Self {
            key,
            is_asked_for: false,
            demand: None,
            generations: Vec::new(),
            results: Vec::new(),
        }
    }

    /// The scores of all nodes before a request asks for them, such as those by another packing model before it is in force.
    pub fn of_all(snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Self {
        let mut page = Self::without_results(ScoreKey::of(snapshot, demand, policy));
        page.make_room(snapshot, demand);
        page.look_at_changed(snapshot, demand, policy);
        page
    }

    /// The scores once the ledger has given their packing model this generation.
    pub fn by_model(mut self, generation: u64) -> Self {
        self.key.packing_model = generation;
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
        debug_assert_eq!(self.key, ScoreKey::of(snapshot, demand, attempt.policy));
        if names.len() > FEW {
            self.is_asked_for = true;
            self.make_room(snapshot, demand);
        }
        let result = |place| self.result(snapshot, place, demand, attempt.policy);
        rank::shortlist_by(snapshot, demand, names, attempt, result)
    }

    /// The index of the best of all nodes.
    fn best(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Option<usize> {
        self.make_room(snapshot, demand);
        self.look_at_changed(snapshot, demand, policy);
        let scores = self.results.iter().enumerate();
        let scores = scores.filter_map(|(place, result)| Some((&result.as_ref().ok()?.0, place)));
        scores.min().map(|(_, place)| place)
    }

    fn make_room(&mut self, snapshot: &Snapshot, demand: &Demand) {
        let nodes = snapshot.nodes().len();
        self.demand.get_or_insert_with(|| Box::new(demand.clone()));
        self.generations.resize(nodes, NEVER);
        self.results.resize(nodes, Err(Misfit::UnknownNode));
    }

    fn result(
        &mut self,
        snapshot: &Snapshot,
        place: usize,
        demand: &Demand,
        policy: &Policy,
    ) -> CachedScore {
        match self.generations.get(place) {
            None => rank::score_node(snapshot, place, demand, policy),
            Some(generation) if *generation == snapshot.generations()[place] => self.results[place],
            Some(_) => {
                self.look_at(snapshot, place, demand, policy);
                self.results[place]
            }
        }
    }

    /// Brings the results of all nodes to this snapshot.
    fn look_at_changed(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) {
        for (place, generation) in snapshot.generations().iter().enumerate() {
            if self.generations[place] != *generation {
                self.look_at(snapshot, place, demand, policy);
            }
        }
    }

    fn look_at(&mut self, snapshot: &Snapshot, place: usize, demand: &Demand, policy: &Policy) {
        self.results[place] = rank::score_node(snapshot, place, demand, policy);
        self.generations[place] = snapshot.generations()[place];
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
    fn a_node_that_did_not_change_is_not_looked_at_again() {
        let (policy, mut snapshot) = (Policy::default(), cluster_of(3));
        let demand = demand_of(10, 1, Sharing::Shared, 0);
        let mut page = ScoreCache::default().take(&snapshot, &demand, &policy);
        assert_eq!(page.best(&snapshot, &demand, &policy), Some(0));
        // A result that the node does not give.
        page.results[0] = Err(Misfit::NoFreshReport);
        assert_eq!(
            page.result(&snapshot, 0, &demand, &policy),
            Err(Misfit::NoFreshReport)
        );
        assert_eq!(page.best(&snapshot, &demand, &policy), Some(1));
        let changed = Node {
            generation: 9,
            ..snapshot.nodes()[0].clone()
        };
        snapshot.update(9, [changed]);
        assert!(page.result(&snapshot, 0, &demand, &policy).is_ok());
        assert_eq!(page.best(&snapshot, &demand, &policy), Some(0));
    }

    #[test]
    fn scores_that_were_made_beforehand_are_found_and_are_not_made_again_unless_they_are_asked_for()
    {
        let (policy, before) = (Policy::default(), cluster_of(FEW as u8 + 1));
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
        let mut beforehand = CachedScores::of_all(&not_taken, &demand, &policy).by_model(7);
        // A result that the node does not give.
        beforehand.results[0] = Err(Misfit::NoFreshReport);
        score_cache.put(beforehand);
        assert_eq!(
            score_cache.demands().len(),
            1,
            "nobody has asked for what was made beforehand"
        );
        assert_eq!(
            ask(&mut score_cache, &after).refused,
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
        let most = *DEMANDS.end();
        (0..most).for_each(|size| assert_eq!(ask(size), Some(0)));
        ask(0);
        ask(most);
        let is_kept = |size: usize| {
            let key = ScoreKey::of(&snapshot, &demand(size), &policy);
            score_cache.pages.iter().any(|page| page.key == key)
        };
        assert_eq!(score_cache.pages.len(), most);
        assert!(is_kept(0) && !is_kept(1) && (2..=most).all(is_kept));
    }

    #[test]
    fn a_request_about_few_nodes_reads_what_is_remembered_and_makes_no_room() {
        let (policy, snapshot) = (Policy::default(), cluster_of(FEW as u8 + 1));
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
                score_cache.pages.first().map(|page| page.results.len()),
                best.len(),
            )
        };
        assert_eq!(ask(&names[..FEW]), (None, 4));
        assert_eq!(ask(&names), (Some(FEW + 1), 4));
        assert_eq!(
            ask(&names[..1]),
            (Some(FEW + 1), 1),
            "what is remembered stays"
        );
    }
}
