//! How much of the cluster each tenant uses, and what follows: which pods may take more, and which may be evicted for which.
//!
//! - No pod takes its tenant beyond its limit, nor, if it may not borrow, beyond its guarantee.
//! - A tenant that borrows takes only what is idle: its pods evict only pods of its own tenant. Pods without a tenant evict only
//!   pods without a tenant.
//! - A pod within its tenant's guarantee may also evict pods of other tenants that borrow. Of a tenant's pods those of the
//!   highest priority use its guarantee first, then those that have run longest; the rest borrow.

use super::Ledger;
use super::node_state::NodeState;
use super::pod_state::PodState;
use crate::ids::PodUid;
use crate::scheduling::policy::{Policy, Reclaim};
use crate::scheduling::vocabulary::classification::TenantId;
use crate::scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::scheduling::vocabulary::demand::Demand;
use crate::units::Moment;
use rustc_hash::FxHashSet;
use serde::Serialize;
use std::cmp::Reverse;
use std::sync::{Arc, OnceLock};

/// A dominant share counts up to the whole cluster.
const WHOLE: u64 = 1_000_000;

/// A tenant's pod in the order in which they use its guarantee: by priority, since when it runs, and its UID; and what it uses.
type Ranked<'a> = (Reverse<i32>, Moment, &'a PodUid, TenantUsage);

/// What each tenant's pods use on all nodes, by its place in the policy.
#[derive(Debug, Clone, Default)]
pub(super) struct TenantUsages {
    usages: Vec<UsageOfTenant>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct UsageOfTenant {
    /// Over what its pods use on each node.
    sum: TenantUsage,
    /// Its pods that use its guarantee, once someone has asked. All its pods are gone through for that, so copies of the ledger
    /// share it until a pod of the tenant changes.
    guaranteed: Arc<OnceLock<FxHashSet<PodUid>>>,
}

impl TenantUsages {
    pub(super) fn of(&self, tenant: TenantId) -> TenantUsage {
        self.usages.get(tenant.place()).map(|usage| usage.sum).unwrap_or_default()
    }

    /// `None` of a tenant that no pod has had yet.
    pub(super) fn get(&self, tenant: TenantId) -> Option<&UsageOfTenant> {
        self.usages.get(tenant.place())
    }

    /// Which pods of the tenant use its guarantee is to be found out again.
    pub(super) fn forget_guaranteed(&mut self, tenant: TenantId) {
        let Some(usage) = self.usages.get_mut(tenant.place()) else { return };
        match Arc::get_mut(&mut usage.guaranteed) {
            Some(alone) => drop(alone.take()),
            // It still holds for the copies.
            None => usage.guaranteed = Arc::default(),
        }
    }

    /// Puts what tenants use on a node now in place of what they used there before.
    pub(super) fn replace(
        &mut self,
        before: &[(TenantId, TenantUsage)],
        now: &[(TenantId, TenantUsage)],
        policy: &Policy,
    ) {
        self.usages.resize_with(policy.tenants().len(), UsageOfTenant::default);
        for (tenant, used) in before {
            if let Some(usage) = self.usages.get_mut(tenant.place()) {
                usage.sum = usage.sum.minus(*used);
            }
            self.forget_guaranteed(*tenant);
        }
        for (tenant, used) in now {
            if let Some(usage) = self.usages.get_mut(tenant.place()) {
                usage.sum += *used;
            }
            self.forget_guaranteed(*tenant);
        }
    }
}

/// The shares of tenants, as a preemptor sees them.
#[derive(Debug, Default)]
pub struct TenantShares {
    /// The policy has no tenants: any pod may be evicted.
    is_off: bool,
    /// There is a preemptor: for one of no pod, no pod uses a guarantee, and none is spared.
    is_of_pod: bool,
    of_preemptor: Option<TenantId>,
    /// What the preemptor's tenant has left of a guarantee that it may reclaim.
    reclaimable: Option<TenantUsage>,
}

impl TenantShares {
    /// Tenants do not matter.
    pub(super) fn off() -> Self {
        Self { is_off: true, ..Self::default() }
    }

    /// Whether the pod is of another tenant than the preemptor, where that matters.
    pub(in crate::scheduling) fn is_of_another(&self, pod_state: &PodState) -> bool {
        !self.is_off && pod_state.demand.tenant != self.of_preemptor
    }

    /// Whether the preemptor, which would use that much, may reclaim what other tenants borrow.
    pub(in crate::scheduling) fn may_reclaim(&self, wanted: TenantUsage) -> bool {
        self.reclaimable.is_some_and(|left| wanted.is_within(left))
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
    /// Whether the tenant may use `wanted` more, once it has given `given_back` back.
    pub(in crate::scheduling) fn allows(&self, wanted: TenantUsage, given_back: TenantUsage) -> bool {
        self.ceiling == TenantLimit::default()
            || self.ceiling.left(self.used.minus(given_back)).allows(wanted)
    }
}

impl Ledger {
    /// What a tenant's pods use: bound, assumed or reserved.
    pub(in crate::scheduling) fn used_by(&self, tenant: TenantId) -> TenantUsage {
        self.node_states.used_by(tenant)
    }

    /// What the cluster has.
    pub(in crate::scheduling) fn whole(&self) -> TenantUsage {
        self.node_states.whole()
    }

    /// What the pod's tenant may still take, beside all it has but this pod's.
    pub(in crate::scheduling) fn allowance(&self, uid: &PodUid, demand: &Demand) -> TenantLimit {
        self.allowance_beside(uid, demand, TenantUsage::default())
    }

    /// The same, once it has given that much back.
    pub(in crate::scheduling) fn allowance_beside(
        &self,
        uid: &PodUid,
        demand: &Demand,
        given_back: TenantUsage,
    ) -> TenantLimit {
        let Some((id, tenant)) = demand.tenant.and_then(|id| Some((id, self.policy.tenant(id)?))) else {
            return TenantLimit::default();
        };
        tenant.ceiling().left(self.used_by(id).minus(self.use_of(uid)).minus(given_back))
    }

    /// The shares of tenants, as the pod of `uid` sees them.
    pub(super) fn tenancy(&self, uid: &PodUid) -> TenantShares {
        let Some(pod_state) = self.pod_states.get(uid) else { return TenantShares::default() };
        if self.policy.tenants().is_empty() {
            return TenantShares::off();
        }
        TenantShares {
            is_of_pod: true,
            of_preemptor: pod_state.demand.tenant,
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
        shares.is_of_another(pod_state)
            && (!shares.may_reclaim(wanted) || shares.is_of_pod && self.uses_guarantee(victim, pod_state))
    }

    pub(in crate::scheduling) fn quota_status(
        &self,
        victim: &PodUid,
        pod_state: &PodState,
        shares: &TenantShares,
    ) -> QuotaStatus {
        if !shares.is_of_pod {
            return QuotaStatus::Borrowed { spared: 0 };
        }
        if self.uses_guarantee(victim, pod_state) {
            return QuotaStatus::Guaranteed;
        }
        let share_of = |id: TenantId| {
            let tenant = self.policy.tenant(id)?;
            Some(WHOLE - tenant.dominant_share(self.used_by(id), self.whole()).min(WHOLE))
        };
        let spared = pod_state.demand.tenant.and_then(share_of);
        QuotaStatus::Borrowed { spared: spared.unwrap_or(0) as u32 }
    }

    /// Whether a pod uses its tenant's guarantee.
    fn uses_guarantee(&self, uid: &PodUid, pod_state: &PodState) -> bool {
        let Some(tenant) = pod_state.demand.tenant else { return false };
        let Some(usage) = self.node_states.usage_of(tenant) else { return false };
        if let Some(guaranteed) = usage.guaranteed.get() {
            return guaranteed.contains(uid);
        }
        let guaranteed = self.guaranteed(tenant);
        let is_guaranteed = guaranteed.contains(uid);
        // Two threads may compute it at the same time, with the same result. Neither waits, because one may hold the ledger's lock.
        let _ = usage.guaranteed.set(guaranteed);
        is_guaranteed
    }

    /// The weighted dominant share of what the tenant borrows, in millionths of a cluster that has `whole`; 0 without a tenant.
    pub(in crate::scheduling) fn borrowed_share(&self, tenant: Option<TenantId>, whole: TenantUsage) -> u64 {
        let known = tenant.and_then(|id| Some((id, self.policy.tenant(id)?)));
        known.map_or(0, |(id, tenant)| tenant.dominant_share(self.used_by(id), whole))
    }

    /// What the pod's tenant, beside all it has but this pod's, may reclaim by eviction.
    fn reclaimable(&self, uid: &PodUid, demand: &Demand) -> Option<TenantUsage> {
        let id = demand.tenant?;
        let tenant = self.policy.tenant(id).filter(|tenant| tenant.reclaim == Reclaim::Allowed)?;
        let others = self.used_by(id).minus(self.use_of(uid));
        others.is_within(tenant.guarantee).then(|| tenant.guarantee.minus(others))
    }

    /// The pods that use the tenant's guarantee.
    fn guaranteed(&self, tenant: TenantId) -> FxHashSet<PodUid> {
        let has_some = |node_state: &NodeState| node_state.usage().iter().any(|(id, _)| *id == tenant);
        let mut pods: Vec<Ranked<'_>> = Vec::new();
        for (name, node_state) in self.node_states.iter().filter(|(_, node_state)| has_some(node_state)) {
            for (uid, pod_state) in node_state.pods().iter().map(|uid| (uid, &self.pod_states[uid])) {
                let is_its = pod_state.demand.tenant == Some(tenant) && pod_state.node() == Some(name);
                if let Some(started) = started(pod_state).filter(|_| is_its) {
                    let used = node_state.use_of(pod_state).unwrap_or_default();
                    pods.push((Reverse(pod_state.demand.priority), started, uid, used));
                }
            }
        }
        pods.sort_unstable_by(|(a, b, c, _), (x, y, z, _)| (a, b, c).cmp(&(x, y, z)));
        let guarantee = self.policy.tenant(tenant).map(|tenant| tenant.guarantee).unwrap_or_default();
        let mut sum = TenantUsage::default();
        let is_within = |(.., uid, used): Ranked<'_>| {
            let with = sum + used;
            with.is_within(guarantee).then(|| {
                sum = with;
                uid.clone()
            })
        };
        pods.into_iter().filter_map(is_within).collect()
    }

    /// What a pod uses or has reserved.
    pub(in crate::scheduling) fn use_of(&self, uid: &PodUid) -> TenantUsage {
        let used = || {
            let pod_state = self.pod_states.get(uid)?;
            let node = pod_state.node().or(pod_state.reservation().map(|reservation| &reservation.node))?;
            self.node_states.get(node)?.use_of(pod_state)
        };
        used().unwrap_or_default()
    }

    /// What the pod's tenant may have, and has beside this pod.
    pub(super) fn tenant_quota(&self, uid: &PodUid) -> TenantQuota {
        let of = || {
            let id = self.pod_states.get(uid)?.demand.tenant?;
            let tenant = self.policy.tenant(id)?;
            Some(TenantQuota { ceiling: tenant.ceiling(), used: self.used_by(id).minus(self.use_of(uid)) })
        };
        of().unwrap_or_default()
    }
}

fn started(pod_state: &PodState) -> Option<Moment> {
    pod_state.bound().map(|bound| bound.started)
}
