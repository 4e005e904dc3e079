//! Converts the file format into the core's policy: defaults for missing settings, built-in classes after the owner's own.
//!
//! It cannot fail, because the files were checked; [`semantic`](super::semantic) checks whether the parts of the [`Draft`] make
//! sense together, before it becomes a policy. [`render`] is the inverse.

mod classes;
pub(super) mod planning;

pub use super::render::render;
pub use classes::SERVING;

use super::file::{self, AmountSpec};
use crate::scheduling::policy::{Class, Policy, PolicyError, Pool, Tenant};
use crate::scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::units::{Bytes, Percent};
use std::collections::BTreeMap;

/// Limits nothing.
pub(super) const UNBOUNDED: u64 = u64::MAX;
pub(super) const MILLI: u64 = 1000;

/// A policy in its parts. Tenants and pools are in the order of the file.
#[derive(Debug, Clone)]
pub struct Draft {
    /// Everything but classes, tenants and pools.
    pub settings: Policy,
    pub classes: Vec<DraftClass>,
    pub tenants: Vec<Tenant>,
    pub pools: Vec<Pool>,
}

#[derive(Debug, Clone)]
pub struct DraftClass {
    pub class: Class,
    /// Its index among the written classes; `None` for an unchanged built-in one.
    pub entry: Option<usize>,
}

impl Draft {
    pub fn new(file: &file::PolicySpec) -> Self {
        Self {
            settings: settings(file),
            classes: classes::parse(file),
            tenants: file.tenants.iter().flatten().map(tenant).collect(),
            pools: file.node_pools.iter().flatten().map(pool).collect(),
        }
    }

    /// The policy, if its parts fit together.
    pub fn finish(self) -> Result<Policy, PolicyError> {
        let classes = self.classes.into_iter().map(|one| one.class).collect();
        self.settings.with_classes(classes)?.with_tenants(self.tenants)?.with_pools(self.pools)
    }
}

/// Overwrites a default with a setting that is present.
fn set<T>(target: &mut T, said: Option<T>) {
    if let Some(said) = said {
        *target = said;
    }
}

fn settings(file: &file::PolicySpec) -> Policy {
    let mut policy = Policy::default();
    set(&mut policy.mode, file.mode);
    set(&mut policy.conflicts, file.conflicts);
    if let Some(headroom) = &file.headroom {
        set(&mut policy.headroom.default, headroom.default.map(|percent| percent.0));
        let models = headroom.models.iter().flatten();
        let by_part =
            |(part, percent): (&String, &file::Percentage<90>)| (part.to_ascii_lowercase(), percent.0);
        set(&mut policy.headroom.models, Some(models.map(by_part).collect()));
    }
    if let Some(telemetry) = &file.telemetry {
        let rules = &mut policy.telemetry;
        set(&mut rules.fresh, telemetry.fresh.map(|time| time.0));
        set(&mut rules.stale, telemetry.stale.map(|time| time.0));
        set(&mut rules.margin, telemetry.margin.map(|percent| percent.0));
        set(&mut rules.expired, telemetry.expired);
    }
    if let Some(loading) = &file.loading {
        let speeds = &mut policy.loading;
        set(&mut speeds.network, loading.network.map(|speed| speed.0));
        set(&mut speeds.disk, loading.disk.map(|speed| speed.0));
        set(&mut speeds.page_cache, loading.page_cache.map(|speed| speed.0));
        set(&mut speeds.init, loading.init.map(|time| time.0));
    }
    scoring(file, &mut policy);
    packing(file, &mut policy);
    preemption(file, &mut policy);
    planning::parse(file, &mut policy);
    policy
}

fn scoring(file: &file::PolicySpec, policy: &mut Policy) {
    let Some(scoring) = &file.scoring else { return };
    set(&mut policy.shortlist, scoring.shortlist);
    set(&mut policy.soft_reservation_lifetime, scoring.soft_reservation_lifetime.map(|time| time.0));
    let Some(said) = &scoring.weights else { return };
    let weights = &mut policy.weights;
    for (weight, said) in [
        (&mut weights.packing, said.packing),
        (&mut weights.kv_headroom, said.kv_headroom),
        (&mut weights.time_to_ready, said.time_to_ready),
        (&mut weights.interference, said.interference),
        (&mut weights.topology, said.topology),
        (&mut weights.spread, said.spread),
    ] {
        set(weight, said.map(u32::from));
    }
}

fn packing(file: &file::PolicySpec, policy: &mut Policy) {
    let Some(said) = &file.packing else { return };
    let packing = &mut policy.packing;
    set(&mut packing.policy, said.policy);
    set(&mut packing.learning, said.learning);
    set(&mut packing.window, said.window);
}

fn preemption(file: &file::PolicySpec, policy: &mut Policy) {
    let Some(preemption) = &file.preemption else { return };
    set(&mut policy.reservation_slack, preemption.reservation_slack.map(|time| time.0));
    set(&mut policy.violate_budgets, preemption.violate_budgets);
    if let Some(said) = &preemption.costs {
        let costs = &mut policy.eviction_costs;
        for (cost, said) in [
            (&mut costs.per_pod, said.per_pod),
            (&mut costs.max_lost_work, said.max_lost_work),
            (&mut costs.per_request, said.per_request),
            (&mut costs.again_within, said.again_within),
        ] {
            set(cost, said.map(|time| time.0));
        }
    }
    if let Some(said) = &preemption.evictions_per_minute {
        let rates = &mut policy.eviction_rates;
        set(&mut rates.cluster, said.cluster);
        set(&mut rates.node, said.node);
        set(&mut rates.tenant, said.tenant);
    }
}

fn tenant(file: &file::TenantSpec) -> Tenant {
    let named = Tenant::named(&file.name.0, &[]);
    Tenant {
        namespaces: file.namespaces.iter().flatten().map(|name| name.0.clone()).collect(),
        guarantee: file.guarantee.as_ref().map_or(named.guarantee, guarantee),
        limit: file.limit.as_ref().map_or(named.limit, limit),
        borrowing: file.borrowing.unwrap_or(named.borrowing),
        reclaim: file.reclaim.unwrap_or(named.reclaim),
        weight: file.weight.map_or(named.weight, u32::from),
        ..named
    }
}

fn milli_gpus(gpus: u32) -> u64 {
    u64::from(gpus) * MILLI
}

/// An empty amount guarantees nothing.
fn guarantee(amount: &AmountSpec) -> TenantUsage {
    match (amount.vram, amount.gpus) {
        (None, None) => TenantUsage::default(),
        (vram, gpus) => usage(vram, gpus),
    }
}

fn usage(vram: Option<file::MemoryQuantity>, gpus: Option<u32>) -> TenantUsage {
    TenantUsage {
        vram: vram.map_or(Bytes(UNBOUNDED), |vram| vram.0),
        milli_gpus: gpus.map_or(UNBOUNDED, milli_gpus),
    }
}

fn limit(amount: &AmountSpec) -> TenantLimit {
    TenantLimit { vram: amount.vram.map(|vram| vram.0), milli_gpus: amount.gpus.map(milli_gpus) }
}

fn pool(file: &file::NodePool) -> Pool {
    let named = Pool::named(&file.name.0);
    Pool {
        selector: texts(&file.selector),
        allocator: file.allocator.unwrap_or(named.allocator),
        classes: file.classes.as_ref().map(|names| names.iter().map(|name| name.0.clone()).collect()),
        mig: file.mig.as_ref().map(|profiles| profiles.iter().map(|profile| profile.0.clone()).collect()),
        capacity: file.capacity.as_ref().map(|capacity| usage(capacity.vram, capacity.gpus)),
        ..named
    }
}

fn texts(labels: &Option<BTreeMap<String, file::LabelValue>>) -> BTreeMap<String, String> {
    labels.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone())).collect()
}

/// For rendering.
pub(super) fn percentage<const MAX: u8>(percent: Percent) -> file::Percentage<MAX> {
    file::Percentage(percent)
}

#[cfg(test)]
mod tests;
