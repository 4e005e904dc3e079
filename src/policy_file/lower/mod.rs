//! From what is written to what the core decides by: defaults where nothing is said, built-in classes behind the owner's own.
//!
//! It cannot fail, since the files were checked; whether the parts make sense together is asked of the [`Draft`] by
//! [`semantic`](super::semantic), before it becomes a policy. [`raise`] is the way back.

mod classes;
mod planning;
mod raise;

pub use classes::SERVING;
pub use raise::raise;

use super::raw::{self, AmountSpec};
use crate::scheduling::policy::{Class, Policy, PolicyError, Pool, Tenant, TenantLimit, TenantUsage};
use crate::units::{Bytes, Percent};
use std::collections::BTreeMap;

/// Bounds nothing.
const UNBOUNDED: u64 = u64::MAX;
const MILLI: u64 = 1000;

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
    /// Its place among the written classes; `None` for a built-in one that nobody changed.
    pub entry: Option<usize>,
}

impl Draft {
    pub fn new(raw: &raw::PolicySpec) -> Self {
        Self {
            settings: settings(raw),
            classes: classes::lower(raw),
            tenants: raw.tenants.iter().flatten().map(tenant).collect(),
            pools: raw.node_pools.iter().flatten().map(pool).collect(),
        }
    }

    /// The policy, if its parts fit together.
    pub fn finish(self) -> Result<Policy, PolicyError> {
        let classes = self.classes.into_iter().map(|one| one.class).collect();
        self.settings.with_classes(classes)?.with_tenants(self.tenants)?.with_pools(self.pools)
    }
}

/// Overwrites a default with what is said.
fn set<T>(target: &mut T, said: Option<T>) {
    if let Some(said) = said {
        *target = said;
    }
}

fn settings(raw: &raw::PolicySpec) -> Policy {
    let mut policy = Policy::default();
    set(&mut policy.mode, raw.mode);
    set(&mut policy.conflicts, raw.conflicts);
    if let Some(headroom) = &raw.headroom {
        set(&mut policy.headroom.default, headroom.default.map(|percent| percent.0));
        let models = headroom.models.iter().flatten();
        let by_part =
            |(part, percent): (&String, &raw::Percentage<90>)| (part.to_ascii_lowercase(), percent.0);
        set(&mut policy.headroom.models, Some(models.map(by_part).collect()));
    }
    if let Some(telemetry) = &raw.telemetry {
        let rules = &mut policy.telemetry;
        set(&mut rules.fresh, telemetry.fresh.map(|time| time.0));
        set(&mut rules.stale, telemetry.stale.map(|time| time.0));
        set(&mut rules.margin, telemetry.margin.map(|percent| percent.0));
        set(&mut rules.expired, telemetry.expired);
    }
    if let Some(loading) = &raw.loading {
        let speeds = &mut policy.loading;
        set(&mut speeds.network, loading.network.map(|speed| speed.0));
        set(&mut speeds.disk, loading.disk.map(|speed| speed.0));
        set(&mut speeds.page_cache, loading.page_cache.map(|speed| speed.0));
        set(&mut speeds.init, loading.init.map(|time| time.0));
    }
    scoring(raw, &mut policy);
    packing(raw, &mut policy);
    preemption(raw, &mut policy);
    planning::lower(raw, &mut policy);
    policy
}

fn scoring(raw: &raw::PolicySpec, policy: &mut Policy) {
    let Some(scoring) = &raw.scoring else { return };
    set(&mut policy.shortlist, scoring.shortlist);
    set(&mut policy.hint_lifetime, scoring.hint_lifetime.map(|time| time.0));
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

fn packing(raw: &raw::PolicySpec, policy: &mut Policy) {
    let Some(said) = &raw.packing else { return };
    let packing = &mut policy.packing;
    set(&mut packing.policy, said.policy);
    set(&mut packing.learning, said.learning);
    set(&mut packing.window, said.window);
}

fn preemption(raw: &raw::PolicySpec, policy: &mut Policy) {
    let Some(preemption) = &raw.preemption else { return };
    set(&mut policy.hold_slack, preemption.hold_slack.map(|time| time.0));
    set(&mut policy.violate_budgets, preemption.violate_budgets);
    if let Some(said) = &preemption.costs {
        let costs = &mut policy.eviction_costs;
        for (cost, said) in [
            (&mut costs.per_pod, said.per_pod),
            (&mut costs.work_at_most, said.work_at_most),
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

fn tenant(raw: &raw::TenantSpec) -> Tenant {
    let named = Tenant::named(&raw.name.0, &[]);
    Tenant {
        namespaces: raw.namespaces.iter().flatten().map(|name| name.0.clone()).collect(),
        guarantee: raw.guarantee.as_ref().map_or(named.guarantee, guarantee),
        limit: raw.limit.as_ref().map_or(named.limit, limit),
        borrowing: raw.borrowing.unwrap_or(named.borrowing),
        reclaim: raw.reclaim.unwrap_or(named.reclaim),
        weight: raw.weight.map_or(named.weight, u32::from),
        ..named
    }
}

fn milli_gpus(gpus: u32) -> u64 {
    u64::from(gpus) * MILLI
}

/// An amount that says nothing guarantees nothing.
fn guarantee(amount: &AmountSpec) -> TenantUsage {
    match (amount.vram, amount.gpus) {
        (None, None) => TenantUsage::default(),
        (vram, gpus) => usage(vram, gpus),
    }
}

fn usage(vram: Option<raw::MemoryQuantity>, gpus: Option<u32>) -> TenantUsage {
    TenantUsage {
        vram: vram.map_or(Bytes(UNBOUNDED), |vram| vram.0),
        milli_gpus: gpus.map_or(UNBOUNDED, milli_gpus),
    }
}

fn limit(amount: &AmountSpec) -> TenantLimit {
    TenantLimit { vram: amount.vram.map(|vram| vram.0), milli_gpus: amount.gpus.map(milli_gpus) }
}

fn pool(raw: &raw::NodePool) -> Pool {
    let named = Pool::named(&raw.name.0);
    Pool {
        selector: texts(&raw.selector),
        nodes: raw.nodes.unwrap_or(named.nodes),
        classes: raw.classes.as_ref().map(|names| names.iter().map(|name| name.0.clone()).collect()),
        mig: raw.mig.as_ref().map(|profiles| profiles.iter().map(|profile| profile.0.clone()).collect()),
        capacity: raw.capacity.as_ref().map(|capacity| usage(capacity.vram, capacity.gpus)),
        ..named
    }
}

fn texts(labels: &Option<BTreeMap<String, raw::LabelValue>>) -> BTreeMap<String, String> {
    labels.iter().flatten().map(|(key, value)| (key.clone(), value.0.clone())).collect()
}

/// For the way back.
fn percentage<const MAX: u8>(percent: Percent) -> raw::Percentage<MAX> {
    raw::Percentage(percent)
}

#[cfg(test)]
mod tests;
