//! Converts the file format into the core's policy: defaults for missing settings, built-in classes after the owner's own.
//!
//! The settings of the whole policy are parsed by their own type, [`Settings`]. It cannot fail, because the files were checked;
//! [`semantic`](super::semantic) checks whether the parts of the [`Draft`] make sense together, before it becomes a policy.
//! [`render`] is the inverse.

mod classes;

pub use super::render::render;
pub(crate) use classes::SERVING;

use super::file::{self, AmountSpec};
use std::collections::BTreeMap;
use stowage_scheduling::policy::{Class, Policy, PolicyError, Pool, Settings, Tenant};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::cluster_share::{TenantLimit, TenantUsage};

/// The amount that stands for "not limited".
pub(super) const UNBOUNDED: u64 = u64::MAX;
pub(super) const MILLI: u64 = 1000;

/// A policy in its parts. Tenants and pools are in the order of the file.
#[derive(Debug, Clone)]
pub(crate) struct Draft {
    pub settings: Settings,
    pub classes: Vec<DraftClass>,
    pub tenants: Vec<Tenant>,
    pub pools: Vec<Pool>,
}

#[derive(Debug, Clone)]
pub(crate) struct DraftClass {
    pub class: Class,
    /// Its index among the written classes; `None` for an unchanged built-in one.
    pub written_index: Option<usize>,
}

impl Draft {
    /// Parses a policy file. Fails only on a value that the check of the file should have rejected.
    pub fn new(file: &file::PolicySpec) -> Result<Self, serde_json::Error> {
        Ok(Self {
            settings: file.settings.clone(),
            classes: classes::parse(file)?,
            tenants: file.tenants.iter().flatten().map(tenant).collect(),
            pools: file.node_pools.iter().flatten().map(pool).collect(),
        })
    }

    /// The policy, if its parts fit together.
    pub fn finish(self) -> Result<Policy, PolicyError> {
        let classes = self.classes.into_iter().map(|one| one.class).collect();
        let policy = Policy::default().with_settings(self.settings);
        policy
            .with_classes(classes)?
            .with_tenants(self.tenants)?
            .with_pools(self.pools)
    }
}

fn tenant(file: &file::TenantSpec) -> Tenant {
    let named = Tenant::new(&file.name.0, &[]);
    Tenant {
        namespaces: file
            .namespaces
            .iter()
            .flatten()
            .map(|name| name.0.clone())
            .collect(),
        namespace_selector: file.namespace_selector.clone(),
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
    TenantLimit {
        vram: amount.vram.map(|vram| vram.0),
        milli_gpus: amount.gpus.map(milli_gpus),
    }
}

fn pool(file: &file::NodePool) -> Pool {
    let named = Pool::new(&file.name.0);
    Pool {
        selector: label_map(&file.selector),
        allocator: file.allocator.unwrap_or(named.allocator),
        classes: file
            .classes
            .as_ref()
            .map(|names| names.iter().map(|name| name.0.clone()).collect()),
        mig: file
            .mig
            .as_ref()
            .map(|profiles| profiles.iter().map(|profile| profile.0.clone()).collect()),
        capacity: file
            .capacity
            .as_ref()
            .map(|capacity| usage(capacity.vram, capacity.gpus)),
        ..named
    }
}

fn label_map(labels: &Option<BTreeMap<String, file::LabelValue>>) -> BTreeMap<String, String> {
    labels
        .iter()
        .flatten()
        .map(|(key, value)| (key.clone(), value.0.clone()))
        .collect()
}

#[cfg(test)]
mod tests;
