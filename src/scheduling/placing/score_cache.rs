//! Verdicts that are still good: of each demand seen lately, what every node answered when it was last looked at.
//!
//! Replicas ask alike, and between two of them one node has changed. What a node answers follows from the node, the demand, the
//! policy and what free VRAM is worth; a verdict is remembered with the generations of those and looked up by them, so it
//! cannot be stale, only missing. What depends on the attempt is not in it: `rank` adds that to what it finds here.

use super::fit::Misfit;
use super::rank::{self, ScheduleAttempt, Score, Shortlist};
use super::snapshot::Snapshot;
use crate::ids::{GpuModel, ModelId};
use crate::scheduling::policy::Policy;
use crate::scheduling::vocabulary::classification::{ClassId, ClassTerms};
use crate::scheduling::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::scheduling::vocabulary::device_plugin::Ask;
use crate::scheduling::vocabulary::gpu::GpuSet;
use crate::units::Bytes;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Verdicts that are kept at most, of all demands together, unless the fewest demands have more: twenty megabytes. That is all
/// demands on 5,000 nodes: fifty classes that ask in turn find what they were told before.
const VERDICTS: usize = 320_000;
/// Demands of which verdicts are kept. A cluster serves a handful of kinds of pods at a time; more pages than this would take
/// longer to look through than they save.
const DEMANDS: RangeInclusive<usize> = 16..=64;

/// Pages of the demands that were asked for last.
#[derive(Debug, Default)]
pub struct ScoreCache {
    /// The latest last.
    pages: Vec<CachedScores>,
}

/// What each node answered one demand.
#[derive(Debug)]
pub struct CachedScores {
    key: ScoreKey,
    /// By the node's place in the snapshot: as of which generation its verdict holds.
    generations: Vec<u64>,
    verdicts: Vec<CachedScore>,
}

/// No node ever gets there.
const NEVER: u64 = u64::MAX;

pub type CachedScore = Result<(Score, GpuSet), Misfit>;

/// All that verdicts follow from beside the node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ScoreKey {
    /// Nodes have the places they had.
    epoch: u64,
    packing_model: u64,
    policy: u64,
    ask: Ask,
    per_gpu: Bytes,
    gpus: u32,
    sharing: Sharing,
    class: ClassId,
    terms: ClassTerms,
    model: Option<ModelId>,
    weights: Bytes,
    host_resources: HostResources,
    models: Arc<[GpuModel]>,
}

impl ScoreKey {
    fn of(snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Self {
        Self {
            epoch: snapshot.epoch(),
            packing_model: snapshot.packing_model().generation(),
            policy: policy.version,
            ask: demand.ask.clone(),
            per_gpu: demand.per_gpu,
            gpus: demand.gpus,
            sharing: demand.sharing,
            class: demand.class,
            terms: demand.terms,
            model: demand.model.clone(),
            weights: demand.weights(),
            host_resources: demand.host_resources,
            models: demand.models.clone(),
        }
    }

    fn is_of_the_time_of(&self, other: &Self) -> bool {
        (self.epoch, self.packing_model, self.policy) == (other.epoch, other.packing_model, other.policy)
    }
}

impl ScoreCache {
    /// The cached scores of this demand, or none. The caller puts them back; a concurrent request for the same demand gets none.
    pub fn take(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> CachedScores {
        let key = ScoreKey::of(snapshot, demand, policy);
        // Nobody will ask for those of before.
        self.pages.retain(|page| page.key.is_of_the_time_of(&key));
        match self.pages.iter().position(|page| page.key == key) {
            Some(place) => self.pages.remove(place),
            None => CachedScores::empty(key, snapshot.nodes().len()),
        }
    }

    /// Keeps the page, and forgets those that were used longest ago if there are too many.
    pub fn put(&mut self, page: CachedScores) {
        self.pages.retain(|known| known.key != page.key);
        let most = (VERDICTS / page.verdicts.len().max(1)).clamp(*DEMANDS.start(), *DEMANDS.end());
        self.pages.push(page);
        self.pages.drain(..self.pages.len().saturating_sub(most));
    }

    /// [`rank::shortlist`], with what is remembered.
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

    /// The best of all nodes, by its place.
    pub fn best(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Option<usize> {
        let mut page = self.take(snapshot, demand, policy);
        let best = page.best(snapshot, demand, policy);
        self.put(page);
        best
    }
}

impl CachedScores {
    fn empty(key: ScoreKey, nodes: usize) -> Self {
        Self { key, generations: vec![NEVER; nodes], verdicts: vec![Err(Misfit::UnknownNode); nodes] }
    }

    /// [`rank::shortlist`], with what is remembered. The page must be of this snapshot, this demand and the attempt's policy.
    pub fn shortlist<'a>(
        &mut self,
        snapshot: &Snapshot,
        demand: &Demand,
        names: impl ExactSizeIterator<Item = &'a str>,
        attempt: ScheduleAttempt<'_>,
    ) -> Shortlist {
        debug_assert_eq!(self.key, ScoreKey::of(snapshot, demand, attempt.policy));
        let verdict = |place| self.verdict(snapshot, place, demand, attempt.policy);
        rank::shortlist_by(snapshot, demand, names, attempt, verdict)
    }

    /// The best of all nodes, by its place.
    fn best(&mut self, snapshot: &Snapshot, demand: &Demand, policy: &Policy) -> Option<usize> {
        for (place, generation) in snapshot.generations().iter().enumerate() {
            if self.generations[place] != *generation {
                self.look_at(snapshot, place, demand, policy);
            }
        }
        let scores = self.verdicts.iter().enumerate();
        let scores = scores.filter_map(|(place, verdict)| Some((&verdict.as_ref().ok()?.0, place)));
        scores.min().map(|(_, place)| place)
    }

    fn verdict(
        &mut self,
        snapshot: &Snapshot,
        place: usize,
        demand: &Demand,
        policy: &Policy,
    ) -> CachedScore {
        if self.generations[place] != snapshot.generations()[place] {
            self.look_at(snapshot, place, demand, policy);
        }
        self.verdicts[place]
    }

    fn look_at(&mut self, snapshot: &Snapshot, place: usize, demand: &Demand, policy: &Policy) {
        self.verdicts[place] = rank::score_node(snapshot, place, demand, policy);
        self.generations[place] = snapshot.generations()[place];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduling::proptests::{cluster_of, demand_of};
    use crate::scheduling::vocabulary::cluster_share::TenantLimit;
    use crate::scheduling::vocabulary::node::Node;

    fn attempt(policy: &Policy) -> ScheduleAttempt<'_> {
        ScheduleAttempt {
            limit: 4,
            just_failed: None,
            reserved_placement: None,
            policy,
            allowance: TenantLimit::default(),
        }
    }

    #[test]
    fn a_node_that_did_not_change_is_not_looked_at_again() {
        let (policy, mut snapshot) = (Policy::default(), cluster_of(3));
        let demand = demand_of(10, 1, Sharing::Shared, 0);
        let mut page = ScoreCache::default().take(&snapshot, &demand, &policy);
        assert_eq!(page.best(&snapshot, &demand, &policy), Some(0));
        // Nobody would say that of it.
        page.verdicts[0] = Err(Misfit::NoFreshReport);
        assert_eq!(page.verdict(&snapshot, 0, &demand, &policy), Err(Misfit::NoFreshReport));
        assert_eq!(page.best(&snapshot, &demand, &policy), Some(1));
        let changed = Node { generation: 9, ..snapshot.nodes()[0].clone() };
        snapshot.update(9, [changed]);
        assert!(page.verdict(&snapshot, 0, &demand, &policy).is_ok());
        assert_eq!(page.best(&snapshot, &demand, &policy), Some(0));
    }

    #[test]
    fn the_demand_that_was_asked_for_longest_ago_is_forgotten() {
        let (policy, snapshot) = (Policy::default(), cluster_of(1));
        let mut score_cache = ScoreCache::default();
        let demand = |size: usize| demand_of(size as u64 + 1, 1, Sharing::Shared, 0);
        let mut ask = |size: usize| {
            score_cache.shortlist(&snapshot, &demand(size), ["n-0"].into_iter(), attempt(&policy))
        };
        let most = *DEMANDS.end();
        (0..most).for_each(|size| drop(ask(size)));
        ask(0);
        ask(most);
        let kept: Vec<u64> = score_cache.pages.iter().map(|page| page.key.per_gpu.0).collect();
        assert_eq!(kept.len(), most);
        assert!(kept.contains(&1) && !kept.contains(&2), "{kept:?}");
    }
}
