//! Families about how sleeping engines wake. How much they lend, and to how many pods, is in [`super::usage`].

use super::family::{Families, known};
use prometheus::{IntCounter, IntCounterVec, IntGauge};
use stowage_scheduling::control_loop::EvictionOutcome;

pub struct LendingMetrics {
    /// Pods that have asked to wake and are not told yet that they may.
    pub waiting: IntGauge,
    /// Engines that were told that they may wake, and engines that woke over their loans.
    pub wakes: IntCounterVec,
    /// Sleeping engines that got back what they lent before they asked.
    pub recalls: IntCounter,
    /// Engines that allocated VRAM that they had lent, awake.
    pub taken_back: IntCounter,
    /// Evictions of borrowers, by outcome.
    pub evictions: IntCounterVec,
}

impl LendingMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        Self {
            waiting: families.gauge("stowage_waking_pods", "Pods that asked to wake and may not yet."),
            wakes: families.counters(
                "stowage_wakes_total",
                "Engines told that they may wake (wakeable), or that woke while others had their VRAM (unasked).",
                [known("outcome", ["wakeable", "unasked"])],
            ),
            recalls: families.counter(
                "stowage_loan_recalls_total",
                "Sleeping engines that got back what they lent before they asked, because their model was in demand.",
            ),
            taken_back: families.counter(
                "stowage_loans_taken_back_total",
                "Engines that used more than they keep while others had what they lend: the driver gives it back to them.",
            ),
            evictions: families.counters(
                "stowage_loan_evictions_total",
                "Evictions of pods that borrow, by outcome.",
                [known("outcome", EvictionOutcome::CODES.iter().copied().chain(["rate-limited"]))],
            ),
        }
    }
}
