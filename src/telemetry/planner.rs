//! Metrics of the planner: how its runs end, how many pods wait for one, and which writes it postponed because a limit was
//! reached.

use prometheus::core::Collector;
use prometheus::{Histogram, HistogramOpts, IntCounterVec, IntGauge, Opts, Registry};

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

/// A run is limited to a quarter of a second.
const SECONDS: [f64; 8] = [1e-3, 5e-3, 25e-3, 0.1, 0.25, 0.5, 1.0, 5.0];

impl PlannerMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let keep = |collector: Box<dyn Collector>| {
            registry.register(collector).expect("each metric is registered once");
        };
        let counters = |name: &str, help: &str, label: &str| {
            let counters =
                IntCounterVec::new(Opts::new(name, help), &[label]).expect("the name and labels are valid");
            keep(Box::new(counters.clone()));
            counters
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help).expect("the name is valid");
            keep(Box::new(gauge.clone()));
            gauge
        };
        let seconds =
            HistogramOpts::new("stowage_planner_run_duration_seconds", "Duration of planning runs.");
        let run_seconds = Histogram::with_opts(seconds.buckets(SECONDS.to_vec())).expect("the name is valid");
        keep(Box::new(run_seconds.clone()));
        let metrics = Self {
            runs: counters("stowage_planner_runs_total", "Planning runs, by outcome.", "outcome"),
            run_seconds,
            waiting: gauge("stowage_planner_waiting_pods", "Pods that wait to be planned."),
            left_over: gauge(
                "stowage_planner_unprocessed_pods",
                "Pods that the latest planning run did not reach.",
            ),
            postponed: counters(
                "stowage_planner_postponed_writes_total",
                "Writes postponed because too many were in progress, by kind.",
                "kind",
            ),
            overuse_evictions: counters(
                "stowage_overuse_evictions_total",
                "Evictions of pods that used more VRAM than they were granted, by outcome.",
                "outcome",
            ),
        };
        for outcome in ["written", "gone", "later", "refused", "unknown"] {
            metrics.overuse_evictions.with_label_values(&[outcome]);
        }
        // An alert on a rate needs to see zero before the first increase.
        for outcome in ["complete", "limited", "cancelled"] {
            metrics.runs.with_label_values(&[outcome]);
        }
        for kind in ["reason", "requeue", "release"] {
            metrics.postponed.with_label_values(&[kind]);
        }
        metrics
    }
}
