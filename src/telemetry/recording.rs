//! Families about the flight recorder.

use super::family::Families;
use prometheus::{IntCounter, IntGauge};

#[derive(Debug, Clone)]
pub struct RecordingMetrics {
    /// Whether inputs are recorded now.
    pub is_recording: IntGauge,
    pub inputs: IntCounter,
    pub dropped_inputs: IntCounter,
    pub dropped_answers: IntCounter,
    pub bytes: IntCounter,
    pub errors: IntCounter,
}

impl RecordingMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        Self {
            is_recording: families.gauge(
                "stowage_recorder_recording",
                "1 while the flight recorder records what comes in; 0 without --record, and between a drop and the next checkpoint.",
            ),
            inputs: families
                .counter("stowage_recorder_inputs_total", "Changes of the cluster that were recorded."),
            dropped_inputs: families.counter(
                "stowage_recorder_dropped_inputs_total",
                "Changes of the cluster that were not recorded, because the recorder did not keep up or could not write.",
            ),
            dropped_answers: families.counter(
                "stowage_recorder_dropped_answers_total",
                "Answers of verbs that were not recorded, because the recorder did not keep up.",
            ),
            bytes: families
                .counter("stowage_recorder_written_bytes_total", "Bytes that the flight recorder wrote to its directory."),
            errors: families.counter(
                "stowage_recorder_errors_total",
                "Failed writes to the directory of --record. After each the recorder pauses, and begins a new segment.",
            ),
        }
    }

    /// Metrics that are on no page, for tests.
    pub fn detached() -> Self {
        Self::new(&mut Families::new())
    }
}
