//! The recorder on a real service: what it records replays, whatever happens to its disk.

use super::*;
use parking_lot::Mutex;
use std::io::{self, Write};
use std::path::Path;
use stowage_recording::read::{ReadError, Reader};
use stowage_recording::replay::{Replay, ReplayProgress};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::verbs::observe::{NodeDeleted, NodeObserved};
use stowage_scheduling::vocabulary::node::NodeKind;

const LIMITS: RingLimits = RingLimits {
    max_bytes: 1 << 30,
    max_age: Duration::from_secs(3600),
};

fn node(n: u32) -> NodeName {
    NodeName::parse(&format!("node-{n}")).unwrap()
}

fn observe(state: &ServerState, n: u32) {
    state
        .cluster()
        .apply(NodeObserved::new(node(n), NodeKind::Stowage));
}

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn until(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "it never comes");
        std::thread::yield_now();
    }
}

fn until_recording(state: &ServerState) {
    until(|| {
        state
            .recording_tap()
            .is_some_and(RecordingTap::is_recording)
    });
}

fn recording() -> (tempfile::TempDir, Arc<ServerState>, FlightRecorder) {
    let directory = tempfile::tempdir().unwrap();
    let state = ServerState::new(Policy::default());
    let options = RecordOptions {
        directory: directory.path().to_owned(),
        limits: LIMITS,
    };
    let recorder = FlightRecorder::start(&options, &state).unwrap();
    until_recording(&state);
    (directory, state, recorder)
}

fn replayed(bytes: &[u8]) -> Result<ReplayProgress, String> {
    let mut replay = Replay::default();
    for part in Reader::new(bytes) {
        replay
            .step(part.map_err(|error| error.to_string())?)
            .map_err(|error| error.to_string())?;
    }
    Ok(replay.progress)
}

fn recorded(directory: &Path) -> Vec<u8> {
    let segments = Ring::segments(directory).unwrap();
    segments
        .iter()
        .flat_map(|segment| std::fs::read(&segment.path).unwrap())
        .collect()
}

#[test]
fn what_a_service_does_is_recorded_and_replays() {
    let directory = tempfile::tempdir().unwrap();
    let state = ServerState::new(Policy::default());
    observe(&state, 0);
    let options = RecordOptions {
        directory: directory.path().to_owned(),
        limits: LIMITS,
    };
    let recorder = FlightRecorder::start(&options, &state).unwrap();
    until_recording(&state);
    (1..10).for_each(|n| observe(&state, n));
    state.record_checkpoint();
    state.cluster().apply(NodeDeleted(node(3)));
    state.record_checkpoint();
    recorder.stop();
    let progress = replayed(&recorded(directory.path())).unwrap();
    let expected = ReplayProgress {
        segments: 4,
        inputs: 10,
        checkpoints: 3,
        ..ReplayProgress::default()
    };
    assert_eq!(progress, expected);
    assert_eq!(state.metrics.recording.inputs.get(), 10);
    assert_eq!(
        state.metrics.recording.bytes.get(),
        recorded(directory.path()).len() as u64
    );
}

/// It was removed, or left out of a bundle because it is damaged.
#[test]
fn a_segment_that_is_missing_is_a_gap_in_the_recording() {
    let (directory, state, recorder) = recording();
    for inputs in [0..3, 3..8, 8..10] {
        inputs.for_each(|n| observe(&state, n));
        state.record_checkpoint();
    }
    recorder.stop();
    std::fs::remove_file(&Ring::segments(directory.path()).unwrap()[1].path).unwrap();
    let progress = replayed(&recorded(directory.path())).unwrap();
    assert_eq!(
        (progress.inputs, progress.gaps, progress.dropped),
        (5, 1, 5)
    );
}

#[test]
fn a_panic_under_the_lock_is_a_gap_in_the_recording() {
    let (directory, state, recorder) = recording();
    observe(&state, 1);
    let panics = std::panic::AssertUnwindSafe(|| {
        let _cluster = state.cluster();
        panic!("in the middle of a change");
    });
    assert!(std::panic::catch_unwind(panics).is_err());
    state.record_checkpoint();
    observe(&state, 2);
    recorder.stop();
    let progress = replayed(&recorded(directory.path())).unwrap();
    assert_eq!((progress.inputs, progress.gaps), (2, 1));
}

#[test]
fn a_torn_tail_loses_only_what_was_torn() {
    let (directory, state, recorder) = recording();
    (0..5).for_each(|n| observe(&state, n));
    recorder.stop();
    let whole = recorded(directory.path());
    let mut replay = Replay::default();
    let mut end = None;
    for part in Reader::new(&whole[..whole.len() - 1]) {
        match part {
            Ok(part) => replay.step(part).unwrap(),
            Err(error) => end = Some(error),
        }
    }
    assert!(matches!(end, Some(ReadError::Cut { .. })), "{end:?}");
    let ReplayProgress {
        segments, inputs, ..
    } = replay.progress;
    assert_eq!(
        (segments, inputs),
        (1, 5),
        "the last segment has nothing but its checkpoint"
    );
}

/// A disk that takes so many bytes in all.
#[derive(Clone, Default)]
struct SmallDisk(Arc<Mutex<SmallDiskState>>);

#[derive(Default)]
struct SmallDiskState {
    room: usize,
    written: Vec<u8>,
    failures: usize,
}

struct SmallFile(SmallDisk);

impl Write for SmallFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.0.0.lock();
        let taken = bytes.len().min(state.room);
        if taken == 0 && !bytes.is_empty() {
            state.failures += 1;
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.room -= taken;
        state.written.extend(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SegmentStore for SmallDisk {
    type Segment = SmallFile;

    fn create_segment(&mut self, _: i64) -> io::Result<SmallFile> {
        Ok(SmallFile(self.clone()))
    }

    fn discard_latest(&mut self) {}

    fn latest_exists(&self) -> bool {
        true
    }

    fn sync(&mut self, _: &SmallFile) -> io::Result<()> {
        Ok(())
    }

    fn remove_expired(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn segment_bytes(&self) -> u64 {
        1 << 30
    }

    fn location(&self) -> String {
        "a small disk".into()
    }
}

#[test]
fn a_full_disk_does_not_disturb_the_service() {
    let disk = SmallDisk::default();
    disk.0.lock().room = 30_000;
    let state = ServerState::new(Policy::default());
    let recorder = FlightRecorder::start_with_segments(disk.clone(), &state);
    until_recording(&state);
    // Until the disk is full, and some more.
    let mut observed = 0;
    let began = Instant::now();
    while disk.0.lock().failures == 0 {
        assert!(began.elapsed() < PATIENCE, "the disk never fills up");
        observe(&state, observed);
        observed += 1;
        if observed % 100 == 0 {
            let written = || state.metrics.recording.bytes.get();
            let before = written();
            state.record_checkpoint();
            until(|| written() > before || disk.0.lock().failures > 0);
        }
    }
    until(|| state.metrics.recording.errors.get() > 0);
    (0..100).for_each(|n| observe(&state, observed + n));
    assert_eq!(
        state.cluster().ledger().totals().nodes,
        u64::from(observed) + 100,
        "decisions go on"
    );
    assert!(
        state.metrics.recording.dropped_inputs.get() >= 100,
        "what cannot be written is not queued"
    );
    // Room again: the next checkpoint ends the gap, and says how much is missing.
    disk.0.lock().room = usize::MAX;
    state.record_checkpoint();
    observe(&state, 1_000_000);
    recorder.stop();
    let written = std::mem::take(&mut disk.0.lock().written);
    let begins = |at: &usize| written[*at..].starts_with(b"STOWREC\n");
    let segments: Vec<usize> = (0..written.len()).filter(begins).collect();
    // The last is the checkpoint at the end; the one before it began when there was room again.
    let [first, second, .., again, _] = segments[..] else {
        panic!("{segments:?}")
    };
    let progress = replayed(&written[again..]).unwrap();
    assert_eq!(
        (progress.segments, progress.inputs, progress.checkpoints),
        (2, 1, 1)
    );
    assert!(
        replayed(&written[first..second]).unwrap().inputs > 0,
        "what was written is read"
    );
}

/// A ring on a disk that has no room left, or that is broken.
struct BadDisk {
    ring: Ring,
    begins: fn() -> Option<io::ErrorKind>,
}

/// Nothing can be written to it.
struct UnwritableFile(io::ErrorKind);

impl Write for UnwritableFile {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SegmentStore for BadDisk {
    type Segment = UnwritableFile;

    fn create_segment(&mut self, wall_ms: i64) -> io::Result<UnwritableFile> {
        self.ring.create_segment(wall_ms)?;
        Ok(UnwritableFile((self.begins)().expect("planted")))
    }

    fn discard_latest(&mut self) {
        self.ring.discard_latest();
    }

    fn latest_exists(&self) -> bool {
        self.ring.latest_exists()
    }

    fn sync(&mut self, _: &UnwritableFile) -> io::Result<()> {
        Ok(())
    }

    fn remove_expired(&mut self) -> io::Result<()> {
        self.ring.remove_expired()
    }

    fn segment_bytes(&self) -> u64 {
        self.ring.segment_bytes()
    }

    fn location(&self) -> String {
        self.ring.location()
    }
}

fn bad_disk(directory: &Path, begins: fn() -> Option<io::ErrorKind>) -> BadDisk {
    let limits = RingLimits {
        max_bytes: 1 << 20,
        max_age: Duration::from_secs(60),
    };
    BadDisk {
        ring: Ring::open(directory, limits).unwrap(),
        begins,
    }
}

/// It tries again every quarter of a minute.
#[test]
fn a_segment_of_which_nothing_can_be_written_is_not_left_behind() {
    let directory = tempfile::tempdir().unwrap();
    let state = ServerState::new(Policy::default());
    let disk = bad_disk(directory.path(), || Some(io::ErrorKind::StorageFull));
    let recorder = FlightRecorder::start_with_segments(disk, &state);
    until(|| state.metrics.recording.errors.get() > 0);
    recorder.stop();
    assert_eq!(Ring::segments(directory.path()).unwrap().len(), 0);
}

#[test]
fn a_recorder_that_panics_says_that_it_records_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let state = ServerState::new(Policy::default());
    state.metrics.recording.is_recording.set(1);
    let recorder = FlightRecorder::start_with_segments(bad_disk(directory.path(), || None), &state);
    until(|| state.metrics.recording.errors.get() > 0);
    assert_eq!(state.metrics.recording.is_recording.get(), 0);
    observe(&state, 1);
    assert_eq!(
        state.cluster().ledger().totals().nodes,
        1,
        "decisions go on"
    );
    recorder.stop();
}
