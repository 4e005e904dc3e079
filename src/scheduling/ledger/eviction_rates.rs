//! How many pods Stowage has had evicted within the last minute: over all, on a node, of a tenant. Those count too that the
//! scheduler evicts because the preempt verb named them.
//!
//! Not durable: a replica that begins to lead has a minute's evictions before it. What the counts allow is for
//! [`EvictionAllowance`] to say.

use super::Ledger;
use super::pod_state::{PodPhase, WaitingPod};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::ledger::eviction_allowance::{
    EvictionAllowance, EvictionCounts, EvictionLimit, LargerSets, ScopeKey,
};
use crate::scheduling::policy::Policy;
use crate::scheduling::vocabulary::classification::TenantId;
use crate::units::{Millis, Moment};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const WINDOW: Millis = Millis::seconds(60);
/// A pod that waits is looked at again before that is over.
const RESERVED_FOR: Millis = Millis::seconds(6);
/// Scopes that are reserved at once; more pods that need a whole minute each are not looked at before these have had theirs.
const RESERVED_AT_MOST: usize = 1024;

static NOTHING_RESERVED: BTreeSet<ScopeKey> = BTreeSet::new();

/// Evictions of the last minute, oldest first, and their counts.
#[derive(Debug, Clone, Default)]
pub(super) struct RecentEvictions {
    lately: VecDeque<(Moment, NodeName, Option<TenantId>)>,
    counts: EvictionCounts,
}

/// A scope in which nothing is evicted for others, because a pod waits for a minute in which nothing is.
#[derive(Debug, Clone)]
pub(super) struct ScopeReservation {
    by: PodUid,
    priority: i32,
    until: Moment,
}

impl RecentEvictions {
    fn add(&mut self, now: Moment, node: NodeName, tenant: Option<TenantId>) {
        self.counts.add(&node, tenant);
        self.lately.push_back((now, node, tenant));
    }

    /// What is a minute old counts no longer.
    pub fn forget_until(&mut self, now: Moment) {
        let since = now.before(WINDOW);
        while self.lately.front().is_some_and(|(when, ..)| *when <= since) {
            if let Some((_, node, tenant)) = self.lately.pop_front() {
                self.counts.remove(&node, tenant);
            }
        }
    }

    /// Tenants are known by their places in a policy: these are the same tenants' places in another one.
    pub fn move_to(&mut self, before: &Policy, after: &Policy) {
        let of = |tenant: Option<TenantId>| {
            let name = &before.tenant(tenant?)?.name;
            after.tenant_ids().find(|id| after.tenant(*id).is_some_and(|tenant| tenant.name == *name))
        };
        let lately = std::mem::take(self).lately;
        lately.into_iter().for_each(|(when, node, tenant)| self.add(when, node, of(tenant)));
    }
}

impl Ledger {
    /// Whether so many more may be evicted now. Who leaves anyway is not evicted.
    pub fn may_order(&self, victims: &[PodUid]) -> bool {
        self.exceeded_by(victims, &NOTHING_RESERVED).is_none()
    }

    /// The limit that keeps these from being evicted now.
    pub fn eviction_limit(&self, victims: &[PodUid]) -> Option<EvictionLimit> {
        self.exceeded_by(victims, &NOTHING_RESERVED).map(|(_, limit)| limit)
    }

    /// The same, with the scope it concerns, where some scopes are reserved.
    pub fn exceeded_by(
        &self,
        victims: &[PodUid],
        reserved: &BTreeSet<ScopeKey>,
    ) -> Option<(ScopeKey, EvictionLimit)> {
        let mut wanted: BTreeMap<ScopeKey, u32> = BTreeMap::new();
        for (node, tenant) in victims.iter().filter_map(|uid| self.stays_on_node(uid)) {
            ScopeKey::of(&node, tenant).into_iter().for_each(|key| *wanted.entry(key).or_default() += 1);
        }
        self.eviction_allowance(LargerSets::AloneInAMinute, reserved).exceeded(&wanted)
    }

    /// How many more may be evicted now.
    pub fn eviction_allowance<'l>(
        &'l self,
        larger: LargerSets,
        reserved: &'l BTreeSet<ScopeKey>,
    ) -> EvictionAllowance<'l> {
        EvictionAllowance {
            rates: self.policy.eviction_rates,
            counts: &self.ordered.counts,
            reserved,
            larger,
            has_tenants: !self.policy.tenants().is_empty(),
        }
    }

    /// They are to be evicted.
    pub(in crate::scheduling) fn note_ordered(&mut self, victims: &[PodUid]) {
        let new: Vec<(NodeName, Option<TenantId>)> =
            victims.iter().filter_map(|uid| self.stays_on_node(uid)).collect();
        let now = self.now;
        new.into_iter().for_each(|(node, tenant)| self.ordered.add(now, node, tenant));
    }

    /// They stay after all.
    pub(in crate::scheduling) fn take_back_ordered(&mut self, victims: &[PodUid]) {
        for (on, of) in victims.iter().filter_map(|uid| self.stays_on_node(uid)).collect::<Vec<_>>() {
            let is_it = |(when, node, tenant): &(Moment, NodeName, Option<TenantId>)| {
                (*when, node, *tenant) == (self.now, &on, of)
            };
            if let Some(found) = self.ordered.lately.iter().rposition(is_it) {
                self.ordered.lately.remove(found);
                self.ordered.counts.remove(&on, of);
            }
        }
    }

    /// The pod needs more evictions at once than the scope's limit: for a while nothing is evicted there for others of no higher
    /// priority, so that there is an empty minute.
    pub(in crate::scheduling) fn reserve_scope(&mut self, scope: ScopeKey, uid: &PodUid) {
        let Some(priority) = self.pod_states.get(uid).map(|pod_state| pod_state.demand.priority) else {
            return;
        };
        let now = self.now;
        self.reserved.retain(|_, reserved| reserved.until > now);
        let is_first = |known: &ScopeReservation| known.by == *uid || known.priority < priority;
        if self.reserved.len() < RESERVED_AT_MOST && self.reserved.get(&scope).is_none_or(is_first) {
            self.reserved
                .insert(scope, ScopeReservation { by: uid.clone(), priority, until: now + RESERVED_FOR });
        }
    }

    /// Scopes in which nothing is evicted for a pod, because they are reserved for another one that still waits.
    pub fn reserved_from(&self, uid: &PodUid, priority: i32) -> BTreeSet<ScopeKey> {
        let waits = |uid: &PodUid| {
            let phase = self.pod_states.get(uid).map(|pod_state| &pod_state.phase);
            matches!(phase, Some(PodPhase::Waiting(WaitingPod { reservation: None, .. })))
        };
        let is_for_another = |reserved: &ScopeReservation| {
            reserved.by != *uid
                && reserved.priority >= priority
                && reserved.until > self.now
                && waits(&reserved.by)
        };
        let reserved = self.reserved.iter().filter(|(_, reserved)| is_for_another(reserved));
        reserved.map(|(scope, _)| scope.clone()).collect()
    }

    /// Where a pod is that is not leaving, and whose it is.
    fn stays_on_node(&self, uid: &PodUid) -> Option<(NodeName, Option<TenantId>)> {
        let pod_state = self.pod_states.get(uid)?;
        match &pod_state.phase {
            PodPhase::Bound(bound) if bound.leaving.is_none() => {
                Some((bound.node.clone(), pod_state.demand.tenant))
            }
            _ => None,
        }
    }
}
