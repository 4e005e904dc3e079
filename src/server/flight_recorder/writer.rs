//! The recorder's work, beside everything else: takes entries out of the queue, makes them small, and writes them.
//!
//! A segment ends when it is long or old enough, by a checkpoint that comes through the queue in its place among the inputs. What
//! a checkpoint costs bounds how often there is one, so that large clusters do not pay more of a processor than small ones. A
//! write that fails ends the segment and closes the tap: until the next attempt the recorder costs nothing and the service
//! notices nothing.

use super::ring::SegmentStore;
use crate::service::{ServerState, TapMessage};
use std::io;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use stowage_recording::answer::{Answer, KeptAnswer};
use stowage_recording::entry::{Checkpoint, Entry, Gap, SegmentHeader};
use stowage_recording::write::SegmentWriter;
use stowage_scheduling::verbs::ClusterCopy;
use stowage_telemetry::RecordingMetrics;
use tracing::{info, warn};

/// A crash loses little more than this, and a frame of a quiet cluster is worth compressing.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// Text that is flushed before that.
const FLUSH_BYTES: usize = 256 << 10;
/// How often the recorder looks whether there is something to do.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// The sleep while the queue is empty; the queue has room for sixteen thousand entries in this time.
const EMPTY_QUEUE_SLEEP: Duration = Duration::from_millis(50);
/// A segment lasts for this long, or this many times as long as its checkpoint took, whichever is more.
const SEGMENT_DURATION: (Duration, u32) = (Duration::from_secs(60), 200);
/// The time between two checkpoints if entries were dropped or are many: at least this long, or this many times what one took.
const CHECKPOINT_SPACING: (Duration, u32) = (Duration::from_secs(1), 100);
/// A checkpoint may take long because the disk was slow once: the next one waits no longer than this.
const MAX_PAUSE: Duration = Duration::from_secs(300);
/// Between a write that failed and the next attempt: a full disk does not empty by itself within a second.
const RETRY_AFTER: Duration = Duration::from_secs(15);

pub struct Writer<S: SegmentStore> {
    segments: S,
    queue: Receiver<TapMessage>,
    /// Weak: the service may end without waiting for the recorder.
    state: Weak<ServerState>,
    metrics: RecordingMetrics,
    build: &'static str,
    segment: Option<OpenSegment<S::Segment>>,
    next_check_at: Instant,
    /// The earliest time of the next checkpoint.
    next_checkpoint_at: Instant,
    /// Whether the last write failed.
    is_failing: bool,
}

struct OpenSegment<W> {
    writer: SegmentWriter<W>,
    ends_at: Instant,
    /// The length in bytes at which it ends, whatever the time.
    max_bytes: u64,
    flush_at: Instant,
    /// Bytes that were counted.
    counted_bytes: u64,
    /// The checkpoint that ends it is in the queue.
    is_ending: bool,
}

impl<S: SegmentStore> Writer<S> {
    pub fn new(
        segments: S,
        queue: Receiver<TapMessage>,
        state: &Arc<ServerState>,
        build: &'static str,
    ) -> Self {
        let metrics = state.metrics.recording.clone();
        let state = Arc::downgrade(state);
        let (look_at, checkpoint_at) = (Instant::now(), Instant::now());
        Self {
            segments,
            queue,
            state,
            metrics,
            build,
            segment: None,
            next_check_at: look_at,
            next_checkpoint_at: checkpoint_at,
            is_failing: false,
        }
    }

    /// Runs until it is stopped or the service is gone; then writes what is left in the queue.
    pub fn run(mut self, is_stopped: &dyn Fn() -> bool) {
        // The first segment begins at once.
        self.run_due_tasks(Instant::now(), true);
        while !is_stopped() {
            let is_empty = match self.queue.try_recv() {
                Ok(tapped) => {
                    self.process(tapped);
                    false
                }
                Err(TryRecvError::Empty) => true,
                Err(TryRecvError::Disconnected) => break,
            };
            let now = Instant::now();
            if now >= self.next_check_at {
                self.run_due_tasks(now, is_empty);
            }
            if is_empty {
                // Nothing wakes it: to wake a thread costs whatever puts an entry into the queue more than the entry does.
                std::thread::sleep(EMPTY_QUEUE_SLEEP);
            }
        }
        self.drain_queue();
        // A last checkpoint, with which a replay compares the state that all inputs led to.
        if let Some(state) = self.state.upgrade().filter(|_| self.segment.is_some()) {
            state.record_checkpoint();
        }
        self.drain_queue();
        self.end_segment();
        self.metrics.is_recording.set(0);
    }

    /// Processes what is in the queue by now.
    fn drain_queue(&mut self) {
        while let Ok(tapped) = self.queue.try_recv() {
            self.process(tapped);
        }
    }

    /// Does what is due: flushes, updates the metrics, requests a checkpoint that ends the segment.
    fn run_due_tasks(&mut self, now: Instant, is_empty: bool) {
        self.next_check_at = now + CHECK_INTERVAL;
        if let Some(segment) = self
            .segment
            .as_mut()
            .filter(|segment| now >= segment.flush_at)
        {
            segment.flush_at = now + FLUSH_EVERY;
            let flushed = segment.writer.flush();
            self.record_write(flushed);
            self.end_if_removed();
        }
        let Some(state) = self.state.upgrade() else {
            return;
        };
        let Some(tap) = state.recording_tap() else {
            return;
        };
        let is_recording = tap.is_recording();
        self.metrics
            .is_recording
            .set(i64::from(is_recording && self.segment.is_some()));
        let is_due = match &self.segment {
            Some(segment) if is_recording => segment.should_end(now),
            // While the queue is full there is no use in going on.
            _ => !is_recording && is_empty,
        };
        // A full segment ends however long its checkpoint took: its size is bounded.
        let is_full = is_recording && self.segment.as_ref().is_some_and(OpenSegment::is_full);
        if is_due && (is_full || now >= self.next_checkpoint_at) {
            self.segment
                .iter_mut()
                .for_each(|segment| segment.is_ending = true);
            state.record_checkpoint();
        }
    }

    fn process(&mut self, tapped: TapMessage) {
        let entry = match tapped {
            TapMessage::Checkpoint { next, after, copy } => {
                return self.begin_segment(next, after, *copy);
            }
            // They would only be dropped.
            _ if self.segment.is_none() => return,
            TapMessage::Clock(now) => Entry::Clock(now),
            TapMessage::Input(numbered, _bytes) => Entry::Input(numbered),
            TapMessage::Answer(input, decision, _bytes) => Entry::Answer(Answer {
                input,
                answer: KeptAnswer::from_decision(*decision),
            }),
        };
        if let Some(segment) = &mut self.segment {
            let mut written = segment.writer.push(entry);
            if written.is_ok() && segment.writer.pending_bytes() >= FLUSH_BYTES {
                written = segment.writer.flush();
            }
            self.record_write(written);
        }
    }

    fn begin_segment(&mut self, next: u64, after: Gap, copy: ClusterCopy) {
        let is_complete = self.end_segment();
        // What was lost before it came to the disk is missing, too.
        let after = if after == Gap::None && !is_complete {
            Gap::Dropped(0)
        } else {
            after
        };
        match self.try_begin(next, after, copy) {
            Ok(segment) => {
                self.segment = Some(segment);
                if let Gap::Dropped(dropped) = after {
                    warn!(
                        dropped,
                        "the flight recorder did not keep up, or could not write; it goes on from a checkpoint"
                    );
                }
                if std::mem::take(&mut self.is_failing) {
                    info!(
                        directory = self.segments.location(),
                        "the flight recorder records again"
                    );
                }
                self.record_write(Ok(()));
            }
            Err(error) => self.handle_write_error(&error),
        }
    }

    fn try_begin(
        &mut self,
        next: u64,
        after: Gap,
        copy: ClusterCopy,
    ) -> io::Result<OpenSegment<S::Segment>> {
        let (wall, began) = (jiff::Timestamp::now().as_millisecond(), Instant::now());
        let state = copy.export();
        drop(copy);
        let header = SegmentHeader {
            stowage: self.build.into(),
            wall_ms: wall,
            began: state.now(),
        };
        // Before the new one, so that a full disk has room for it.
        self.segments.remove_expired()?;
        let file = self.segments.create_segment(wall)?;
        let checkpoint = Entry::Checkpoint(Box::new(Checkpoint { next, after, state }));
        let begun = SegmentWriter::begin(file, &header).and_then(|mut writer| {
            writer.push(checkpoint)?;
            writer.flush()?;
            Ok(writer)
        });
        let writer = begun.inspect_err(|_| self.segments.discard_latest())?;
        let (now, took) = (Instant::now(), began.elapsed());
        self.next_checkpoint_at = now + pause_after(CHECKPOINT_SPACING, took);
        Ok(OpenSegment {
            max_bytes: writer.bytes_written() + self.segments.segment_bytes(),
            writer,
            ends_at: now + pause_after(SEGMENT_DURATION, took),
            flush_at: now + FLUSH_EVERY,
            counted_bytes: 0,
            is_ending: false,
        })
    }

    /// Abandons a segment whose file was removed, because no reader finds it: another begins as soon as a checkpoint is due.
    fn end_if_removed(&mut self) {
        if self.segment.is_none() || self.segments.latest_exists() {
            return;
        }
        warn!(
            directory = self.segments.location(),
            "the segment was removed while the flight recorder wrote it; it begins another"
        );
        self.abandon_segment();
    }

    /// Ends the open segment. Returns whether all of it is written.
    fn end_segment(&mut self) -> bool {
        self.end_if_removed();
        let Some(mut segment) = self.segment.take() else {
            return false;
        };
        let ended = segment
            .writer
            .flush()
            .and_then(|()| self.segments.sync(segment.writer.get_ref()));
        self.metrics.bytes.inc_by(segment.take_uncounted_bytes());
        if let Err(error) = &ended {
            self.handle_write_error(error);
        }
        ended.is_ok()
    }

    /// Counts what was written, or abandons the segment after an error.
    fn record_write(&mut self, written: io::Result<()>) {
        if let Some(segment) = &mut self.segment {
            self.metrics.bytes.inc_by(segment.take_uncounted_bytes());
        }
        if let Err(error) = written {
            self.handle_write_error(&error);
        }
    }

    /// Abandons the segment, and pauses before the next attempt.
    fn handle_write_error(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.is_failing, true) {
            warn!(
                directory = self.segments.location(), %error,
                "the flight recorder cannot write, and pauses; decisions go on. {}", remedy(error)
            );
        }
        self.next_checkpoint_at = Instant::now() + RETRY_AFTER;
        self.abandon_segment();
    }

    /// Abandons the segment: what was recorded since the last flush is lost, and recording starts again with the next checkpoint.
    fn abandon_segment(&mut self) {
        self.segment = None;
        if let Some(state) = self.state.upgrade()
            && let Some(tap) = state.recording_tap()
        {
            tap.interrupt(Gap::Dropped(0));
        }
        self.metrics.is_recording.set(0);
        self.metrics.errors.inc();
    }
}

/// What an operator can do about a failed write.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "Free space there, or give it less by --record-size"
        }
        _ => "See that the directory is there, and that this process may write in it",
    }
}

/// The pause after a checkpoint that took `took`.
fn pause_after((minimum, factor): (Duration, u32), took: Duration) -> Duration {
    minimum.max(took.saturating_mul(factor).min(MAX_PAUSE))
}

impl<W: io::Write> OpenSegment<W> {
    fn should_end(&self, now: Instant) -> bool {
        !self.is_ending && (now >= self.ends_at || self.is_full())
    }

    fn is_full(&self) -> bool {
        self.writer.bytes_written() >= self.max_bytes
    }

    /// Bytes written since this was last asked.
    fn take_uncounted_bytes(&mut self) -> u64 {
        let written = self.writer.bytes_written();
        written - std::mem::replace(&mut self.counted_bytes, written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_disk_keeps_the_recorder_from_going_on_for_five_minutes_at_most() {
        let seconds = Duration::from_secs;
        let apart = |took| pause_after(CHECKPOINT_SPACING, took);
        assert_eq!(apart(Duration::from_millis(2)), seconds(1));
        assert_eq!(apart(Duration::from_millis(500)), seconds(50));
        assert_eq!([apart(seconds(10)), apart(Duration::MAX)], [MAX_PAUSE; 2]);
        assert_eq!(
            pause_after(SEGMENT_DURATION, Duration::from_millis(2)),
            seconds(60)
        );
    }
}
