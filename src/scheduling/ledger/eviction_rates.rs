//! How many pods Stowage has had evicted within the last minute: over all, on a node, of a tenant. Pods that the scheduler evicts
//! because the preempt verb named them count too.
//!
//! Not durable: a replica that begins to lead has a whole minute's allowance. What the counts allow is for
//! [`EvictionAllowance`] to say.

use super::Ledger;
use crate::ids::{NodeName, PodUid};
use crate::ledger::eviction_allowance::{
    EvictionAllowance, EvictionCounts, EvictionLimit, LargerSets, ScopeKey,
};
use crate::policy::Policy;
use crate::units::{Millis, Moment};
use crate::vocabulary::classification::TenantId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const WINDOW: Millis = Millis::seconds(60);
/// A pod that waits is looked at again before that is over.
const RESERVED_FOR: Millis = Millis::seconds(6);
/// A scope is reserved for this long on end, whoever waits: an empty minute, and some looks. For as long after that it is not.
const RESERVED_ON_END: Millis = Millis::seconds(90);
/// Scopes that are reserved at once; more pods that need a whole minute each are not looked at before these have had theirs.
const RESERVED_AT_MOST: usize = 1024;

static NOTHING_RESERVED: BTreeSet<ScopeKey> = BTreeSet::new();

/// Evictions of the last minute, and scopes in which none are ordered for a while.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(from = "StoredEvictions", into = "StoredEvictions")]
pub(super) struct RecentEvictions {
    /// Oldest first.
    recently: VecDeque<RecentEviction>,
    counts: EvictionCounts,
    /// For pods that need a whole minute's evictions.
    reserved: BTreeMap<ScopeKey, ScopeReservation>,
}

/// When one was ordered, where, whose, and of which pod: recordings of earlier builds do not say the last.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RecentEviction(
    Moment,
    NodeName,
    Option<TenantId>,
    #[serde(default)] Option<PodUid>,
);

/// A scope in which nothing is evicted for others, because a pod waits for a minute without evictions.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ScopeReservation {
    by: PodUid,
    priority: i32,
    until: Moment,
    /// When the first of the pods came for which it has been reserved on end, and the highest of their priorities.
    #[serde(default)]
    since: Moment,
    #[serde(default)]
    highest: i32,
}

/// What is stored of recent evictions: the counts follow from it.
#[derive(Serialize, Deserialize)]
struct StoredEvictions {
    /// Recordings call it something else.
    #[serde(rename = "lately")]
    recently: VecDeque<RecentEviction>,
    reserved: Vec<(ScopeKey, ScopeReservation)>,
}

impl From<RecentEvictions> for StoredEvictions {
    fn from(
        RecentEvictions {
            recently, reserved, ..
        }: RecentEvictions,
    ) -> Self {
        Self {
            recently,
            reserved: reserved.into_iter().collect(),
        }
    }
}

impl From<StoredEvictions> for RecentEvictions {
    fn from(stored: StoredEvictions) -> Self {
        let mut loaded = Self {
            reserved: stored.reserved.into_iter().collect(),
            ..Self::default()
        };
        stored
            .recently
            .into_iter()
            .for_each(|eviction| loaded.add(eviction));
        loaded
    }
}

impl RecentEvictions {
    fn add(&mut self, eviction: RecentEviction) {
        self.counts.add(&eviction.1, eviction.2);
        self.recently.push_back(eviction);
    }

    /// What is a minute old counts no longer.
    pub(super) fn forget_until(&mut self, now: Moment) {
        let since = now.before(WINDOW);
        while self
            .recently
            .front()
            .is_some_and(|RecentEviction(when, ..)| *when <= since)
        {
            if let Some(RecentEviction(_, node, tenant, _)) = self.recently.pop_front() {
                self.counts.remove(&node, tenant);
            }
        }
    }

    /// Takes back the latest eviction of the pod.
    fn take_back(&mut self, uid: &PodUid) {
        let found = self
            .recently
            .iter()
            .rposition(|RecentEviction(.., of)| of.as_ref() == Some(uid));
        if let Some(RecentEviction(_, node, tenant, _)) =
            found.and_then(|found| self.recently.remove(found))
        {
            self.counts.remove(&node, tenant);
        }
    }

    /// Tenants are known by their places in a policy: brings all of them to their places in another one.
    pub(super) fn move_to(&mut self, before: &Policy, after: &Policy) {
        let of = |tenant: Option<TenantId>| {
            let name = &before.tenant(tenant?)?.name;
            after
                .tenant_ids()
                .find(|id| after.tenant(*id).is_some_and(|tenant| tenant.name == *name))
        };
        // Scopes that are reserved name tenants of the old policy: they go.
        let recently = std::mem::take(self).recently;
        recently
            .into_iter()
            .for_each(|RecentEviction(when, node, tenant, uid)| {
                self.add(RecentEviction(when, node, of(tenant), uid));
            });
    }
}

impl Ledger {
    /// Whether these pods may be evicted now. One that leaves anyway is not evicted.
    pub fn may_order(&self, victims: &[PodUid]) -> bool {
        self.exceeded_by(victims, &NOTHING_RESERVED).is_none()
    }

    /// Whether one more pod may be evicted now, after `ordered`, which no limit counts yet. Together they may not exceed a limit,
    /// even in a minute in which nothing else is evicted.
    pub(crate) fn may_order_after(&self, ordered: &[PodUid], uid: &PodUid) -> bool {
        let wanted = self.by_scope(ordered.iter().chain([uid]));
        self.eviction_allowance(LargerSets::Refused, &NOTHING_RESERVED)
            .exceeded(&wanted)
            .is_none()
    }

    /// The limit that keeps these pods from being evicted now.
    pub(crate) fn eviction_limit(&self, victims: &[PodUid]) -> Option<EvictionLimit> {
        self.exceeded_by(victims, &NOTHING_RESERVED)
            .map(|(_, limit)| limit)
    }

    /// The same, with the scope it concerns, where some scopes are reserved.
    pub(crate) fn exceeded_by(
        &self,
        victims: &[PodUid],
        reserved: &BTreeSet<ScopeKey>,
    ) -> Option<(ScopeKey, EvictionLimit)> {
        let wanted = self.by_scope(victims);
        self.eviction_allowance(LargerSets::AloneInAMinute, reserved)
            .exceeded(&wanted)
    }

    /// How many of these pods count in each scope.
    fn by_scope<'v>(
        &self,
        victims: impl IntoIterator<Item = &'v PodUid>,
    ) -> BTreeMap<ScopeKey, u32> {
        let mut wanted: BTreeMap<ScopeKey, u32> = BTreeMap::new();
        for (node, tenant) in victims
            .into_iter()
            .filter_map(|uid| self.stays_on_node(uid))
        {
            ScopeKey::of(&node, tenant)
                .into_iter()
                .for_each(|key| *wanted.entry(key).or_default() += 1);
        }
        wanted
    }

    /// How many more pods may be evicted now.
    pub(crate) fn eviction_allowance<'l>(
        &'l self,
        larger: LargerSets,
        reserved: &'l BTreeSet<ScopeKey>,
    ) -> EvictionAllowance<'l> {
        EvictionAllowance {
            rates: self.policy.preemption.evictions_per_minute,
            counts: &self.evictions.counts,
            reserved,
            larger,
            has_tenants: !self.policy.tenants().is_empty(),
        }
    }

    /// These pods are to be evicted.
    pub(crate) fn note_ordered(&mut self, victims: &[PodUid]) {
        for uid in victims {
            if let Some((node, tenant)) = self.stays_on_node(uid) {
                self.evictions
                    .add(RecentEviction(self.now, node, tenant, Some(uid.clone())));
            }
        }
    }

    /// These evictions were not made.
    pub(crate) fn take_back_ordered(&mut self, victims: &[PodUid]) {
        victims.iter().for_each(|uid| self.evictions.take_back(uid));
    }

    /// The pod needs more evictions at once than the scope's limit: for a while nothing is evicted there for others of no higher
    /// priority, so that there is an empty minute.
    pub(crate) fn reserve_scope(&mut self, scope: ScopeKey, uid: &PodUid) {
        let Some(priority) = self
            .pod_states
            .get(uid)
            .map(|pod_state| pod_state.demand.priority)
        else {
            return;
        };
        let now = self.now;
        let reserved = &mut self.evictions.reserved;
        reserved.retain(|_, reserved| now < reserved.since + RESERVED_ON_END + RESERVED_ON_END);
        let (since, highest) = match reserved.get(&scope) {
            Some(known) if priority <= known.highest => (known.since, known.highest),
            _ => (now, priority),
        };
        let is_first = |known: &ScopeReservation| {
            known.by == *uid || known.priority < priority || known.until <= now
        };
        let has_room = || {
            reserved
                .values()
                .filter(|reserved| reserved.until > now)
                .count()
                < RESERVED_AT_MOST
        };
        let is_free = reserved.get(&scope).map_or_else(has_room, is_first);
        if is_free && now < since + RESERVED_ON_END {
            let (by, until) = (uid.clone(), now + RESERVED_FOR);
            reserved.insert(
                scope,
                ScopeReservation {
                    by,
                    priority,
                    until,
                    since,
                    highest,
                },
            );
        }
    }

    /// Scopes in which nothing is evicted for a pod, because they are reserved for another one that still waits.
    pub(crate) fn reserved_from(&self, uid: &PodUid, priority: i32) -> BTreeSet<ScopeKey> {
        let waits = |uid: &PodUid| {
            self.pod_states
                .waiting(uid)
                .is_some_and(|waiting| waiting.reservation.is_none())
        };
        let is_for_another = |reserved: &ScopeReservation| {
            reserved.by != *uid
                && reserved.priority >= priority
                && reserved.until > self.now
                && waits(&reserved.by)
        };
        let reserved = self
            .evictions
            .reserved
            .iter()
            .filter(|(_, reserved)| is_for_another(reserved));
        reserved.map(|(scope, _)| scope.clone()).collect()
    }

    /// The node and the tenant of a pod that stays unless it is evicted.
    fn stays_on_node(&self, uid: &PodUid) -> Option<(NodeName, Option<TenantId>)> {
        let Some(pod_state) = self.pod_states.get(uid) else {
            return Some((self.ungranted(uid)?.0.clone(), None));
        };
        let bound = pod_state.bound().filter(|_| self.stays(pod_state))?;
        Some((bound.node.clone(), pod_state.demand.tenant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evictions_in_recordings_that_name_no_pod_count() {
        let stored = serde_json::json!({ "lately": [[5_000, "n", null], [6_000, "n", null, "a"]], "reserved": [] });
        let mut loaded: RecentEvictions = serde_json::from_value(stored).unwrap();
        loaded.take_back(&PodUid::parse("b").unwrap());
        assert_eq!(loaded.recently.len(), 2);
        loaded.take_back(&PodUid::parse("a").unwrap());
        loaded.forget_until(Moment(5_000) + WINDOW);
        assert_eq!(loaded.counts, EvictionCounts::default());
    }
}
