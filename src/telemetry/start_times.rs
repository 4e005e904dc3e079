//! Metrics of engines' starts: how long they were expected to take, how long they took, and how far the two were apart.

use crate::scheduling::ledger::{StartErrors, TimedStart};
use crate::scheduling::vocabulary::start_time::EngineKind;
use prometheus::core::Collector;
use prometheus::{GaugeVec, HistogramOpts, HistogramVec, IntGauge, Opts, Registry};

pub struct StartMetrics {
    observed: HistogramVec,
    expected: HistogramVec,
    errors: GaugeVec,
    starts: IntGauge,
}

/// From an engine that wakes to a 400 GB model that is fetched over a slow network.
const SECONDS: [f64; 12] = [1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0];

impl StartMetrics {
    pub(super) fn new(registry: &Registry) -> Self {
        let keep = |collector: Box<dyn Collector>| {
            registry.register(collector).expect("each metric is registered once");
        };
        let histograms = |name: &str, help: &str| {
            let options = HistogramOpts::new(name, help).buckets(SECONDS.to_vec());
            let histograms = HistogramVec::new(options, &["engine"]).expect("the name and labels are valid");
            keep(Box::new(histograms.clone()));
            histograms
        };
        let observed = histograms(
            "stowage_engine_start_duration_seconds",
            "Time from binding until an engine was ready, by engine.",
        );
        let expected = histograms(
            "stowage_engine_start_expected_seconds",
            "The same as it was expected when the pod was bound, by engine.",
        );
        let errors = GaugeVec::new(
            Opts::new(
                "stowage_engine_start_error_ratio",
                "How far expected starts were off, relative to the observed ones, by basis and percentile over the latest starts.",
            ),
            &["basis", "percentile"],
        )
        .expect("the name and labels are valid");
        let starts = IntGauge::new(
            "stowage_engine_starts_compared",
            "The latest starts over which the percentiles of the error are taken.",
        )
        .expect("the name is valid");
        keep(Box::new(errors.clone()));
        keep(Box::new(starts.clone()));
        // A rate needs to see the count before its first rise.
        for engine in EngineKind::ALL {
            observed.with_label_values(&[engine.name()]);
            expected.with_label_values(&[engine.name()]);
        }
        Self { observed, expected, errors, starts }
    }

    /// An engine has started.
    pub fn note(&self, start: &TimedStart) {
        let engine = [start.engine.name()];
        self.observed.with_label_values(&engine).observe(start.observed.0 as f64 / 1e3);
        self.expected.with_label_values(&engine).observe(start.expected.0 as f64 / 1e3);
    }

    pub fn set_errors(&self, errors: &StartErrors) {
        self.starts.set(errors.starts as i64);
        if errors.starts == 0 {
            return;
        }
        for (basis, percentiles) in [("calibrated", errors.expected), ("policy", errors.prior)] {
            for (label, error) in [("50", percentiles.p50), ("90", percentiles.p90)] {
                self.errors.with_label_values(&[basis, label]).set(error as f64 / 1e3);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;
    use super::*;
    use crate::scheduling::ledger::Percentiles;
    use crate::units::Millis;

    #[test]
    fn expected_and_observed_starts_are_shown_with_their_error() {
        let metrics = Metrics::new();
        let seconds = Millis::seconds;
        let (engine, prior) = (EngineKind::Vllm, seconds(30));
        metrics.starts.note(&TimedStart { engine, expected: seconds(80), prior, observed: seconds(100) });
        let errors = StartErrors {
            starts: 1,
            expected: Percentiles { p50: 200, p90: 200 },
            prior: Percentiles { p50: 700, p90: 700 },
        };
        metrics.starts.set_errors(&errors);
        let text = metrics.render();
        for line in [
            "stowage_engine_start_duration_seconds_sum{engine=\"vllm\"} 100",
            "stowage_engine_start_expected_seconds_sum{engine=\"vllm\"} 80",
            "stowage_engine_start_error_ratio{basis=\"calibrated\",percentile=\"50\"} 0.2",
            "stowage_engine_start_error_ratio{basis=\"policy\",percentile=\"90\"} 0.7",
            "stowage_engine_starts_compared 1",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
