//! Metrics of engines' starts: how long they were expected to take, how long they took, and how far the two were apart.

use super::family::{Families, Sampled, known};
use super::scrape::Scrape;
use prometheus::HistogramVec;
use std::io;
use stowage_scheduling::engines::Engine;
use stowage_scheduling::ledger::{StartErrors, TimedStart};

pub struct StartMetrics {
    observed: HistogramVec,
    expected: HistogramVec,
    median_error: Sampled,
    high_error: Sampled,
    starts: Sampled,
}

/// From an engine that wakes to a 400 GB model that is fetched over a slow network.
const START_BUCKETS: [f64; 12] = [
    1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0,
];

impl StartMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        let engine = || known("engine", Engine::ALL.map(Engine::name));
        let basis = || known("basis", ["calibrated", "policy"]);
        Self {
            observed: families.histograms(
                "stowage_engine_start_duration_seconds",
                "Time from binding until an engine was ready, by engine.",
                [engine()],
                &START_BUCKETS,
            ),
            expected: families.histograms(
                "stowage_engine_start_expected_seconds",
                "Time from binding until an engine is ready, as expected when the pod was bound, by engine.",
                [engine()],
                &START_BUCKETS,
            ),
            median_error: families.sampled(
                "stowage_engine_start_error_median_ratio",
                "Median of |expected - observed| / observed over the latest 256 starts, for the expectation at bind (calibrated) and for \
                 that of the policy's figures alone (policy).",
                [basis()],
            ),
            high_error: families.sampled(
                "stowage_engine_start_error_p90_ratio",
                "90th percentile of |expected - observed| / observed over the latest 256 starts, by basis.",
                [basis()],
            ),
            starts: families.sampled(
                "stowage_engine_starts_compared",
                "Starts that this replica saw, of the latest 256, over which the error is taken.",
                [],
            ),
        }
    }

    /// Records an engine's start, and how long it was expected to take.
    pub fn observe_start(&self, start: &TimedStart) {
        let engine = [start.engine.name()];
        self.observed
            .with_label_values(&engine)
            .observe(start.observed.0 as f64 / 1e3);
        self.expected
            .with_label_values(&engine)
            .observe(start.expected.0 as f64 / 1e3);
    }

    pub fn write(&self, scrape: &mut Scrape<'_>, errors: &StartErrors) -> io::Result<()> {
        let bases = [("calibrated", errors.expected), ("policy", errors.prior)];
        // Without a start there is no error, not one of zero.
        let bases = if errors.starts == 0 {
            &[][..]
        } else {
            &bases[..]
        };
        let of = |thousandths: u64| thousandths as f64 / 1e3;
        scrape.write_samples(
            &self.median_error,
            bases.iter().map(|(basis, error)| ([basis], of(error.p50))),
        )?;
        scrape.write_samples(
            &self.high_error,
            bases.iter().map(|(basis, error)| ([basis], of(error.p90))),
        )?;
        scrape.write_value(&self.starts, errors.starts as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;
    use super::*;
    use stowage_scheduling::ledger::Percentiles;
    use stowage_scheduling::units::Millis;

    #[test]
    fn expected_and_observed_starts_are_shown_with_their_error() {
        let metrics = Metrics::new();
        let seconds = Millis::seconds;
        let (engine, prior) = (Engine::Vllm, seconds(30));
        metrics.starts.observe_start(&TimedStart {
            engine,
            expected: seconds(80),
            prior,
            observed: seconds(100),
        });
        let errors = StartErrors {
            starts: 1,
            expected: Percentiles { p50: 200, p90: 200 },
            prior: Percentiles { p50: 700, p90: 700 },
        };
        let mut text = Vec::new();
        let mut scrape = Scrape::new(&mut text);
        scrape.write_registered(metrics.families()).unwrap();
        metrics.starts.write(&mut scrape, &errors).unwrap();
        let text = String::from_utf8(text).unwrap();
        for line in [
            "stowage_engine_start_duration_seconds_sum{engine=\"vllm\"} 100",
            "stowage_engine_start_expected_seconds_sum{engine=\"vllm\"} 80",
            "stowage_engine_start_error_median_ratio{basis=\"calibrated\"} 0.2",
            "stowage_engine_start_error_p90_ratio{basis=\"policy\"} 0.7",
            "stowage_engine_starts_compared 1",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
