//! The flight recorder of `serve --record`: a thread that takes what the service's tap gives it, and writes it to segments in a
//! directory, in a ring by size and age.
//!
//! Nothing that answers a request waits for it. It can fail in one way, which is that something is missing: a full queue, a full
//! disk and a killed process each leave a gap, which the next checkpoint names and ends.
//!
//! - [`ring`]: the directory, its segments, and when the oldest go.
//! - [`bundle`]: the ring's last minutes, for the operators' address.
//! - [`writer`]: the thread's work: entries into the segment, checkpoints, failures.

mod bundle;
mod ring;
mod writer;

pub use bundle::{LeftOut, Recordings, write_recording_bundle};
pub(crate) use ring::{RecordDirectoryError, SegmentStore};
pub use ring::{Ring, RingLimits};

use crate::service::{RecordingTap, ServerState};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stowage_telemetry::build_info;
use tracing::warn;
use writer::Writer;

/// Where to record, and how much to keep.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    pub directory: PathBuf,
    pub limits: RingLimits,
}

/// A running recorder. It keeps its service, because the last thing that it writes is the state at the end.
pub struct FlightRecorder {
    state: Arc<ServerState>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FlightRecorder {
    /// Records what the service does from here on.
    pub fn start(
        options: &RecordOptions,
        state: &Arc<ServerState>,
    ) -> Result<Self, RecordDirectoryError> {
        let ring = Ring::open(&options.directory, options.limits)?;
        Ok(Self::start_with_segments(ring, state))
    }

    /// Starts a recorder that writes into these segments.
    pub(crate) fn start_with_segments(
        segments: impl SegmentStore + 'static,
        state: &Arc<ServerState>,
    ) -> Self {
        let (tap, queue) = RecordingTap::new(state.metrics.recording.clone());
        state.set_recording_tap(tap);
        let stop = Arc::new(AtomicBool::new(false));
        let writer = Writer::new(segments, queue, state, build_info::text());
        let is_stopped = stop.clone();
        let metrics = state.metrics.recording.clone();
        let record = move || {
            let recording = AssertUnwindSafe(|| writer.run(&|| is_stopped.load(Ordering::Acquire)));
            // The panic is in the log. With the queue's end, the tap records nothing more.
            if std::panic::catch_unwind(recording).is_err() {
                metrics.is_recording.set(0);
                metrics.errors.inc();
            }
        };
        let thread = std::thread::Builder::new()
            .name("flight-recorder".into())
            .spawn(record)
            .expect("a process that serves can have one more thread");
        Self {
            state: state.clone(),
            stop,
            thread: Some(thread),
        }
    }

    /// Writes what is in the queue and a last checkpoint, with which a replay compares its own state, and ends.
    pub fn stop(mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for FlightRecorder {
    /// Stops the recorder as [`Self::stop`] does, but a disk that hangs does not keep the process from ending.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else {
            return;
        };
        let until = Instant::now() + SHUTDOWN_TIMEOUT;
        while !thread.is_finished() {
            if Instant::now() >= until {
                self.state.metrics.recording.errors.inc();
                warn!(
                    "the flight recorder's disk does not answer: the end of the recording may be missing"
                );
                return;
            }
            std::thread::park_timeout(SHUTDOWN_POLL_INTERVAL);
        }
    }
}

/// How long a dropped recorder may take to write the rest, which usually takes a fraction of a second.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the end of the thread is checked: a shutdown is this much late at most.
const SHUTDOWN_POLL_INTERVAL: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests;
