//! Metrics of the planner: how its runs end, how many pods wait for one, and which writes it postponed because a limit was
//! reached.

use super::family::{Families, known};
use prometheus::{Histogram, IntCounterVec, IntGauge};

pub struct PlannerMetrics {
    /// Planning runs, by how they ended.
    pub runs: IntCounterVec,
    /// How long they took.
    pub run_seconds: Histogram,
    /// Pods that wait to be planned, due or not.
    pub waiting: IntGauge,
    /// Pods that the latest run was given and did not reach.
    pub left_over: IntGauge,
    /// Writes that were postponed because too many were in progress, by kind.
    pub postponed: IntCounterVec,
    /// Evictions of pods that use more VRAM than they were granted, by outcome.
    pub overuse_evictions: IntCounterVec,
}

/// The bound of a run is about a quarter of a second at 5,000 nodes, and some seconds at 65,000.
const RUN_BUCKETS: [f64; 9] = [1e-3, 5e-3, 25e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];

impl PlannerMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        Self {
            runs: families.counters(
                "stowage_planner_runs_total",
                "Planning runs, by outcome.",
                [known(
                    "outcome",
                    ["complete", "limited", "cancelled", "failed"],
                )],
            ),
            run_seconds: families.histogram(
                "stowage_planner_run_duration_seconds",
                "Duration of planning runs.",
                &RUN_BUCKETS,
            ),
            waiting: families.gauge(
                "stowage_planner_waiting_pods",
                "Pods that wait to be planned.",
            ),
            left_over: families.gauge(
                "stowage_planner_unprocessed_pods",
                "Pods that the latest planning run did not reach.",
            ),
            postponed: families.counters(
                "stowage_planner_postponed_writes_total",
                "Writes postponed because too many were in progress, by kind.",
                [known("kind", ["reason", "requeue", "release"])],
            ),
            overuse_evictions: families.counters(
                "stowage_overuse_evictions_total",
                "Evictions of pods that used more VRAM than they were granted, by outcome.",
                [known(
                    "outcome",
                    [
                        "written",
                        "gone",
                        "later",
                        "called-off",
                        "refused",
                        "unknown",
                    ],
                )],
            ),
        }
    }
}
