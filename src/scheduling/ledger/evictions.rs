//! Evictions of the last minutes: how many, whose, and which came to nothing. Which pods are worth evicting is not known here.
//!
//! - [`RecentEvictions`]: those of the last minute: over all, on a node, of a tenant. Pods that the scheduler evicts because the
//!   preempt verb named them count too. [`EvictionAllowance`] is how many more there may be: a search takes it as a constraint, so
//!   that no set is found which may not be evicted.
//! - [`OwnerEvictions`]: recent evictions by owner. The planner prefers victims whose owner lost no pod recently.
//! - [`EvictionRefusal`]: an admission webhook denied it, or the pod is protected now: the pod is no victim for a while.
//!
//! None of it is durable: a new leader has a whole minute's allowance, and tries each refused pod once more.

use super::Ledger;
use super::pod_state::PodPhase;
use crate::ids::{NodeName, OwnerUid, PodUid};
use crate::policy::{EvictionRates, Policy};
pub use crate::reasons::EvictionLimit;
pub(crate) use crate::reasons::{EvictionScope, LimitedBecause};
use crate::units::{Millis, Moment};
use crate::vocabulary::classification::TenantId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// The time over which evictions are counted: rates are per minute (`preemption.evictionsPerMinute`).
const EVICTION_RATE_WINDOW: Millis = Millis::seconds(60);
/// How long a scope stays reserved unless it is reserved again: a waiting pod is checked again before that.
const SCOPE_RESERVATION_TIME: Millis = Millis::seconds(6);
/// The longest that a scope stays reserved without a break: an empty minute, and some checks. Then it is free for as long.
const MAX_SCOPE_RESERVATION_TIME: Millis = Millis::seconds(90);
/// The most scopes that are reserved at once: further pods that need a whole minute's evictions wait for one of these to end.
const MAX_RESERVED_SCOPES: usize = 1024;

static NO_RESERVED_SCOPES: BTreeSet<ScopeKey> = BTreeSet::new();

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

/// One eviction: when it was ordered, the node, the tenant, and the pod, which recordings of earlier builds do not name.
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

    /// Removes evictions that are older than a minute.
    pub(super) fn remove_expired(&mut self, now: Moment) {
        let since = now.before(EVICTION_RATE_WINDOW);
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

    /// Removes the latest eviction of the pod, because it was not made.
    fn remove_latest(&mut self, uid: &PodUid) {
        let found = self
            .recently
            .iter()
            .rposition(|RecentEviction(.., evicted)| evicted.as_ref() == Some(uid));
        if let Some(RecentEviction(_, node, tenant, _)) =
            found.and_then(|found| self.recently.remove(found))
        {
            self.counts.remove(&node, tenant);
        }
    }

    /// Replaces tenants' indices in one policy by their indices in the next.
    pub(super) fn map_tenants(&mut self, before: &Policy, after: &Policy) {
        let tenant_after = |tenant: Option<TenantId>| {
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
                self.add(RecentEviction(when, node, tenant_after(tenant), uid));
            });
    }
}

impl Ledger {
    /// Whether the eviction rates allow to evict these pods now. Pods that leave anyway do not count.
    pub fn is_within_eviction_rates(&self, victims: &[PodUid]) -> bool {
        self.exceeded_limit(victims, &NO_RESERVED_SCOPES).is_none()
    }

    /// Whether one more pod may be evicted now, after `ordered`, which no limit counts yet. Together they may not exceed a limit,
    /// even in a minute in which nothing else is evicted.
    pub(crate) fn is_within_eviction_rates_after(&self, ordered: &[PodUid], uid: &PodUid) -> bool {
        let wanted = self.count_by_scope(ordered.iter().chain([uid]));
        self.eviction_allowance(OversizedSets::Refused, &NO_RESERVED_SCOPES)
            .exceeded(&wanted)
            .is_none()
    }

    /// The limit that keeps these pods from being evicted now.
    pub(crate) fn eviction_limit(&self, victims: &[PodUid]) -> Option<EvictionLimit> {
        self.exceeded_limit(victims, &NO_RESERVED_SCOPES)
            .map(|(_, limit)| limit)
    }

    /// The limit that keeps these pods from being evicted now, and its scope, where some scopes are reserved.
    pub(crate) fn exceeded_limit(
        &self,
        victims: &[PodUid],
        reserved: &BTreeSet<ScopeKey>,
    ) -> Option<(ScopeKey, EvictionLimit)> {
        let wanted = self.count_by_scope(victims);
        self.eviction_allowance(OversizedSets::AloneInAMinute, reserved)
            .exceeded(&wanted)
    }

    /// How many of these pods count in each scope.
    fn count_by_scope<'v>(
        &self,
        victims: impl IntoIterator<Item = &'v PodUid>,
    ) -> BTreeMap<ScopeKey, u32> {
        let mut wanted: BTreeMap<ScopeKey, u32> = BTreeMap::new();
        for (node, tenant) in victims
            .into_iter()
            .filter_map(|uid| self.node_and_tenant_of(uid))
        {
            ScopeKey::scopes_of(&node, tenant)
                .into_iter()
                .for_each(|key| *wanted.entry(key).or_default() += 1);
        }
        wanted
    }

    /// How many more pods may be evicted now.
    pub(crate) fn eviction_allowance<'l>(
        &'l self,
        oversized_sets: OversizedSets,
        reserved: &'l BTreeSet<ScopeKey>,
    ) -> EvictionAllowance<'l> {
        EvictionAllowance {
            rates: self.policy.preemption.evictions_per_minute,
            counts: &self.evictions.counts,
            reserved,
            oversized_sets,
            has_tenants: !self.policy.tenants().is_empty(),
        }
    }

    /// Counts the eviction of these pods, which is ordered now.
    pub(crate) fn record_evictions(&mut self, victims: &[PodUid]) {
        for uid in victims {
            if let Some((node, tenant)) = self.node_and_tenant_of(uid) {
                self.evictions
                    .add(RecentEviction(self.now, node, tenant, Some(uid.clone())));
            }
        }
    }

    /// Uncounts the eviction of these pods, which was not made.
    pub(crate) fn take_back_evictions(&mut self, victims: &[PodUid]) {
        victims
            .iter()
            .for_each(|uid| self.evictions.remove_latest(uid));
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
        reserved.retain(|_, reserved| {
            now < reserved.since + MAX_SCOPE_RESERVATION_TIME + MAX_SCOPE_RESERVATION_TIME
        });
        let (since, highest) = match reserved.get(&scope) {
            Some(reservation) if priority <= reservation.highest => {
                (reservation.since, reservation.highest)
            }
            _ => (now, priority),
        };
        let is_first = |reservation: &ScopeReservation| {
            reservation.by == *uid || reservation.priority < priority || reservation.until <= now
        };
        let has_free_slot = || {
            reserved
                .values()
                .filter(|reserved| reserved.until > now)
                .count()
                < MAX_RESERVED_SCOPES
        };
        let is_free = reserved.get(&scope).map_or_else(has_free_slot, is_first);
        if is_free && now < since + MAX_SCOPE_RESERVATION_TIME {
            let (by, until) = (uid.clone(), now + SCOPE_RESERVATION_TIME);
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
    pub(crate) fn scopes_reserved_for_others(
        &self,
        uid: &PodUid,
        priority: i32,
    ) -> BTreeSet<ScopeKey> {
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

    /// The node and the tenant of a pod that stays there unless it is evicted; `None` for any other.
    fn node_and_tenant_of(&self, uid: &PodUid) -> Option<(NodeName, Option<TenantId>)> {
        let Some(pod_state) = self.pod_states.get(uid) else {
            return Some((self.ungranted_overuse(uid)?.0.clone(), None));
        };
        let bound = pod_state.bound().filter(|_| self.is_staying(pod_state))?;
        Some((bound.node.clone(), pod_state.demand.tenant))
    }
}

/// One scope by name: its own count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ScopeKey {
    Cluster,
    Tenant(Option<TenantId>),
    Node(NodeName),
}

/// Evictions of the last minute, counted by scope.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EvictionCounts {
    total: u32,
    by_node: BTreeMap<NodeName, u32>,
    by_tenant: BTreeMap<Option<TenantId>, u32>,
}

/// Whether a set that is larger than a limit counts as within it where nothing else was evicted in the minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OversizedSets {
    Refused,
    AloneInAMinute,
}

/// What remains of each eviction limit.
#[derive(Debug, Clone, Copy)]
pub struct EvictionAllowance<'a> {
    pub rates: EvictionRates,
    pub counts: &'a EvictionCounts,
    /// Scopes of which nothing is left, whatever the counts say.
    pub reserved: &'a BTreeSet<ScopeKey>,
    pub oversized_sets: OversizedSets,
    /// Whether the policy has tenants. Where it has none, pods without a tenant are limited by the cluster and the node only.
    pub has_tenants: bool,
}

impl EvictionCounts {
    pub(super) fn add(&mut self, node: &NodeName, tenant: Option<TenantId>) {
        self.total += 1;
        *self.by_node.entry(node.clone()).or_default() += 1;
        *self.by_tenant.entry(tenant).or_default() += 1;
    }

    pub(super) fn remove(&mut self, node: &NodeName, tenant: Option<TenantId>) {
        self.total = self.total.saturating_sub(1);
        decrement(&mut self.by_node, node);
        decrement(&mut self.by_tenant, &tenant);
    }
}

fn decrement<K: Ord>(counts: &mut BTreeMap<K, u32>, key: &K) {
    match counts.get_mut(key) {
        Some(count) if *count > 1 => *count -= 1,
        _ => {
            counts.remove(key);
        }
    }
}

impl EvictionAllowance<'_> {
    pub(crate) fn remaining_in_cluster(&self) -> u32 {
        self.remaining(&ScopeKey::Cluster)
    }

    pub(crate) fn remaining_on(&self, node: &NodeName) -> u32 {
        // The only lookup that is made for each of many nodes: no key is made for it.
        match self.reserved.is_empty() {
            true => self.remaining_of(
                self.rates.node,
                self.counts.by_node.get(node).copied().unwrap_or(0),
            ),
            false => self.remaining(&ScopeKey::Node(node.clone())),
        }
    }

    pub(crate) fn remaining(&self, key: &ScopeKey) -> u32 {
        match self.reserved.contains(key) {
            true => 0,
            false if !self.is_limited(key) => u32::MAX,
            false => self.remaining_of(self.limit(key), self.used(key)),
        }
    }

    /// The first limit that keeps a set from being evicted, of which so many pods count in each scope.
    pub(crate) fn exceeded(
        &self,
        set: &BTreeMap<ScopeKey, u32>,
    ) -> Option<(ScopeKey, EvictionLimit)> {
        let (key, wanted) = set
            .iter()
            .find(|(key, wanted)| self.remaining(key) < **wanted)?;
        let per_minute = self.limit(key);
        let because = match self.reserved.contains(key) {
            true => LimitedBecause::Reserved,
            false if *wanted > per_minute && per_minute > 0 => LimitedBecause::SetIsLarger,
            false => LimitedBecause::UsedUp,
        };
        Some((
            key.clone(),
            EvictionLimit {
                scope: key.scope(),
                per_minute,
                because,
            },
        ))
    }

    fn remaining_of(&self, limit: u32, used: u32) -> u32 {
        match self.oversized_sets {
            // A limit of nothing is no limit on large sets: it allows no eviction.
            OversizedSets::AloneInAMinute if used == 0 && limit > 0 => u32::MAX,
            _ => limit.saturating_sub(used),
        }
    }

    fn is_limited(&self, key: &ScopeKey) -> bool {
        self.has_tenants || !matches!(key, ScopeKey::Tenant(_))
    }

    fn limit(&self, key: &ScopeKey) -> u32 {
        match key {
            ScopeKey::Cluster => self.rates.cluster,
            ScopeKey::Tenant(_) => self.rates.tenant,
            ScopeKey::Node(_) => self.rates.node,
        }
    }

    fn used(&self, key: &ScopeKey) -> u32 {
        match key {
            ScopeKey::Cluster => self.counts.total,
            ScopeKey::Tenant(tenant) => self.counts.by_tenant.get(tenant).copied().unwrap_or(0),
            ScopeKey::Node(node) => self.counts.by_node.get(node).copied().unwrap_or(0),
        }
    }
}

impl ScopeKey {
    fn scope(&self) -> EvictionScope {
        match self {
            Self::Cluster => EvictionScope::Cluster,
            Self::Tenant(_) => EvictionScope::Tenant,
            Self::Node(_) => EvictionScope::Node,
        }
    }

    /// The scopes in which the eviction of one pod counts.
    pub(crate) fn scopes_of(node: &NodeName, tenant: Option<TenantId>) -> [Self; 3] {
        [
            Self::Cluster,
            Self::Tenant(tenant),
            Self::Node(node.clone()),
        ]
    }
}

/// Evictions that are remembered at most, over all owners; the oldest are forgotten first. At the usual limit of sixty a minute
/// it is more than a day's.
const MAX_REMEMBERED_EVICTIONS: usize = 100_000;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(
    from = "VecDeque<(Moment, OwnerUid)>",
    into = "VecDeque<(Moment, OwnerUid)>"
)]
pub(super) struct OwnerEvictions {
    /// Oldest first.
    when: VecDeque<(Moment, OwnerUid)>,
    count: BTreeMap<OwnerUid, u64>,
}

impl Ledger {
    /// Counts an eviction for the pod's owner, whose other pods are spared for a while. Call it before the pod is released.
    /// The pod was evicted, or will be.
    pub(crate) fn record_owner_eviction(&mut self, uid: &PodUid) {
        let now = self.now;
        self.forget_old_evictions();
        if let Some(owner) = self
            .pod_states
            .get(uid)
            .and_then(|pod_state| pod_state.disruption_info.owner.clone())
        {
            Arc::make_mut(&mut self.owner_evictions).add(now, owner);
        }
    }

    /// How many pods of that owner were evicted within `preemption.costs.again_within`.
    pub(crate) fn recent_evictions_of(&self, owner: &OwnerUid) -> u64 {
        if !self.owner_evictions.count.contains_key(owner) {
            return 0;
        }
        let since = self.now.before(self.policy.preemption.costs.again_within);
        let recently = self
            .owner_evictions
            .when
            .iter()
            .rev()
            .take_while(|(when, _)| *when > since);
        recently
            .filter(|(_, evicted_owner)| evicted_owner == owner)
            .count() as u64
    }

    fn forget_old_evictions(&mut self) {
        let since = self.now.before(self.policy.preemption.costs.again_within);
        while self
            .owner_evictions
            .when
            .front()
            .is_some_and(|(when, _)| *when <= since)
        {
            Arc::make_mut(&mut self.owner_evictions).forget_oldest();
        }
    }
}

impl From<OwnerEvictions> for VecDeque<(Moment, OwnerUid)> {
    fn from(evictions: OwnerEvictions) -> Self {
        evictions.when
    }
}

impl From<VecDeque<(Moment, OwnerUid)>> for OwnerEvictions {
    fn from(stored: VecDeque<(Moment, OwnerUid)>) -> Self {
        let mut loaded = Self::default();
        stored
            .into_iter()
            .for_each(|(when, owner)| loaded.add(when, owner));
        loaded
    }
}

impl OwnerEvictions {
    fn add(&mut self, now: Moment, owner: OwnerUid) {
        if self.when.len() >= MAX_REMEMBERED_EVICTIONS {
            self.forget_oldest();
        }
        *self.count.entry(owner.clone()).or_default() += 1;
        self.when.push_back((now, owner));
    }

    fn forget_oldest(&mut self) {
        let Some((_, owner)) = self.when.pop_front() else {
            return;
        };
        match self.count.get_mut(&owner) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(self.count.remove(&owner)),
        }
    }
}

/// How long the first refused eviction excludes a pod from victims; each further one excludes it for twice as long.
const FIRST_EXCLUSION_TIME: Millis = Millis::seconds(30);
/// The longest such exclusion, so that a pod that may be evictable by now is tried again.
const MAX_EXCLUSION_TIME: Millis = Millis::seconds(600);

/// Why a pod could not be evicted, and how long that counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionRefusal {
    pub why: Arc<str>,
    at: Moment,
    times: u32,
    pub until: Moment,
}

impl EvictionRefusal {
    fn new(why: &str, at: Moment, times: u32) -> Self {
        Self {
            why: why.into(),
            at,
            times,
            until: at
                + FIRST_EXCLUSION_TIME
                    .times(1 << (times - 1).min(16))
                    .min(MAX_EXCLUSION_TIME),
        }
    }

    /// Shortens the exclusion, because the pod has changed and may be evictable by now, but not below a minimum: if many pods that
    /// change all the time were the cheapest, a search would never reach the others.
    pub(super) fn shorten(&mut self) {
        self.until = self
            .until
            .min(self.at + FIRST_EXCLUSION_TIME.times(self.times.into()));
    }
}

impl Ledger {
    /// Records that the pod's eviction was refused. A refusal while an earlier one counts changes nothing.
    pub(crate) fn record_eviction_refusal(&mut self, uid: &PodUid, why: &str) {
        let now = self.now;
        self.pod_states.edit_without_move(uid, |pod_state| {
            if let PodPhase::Bound(bound) = &mut pod_state.phase
                && bound
                    .eviction_refusal
                    .as_ref()
                    .is_none_or(|refusal| refusal.until <= now)
            {
                let times = bound
                    .eviction_refusal
                    .as_ref()
                    .map_or(0, |refusal| refusal.times);
                let refusal = EvictionRefusal::new(why, now, times.saturating_add(1));
                bound.eviction_refusal = Some(Box::new(refusal));
            }
        });
    }
}

#[cfg(test)]
mod eviction_rates_tests {
    use super::*;

    #[test]
    fn stored_evictions_without_a_pod_are_loaded_and_counted() {
        let stored = serde_json::json!({ "lately": [[5_000, "n", null], [6_000, "n", null, "a"]], "reserved": [] });
        let mut loaded: RecentEvictions = serde_json::from_value(stored).unwrap();
        loaded.remove_latest(&PodUid::parse("b").unwrap());
        assert_eq!(loaded.recently.len(), 2);
        loaded.remove_latest(&PodUid::parse("a").unwrap());
        loaded.remove_expired(Moment(5_000) + EVICTION_RATE_WINDOW);
        assert_eq!(loaded.counts, EvictionCounts::default());
    }
}

#[cfg(test)]
mod eviction_allowance_tests {
    use super::*;
    use crate::testkit::node;

    fn set(cluster: u32, on: &str, here: u32) -> BTreeMap<ScopeKey, u32> {
        [
            (ScopeKey::Cluster, cluster),
            (ScopeKey::Node(node(on)), here),
        ]
        .into()
    }

    #[test]
    fn a_set_larger_than_the_limit_is_allowed_only_if_nothing_else_was_evicted_in_the_minute() {
        let mut counts = EvictionCounts::default();
        let reserved = BTreeSet::new();
        fn allowance<'a>(
            counts: &'a EvictionCounts,
            reserved: &'a BTreeSet<ScopeKey>,
            node: u32,
            larger: OversizedSets,
        ) -> EvictionAllowance<'a> {
            let rates = EvictionRates {
                cluster: 60,
                node,
                tenant: 30,
            };
            EvictionAllowance {
                rates,
                counts,
                reserved,
                oversized_sets: larger,
                has_tenants: false,
            }
        }
        let because = |counts: &EvictionCounts, limit, larger, wanted| {
            allowance(counts, &reserved, limit, larger)
                .exceeded(&set(wanted, "n", wanted))
                .map(|(_, limit)| limit.because)
        };
        use OversizedSets::{AloneInAMinute, Refused};
        assert_eq!(because(&counts, 10, AloneInAMinute, 12), None);
        assert_eq!(
            because(&counts, 10, Refused, 12),
            Some(LimitedBecause::SetIsLarger)
        );
        assert_eq!(
            because(&counts, 0, AloneInAMinute, 1),
            Some(LimitedBecause::UsedUp)
        );
        counts.add(&node("n"), None);
        assert_eq!(
            because(&counts, 10, AloneInAMinute, 12),
            Some(LimitedBecause::SetIsLarger)
        );
        assert_eq!(
            because(&counts, 10, AloneInAMinute, 10),
            Some(LimitedBecause::UsedUp)
        );
        assert_eq!(because(&counts, 10, AloneInAMinute, 9), None);
        assert_eq!(
            allowance(&counts, &reserved, 10, Refused).remaining(&ScopeKey::Tenant(None)),
            u32::MAX,
            "no tenants"
        );
        counts.remove(&node("n"), None);
        assert_eq!(counts, EvictionCounts::default());
    }

    #[test]
    fn a_scope_reserved_for_another_pod_has_no_allowance_left() {
        let (counts, reserved) = (
            EvictionCounts::default(),
            BTreeSet::from([ScopeKey::Node(node("n"))]),
        );
        let allowance = EvictionAllowance {
            rates: EvictionRates::default(),
            counts: &counts,
            reserved: &reserved,
            oversized_sets: OversizedSets::AloneInAMinute,
            has_tenants: true,
        };
        assert_eq!(
            (
                allowance.remaining_on(&node("n")),
                allowance.remaining_on(&node("m"))
            ),
            (0, u32::MAX)
        );
        let (key, limit) = allowance.exceeded(&set(1, "n", 1)).unwrap();
        assert_eq!(
            (key, limit.because),
            (ScopeKey::Node(node("n")), LimitedBecause::Reserved)
        );
        assert!(
            limit
                .to_string()
                .contains("10 a minute on one node (preemption.evictionsPerMinute.node)")
        );
    }
}

#[cfg(test)]
mod refused_evictions_tests {
    use super::*;

    #[test]
    fn each_eviction_refusal_doubles_the_exclusion_and_a_pod_change_shortens_it() {
        let at = Moment(1_000_000);
        let seconds = |times: u32, changes: bool| {
            let mut refusal = EvictionRefusal::new("no", at, times);
            if changes {
                refusal.shorten();
            }
            refusal.until.since(at).0 / 1000
        };
        assert_eq!(
            [1, 2, 3, 4, 5, 6, u32::MAX].map(|n| seconds(n, false)),
            [30, 60, 120, 240, 480, 600, 600]
        );
        assert_eq!(
            [1, 2, 3, 4, 5, 20, 21].map(|n| seconds(n, true)),
            [30, 60, 90, 120, 150, 600, 600]
        );
    }
}
