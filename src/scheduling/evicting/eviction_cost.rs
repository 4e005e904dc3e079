//! What it costs that pods leave: the parts of one pod's loss, and the price of a set, whose order is the policy.

use super::candidate::PotentialVictim;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

/// What the eviction of one pod loses, part by part, each in thousandths of a GPU for a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodEvictionCost {
    /// To stop, and to be placed and started again.
    pub restart: u64,
    /// Work since its last checkpoint, up to what its class lets count.
    pub work: u64,
    /// Its GPUs while its model loads again, where that is quickest.
    pub reload: u64,
    /// Its GPUs while it leaves: its grace period, and what its class needs beyond.
    pub drain: u64,
    /// Requests its engine works on: their KV cache goes with it.
    pub in_flight: u64,
    /// Its owner has lost others to eviction lately.
    pub again: u64,
}

/// Whose share a victim lives on: what is borrowed goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum QuotaStatus {
    /// Beyond its tenant's guarantee, if it has one. The more its tenant has borrowed for its weight, the less it is spared:
    /// its share in millionths, counted from above.
    Borrowed {
        spared: u32,
    },
    Guaranteed,
}

/// What a victim set costs; less is better, the first field that differs decides. It only grows as victims are added.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EvictionCost {
    /// By how many pods disruption budgets are overdrawn, over all of them.
    pub violations: u32,
    /// Somebody loses what is guaranteed: only where what is borrowed is not enough.
    pub from_guarantee: bool,
    /// The highest priority among the victims, counted from the lowest possible.
    pub priority: u32,
    /// How much the most spared of the borrowers among them is spared.
    pub spared: u32,
    /// In thousandths of a GPU for a second.
    pub cost: u64,
    /// The highest deletion cost among the victims, counted from the lowest possible.
    pub deletion_cost: u32,
    pub victims: u32,
    pub evicted: Bytes,
    /// Pods that leave anyway, and whose room it counts on.
    pub awaited: u32,
}

impl PodEvictionCost {
    pub fn total(&self) -> u64 {
        let Self { restart, work, reload, drain, in_flight, again } = *self;
        [restart, work, reload, drain, in_flight, again].into_iter().fold(0, u64::saturating_add)
    }
}

impl EvictionCost {
    /// With one more who leaves.
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

    /// Both sets together; overdrawn budgets are the caller's to count.
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
