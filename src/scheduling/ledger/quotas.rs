//! How much of what is free a pod may take: what its tenant may, and GPUs that are kept spare.
//!
//! - No pod takes its tenant beyond its limit, nor, if it may not borrow, beyond its guarantee.
//! - A tenant that borrows takes only what is idle: its pods evict only pods of its own tenant. Pods without a tenant evict only
//!   pods without a tenant.
//! - A pod within its tenant's guarantee may also evict pods of other tenants that borrow. Of a tenant's pods those of the
//!   highest priority use its guarantee first, then those that have run longest; the rest borrow.
//!
//! Spare GPUs: which free GPUs a pod of a preemptible class may not take. A rule of `planning.spare` keeps its last GPUs: such a
//! pod takes a wholly free GPU that counts for the rule only if, beside all the GPUs that the pod requests, as many are free as
//! the rule keeps. So no order of pods leaves fewer. Pods of other classes take them; they become free again as pods leave.

use super::Ledger;
use super::pod_state::PodState;
use crate::ids::{NodeName, PodUid};
use crate::policy::{Policy, Reclaim, SpareRule};
use crate::units::Moment;
use crate::vocabulary::classification::TenantId;
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::Demand;
use crate::vocabulary::spare::{SpareCounts, SpareSet};
use rustc_hash::FxHashSet;
use serde::Serialize;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

/// The dominant share of the whole cluster, in millionths.
const WHOLE_CLUSTER_SHARE: u64 = 1_000_000;

/// The order in which a tenant's pods use its guarantee: by priority, since when they run, and their UIDs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct GuaranteeRank {
    priority: Reverse<i32>,
    started: Moment,
    uid: PodUid,
}

/// What the pods of tenants use on one node.
#[derive(Debug, Clone, Default)]
pub(super) struct TenantsOnNode {
    /// In order of tenant: what its pods use, and what is reserved for them.
    pub usage: Vec<(TenantId, TenantUsage)>,
    /// Their pods that are bound here, in order of UID. From those of all nodes follows which use a guarantee.
    pub bound: Vec<BoundPodOfTenant>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BoundPodOfTenant {
    pub tenant: TenantId,
    pub uid: PodUid,
    pub priority: i32,
    pub started: Moment,
    pub used: TenantUsage,
}

impl BoundPodOfTenant {
    fn rank(&self) -> GuaranteeRank {
        GuaranteeRank {
            priority: Reverse(self.priority),
            started: self.started,
            uid: self.uid.clone(),
        }
    }
}

impl TenantsOnNode {
    fn bound_of(&self, tenant: TenantId) -> impl Iterator<Item = &BoundPodOfTenant> {
        self.bound.iter().filter(move |pod| pod.tenant == tenant)
    }

    /// Tenants whose bound pods, or what these use, differ between the two.
    fn tenants_that_differ(&self, other: &Self) -> BTreeSet<TenantId> {
        if self.bound == other.bound {
            return BTreeSet::new();
        }
        let tenants: BTreeSet<TenantId> = self
            .bound
            .iter()
            .chain(&other.bound)
            .map(|pod| pod.tenant)
            .collect();
        let differs = |tenant: &TenantId| !self.bound_of(*tenant).eq(other.bound_of(*tenant));
        tenants.into_iter().filter(differs).collect()
    }

    /// Corrects when a pod that is bound here began to run.
    pub(super) fn set_started(&mut self, uid: &PodUid, started: Moment) {
        if let Ok(index) = self.bound.binary_search_by(|pod| pod.uid.cmp(uid)) {
            self.bound[index].started = started;
        }
    }
}

/// What each tenant's pods use on all nodes, by its index in the policy.
#[derive(Debug, Clone, Default)]
pub(super) struct TenantUsages {
    usages: Vec<TenantAccount>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct TenantAccount {
    /// Over what its pods use on each node.
    sum: TenantUsage,
    /// Its pods that use its guarantee, once someone has asked. All its bound pods are gone through for that, so copies of the
    /// ledger share it until one of them changes.
    guaranteed: Arc<OnceLock<GuaranteedPods>>,
}

/// A tenant's pods that use its guarantee. There may be thousands: all of these are freed under the ledger's lock when one pod
/// changes, so only those are listed that come after one that does not fit.
#[derive(Debug, Default)]
struct GuaranteedPods {
    /// The first in order that does not fit into the guarantee; `None` if all fit. Those before it use the guarantee.
    first_not_fitting: Option<GuaranteeRank>,
    /// Those after it that fit into what is left.
    fitting_after: FxHashSet<PodUid>,
}

impl GuaranteedPods {
    /// The pods that use a guarantee, of these bound pods in order.
    fn from_ordered<'a>(
        in_order: impl Iterator<Item = &'a BoundPodOfTenant>,
        guarantee: TenantUsage,
    ) -> Self {
        let (mut guaranteed, mut sum) = (Self::default(), TenantUsage::default());
        for pod in in_order {
            let with = sum + pod.used;
            if with.is_within(guarantee) {
                sum = with;
                if guaranteed.first_not_fitting.is_some() {
                    guaranteed.fitting_after.insert(pod.uid.clone());
                }
            } else if guaranteed.first_not_fitting.is_none() {
                guaranteed.first_not_fitting = Some(pod.rank());
            }
        }
        guaranteed
    }

    fn contains(&self, pod: &GuaranteeRank) -> bool {
        self.first_not_fitting
            .as_ref()
            .is_none_or(|first| pod < first)
            || self.fitting_after.contains(&pod.uid)
    }
}

impl TenantUsages {
    pub(super) fn usage_of(&self, tenant: TenantId) -> TenantUsage {
        self.usages
            .get(tenant.index())
            .map(|usage| usage.sum)
            .unwrap_or_default()
    }

    /// The account of a tenant; `None` for one that never had a pod.
    pub(super) fn get(&self, tenant: TenantId) -> Option<&TenantAccount> {
        self.usages.get(tenant.index())
    }

    /// Which pods of the tenant use its guarantee is to be found out again.
    pub(super) fn forget_guaranteed(&mut self, tenant: TenantId) {
        let Some(usage) = self.usages.get_mut(tenant.index()) else {
            return;
        };
        match Arc::get_mut(&mut usage.guaranteed) {
            Some(alone) => drop(alone.take()),
            // It still holds for the copies.
            None => usage.guaranteed = Arc::default(),
        }
    }

    /// Puts what tenants use on a node now in place of what they used there before.
    pub(super) fn replace(&mut self, before: &TenantsOnNode, now: &TenantsOnNode, policy: &Policy) {
        self.usages
            .resize_with(policy.tenants().len(), TenantAccount::default);
        for (tenant, used) in &before.usage {
            if let Some(usage) = self.usages.get_mut(tenant.index()) {
                usage.sum = usage.sum.minus(*used);
            }
        }
        for (tenant, used) in &now.usage {
            if let Some(usage) = self.usages.get_mut(tenant.index()) {
                usage.sum += *used;
            }
        }
        // Only bound pods use a guarantee: a reservation changes the sums alone.
        now.tenants_that_differ(before)
            .into_iter()
            .for_each(|tenant| self.forget_guaranteed(tenant));
    }
}

/// The shares of tenants, as a preemptor sees them.
#[derive(Debug, Default)]
pub(crate) struct TenantShares {
    /// The policy has no tenants: any pod may be evicted.
    is_disabled: bool,
    /// The preemptor is a pod. For one that only prices evictions no pod uses a guarantee, and none is spared.
    has_pod: bool,
    preemptor_tenant: Option<TenantId>,
    /// What the preemptor's tenant has left of a guarantee that it may reclaim.
    reclaimable: Option<TenantUsage>,
}

impl TenantShares {
    /// Shares by which tenants do not matter.
    pub(super) fn disabled() -> Self {
        Self {
            is_disabled: true,
            ..Self::default()
        }
    }

    /// Whether the pod is of another tenant than the preemptor, where that matters.
    pub(crate) fn is_of_other_tenant(&self, pod_state: &PodState) -> bool {
        !self.is_disabled && pod_state.demand.tenant != self.preemptor_tenant
    }

    /// Whether the preemptor, which would use that much, may reclaim what other tenants borrow.
    pub(crate) fn may_reclaim(&self, requested: TenantUsage) -> bool {
        self.reclaimable
            .is_some_and(|left| requested.is_within(left))
    }
}

/// Whose quota a victim uses: borrowed capacity is reclaimed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum QuotaStatus {
    /// Beyond its tenant's guarantee, if it has one. The more its tenant has borrowed for its weight, the less the pod is spared:
    /// the tenant's share in millionths, subtracted from the maximum.
    Borrowed {
        spared: u32,
    },
    Guaranteed,
}

/// A tenant's quota and its usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TenantQuota {
    pub ceiling: TenantLimit,
    pub used: TenantUsage,
}

impl TenantQuota {
    /// Whether the tenant may use `requested` more, once it has given `given_back` back.
    pub(crate) fn allows(&self, requested: TenantUsage, given_back: TenantUsage) -> bool {
        self.ceiling == TenantLimit::default()
            || self
                .ceiling
                .remaining(self.used.minus(given_back))
                .allows(requested)
    }
}

impl Ledger {
    /// What a tenant's pods use: bound, assumed or reserved.
    pub(crate) fn tenant_usage(&self, tenant: TenantId) -> TenantUsage {
        self.node_states.tenant_usage(tenant)
    }

    /// VRAM and GPUs of the whole cluster.
    pub(crate) fn cluster_total(&self) -> TenantUsage {
        self.node_states.total()
    }

    /// What the pod's tenant may still take, if this pod had nothing.
    pub(crate) fn tenant_allowance(&self, uid: &PodUid, demand: &Demand) -> TenantLimit {
        self.tenant_allowance_after(uid, demand, TenantUsage::default())
    }

    /// What the pod's tenant may still take, if this pod had nothing and the tenant had given that much back.
    pub(crate) fn tenant_allowance_after(
        &self,
        uid: &PodUid,
        demand: &Demand,
        given_back: TenantUsage,
    ) -> TenantLimit {
        let Some((id, tenant)) = demand
            .tenant
            .and_then(|id| Some((id, self.policy.tenant(id)?)))
        else {
            return TenantLimit::default();
        };
        tenant.ceiling().remaining(
            self.tenant_usage(id)
                .minus(self.usage_of(uid))
                .minus(given_back),
        )
    }

    /// The shares of tenants, as the pod of `uid` sees them.
    pub(super) fn tenant_shares(&self, uid: &PodUid) -> TenantShares {
        let Some(pod_state) = self.pod_states.get(uid) else {
            return TenantShares::default();
        };
        if self.policy.tenants().is_empty() {
            return TenantShares::disabled();
        }
        TenantShares {
            has_pod: true,
            preemptor_tenant: pod_state.demand.tenant,
            reclaimable: self.reclaimable(uid, &pod_state.demand),
            ..TenantShares::default()
        }
    }

    /// Whether a pod's tenant keeps it from being evicted for a preemptor that would use that much: of another tenant's pods, only
    /// those that borrow are reclaimed.
    pub(super) fn is_kept_by_tenant(
        &self,
        victim: &PodUid,
        pod_state: &PodState,
        wanted: TenantUsage,
        shares: &TenantShares,
    ) -> bool {
        // Most preemptors may reclaim nothing: for them no tenant's pods are gone through.
        shares.is_of_other_tenant(pod_state)
            && (!shares.may_reclaim(wanted)
                || shares.has_pod && self.uses_guarantee(victim, pod_state))
    }

    /// Whose quota a victim uses, as the preemptor sees it for which `shares` was made.
    pub(crate) fn quota_status(
        &self,
        victim: &PodUid,
        pod_state: &PodState,
        shares: &TenantShares,
    ) -> QuotaStatus {
        if !shares.has_pod {
            return QuotaStatus::Borrowed { spared: 0 };
        }
        if self.uses_guarantee(victim, pod_state) {
            return QuotaStatus::Guaranteed;
        }
        let spared_share = |id: TenantId| {
            let tenant = self.policy.tenant(id)?;
            Some(
                WHOLE_CLUSTER_SHARE
                    - tenant
                        .dominant_share(self.tenant_usage(id), self.cluster_total())
                        .min(WHOLE_CLUSTER_SHARE),
            )
        };
        let spared = pod_state.demand.tenant.and_then(spared_share);
        QuotaStatus::Borrowed {
            spared: spared.unwrap_or(0) as u32,
        }
    }

    /// Whether a pod uses its tenant's guarantee.
    fn uses_guarantee(&self, uid: &PodUid, pod_state: &PodState) -> bool {
        let Some((tenant, bound)) = pod_state.demand.tenant.zip(pod_state.bound()) else {
            return false;
        };
        let Some(usage) = self.node_states.tenant_account(tenant) else {
            return false;
        };
        let priority = Reverse(pod_state.demand.priority);
        let rank = GuaranteeRank {
            priority,
            started: bound.started,
            uid: uid.clone(),
        };
        if let Some(guaranteed) = usage.guaranteed.get() {
            return guaranteed.contains(&rank);
        }
        let guaranteed = self.guaranteed(tenant);
        let is_guaranteed = guaranteed.contains(&rank);
        // Two threads may compute it at the same time, with the same result. Neither waits, because one may hold the ledger's lock.
        let _ = usage.guaranteed.set(guaranteed);
        is_guaranteed
    }

    #[cfg(test)]
    pub(super) fn knows_guaranteed(&self, tenant: TenantId) -> bool {
        self.node_states
            .tenant_account(tenant)
            .is_some_and(|usage| usage.guaranteed.get().is_some())
    }

    /// The weighted dominant share of what the tenant borrows, in millionths of a cluster that has `whole`; 0 without a tenant.
    pub(crate) fn borrowed_share(&self, tenant: Option<TenantId>, whole: TenantUsage) -> u64 {
        let tenant_policy = tenant.and_then(|id| Some((id, self.policy.tenant(id)?)));
        tenant_policy.map_or(0, |(id, tenant)| {
            tenant.dominant_share(self.tenant_usage(id), whole)
        })
    }

    /// What the pod's tenant, beside all it has but this pod's, may reclaim by eviction.
    fn reclaimable(&self, uid: &PodUid, demand: &Demand) -> Option<TenantUsage> {
        let id = demand.tenant?;
        let tenant = self
            .policy
            .tenant(id)
            .filter(|tenant| tenant.reclaim == Reclaim::Allowed)?;
        let others = self.tenant_usage(id).minus(self.usage_of(uid));
        others
            .is_within(tenant.guarantee)
            .then(|| tenant.guarantee.minus(others))
    }

    /// The pods that use the tenant's guarantee.
    fn guaranteed(&self, tenant: TenantId) -> GuaranteedPods {
        let bound = self
            .node_states
            .iter()
            .flat_map(|(_, node_state)| node_state.tenants().bound_of(tenant));
        let mut in_order: Vec<&BoundPodOfTenant> = bound.collect();
        in_order.sort_by_cached_key(|pod| pod.rank());
        let guarantee = self
            .policy
            .tenant(tenant)
            .map(|tenant| tenant.guarantee)
            .unwrap_or_default();
        GuaranteedPods::from_ordered(in_order.into_iter(), guarantee)
    }

    /// What a pod uses, or what is reserved for it.
    pub(crate) fn usage_of(&self, uid: &PodUid) -> TenantUsage {
        let used = || {
            let pod_state = self.pod_states.get(uid)?;
            let node = pod_state
                .node()
                .or(pod_state.reservation().map(|reservation| &reservation.node))?;
            self.node_states.get(node)?.usage_of(pod_state)
        };
        used().unwrap_or_default()
    }

    /// What the pod's tenant may have, and has beside this pod.
    pub(super) fn tenant_quota(&self, uid: &PodUid) -> TenantQuota {
        let quota = || {
            let id = self.pod_states.get(uid)?.demand.tenant?;
            let tenant = self.policy.tenant(id)?;
            Some(TenantQuota {
                ceiling: tenant.ceiling(),
                used: self.tenant_usage(id).minus(self.usage_of(uid)),
            })
        };
        quota().unwrap_or_default()
    }
}

impl Ledger {
    /// The rules whose last free GPUs such a pod may not take now.
    pub(crate) fn spare_rules_against(&self, demand: &Demand) -> SpareSet {
        self.spare_rules_against_with(self.node_states.spare(), demand)
    }

    /// The rules whose last free GPUs such a pod may not take if so many GPUs were free for each rule.
    fn spare_rules_against_with(&self, free: &SpareCounts, demand: &Demand) -> SpareSet {
        if self.policy.planning.spare.is_empty()
            || demand.is_allocated_externally()
            || !self.policy.is_preemptible(demand.class)
        {
            return SpareSet::NONE;
        }
        let is_kept = |rule_index: usize, rule: &SpareRule| {
            free.get(rule_index) < rule.gpus.saturating_add(demand.gpus)
        };
        let rules = self.policy.spare_rules_now();
        rules
            .filter(|(rule_index, rule)| is_kept(*rule_index, rule))
            .map(|(rule_index, _)| rule_index)
            .collect()
    }

    /// The demand with the spare rules that hold against it now.
    pub(crate) fn with_spare_rules<'d>(&self, demand: &'d Demand) -> Cow<'d, Demand> {
        self.with_spare_rules_for(self.node_states.spare(), demand)
    }

    /// The demand with the spare rules that hold against it if so many GPUs were free for each rule.
    pub(crate) fn with_spare_rules_for<'d>(
        &self,
        free: &SpareCounts,
        demand: &'d Demand,
    ) -> Cow<'d, Demand> {
        match self.spare_rules_against_with(free, demand) {
            kept if kept == demand.kept => Cow::Borrowed(demand),
            kept => Cow::Owned(Demand {
                kept,
                ..demand.clone()
            }),
        }
    }

    /// The GPUs that are free now, for each rule.
    pub(crate) fn free_for_spare(&self) -> SpareCounts {
        *self.node_states.spare()
    }

    /// Whether new pods go to a node at all: a free GPU of a node that is cordoned is no spare one.
    pub(crate) fn set_takes_new_pods(&mut self, name: &NodeName, takes_new_pods: bool) {
        self.node_states.set_takes_new_pods(name, takes_new_pods);
    }

    /// The rules of `planning.spare` in their order, with the GPUs that are free for each; `None` for one that does not hold now.
    pub fn spare_status(&self) -> impl Iterator<Item = (&SpareRule, Option<u32>)> {
        let free = self.node_states.spare();
        let rules = self.policy.planning.spare.iter().enumerate();
        rules.map(|(rule_index, rule)| {
            (
                rule,
                self.policy.is_in_force(rule).then(|| free.get(rule_index)),
            )
        })
    }
}

#[cfg(test)]
mod spare_tests;
