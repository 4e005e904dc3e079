//! Renders a policy with every setting: for `policy show`, and for the digest, which must not depend on how the settings were
//! written.

use super::parse::{MILLI, UNBOUNDED};
use crate::file::{
    self, AmountSpec, LabelValue, MemoryQuantity, MigProfile, Name, NamePattern, PoolCapacitySpec,
};
use std::collections::BTreeMap;
use stowage_scheduling::policy::{Class, Policy, Pool, Tenant};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::cluster_share::TenantUsage;

/// Converts a policy into its file format with every setting; parsing the result gives the same policy.
pub fn render(policy: &Policy) -> file::PolicySpec<Class> {
    file::PolicySpec {
        api_version: Some(file::ApiVersion::V1Alpha1),
        kind: Some(file::PolicyKind::SchedulingPolicy),
        settings: policy.settings.clone(),
        // Each class has its own.
        start_gate: None,
        classes: Some(policy.classes().to_vec()),
        tenants: Some(policy.tenants().iter().map(tenant).collect()),
        node_pools: Some(policy.pools().iter().map(pool).collect()),
    }
}

fn tenant(tenant: &Tenant) -> file::TenantSpec {
    let guaranteed = tenant.guarantee != TenantUsage::default();
    let limit = AmountSpec {
        vram: tenant.limit.vram.map(MemoryQuantity),
        gpus: tenant.limit.milli_gpus.map(gpus),
    };
    file::TenantSpec {
        name: Name(tenant.name.clone()),
        namespaces: wrap_unless_empty(&tenant.namespaces, NamePattern),
        namespace_selector: tenant.namespace_selector.clone(),
        guarantee: guaranteed.then(|| AmountSpec {
            vram: vram(tenant.guarantee),
            gpus: whole_gpus(tenant.guarantee),
        }),
        limit: (limit != AmountSpec::default()).then_some(limit),
        borrowing: Some(tenant.borrowing),
        reclaim: Some(tenant.reclaim),
        weight: Some(u16::try_from(tenant.weight).unwrap_or(u16::MAX)),
    }
}

fn pool(pool: &Pool) -> file::NodePool {
    file::NodePool {
        name: Name(pool.name.clone()),
        selector: labels(&pool.selector),
        allocator: Some(pool.allocator),
        classes: pool.classes.as_deref().map(|names| wrap_names(names, Name)),
        mig: pool
            .mig
            .as_deref()
            .map(|profiles| wrap_names(profiles, MigProfile)),
        capacity: pool.capacity.map(|all| PoolCapacitySpec {
            gpus: whole_gpus(all),
            vram: vram(all),
        }),
    }
}

fn vram(usage: TenantUsage) -> Option<MemoryQuantity> {
    (usage.vram != Bytes(UNBOUNDED)).then_some(MemoryQuantity(usage.vram))
}

fn whole_gpus(usage: TenantUsage) -> Option<u32> {
    (usage.milli_gpus != UNBOUNDED).then(|| gpus(usage.milli_gpus))
}

fn gpus(milli: u64) -> u32 {
    u32::try_from(milli / MILLI).unwrap_or(u32::MAX)
}

fn wrap_names<T>(names: &[String], word: fn(String) -> T) -> Vec<T> {
    names.iter().cloned().map(word).collect()
}

fn wrap_unless_empty<T>(names: &[String], word: fn(String) -> T) -> Option<Vec<T>> {
    (!names.is_empty()).then(|| wrap_names(names, word))
}

fn labels(labels: &BTreeMap<String, String>) -> Option<BTreeMap<String, LabelValue>> {
    let labels: BTreeMap<String, LabelValue> = labels
        .iter()
        .map(|(key, value)| (key.clone(), LabelValue(value.clone())))
        .collect();
    (!labels.is_empty()).then_some(labels)
}
