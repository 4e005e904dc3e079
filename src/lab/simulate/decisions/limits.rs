//! Limits by time, counted a second time: how many pods may be evicted within a minute, and how often a node's list of GPUs may
//! gain some.

use super::oracle::Checked;
use super::record::{Age, KnownState, Record};
use super::tally::DecisionTally;
use super::victims::Leftover;

/// How long an eviction counts, in milliseconds.
const MINUTE: u64 = 60_000;
const RESERVED_FOR: u64 = 6_000;
/// So many gains of a node's list of GPUs may come at once, and one more each ten seconds.
const GAINS_AT_ONCE: u64 = 4;
const GAIN_EVERY: u64 = 10_000;
/// Of more pods on a node not all sets are looked at.
const MOST_VICTIMS: usize = 9;

/// Evictions within a minute, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EvictionLimits {
    pub cluster: u32,
    pub node: u32,
    pub tenant: u32,
}

/// An eviction that was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EvictionRecord {
    at: u64,
    node: u8,
    /// The first namespace is a tenant's, where the policy has one; all other pods are nobody's.
    is_of_tenant: bool,
}

impl Record {
    /// These pods are evicted, as one set.
    pub(crate) fn note_evictions(&mut self, evicted: &[u32]) -> Checked {
        if let Some(why) = self.exceeded_by(evicted) {
            return Err(format!("{evicted:?} are evicted, and {why}"));
        }
        let new: Vec<EvictionRecord> = evicted
            .iter()
            .filter_map(|victim| self.eviction_of(*victim))
            .collect();
        let now = self.now;
        self.evictions.retain(|eviction| eviction.at + MINUTE > now);
        self.evictions.extend(new);
        Ok(())
    }

    /// A process that begins has a whole minute's evictions.
    pub fn forget_evictions(&mut self) {
        self.evictions.clear();
        self.minute_reserved.clear();
    }

    /// Another policy has come into force. Without tenants all pods are nobody's, and what was evicted stays that.
    pub(crate) fn note_tenants(&mut self) {
        self.minute_reserved.clear();
        if self.rules.tenant_limit.is_none() {
            self.evictions
                .iter_mut()
                .for_each(|eviction| eviction.is_of_tenant = false);
        }
    }

    fn eviction_of(&self, victim: u32) -> Option<EvictionRecord> {
        let node = self.told(victim).place()?.node;
        let is_of_tenant =
            self.rules.tenant_limit.is_some() && self.is_of_tenant(self.spec(victim));
        Some(EvictionRecord {
            at: self.now,
            node,
            is_of_tenant,
        })
    }

    /// The limit that keeps these pods from being evicted now. A set that is larger than a limit may leave in a minute in which
    /// nothing else was evicted there.
    pub fn exceeded_by(&self, victims: &[u32]) -> Option<String> {
        let limits = self.rules.eviction_limits?;
        let wanted: Vec<EvictionRecord> = victims
            .iter()
            .filter_map(|victim| self.eviction_of(*victim))
            .collect();
        let recent: Vec<EvictionRecord> = self
            .evictions
            .iter()
            .copied()
            .filter(|eviction| eviction.at + MINUTE > self.now)
            .collect();
        let exceeds = |limit: u32, is_in: &dyn Fn(&EvictionRecord) -> bool| {
            let count = |evictions: &[EvictionRecord]| {
                evictions.iter().filter(|one| is_in(one)).count() as u32
            };
            let (used, wanted) = (count(&recent), count(&wanted));
            let is_alone = used == 0 && limit > 0;
            (used + wanted > limit && wanted > 0 && !is_alone)
                .then(|| format!("{used} were within the minute, where {limit} may be"))
        };
        let of_nodes = || {
            let mut nodes = wanted.iter().map(|eviction| eviction.node);
            nodes.find_map(|node| exceeds(limits.node, &|eviction| eviction.node == node))
        };
        let of_tenants = || {
            let has_tenants = self.rules.tenant_limit.is_some();
            let mut both = [false, true].into_iter().filter(|_| has_tenants);
            both.find_map(|it| exceeds(limits.tenant, &|eviction| eviction.is_of_tenant == it))
        };
        exceeds(limits.cluster, &|_| true)
            .or_else(of_nodes)
            .or_else(of_tenants)
    }

    /// Pods on a node that may be evicted for the pod now, and without which it fits there, where that is simple to see: no earlier
    /// reservation, no group, no budget, no limit of its tenant, no spare GPUs, nothing that becomes free by itself, and nobody for
    /// whom the limits are reserved.
    pub(crate) fn enough_victims(
        &mut self,
        pod: u32,
        node: u8,
        tally: &mut DecisionTally,
    ) -> Option<Vec<u32>> {
        let is_in_doubt = self.pods[pod as usize].was_kept
            || self.is_closed(node)
            || self.age_of(node) == Age::Expired
            || self.allowance(pod, &[]).is_some()
            || self.waits_behind_another(pod);
        let spec = *self.spec(pod);
        if !spec.may_preempt
            || is_in_doubt
            || self.keeps_spare_from(&spec)
            || self.becomes_free(pod)
        {
            return None;
        }
        let goes = |victim: &u32| {
            let spec = self.spec(*victim);
            let budget = self.budgets[usize::from(spec.namespace)][usize::from(spec.app)];
            self.may_be_evicted(*victim, pod).is_ok() && spec.group.is_none() && budget.is_none()
        };
        let here = self.nodes[usize::from(node)].here.iter().copied();
        let mut going: Vec<u32> = here.filter(goes).collect();
        going.sort_unstable();
        let fits_without = |leaving: &[u32]| {
            let views = self.views_after(node, pod, leaving, Leftover::Stays);
            self.takers(&views, &spec, false).count_ones() >= spec.gpus
        };
        if going.is_empty() || going.len() > MOST_VICTIMS {
            return None;
        }
        tally.no_planned_victims += 1;
        if !fits_without(&going) {
            return None;
        }
        let sets = 1..1u32 << going.len();
        let chosen = |set: u32| {
            let is_in = |(place, victim): (usize, &u32)| (set >> place & 1 == 1).then_some(*victim);
            going
                .iter()
                .enumerate()
                .filter_map(is_in)
                .collect::<Vec<u32>>()
        };
        let may_go = |set: &Vec<u32>| self.exceeded_by(set).is_none() && fits_without(set);
        let enough = sets.rev().map(chosen).find(may_go);
        tally.limited += u64::from(enough.is_none());
        enough
    }

    /// For a pod that needs more evictions than a minute has, nothing is evicted for others for a while.
    pub(crate) fn reserve_minute(&mut self, pod: u32) {
        let until = self.now + RESERVED_FOR;
        self.minute_reserved.retain(|(known, _)| *known != pod);
        self.minute_reserved.push((pod, until));
    }

    fn waits_behind_another(&self, pod: u32) -> bool {
        let waits =
            |other: u32| self.told(other) == KnownState::Waiting && self.kept(other).is_none();
        let is_first = |other: u32| self.spec(other).priority >= self.spec(pod).priority;
        let mut reserved = self
            .minute_reserved
            .iter()
            .filter(|(other, until)| *other != pod && *until > self.now);
        reserved.any(|(other, _)| waits(*other) && is_first(*other))
    }

    /// Whether the pod would fit somewhere once pods that have ended have no memory any more: it waits for that.
    fn becomes_free(&mut self, pod: u32) -> bool {
        let spec = *self.spec(pod);
        let fits = |node: u8| {
            let ended = self.nodes[usize::from(node)].departed_pods();
            let views = self.views_after(node, pod, &ended, Leftover::IsGivenBack);
            !ended.is_empty() && self.takers(&views, &spec, false).count_ones() >= spec.gpus
        };
        (0..self.nodes.len() as u8).any(fits)
    }

    /// The list of a node's GPUs gains some only as often as it may.
    pub(crate) fn check_gains(&self, node: u8) -> Checked {
        let gains = &self.nodes[usize::from(node)].gains;
        let allowed = |since: u64| GAINS_AT_ONCE + (self.now - since) / GAIN_EVERY;
        let taken = |place: usize| (gains.len() - place) as u64;
        match (0..gains.len()).find(|place| taken(*place) > allowed(gains[*place])) {
            Some(place) => {
                let (taken, millis) = (taken(place), self.now - gains[place]);
                Err(format!(
                    "GPUs of node {node} come {taken} times within {millis} ms"
                ))
            }
            None => Ok(()),
        }
    }
}
