//! Metrics of the continuous audit: current conflicts, detected conflicts, evictions to resolve them, and the audit's backlog.

use crate::scheduling::audit::conflicts::{AuditRound, Conflicts, GpuConflictKind};
use prometheus::core::Collector;
use prometheus::{IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

pub struct ConflictMetrics {
    /// Current conflicts, by kind.
    standing: IntGaugeVec,
    /// Detected conflicts, by kind.
    found: IntCounterVec,
    /// Evictions that `conflicts: evict-unstarted` asked for, by outcome.
    pub evictions: IntCounterVec,
    /// Nodes that changed and have not been audited since.
    unchecked: IntGauge,
}

/// Outcomes of an eviction, as labels.
pub const OUTCOMES: [&str; 7] = ["written", "gone", "later", "refused", "unknown", "rate-limited", "over"];

impl ConflictMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let keep = |collector: Box<dyn Collector>| {
            registry.register(collector).expect("each metric is registered once");
        };
        let standing = Opts::new("stowage_gpu_conflicts", "GPUs with conflicting allocations, by kind.");
        let standing = IntGaugeVec::new(standing, &["kind"]).expect("the name and labels are valid");
        let found = Opts::new("stowage_gpu_conflicts_detected_total", "GPU conflicts detected, by kind.");
        let found = IntCounterVec::new(found, &["kind"]).expect("the name and labels are valid");
        let evictions = Opts::new(
            "stowage_gpu_conflict_evictions_total",
            "Evictions of unstarted pods to resolve a GPU conflict, by outcome.",
        );
        let evictions = IntCounterVec::new(evictions, &["outcome"]).expect("the name and labels are valid");
        let unchecked = IntGauge::new(
            "stowage_audit_pending_nodes",
            "Nodes that changed since the audit last checked them.",
        )
        .expect("the name is valid");
        keep(Box::new(standing.clone()));
        keep(Box::new(found.clone()));
        keep(Box::new(evictions.clone()));
        keep(Box::new(unchecked.clone()));
        // An alert on a rate needs to see zero before the first increase.
        for kind in GpuConflictKind::ALL {
            standing.with_label_values(&[kind.code()]);
            found.with_label_values(&[kind.code()]);
        }
        for outcome in OUTCOMES {
            evictions.with_label_values(&[outcome]);
        }
        Self { standing, found, evictions, unchecked }
    }

    /// Sets the gauges after an audit.
    pub fn set(&self, conflicts: &Conflicts, look: &AuditRound) {
        for kind in GpuConflictKind::ALL {
            self.standing.with_label_values(&[kind.code()]).set(conflicts.count(kind) as i64);
        }
        for conflict in &look.begun {
            self.found.with_label_values(&[conflict.kind.code()]).inc();
        }
        self.unchecked.set(conflicts.waiting() as i64);
    }
}
