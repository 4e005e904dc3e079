//! How many pods Stowage has had evicted within the last minute: over all, on a node, of a tenant. Those count too that the
//! scheduler evicts because the preempt verb named them.
//!
//! Not durable: a replica that begins to lead has a minute's evictions before it.

use super::Ledger;
use super::entry::Phase;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::policy::{EvictionRates, TenantId};
use crate::units::{Millis, Moment};
use std::collections::VecDeque;

const WINDOW: Millis = Millis::seconds(60);

/// Evictions of the last minute, oldest first.
#[derive(Debug, Clone, Default)]
pub(super) struct Ordered(VecDeque<(Moment, NodeName, Option<TenantId>)>);

impl Ledger {
    /// Whether so many more may be evicted now. Who leaves anyway is not evicted.
    pub fn may_order(&self, victims: &[PodUid]) -> bool {
        let EvictionRates { cluster, node, tenant } = self.policy.eviction_rates;
        let new: Vec<(NodeName, Option<TenantId>)> =
            victims.iter().filter_map(|uid| self.stays_on(uid)).collect();
        let is_within = |limit: u32, is_one: &dyn Fn(&NodeName, Option<TenantId>) -> bool| {
            let before = self.lately().filter(|(_, node, tenant)| is_one(node, *tenant)).count();
            before + new.iter().filter(|(node, tenant)| is_one(node, *tenant)).count() <= limit as usize
        };
        is_within(cluster, &|_, _| true)
            && new.iter().all(|(on, of)| {
                is_within(node, &|other, _| other == on) && is_within(tenant, &|_, other| other == *of)
            })
    }

    /// They are to be evicted.
    pub fn note_ordered(&mut self, victims: &[PodUid]) {
        let (now, since) = (self.now, self.now.before(WINDOW));
        let new: Vec<(NodeName, Option<TenantId>)> =
            victims.iter().filter_map(|uid| self.stays_on(uid)).collect();
        while self.ordered.0.front().is_some_and(|(when, ..)| *when <= since) {
            self.ordered.0.pop_front();
        }
        self.ordered.0.extend(new.into_iter().map(|(node, tenant)| (now, node, tenant)));
    }

    /// They stay after all.
    pub fn take_back_ordered(&mut self, victims: &[PodUid]) {
        for (on, of) in victims.iter().filter_map(|uid| self.stays_on(uid)).collect::<Vec<_>>() {
            let is_it = |(when, node, tenant): &(Moment, NodeName, Option<TenantId>)| {
                (*when, node, *tenant) == (self.now, &on, of)
            };
            if let Some(found) = self.ordered.0.iter().rposition(is_it) {
                self.ordered.0.remove(found);
            }
        }
    }

    /// Whether anybody at all may be evicted now.
    pub fn may_order_more(&self) -> bool {
        let EvictionRates { cluster, tenant, .. } = self.policy.eviction_rates;
        let has_more = |of| self.lately().filter(|(_, _, tenant)| *tenant == of).count() < tenant as usize;
        self.lately().count() < cluster as usize
            && (has_more(None) || self.policy.tenant_ids().any(|tenant| has_more(Some(tenant))))
    }

    fn lately(&self) -> impl Iterator<Item = &(Moment, NodeName, Option<TenantId>)> {
        let since = self.now.before(WINDOW);
        self.ordered.0.iter().rev().take_while(move |(when, ..)| *when > since)
    }

    /// Where a pod is that is not leaving, and whose it is.
    fn stays_on(&self, uid: &PodUid) -> Option<(NodeName, Option<TenantId>)> {
        let entry = self.entries.get(uid)?;
        match &entry.phase {
            Phase::Bound(bound) if bound.leaving.is_none() => Some((bound.node.clone(), entry.demand.tenant)),
            _ => None,
        }
    }
}
