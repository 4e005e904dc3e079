//! Metrics in Prometheus text, and logs.
//!
//! No decision reads a metric.

mod autoscaling;
mod conflicts;
mod edge;
mod lending;
mod overuse;
mod planner;
mod policy;
mod start_times;

use crate::build_info;
use crate::scheduling::ledger::Totals;
use crate::scheduling::policy::SpareRule;
use crate::units::Millis;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

pub use autoscaling::AutoscalingMetrics;
pub use conflicts::ConflictMetrics;
pub use edge::EdgeMetrics;
pub use lending::LendingMetrics;
pub use overuse::OveruseMetrics;
pub use planner::PlannerMetrics;
pub use policy::PolicyMetrics;
pub use start_times::StartMetrics;

/// Resources that are watched.
const WATCHED: [&str; 8] = [
    "namespaces",
    "nodes",
    "persistentvolumeclaims",
    "persistentvolumes",
    "poddisruptionbudgets",
    "pods",
    "resourceslices",
    "storageclasses",
];

pub struct Metrics {
    registry: Registry,
    /// Time per verb from the last byte of the body to the answer.
    pub verb_seconds: HistogramVec,
    /// Answers by verb, outcome and reason code.
    pub answers: IntCounterVec,
    /// Nodes refused by filter, by reason code.
    pub refusals: IntCounterVec,
    /// Malformed requests, by verb (or `reports`) and code.
    pub bad_requests: IntCounterVec,
    /// Agent reports by outcome.
    pub reports: IntCounterVec,
    /// Bytes of report bodies.
    pub report_bytes: IntCounter,
    /// GPUs that appear in a report and are not used yet, because their node's list changes too often.
    pub gpus_delayed: IntCounter,
    /// Ledgers discarded because of a panic.
    pub ledgers_discarded: IntCounter,
    /// Parts that reports lack.
    pub report_missing: IntCounterVec,
    /// Findings of agents, counted once per pod while they last.
    pub report_findings: IntCounterVec,
    /// Reviews of agents' tokens, by outcome.
    pub token_reviews: IntCounterVec,
    report_age: GaugeVec,
    /// Events published, suppressed as repetitions, or dropped, by reason.
    pub events: IntCounterVec,
    /// Writes to the API server by kind and outcome.
    pub writes: IntCounterVec,
    /// Edits of Stowage's annotations on a pod, and pods without a record.
    pub pod_warnings: IntCounterVec,
    /// Shadow mode's answers, by verb and how they compare.
    pub shadow: IntCounterVec,
    /// Handlers that panicked and were caught.
    pub panics: IntCounterVec,
    /// How long a filter waited for the ledger's lock and held it.
    pub ledger_seconds: Histogram,
    ledger_pods: IntGaugeVec,
    vram_allocatable: IntGauge,
    vram_allocated: IntGauge,
    nodes: IntGauge,
    dra_nodes: IntGauge,
    gpus: IntGauge,
    reusable_engines: IntGauge,
    pub bound_to_wake: IntCounter,
    spare: IntGaugeVec,
    pub leading: IntGauge,
    pub synced: IntGauge,
    /// 1 for each kind of object that the API server does not let this replica read.
    pub refused_watches: IntGaugeVec,
    pub planner: PlannerMetrics,
    /// Time since the API server last answered.
    pub silence: Gauge,
    pub policy: PolicyMetrics,
    pub lending: LendingMetrics,
    pub conflicts: ConflictMetrics,
    pub starts: StartMetrics,
    pub autoscaling: AutoscalingMetrics,
    pub overuse: OveruseMetrics,
    pub edge: EdgeMetrics,
}

/// Whether `NO_COLOR` is set, to anything but nothing: <https://no-color.org>.
pub fn wants_no_colour() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// From 50 µs, below which latency does not matter, to 3 s, beyond which kube-scheduler has given up.
const SECONDS: [f64; 12] = [50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.25, 1.0, 3.0];

impl Metrics {
    pub fn new() -> Self {
        let registry = Registry::new();
        let keep = |collector: Box<dyn prometheus::core::Collector>| {
            registry.register(collector).expect("each metric is registered once");
        };
        let counters = |name: &str, help: &str, labels: &[&str]| {
            let counters =
                IntCounterVec::new(Opts::new(name, help), labels).expect("the name and labels are valid");
            keep(Box::new(counters.clone()));
            counters
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help).expect("the name is valid");
            keep(Box::new(gauge.clone()));
            gauge
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            let gauges =
                IntGaugeVec::new(Opts::new(name, help), labels).expect("the name and labels are valid");
            keep(Box::new(gauges.clone()));
            gauges
        };
        let build =
            gauges("stowage_build_info", "1; the labels say which build this is.", &["version", "commit"]);
        build.with_label_values(&[build_info::VERSION, build_info::COMMIT.unwrap_or("unknown")]).set(1);
        let options = |name: &str, help: &str| HistogramOpts::new(name, help).buckets(SECONDS.to_vec());
        let verb_seconds = HistogramVec::new(
            options("stowage_verb_duration_seconds", "Time to answer the scheduler, by verb."),
            &["verb"],
        )
        .expect("the name and labels are valid");
        let ledger_seconds = Histogram::with_opts(options(
            "stowage_ledger_lock_duration_seconds",
            "Time that filter waited for the ledger's lock and held it.",
        ))
        .expect("the name is valid");
        let report_bytes =
            IntCounter::new("stowage_agent_report_bytes_total", "Bytes of agent reports received.")
                .expect("the name is valid");
        let gpus_delayed = IntCounter::new(
            "stowage_agent_gpus_delayed_total",
            "GPUs in agent reports that were deferred because their node's GPU list changes too often.",
        )
        .expect("the name is valid");
        let ledgers_discarded = IntCounter::new(
            "stowage_ledger_discarded_total",
            "Ledgers discarded after a panic under the lock, and rebuilt from a new list of the cluster.",
        )
        .expect("the name is valid");
        let bound_to_wake = IntCounter::new(
            "stowage_bound_to_reusable_engines_total",
            "Pods bound to GPUs on which an engine of their model slept that they may wake.",
        )
        .expect("the name is valid");
        let report_age = GaugeVec::new(
            Opts::new(
                "stowage_agent_report_age_seconds",
                "Time since the latest report of each node, by percentile over the nodes.",
            ),
            &["percentile"],
        )
        .expect("the name and labels are valid");
        let silence = Gauge::new(
            "stowage_api_server_last_contact_age_seconds",
            "Time since the last response or watch event of the API server; 0 without an API server.",
        )
        .expect("the name is valid");
        keep(Box::new(silence.clone()));
        keep(Box::new(verb_seconds.clone()));
        keep(Box::new(ledger_seconds.clone()));
        keep(Box::new(report_bytes.clone()));
        keep(Box::new(report_age.clone()));
        keep(Box::new(bound_to_wake.clone()));
        keep(Box::new(gpus_delayed.clone()));
        keep(Box::new(ledgers_discarded.clone()));
        let refused_watches = gauges(
            "stowage_watch_refused",
            "1 while the API server does not let this replica list or watch the resource.",
            &["resource"],
        );
        WATCHED.iter().for_each(|resource| drop(refused_watches.with_label_values(&[*resource])));
        Self {
            verb_seconds,
            ledger_seconds,
            answers: counters(
                "stowage_answers_total",
                "Answers to the scheduler, by verb, outcome and reason code.",
                &["verb", "outcome", "code"],
            ),
            refusals: counters(
                "stowage_nodes_rejected_total",
                "Nodes rejected by filter, by reason code.",
                &["code"],
            ),
            bad_requests: counters(
                "stowage_bad_requests_total",
                "Invalid requests, by verb and code.",
                &["verb", "code"],
            ),
            reports: counters("stowage_agent_reports_total", "Agent reports, by outcome.", &["outcome"]),
            report_bytes,
            gpus_delayed,
            ledgers_discarded,
            report_missing: counters(
                "stowage_agent_missing_parts_total",
                "Parts that agent reports lacked because they could not be sampled, by part.",
                &["part"],
            ),
            report_findings: counters(
                "stowage_agent_findings_total",
                "Pods found to run on other GPUs or to use more VRAM than recorded, by kind.",
                &["kind"],
            ),
            token_reviews: counters(
                "stowage_agent_token_reviews_total",
                "TokenReviews of agents' tokens, by outcome.",
                &["outcome"],
            ),
            report_age,
            events: counters(
                "stowage_events_total",
                "Kubernetes Events, by reason and outcome.",
                &["reason", "outcome"],
            ),
            writes: counters(
                "stowage_api_server_writes_total",
                "Writes to the API server, by kind and outcome.",
                &["kind", "outcome"],
            ),
            pod_warnings: counters(
                "stowage_pod_warnings_total",
                "Pods whose placement record is missing or was edited, by warning.",
                &["warning"],
            ),
            shadow: counters(
                "stowage_shadow_decisions_total",
                "Decisions recorded in shadow mode, by verb and how they compare.",
                &["verb", "outcome"],
            ),
            panics: counters(
                "stowage_panics_total",
                "Panics caught in request handlers, by verb.",
                &["verb"],
            ),
            ledger_pods: gauges("stowage_ledger_pods", "Pods in the ledger, by state.", &["state"]),
            vram_allocatable: gauge(
                "stowage_vram_allocatable_bytes",
                "VRAM that pods can be allocated: total less the driver's reserve and the headroom.",
            ),
            vram_allocated: gauge("stowage_vram_allocated_bytes", "VRAM allocated to pods."),
            nodes: gauge("stowage_nodes", "GPU nodes in the ledger."),
            dra_nodes: gauge(
                "stowage_dra_nodes",
                "Nodes whose GPUs a DRA driver publishes, so that Stowage allocates none of them.",
            ),
            gpus: gauge("stowage_gpus", "GPUs and MIG slices in the ledger."),
            reusable_engines: gauge(
                "stowage_reusable_engines",
                "Sleeping engines that new pods may wake and none has taken.",
            ),
            bound_to_wake,
            spare: gauges(
                "stowage_spare_gpus",
                "GPUs that a rule of planning.spare keeps free, and free GPUs that count for it.",
                &["rule", "kind"],
            ),
            leading: gauge("stowage_leader", "1 if this replica leads."),
            refused_watches,
            synced: gauge(
                "stowage_synced",
                "1 once the watches have synced, 0 while the API server is gone.",
            ),
            silence,
            planner: PlannerMetrics::new(&registry),
            policy: PolicyMetrics::new(&registry),
            conflicts: ConflictMetrics::new(&registry),
            lending: LendingMetrics::new(&registry),
            starts: StartMetrics::new(&registry),
            autoscaling: AutoscalingMetrics::new(&registry),
            overuse: OveruseMetrics::new(&registry),
            edge: EdgeMetrics::new(&registry),
            registry,
        }
    }

    /// Of each rule of `planning.spare`, what it keeps and what is free; nothing of one that does not hold now.
    pub fn set_spare<'r>(&self, rules: impl Iterator<Item = (&'r SpareRule, Option<u32>)>) {
        self.spare.reset();
        for (place, (rule, free)) in rules.enumerate() {
            let Some(free) = free else { continue };
            // Two rules may be for the same GPUs.
            let name = format!("{place}: {rule}");
            self.spare.with_label_values(&[name.as_str(), "kept"]).set(rule.gpus.into());
            self.spare.with_label_values(&[name.as_str(), "free"]).set(free.into());
        }
    }

    pub fn set_totals(&self, totals: &Totals) {
        for (state, count) in [
            ("waiting", totals.waiting),
            ("assumed", totals.assumed),
            ("bound", totals.bound),
            ("unplaced", totals.unplaced),
            ("reserved", totals.reservations),
            ("soft-reserved", totals.soft_reservations),
        ] {
            self.ledger_pods.with_label_values(&[state]).set(count as i64);
        }
        self.vram_allocatable.set(totals.capacity.0 as i64);
        self.vram_allocated.set(totals.charged.0 as i64);
        self.nodes.set(totals.nodes as i64);
        self.dra_nodes.set(totals.dra_nodes as i64);
        self.gpus.set(totals.gpus as i64);
        self.reusable_engines.set(totals.reusable_engines as i64);
        self.lending.lent.set(totals.lent.0 as i64);
        self.lending.borrowers.set(totals.borrowing as i64);
    }

    /// Ages of the nodes' latest reports; `ages` in any order.
    pub fn set_report_ages(&self, mut ages: Vec<Millis>) {
        ages.sort_unstable();
        self.report_age.reset();
        for (label, percent) in [("50", 50), ("99", 99), ("100", 100)] {
            let place = (ages.len() * percent).div_ceil(100).saturating_sub(1);
            if let Some(age) = ages.get(place) {
                self.report_age.with_label_values(&[label]).set(age.0 as f64 / 1e3);
            }
        }
    }

    /// All metrics in Prometheus' text format.
    pub fn render(&self) -> String {
        let mut text = Vec::new();
        TextEncoder::new()
            .encode(&self.registry.gather(), &mut text)
            .expect("writing to memory does not fail");
        String::from_utf8(text).expect("the text format is UTF-8")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}
