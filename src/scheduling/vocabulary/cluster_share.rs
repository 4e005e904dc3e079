//! Parts of a cluster: what a tenant uses of VRAM and GPUs, and the most that it may use.

use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use std::ops::{Add, AddAssign};

/// A part of the cluster. A pod that shares a GPU uses the part of it that its VRAM is, rounded up to a thousandth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantUsage {
    pub vram: Bytes,
    pub milli_gpus: u64,
}

/// The most a tenant may use of each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TenantLimit {
    pub vram: Option<Bytes>,
    pub milli_gpus: Option<u64>,
}

impl TenantUsage {
    pub fn minus(self, other: Self) -> Self {
        Self {
            vram: self.vram.minus(other.vram),
            milli_gpus: self.milli_gpus.saturating_sub(other.milli_gpus),
        }
    }

    /// The larger of either.
    pub fn max_of_each(self, other: Self) -> Self {
        Self {
            vram: self.vram.max(other.vram),
            milli_gpus: self.milli_gpus.max(other.milli_gpus),
        }
    }

    /// Whether it is no more than `other` in either.
    pub fn is_within(self, other: Self) -> bool {
        self.vram <= other.vram && self.milli_gpus <= other.milli_gpus
    }
}

impl Add for TenantUsage {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            vram: self.vram + other.vram,
            milli_gpus: self.milli_gpus.saturating_add(other.milli_gpus),
        }
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

    /// What of the limit remains beside `used`.
    pub fn remaining(self, used: TenantUsage) -> Self {
        Self {
            vram: self.vram.map(|limit| limit.minus(used.vram)),
            milli_gpus: self
                .milli_gpus
                .map(|limit| limit.saturating_sub(used.milli_gpus)),
        }
    }
}
