//! Families about spans: how many were exported and dropped.

use super::family::{Families, known};
use prometheus::{IntCounter, IntCounterVec};

/// Why spans are dropped: they came faster than the collector takes them, or it did not take them at all.
pub(crate) const REASONS: [&str; 2] = ["export-failed", "queue-full"];

#[derive(Debug, Clone)]
pub struct TraceMetrics {
    pub exported: IntCounter,
    /// By reason.
    pub dropped: IntCounterVec,
}

impl TraceMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        Self {
            exported: families.counter(
                "stowage_trace_spans_exported_total",
                "Spans that the OTLP collector has taken; 0 without --otlp-endpoint.",
            ),
            dropped: families.counters(
                "stowage_trace_spans_dropped_total",
                "Spans that did not reach the OTLP collector, by reason.",
                [known("reason", REASONS)],
            ),
        }
    }
}
