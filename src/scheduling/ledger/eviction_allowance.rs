//! How many more pods may be evicted within this minute: over all, on one node, of one tenant. A search takes it as a constraint,
//! so that no set is found which may not be evicted.
//!
//! Counts and comparisons only. Which pods were evicted, and when one of them no longer counts, is the ledger's to know.

use crate::ids::NodeName;
use crate::policy::EvictionRates;
pub use crate::reasons::EvictionLimit;
pub(crate) use crate::reasons::{EvictionScope, LimitedBecause};
use crate::vocabulary::classification::TenantId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

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
    in_all: u32,
    on_nodes: BTreeMap<NodeName, u32>,
    of_tenants: BTreeMap<Option<TenantId>, u32>,
}

/// Whether a set that is larger than a limit counts as within it where nothing else was evicted in the minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LargerSets {
    Refused,
    AloneInAMinute,
}

/// What is left of each limit.
#[derive(Debug, Clone, Copy)]
pub struct EvictionAllowance<'a> {
    pub rates: EvictionRates,
    pub counts: &'a EvictionCounts,
    /// Scopes of which nothing is left, whatever the counts say.
    pub reserved: &'a BTreeSet<ScopeKey>,
    pub larger: LargerSets,
    /// Whether the policy has tenants. Where it has none, pods without a tenant are limited by the cluster and the node only.
    pub has_tenants: bool,
}

impl EvictionCounts {
    pub(super) fn add(&mut self, node: &NodeName, tenant: Option<TenantId>) {
        self.in_all += 1;
        *self.on_nodes.entry(node.clone()).or_default() += 1;
        *self.of_tenants.entry(tenant).or_default() += 1;
    }

    pub(super) fn remove(&mut self, node: &NodeName, tenant: Option<TenantId>) {
        self.in_all = self.in_all.saturating_sub(1);
        decrement(&mut self.on_nodes, node);
        decrement(&mut self.of_tenants, &tenant);
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
    pub(crate) fn left_in_cluster(&self) -> u32 {
        self.left(&ScopeKey::Cluster)
    }

    pub(crate) fn left_on(&self, node: &NodeName) -> u32 {
        // The only lookup that is made for each of many nodes: no key is made for it.
        match self.reserved.is_empty() {
            true => self.left_of(
                self.rates.node,
                self.counts.on_nodes.get(node).copied().unwrap_or(0),
            ),
            false => self.left(&ScopeKey::Node(node.clone())),
        }
    }

    pub(crate) fn left(&self, key: &ScopeKey) -> u32 {
        match self.reserved.contains(key) {
            true => 0,
            false if !self.is_limited(key) => u32::MAX,
            false => self.left_of(self.limit(key), self.used(key)),
        }
    }

    /// The first limit that keeps a set from being evicted, of which so many pods count in each scope.
    pub(crate) fn exceeded(
        &self,
        set: &BTreeMap<ScopeKey, u32>,
    ) -> Option<(ScopeKey, EvictionLimit)> {
        let (key, wanted) = set.iter().find(|(key, wanted)| self.left(key) < **wanted)?;
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

    fn left_of(&self, limit: u32, used: u32) -> u32 {
        match self.larger {
            // A limit of nothing is no limit on large sets: it allows no eviction.
            LargerSets::AloneInAMinute if used == 0 && limit > 0 => u32::MAX,
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
            ScopeKey::Cluster => self.counts.in_all,
            ScopeKey::Tenant(tenant) => self.counts.of_tenants.get(tenant).copied().unwrap_or(0),
            ScopeKey::Node(node) => self.counts.on_nodes.get(node).copied().unwrap_or(0),
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
    pub(crate) fn of(node: &NodeName, tenant: Option<TenantId>) -> [Self; 3] {
        [
            Self::Cluster,
            Self::Tenant(tenant),
            Self::Node(node.clone()),
        ]
    }
}

#[cfg(test)]
mod tests {
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
    fn b10_a_larger_set_is_within_a_limit_of_which_nothing_was_used_and_a_limit_of_nothing_allows_none()
     {
        let mut counts = EvictionCounts::default();
        let reserved = BTreeSet::new();
        fn allowance<'a>(
            counts: &'a EvictionCounts,
            reserved: &'a BTreeSet<ScopeKey>,
            node: u32,
            larger: LargerSets,
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
                larger,
                has_tenants: false,
            }
        }
        let because = |counts: &EvictionCounts, limit, larger, wanted| {
            allowance(counts, &reserved, limit, larger)
                .exceeded(&set(wanted, "n", wanted))
                .map(|(_, limit)| limit.because)
        };
        use LargerSets::{AloneInAMinute, Refused};
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
            allowance(&counts, &reserved, 10, Refused).left(&ScopeKey::Tenant(None)),
            u32::MAX,
            "no tenants"
        );
        counts.remove(&node("n"), None);
        assert_eq!(counts, EvictionCounts::default());
    }

    #[test]
    fn what_is_reserved_is_not_left_to_others() {
        let (counts, reserved) = (
            EvictionCounts::default(),
            BTreeSet::from([ScopeKey::Node(node("n"))]),
        );
        let allowance = EvictionAllowance {
            rates: EvictionRates::default(),
            counts: &counts,
            reserved: &reserved,
            larger: LargerSets::AloneInAMinute,
            has_tenants: true,
        };
        assert_eq!(
            (allowance.left_on(&node("n")), allowance.left_on(&node("m"))),
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
