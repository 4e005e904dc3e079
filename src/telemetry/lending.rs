//! Metrics of VRAM that sleeping engines lend: how much, to how many pods, and how engines wake.

use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, Registry};

pub struct LendingMetrics {
    /// VRAM that sleeping engines lend, used or not.
    pub lent: IntGauge,
    /// Pods that borrow.
    pub borrowers: IntGauge,
    /// Pods that have asked to wake and are not told yet that they may.
    pub waiting: IntGauge,
    /// Engines that were told that they may wake, and engines that woke over their loans.
    pub wakes: IntCounterVec,
    /// Sleeping engines that got back what they lent before they asked.
    pub recalls: IntCounter,
    /// Evictions of borrowers, by outcome.
    pub evictions: IntCounterVec,
}

/// Outcomes of an eviction, as labels.
pub const EVICTION_OUTCOMES: [&str; 6] = ["written", "gone", "later", "refused", "unknown", "rate-limited"];

impl LendingMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let keep = |collector: Box<dyn Collector>| {
            registry.register(collector).expect("each metric is registered once");
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help).expect("the name is valid");
            keep(Box::new(gauge.clone()));
            gauge
        };
        let counters = |name: &str, help: &str, values: &[&str]| {
            let counters = IntCounterVec::new(Opts::new(name, help), &["outcome"])
                .expect("the name and labels are valid");
            keep(Box::new(counters.clone()));
            // An alert on a rate needs to see zero before the first increase.
            values.iter().for_each(|value| drop(counters.with_label_values(&[*value])));
            counters
        };
        let recalls = IntCounter::new(
            "stowage_loan_recalls_total",
            "Sleeping engines that got back what they lent before they asked, because their model was in demand.",
        )
        .expect("the name is valid");
        keep(Box::new(recalls.clone()));
        Self {
            recalls,
            lent: gauge("stowage_vram_lent_bytes", "VRAM that sleeping engines lend, used or not."),
            borrowers: gauge("stowage_borrowing_pods", "Pods whose VRAM is lent by sleeping engines."),
            waiting: gauge("stowage_waking_pods", "Pods that asked to wake and may not yet."),
            wakes: counters(
                "stowage_wakes_total",
                "Engines told that they may wake (wakeable), or that woke while others had their VRAM (unasked).",
                &["wakeable", "unasked"],
            ),
            evictions: counters(
                "stowage_loan_evictions_total",
                "Evictions of pods that borrow, by outcome.",
                &EVICTION_OUTCOMES,
            ),
        }
    }
}
