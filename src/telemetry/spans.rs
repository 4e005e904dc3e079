//! How many spans were exported and dropped.

use prometheus::{IntCounter, IntCounterVec, Opts, Registry};

/// Why spans are dropped: they came faster than the collector takes them, or it did not take them at all.
pub const REASONS: [&str; 2] = ["export-failed", "queue-full"];

#[derive(Debug, Clone)]
pub struct TraceMetrics {
    pub exported: IntCounter,
    /// By reason.
    pub dropped: IntCounterVec,
}

impl TraceMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let exported = IntCounter::new(
            "stowage_trace_spans_exported_total",
            "Spans that the OTLP collector has taken; 0 without --otlp-endpoint.",
        )
        .expect("the name is valid");
        let dropped = IntCounterVec::new(
            Opts::new(
                "stowage_trace_spans_dropped_total",
                "Spans that did not reach the OTLP collector, by reason.",
            ),
            &["reason"],
        )
        .expect("the name and labels are valid");
        // An alert on a rate needs to see zero before the first increase.
        REASONS.iter().for_each(|reason| drop(dropped.with_label_values(&[*reason])));
        registry.register(Box::new(exported.clone())).expect("each metric is registered once");
        registry.register(Box::new(dropped.clone())).expect("each metric is registered once");
        Self { exported, dropped }
    }
}
