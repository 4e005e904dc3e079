//! Eviction cost: the parts of what one pod's eviction loses, and the cost of a victim set, whose field order is the policy.

use super::candidate::PotentialVictim;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

/// What the eviction of one pod loses, by part, each in thousandths of a GPU-second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodEvictionCost {
    /// Stopping it, and placing and starting it again.
    pub restart: u64,
    /// Work since its last checkpoint, up to the limit of its class.
    pub work: u64,
    /// Its GPUs while its model loads again, on the node where that is quickest.
    pub reload: u64,
    /// Its GPUs while it terminates: its grace period, and the extra time of its class.
    pub drain: u64,
    /// Requests in flight of its engine: their KV cache is lost.
    pub in_flight: u64,
    /// A surcharge because its owner has lost other pods to eviction recently.
    pub again: u64,
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

/// The cost of a victim set. Less is better; the first field that differs decides. It only grows as victims are added.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EvictionCost {
    /// By how many pods disruption budgets are overdrawn, summed over all budgets.
    pub violations: u32,
    /// A victim lives on its tenant's guarantee: only where borrowed capacity is not enough.
    pub from_guarantee: bool,
    /// The highest priority among the victims, relative to the lowest possible.
    pub priority: u32,
    /// How much the most spared borrower among the victims is spared.
    pub spared: u32,
    /// The sum of the losses, in thousandths of a GPU-second.
    pub cost: u64,
    /// The highest pod deletion cost among the victims, relative to the lowest possible.
    pub deletion_cost: u32,
    pub victims: u32,
    pub evicted: Bytes,
    /// Pods that leave anyway, and whose VRAM the set needs.
    pub awaited: u32,
}

impl PodEvictionCost {
    pub fn total(&self) -> u64 {
        let Self { restart, work, reload, drain, in_flight, again } = *self;
        [restart, work, reload, drain, in_flight, again].into_iter().fold(0, u64::saturating_add)
    }
}

impl EvictionCost {
    /// The cost with one more victim.
    pub fn plus(self, resident: &PotentialVictim) -> Self {
        let (guaranteed, spared) = match resident.standing {
            QuotaStatus::Guaranteed => (true, 0),
            QuotaStatus::Borrowed { spared } => (false, spared),
        };
        self.and(Self {
            violations: 0,
            from_guarantee: guaranteed,
            priority: resident.priority.abs_diff(i32::MIN),
            spared,
            cost: resident.eviction_cost.total(),
            deletion_cost: resident.deletion_cost.abs_diff(i32::MIN),
            victims: 1,
            evicted: resident.vram(),
            awaited: 0,
        })
    }

    /// The cost of both sets together; the caller counts overdrawn budgets.
    pub fn and(self, other: Self) -> Self {
        Self {
            violations: self.violations.saturating_add(other.violations),
            from_guarantee: self.from_guarantee || other.from_guarantee,
            priority: self.priority.max(other.priority),
            spared: self.spared.max(other.spared),
            cost: self.cost.saturating_add(other.cost),
            deletion_cost: self.deletion_cost.max(other.deletion_cost),
            victims: self.victims.saturating_add(other.victims),
            evicted: self.evicted + other.evicted,
            awaited: self.awaited.saturating_add(other.awaited),
        }
    }
}
