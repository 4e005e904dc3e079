//! Tenants: their shares of the cluster, and the use of idle shares.
//!
//! A tenant's *guarantee* is its own: it reclaims what others borrowed of it. Beyond it, up to the
//! *limit*, a tenant *borrows*. Of several borrowers the one with the smallest weighted dominant share comes first:
//! `max(VRAM borrowed ÷ VRAM of the cluster, GPUs borrowed ÷ GPUs of the cluster) ÷ weight` (dominant resource fairness:
//! Ghodsi et al., NSDI 2011).

use super::selection::NamespaceSelector;
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    pub name: String,
    /// Names and patterns. A name counts before every pattern and selector of any tenant, and those in order of tenants.
    pub namespaces: Vec<String>,
    /// Namespaces that are its own, too, by their labels.
    pub namespace_selector: Option<NamespaceSelector>,
    /// Nothing, if none is given. If only one of the two is given, the other is not limited: it is `u64::MAX`.
    pub guarantee: TenantUsage,
    pub limit: TenantLimit,
    pub borrowing: Borrowing,
    pub reclaim: Reclaim,
    /// Its part of the borrowed capacity, in proportion to other tenants' weights; at least 1.
    pub weight: u32,
}

/// Whether a tenant may use other tenants' idle shares beyond its guarantee.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Borrowing {
    Allowed,
    Never,
}

/// Whether a tenant reclaims its guarantee from borrowers, by eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reclaim {
    Allowed,
    Never,
}

impl Tenant {
    pub fn new(name: &str, namespaces: &[&str]) -> Self {
        Self {
            name: name.into(),
            namespaces: namespaces
                .iter()
                .map(|&namespace| namespace.into())
                .collect(),
            namespace_selector: None,
            guarantee: TenantUsage::default(),
            limit: TenantLimit::default(),
            borrowing: Borrowing::Allowed,
            reclaim: Reclaim::Allowed,
            weight: 1,
        }
    }

    /// The most it may use, with what its borrowing says.
    pub(crate) fn ceiling(&self) -> TenantLimit {
        let TenantUsage { vram, milli_gpus } = self.guarantee;
        match self.borrowing {
            Borrowing::Allowed => self.limit,
            Borrowing::Never => TenantLimit {
                vram: Some(self.limit.vram.map_or(vram, |limit| limit.min(vram))),
                milli_gpus: Some(
                    self.limit
                        .milli_gpus
                        .map_or(milli_gpus, |limit| limit.min(milli_gpus)),
                ),
            },
        }
    }

    /// The weighted dominant share of what it borrows, in millionths of the capacity of the `cluster`.
    pub(crate) fn dominant_share(&self, used: TenantUsage, cluster: TenantUsage) -> u64 {
        let borrowed = used.minus(self.guarantee);
        let millionths = |part: u64, whole: u64| match whole {
            0 => 0,
            whole => (u128::from(part) * 1_000_000 / u128::from(whole)) as u64,
        };
        let dominant = millionths(borrowed.vram.0, cluster.vram.0)
            .max(millionths(borrowed.milli_gpus, cluster.milli_gpus));
        dominant / u64::from(self.weight.max(1))
    }
}
