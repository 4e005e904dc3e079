//! Metrics of the continuous audit: current conflicts, detected conflicts, evictions to resolve them, and the audit's backlog.

use super::family::{Families, known};
use prometheus::{IntCounterVec, IntGauge, IntGaugeVec};
use stowage_scheduling::audit::conflicts::{AuditRound, OverAllocationAudit, OverAllocationKind};
use stowage_scheduling::control_loop::EvictionOutcome;
use strum::VariantArray;

pub struct OverAllocationMetrics {
    /// Current conflicts, by kind.
    current: IntGaugeVec,
    /// Detected conflicts, by kind.
    detected: IntCounterVec,
    /// Evictions that `conflicts: evict-unstarted` asked for, by outcome.
    pub evictions: IntCounterVec,
    /// Nodes that changed and have not been audited since.
    unchecked: IntGauge,
}

impl OverAllocationMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        let kind = || {
            known(
                "kind",
                OverAllocationKind::VARIANTS
                    .iter()
                    .map(OverAllocationKind::into_str),
            )
        };
        Self {
            current: families.gauges(
                "stowage_gpu_conflicts",
                "GPUs with conflicting allocations, by kind.",
                [kind()],
            ),
            detected: families.counters(
                "stowage_gpu_conflicts_detected_total",
                "GPU conflicts detected, by kind.",
                [kind()],
            ),
            evictions: families.counters(
                "stowage_gpu_conflict_evictions_total",
                "Evictions of unstarted pods to resolve a GPU conflict, by outcome.",
                [known(
                    "outcome",
                    EvictionOutcome::CODES
                        .iter()
                        .copied()
                        .chain(["rate-limited", "over"]),
                )],
            ),
            unchecked: families.gauge(
                "stowage_audit_pending_nodes",
                "Nodes that changed since the audit last checked them.",
            ),
        }
    }

    /// Sets the gauges after an audit.
    pub fn set(&self, audit: &OverAllocationAudit, round: &AuditRound) {
        for &kind in OverAllocationKind::VARIANTS {
            self.current
                .with_label_values(&[kind.into_str()])
                .set(audit.count(kind) as i64);
        }
        for over_allocation in &round.begun {
            self.detected
                .with_label_values(&[over_allocation.kind.into_str()])
                .inc();
        }
        self.unchecked.set(audit.waiting() as i64);
    }
}
