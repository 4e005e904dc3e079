//! What `stowage serve` and `stowage agent` tell of themselves, and by which sockets: metrics in Prometheus text, [`traces`] for
//! OpenTelemetry, [`listening`] for the addresses of the command line, [`trust`] for the servers they call, and which build it is
//! ([`build_info`]).
//!
//! - [`family`]: how a family is declared. Read it before you add one.
//! - [`scrape`]: how a page is written.
//! - serve's page, kept: `requests`, `reports`, `cluster`, `autoscaling`, [`edge`], [`planner`], [`policy`], [`lending`],
//!   [`recording`], [`conflicts`], [`start_times`], by subject.
//! - serve's page, sampled from a copy of the ledger: [`usage`], [`devices`], [`models`], [`overuse`].
//! - [`agent`]: the agent's page.
//! - [`mod@reference`]: `docs/reference/metrics.md`, generated from the declarations.
//!
//! No decision reads a metric.

pub mod agent;
mod autoscaling;
pub mod build_info;
mod cluster;
mod conflicts;
pub mod devices;
mod edge;
pub mod family;
mod lending;
pub mod listening;
pub mod models;
mod overuse;
mod planner;
mod policy;
mod recording;
pub mod reference;
mod reports;
mod requests;
pub mod scrape;
mod spans;
mod start_times;
pub mod traces;
pub mod trust;
mod usage;
mod work_kind;

use family::{Families, open};
use prometheus::{
    Gauge, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
};

pub(crate) use autoscaling::AutoscalingMetrics;
pub(crate) use conflicts::OverAllocationMetrics;
pub(crate) use devices::DeviceMetrics;
pub use edge::EdgeMetrics;
pub(crate) use lending::LendingMetrics;
pub(crate) use models::ModelMetrics;
pub(crate) use overuse::OveruseMetrics;
pub(crate) use planner::PlannerMetrics;
pub(crate) use policy::PolicyMetrics;
pub use recording::RecordingMetrics;
pub use requests::NO_CODE;
pub(crate) use spans::TraceMetrics;
pub(crate) use start_times::StartMetrics;
pub(crate) use usage::UsageMetrics;
pub use usage::UsageSample;
pub use work_kind::WorkKind;

/// The innermost cause of an error says most: "connection refused" rather than "service error".
pub fn root_cause<'e>(
    mut error: &'e (dyn std::error::Error + 'static),
) -> &'e (dyn std::error::Error + 'static) {
    while let Some(source) = error.source() {
        error = source;
    }
    error
}

/// Whether `NO_COLOR` is set, to anything but nothing: <https://no-color.org>.
pub fn wants_no_color() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// The metrics of `stowage serve`.
pub struct Metrics {
    families: Families,
    /// Time per verb from the last byte of the body to the answer.
    pub verb_seconds: HistogramVec,
    /// Answers by verb, outcome and reason code.
    pub answers: IntCounterVec,
    /// Nodes refused by filter, by reason code.
    pub refusals: IntCounterVec,
    /// Malformed requests, by verb (or `reports`) and code.
    pub bad_requests: IntCounterVec,
    /// Shadow mode's answers, by verb and how they compare.
    pub shadow: IntCounterVec,
    /// Handlers that panicked and were caught.
    pub panics: IntCounterVec,
    /// How long a filter waited for the ledger's lock.
    pub ledger_wait: Histogram,
    /// How long a filter held the ledger's lock.
    pub ledger_hold: Histogram,
    /// From a pod's first refusal, or its first sight behind the gate, to its Binding, by class.
    pub placement_seconds: HistogramVec,
    pub bound_to_reusable_engines: IntCounter,
    /// Agent reports by outcome.
    pub reports: IntCounterVec,
    /// Bytes of report bodies.
    pub report_bytes: IntCounter,
    /// GPUs that appear in a report and are not used yet, because their node's list changes too often.
    pub gpus_delayed: IntCounter,
    /// Parts that reports lack.
    pub report_missing: IntCounterVec,
    /// Findings of agents, counted once per pod while they last.
    pub report_findings: IntCounterVec,
    /// Reviews of agents' tokens, by outcome.
    pub token_reviews: IntCounterVec,
    /// Ledgers discarded because of a panic.
    pub ledgers_discarded: IntCounter,
    /// Events published, suppressed as repetitions, or dropped, by reason.
    pub events: IntCounterVec,
    /// Writes to the API server by kind and outcome.
    pub writes: IntCounterVec,
    /// Pods evicted, by reason.
    pub evictions: IntCounterVec,
    /// Edits of Stowage's annotations on a pod, and pods without a record.
    pub pod_warnings: IntCounterVec,
    pub leading: IntGauge,
    pub synced: IntGauge,
    /// 1 for each kind of object that the API server does not let this replica read.
    pub refused_watches: IntGaugeVec,
    /// Objects that are larger than Stowage reads.
    pub bounds_reached: IntCounterVec,
    /// Time since the API server last answered.
    pub last_contact_age: Gauge,
    pub planner: PlannerMetrics,
    pub policy: PolicyMetrics,
    pub lending: LendingMetrics,
    pub recording: RecordingMetrics,
    pub over_allocations: OverAllocationMetrics,
    pub starts: StartMetrics,
    pub autoscaling: AutoscalingMetrics,
    pub edge: EdgeMetrics,
    pub usage: UsageMetrics,
    pub devices: DeviceMetrics,
    pub models: ModelMetrics,
    pub overuse: OveruseMetrics,
    pub traces: TraceMetrics,
}

impl Metrics {
    pub fn new() -> Self {
        let mut declared = Families::new();
        let families = &mut declared;
        declare_build_and_process(families);
        Self {
            verb_seconds: requests::verb_seconds(families),
            answers: requests::answers(families),
            refusals: requests::refusals(families),
            bad_requests: requests::bad_requests(families),
            shadow: requests::shadow(families),
            panics: requests::panics(families),
            ledger_wait: requests::ledger_wait(families),
            ledger_hold: requests::ledger_hold(families),
            placement_seconds: requests::placement_seconds(families),
            bound_to_reusable_engines: requests::bound_to_reusable_engines(families),
            reports: reports::reports(families),
            report_bytes: reports::bytes(families),
            gpus_delayed: reports::gpus_delayed(families),
            report_missing: reports::missing(families),
            report_findings: reports::findings(families),
            token_reviews: reports::token_reviews(families),
            ledgers_discarded: cluster::ledgers_discarded(families),
            events: cluster::events(families),
            writes: cluster::writes(families),
            evictions: cluster::evictions(families),
            pod_warnings: cluster::pod_warnings(families),
            leading: cluster::leading(families),
            synced: cluster::synced(families),
            refused_watches: cluster::refused_watches(families),
            bounds_reached: cluster::bounds_reached(families),
            last_contact_age: cluster::last_contact_age(families),
            planner: PlannerMetrics::new(families),
            policy: PolicyMetrics::new(families),
            lending: LendingMetrics::new(families),
            recording: RecordingMetrics::new(families),
            over_allocations: OverAllocationMetrics::new(families),
            starts: StartMetrics::new(families),
            edge: EdgeMetrics::new(families),
            usage: UsageMetrics::new(families),
            devices: DeviceMetrics::new(families),
            models: ModelMetrics::new(families),
            overuse: OveruseMetrics::new(families),
            autoscaling: AutoscalingMetrics::new(families),
            traces: TraceMetrics::new(families),
            families: declared,
        }
    }

    /// Every family of serve's page.
    pub fn families(&self) -> &Families {
        &self.families
    }

    /// The kept families in Prometheus' text format.
    pub fn render(&self) -> String {
        let mut text = Vec::new();
        scrape::Scrape::new(&mut text)
            .write_registered(&self.families)
            .expect("writing to memory does not fail");
        String::from_utf8(text).expect("the text format is UTF-8")
    }
}

/// Declares what both metrics pages have: which build this is, and the process' own figures.
fn declare_build_and_process(families: &mut Families) {
    let build = families.gauges(
        "stowage_build_info",
        "1; the labels say which build this is.",
        [open("version", "one"), open("commit", "one")],
    );
    build
        .with_label_values(&[build_info::VERSION, build_info::COMMIT.unwrap_or("unknown")])
        .set(1);
    families.register_process();
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}
