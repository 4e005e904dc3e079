//! How much of the cluster each tenant uses, and what follows: which pods may take more, and which may be evicted for which.
//!
//! - No pod takes its tenant beyond its limit, nor, if it may not borrow, beyond its guarantee.
//! - A tenant that borrows takes only what is idle: its pods evict only pods of its own tenant. Pods without a tenant evict only
//!   pods without a tenant.
//! - A pod within its tenant's guarantee may also evict pods of other tenants that borrow. Of a tenant's pods those of the
//!   highest priority use its guarantee first, then those that have run longest; the rest borrow.

use super::Ledger;
use super::pod_state::PodState;
use crate::ids::PodUid;
use crate::scheduling::policy::{Policy, Reclaim};
use crate::scheduling::vocabulary::classification::TenantId;
use crate::scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::scheduling::vocabulary::demand::Demand;
use crate::units::Moment;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A dominant share counts up to the whole cluster.
const WHOLE: u64 = 1_000_000;

/// A tenant's pod in the order in which they use its guarantee: by priority, since when it runs, and its UID.
type Ranked<'a> = (Reverse<i32>, Moment, &'a PodUid);

/// What each tenant's pods use on all nodes, by its place in the policy: the sum of what they use on each.
#[derive(Debug, Clone, Default)]
pub(super) struct TenantUsages {
    usages: Vec<TenantUsage>,
}

impl TenantUsages {
    pub(super) fn of(&self, tenant: TenantId) -> TenantUsage {
        self.usages.get(tenant.place()).copied().unwrap_or_default()
    }

    /// Puts what tenants use on a node now in place of what they used there before.
    pub(super) fn replace(
        &mut self,
        before: &[(TenantId, TenantUsage)],
        now: &[(TenantId, TenantUsage)],
        policy: &Policy,
    ) {
        self.usages.resize(policy.tenants().len(), TenantUsage::default());
        for (tenant, used) in before {
            if let Some(sum) = self.usages.get_mut(tenant.place()) {
                *sum = sum.minus(*used);
            }
        }
        for (tenant, used) in now {
            if let Some(sum) = self.usages.get_mut(tenant.place()) {
                *sum += *used;
            }
        }
    }
}

/// The shares of tenants at one moment, as a preemptor sees them.
#[derive(Debug, Default)]
pub struct TenantShares {
    /// The policy has no tenants: any pod may be evicted.
    is_off: bool,
    of_preemptor: Option<TenantId>,
    /// What the preemptor's tenant has left of a guarantee that it may reclaim.
    reclaimable: Option<TenantUsage>,
    /// Pods that use their tenants' guarantees.
    guaranteed: BTreeSet<PodUid>,
    /// How much each tenant is spared, by the share that it borrows.
    spared: BTreeMap<TenantId, u32>,
}

/// Whether a pod's tenant keeps it from being evicted for another pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::scheduling) enum TenantHold {
    /// It does not: both are of one tenant, or tenants do not count.
    Loose,
    /// It uses borrowed quota, which other tenants may reclaim.
    Borrowed,
    /// It uses its tenant's guarantee.
    Kept,
}

impl TenantShares {
    /// Tenants do not matter.
    pub(super) fn off() -> Self {
        Self { is_off: true, ..Self::default() }
    }

    /// Whether a pod's tenant keeps it.
    pub(in crate::scheduling) fn bond(&self, victim: &PodUid, pod_state: &PodState) -> TenantHold {
        if self.is_off || pod_state.demand.tenant == self.of_preemptor {
            return TenantHold::Loose;
        }
        if self.guaranteed.contains(victim) { TenantHold::Kept } else { TenantHold::Borrowed }
    }

    /// Whether the preemptor, which would use that much, may reclaim what other tenants borrow.
    pub(in crate::scheduling) fn may_reclaim(&self, wanted: TenantUsage) -> bool {
        self.reclaimable.is_some_and(|left| wanted.is_within(left))
    }

    pub(in crate::scheduling) fn standing(&self, victim: &PodUid, pod_state: &PodState) -> QuotaStatus {
        if self.guaranteed.contains(victim) {
            return QuotaStatus::Guaranteed;
        }
        let spared = pod_state.demand.tenant.and_then(|tenant| self.spared.get(&tenant));
        QuotaStatus::Borrowed { spared: spared.copied().unwrap_or(0) }
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

    /// What the cluster has, where tenants have shares of it.
    pub(in crate::scheduling) fn shared_whole(&self) -> TenantUsage {
        if self.policy.tenants().is_empty() { TenantUsage::default() } else { self.whole() }
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
        let whole = self.whole();
        let spared = |(id, used): (TenantId, TenantUsage)| {
            let share = self.policy.tenant(id).map_or(0, |tenant| tenant.dominant_share(used, whole));
            (id, (WHOLE - share.min(WHOLE)) as u32)
        };
        TenantShares {
            is_off: false,
            of_preemptor: pod_state.demand.tenant,
            reclaimable: self.reclaimable(uid, &pod_state.demand),
            guaranteed: self.guaranteed(),
            spared: self.policy.tenant_ids().map(|id| (id, self.used_by(id))).map(spared).collect(),
        }
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

    /// The pods that use their tenants' guarantees.
    fn guaranteed(&self) -> BTreeSet<PodUid> {
        let mut by_tenant: BTreeMap<TenantId, Vec<Ranked<'_>>> = BTreeMap::new();
        for (name, node_state) in self.node_states.iter() {
            for (uid, pod_state) in node_state.pods().iter().map(|uid| (uid, &self.pod_states[uid])) {
                let is_here = pod_state.node() == Some(name);
                if let Some((tenant, started)) =
                    pod_state.demand.tenant.zip(started(pod_state)).filter(|_| is_here)
                {
                    by_tenant.entry(tenant).or_default().push((
                        Reverse(pod_state.demand.priority),
                        started,
                        uid,
                    ));
                }
            }
        }
        by_tenant.into_iter().flat_map(|(tenant, pods)| self.within_guarantee(tenant, pods)).collect()
    }

    fn within_guarantee(&self, tenant: TenantId, mut pods: Vec<Ranked<'_>>) -> Vec<PodUid> {
        let guarantee = self.policy.tenant(tenant).map(|tenant| tenant.guarantee).unwrap_or_default();
        pods.sort_unstable();
        let mut used = TenantUsage::default();
        pods.retain(|(.., uid)| {
            let with = used + self.use_of(uid);
            let is_within = with.is_within(guarantee);
            if is_within {
                used = with;
            }
            is_within
        });
        pods.into_iter().map(|(.., uid)| uid.clone()).collect()
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
