//! Tenants: who has a right to what part of the cluster, and who may use what others leave idle.
//!
//! A tenant's *guarantee* is its own: what others borrowed of it is taken back when it is wanted. Beyond it, up to the
//! *limit*, a tenant *borrows*. Of several borrowers the one with the smallest weighted dominant share comes first:
//! `max(VRAM borrowed ÷ VRAM of the cluster, GPUs borrowed ÷ GPUs of the cluster) ÷ weight` (dominant resource fairness:
//! Ghodsi et al., NSDI 2011).

use crate::units::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ops::{Add, AddAssign};

/// The most tenants a policy may have.
pub const MAX_TENANTS: usize = u16::MAX as usize;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    pub name: String,
    pub namespaces: Vec<String>,
    /// Nothing, if none is given. Where only one of the two is, the other sets no bound: it is `u64::MAX`.
    pub guarantee: TenantUsage,
    pub limit: TenantLimit,
    pub borrowing: Borrowing,
    pub reclaim: Reclaim,
    /// Its part of what is borrowed, beside the others'; at least 1.
    pub weight: u32,
}

/// A tenant by its place in its policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TenantId(pub(super) u16);

/// A part of the cluster. A pod that shares a GPU uses the part of it that its VRAM is, rounded up to a thousandth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantUsage {
    pub vram: Bytes,
    pub milli_gpus: u64,
}

/// The most a tenant may use of each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantLimit {
    pub vram: Option<Bytes>,
    pub milli_gpus: Option<u64>,
}

/// Whether a tenant may use, beyond its guarantee, what others leave idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Borrowing {
    Allowed,
    Never,
}

/// Whether a tenant takes its guarantee back by eviction from those who borrowed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reclaim {
    Allowed,
    Never,
}

impl TenantId {
    pub fn place(self) -> usize {
        self.0.into()
    }
}

impl Tenant {
    pub fn named(name: &str, namespaces: &[&str]) -> Self {
        Self {
            name: name.into(),
            namespaces: namespaces.iter().map(|&namespace| namespace.into()).collect(),
            guarantee: TenantUsage::default(),
            limit: TenantLimit::default(),
            borrowing: Borrowing::Allowed,
            reclaim: Reclaim::Allowed,
            weight: 1,
        }
    }

    /// The most it may use, with what its borrowing says.
    pub fn ceiling(&self) -> TenantLimit {
        let TenantUsage { vram, milli_gpus } = self.guarantee;
        match self.borrowing {
            Borrowing::Allowed => self.limit,
            Borrowing::Never => TenantLimit {
                vram: Some(self.limit.vram.map_or(vram, |limit| limit.min(vram))),
                milli_gpus: Some(self.limit.milli_gpus.map_or(milli_gpus, |limit| limit.min(milli_gpus))),
            },
        }
    }

    /// The weighted dominant share of what it borrows, in millionths of a cluster that has `whole`.
    pub fn dominant_share(&self, used: TenantUsage, whole: TenantUsage) -> u64 {
        let borrowed = used.minus(self.guarantee);
        let millionths = |part: u64, whole: u64| match whole {
            0 => 0,
            whole => (u128::from(part) * 1_000_000 / u128::from(whole)) as u64,
        };
        let dominant =
            millionths(borrowed.vram.0, whole.vram.0).max(millionths(borrowed.milli_gpus, whole.milli_gpus));
        dominant / u64::from(self.weight.max(1))
    }
}

impl TenantUsage {
    pub fn minus(self, other: Self) -> Self {
        Self {
            vram: self.vram.minus(other.vram),
            milli_gpus: self.milli_gpus.saturating_sub(other.milli_gpus),
        }
    }

    /// The larger of either.
    pub fn most(self, other: Self) -> Self {
        Self { vram: self.vram.max(other.vram), milli_gpus: self.milli_gpus.max(other.milli_gpus) }
    }

    /// Whether it is no more than `other` in either.
    pub fn is_within(self, other: Self) -> bool {
        self.vram <= other.vram && self.milli_gpus <= other.milli_gpus
    }
}

impl Add for TenantUsage {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self { vram: self.vram + other.vram, milli_gpus: self.milli_gpus.saturating_add(other.milli_gpus) }
    }
}

impl AddAssign for TenantUsage {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::iter::Sum for TenantUsage {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), Add::add)
    }
}

impl TenantLimit {
    pub fn allows(self, used: TenantUsage) -> bool {
        self.vram.is_none_or(|limit| used.vram <= limit)
            && self.milli_gpus.is_none_or(|limit| used.milli_gpus <= limit)
    }

    /// What is left of it beside `used`.
    pub fn left(self, used: TenantUsage) -> Self {
        Self {
            vram: self.vram.map(|limit| limit.minus(used.vram)),
            milli_gpus: self.milli_gpus.map(|limit| limit.saturating_sub(used.milli_gpus)),
        }
    }
}
