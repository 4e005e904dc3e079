//! Eviction cost: the parts of what one pod's eviction loses, and the cost of a victim set, whose field order is the policy.

use crate::ledger::{PotentialVictim, QuotaStatus};
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

/// The cost of a victim set. Less is better; the first field that differs decides. It only grows as victims are added.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
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
    /// Victims whose replacements could run on the same node only: of sets that lose as much the one with fewer of them.
    #[serde(default)]
    pub stranded: u32,
    /// The highest pod deletion cost among the victims, relative to the lowest possible.
    pub deletion_cost: u32,
    pub victims: u32,
    pub evicted: Bytes,
    /// Pods that leave anyway, and whose VRAM the set needs.
    pub awaited: u32,
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
            stranded: u32::from(resident.eviction_cost.stranded > 0),
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
            stranded: self.stranded.saturating_add(other.stranded),
            deletion_cost: self.deletion_cost.max(other.deletion_cost),
            victims: self.victims.saturating_add(other.victims),
            evicted: self.evicted + other.evicted,
            awaited: self.awaited.saturating_add(other.awaited),
        }
    }
}
