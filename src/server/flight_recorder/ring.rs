//! The directory of a recording: segments in files whose names tell their order, and the oldest go first.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use tracing::warn;

/// The end of a segment's name.
pub(crate) const EXTENSION: &str = "stowrec";

/// The file that says by its lock that a service records there.
const LOCK: &str = ".lock";

/// How much is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingLimits {
    /// Bytes of all segments together, without the one that is being written and the one before it.
    pub max_bytes: u64,
    pub max_age: Duration,
}

/// Why nothing can be recorded in a directory.
#[derive(Debug, thiserror::Error)]
pub enum RecordDirectoryError {
    #[error(
        "--record {}: {why}. Name a directory that exists or can be made, in which this process may write",
        directory.display()
    )]
    Unwritable { directory: PathBuf, why: io::Error },
    #[error("--record {}: this is a file. Name a directory that exists or can be made", directory.display())]
    NotADirectory { directory: PathBuf },
    #[error(
        "--record {}: another service records there, and what two write cannot be replayed. Give each service a directory of its own",
        directory.display()
    )]
    InUse { directory: PathBuf },
}

/// Where segments go.
pub(crate) trait SegmentStore: Send {
    type Segment: Write + Send;

    /// A new segment, begun at this wall time.
    fn create_segment(&mut self, wall_ms: i64) -> io::Result<Self::Segment>;

    /// Removes the segment that was begun last: nothing of it can be read.
    fn discard_latest(&mut self);

    /// Whether the segment that was begun last is still where a reader finds it.
    fn latest_exists(&self) -> bool;

    /// Syncs a finished segment to the disk.
    fn sync(&mut self, segment: &Self::Segment) -> io::Result<()>;

    /// Removes the oldest segments beyond the limits, never the latest. Called before a new one is begun.
    fn remove_expired(&mut self) -> io::Result<()>;

    /// A segment ends once it has grown by this since its checkpoint.
    fn segment_bytes(&self) -> u64;

    /// Where the segments are, as text for the log.
    fn location(&self) -> String;
}

/// Segments in a directory. Other files there are left alone.
#[derive(Debug)]
pub struct Ring {
    directory: PathBuf,
    limits: RingLimits,
    /// The segment that was begun last.
    latest: Option<PathBuf>,
    /// The age of each segment at some moment, from which a monotonic clock measures on.
    ages: BTreeMap<PathBuf, (Duration, Instant)>,
    /// Locked as long as this records there; none where that is not possible.
    lock: Option<File>,
}

/// A file of the ring.
#[derive(Debug, Clone)]
pub struct SegmentFile {
    pub path: PathBuf,
    pub bytes: u64,
    /// When it was last written.
    pub modified: SystemTime,
}

impl Ring {
    /// Makes the directory if it is not there, and finds out whether it can be written, and that no other service records there.
    pub fn open(directory: &Path, limits: RingLimits) -> Result<Self, RecordDirectoryError> {
        let bad = |why| RecordDirectoryError::Unwritable {
            directory: directory.to_owned(),
            why,
        };
        create_directory(directory).map_err(|why| match directory.is_file() {
            true => RecordDirectoryError::NotADirectory {
                directory: directory.to_owned(),
            },
            false => bad(why),
        })?;
        let lock = lock(directory)?;
        let mut ring = Self {
            directory: directory.to_owned(),
            limits,
            latest: None,
            ages: BTreeMap::new(),
            lock,
        };
        // What is beyond the limits may be what fills the disk.
        let tidied = ring.remove_expired();
        ring.lock_if_unlocked()?;
        let trial = directory.join(format!(".trial-{}", std::process::id()));
        match tidied
            .and_then(|()| File::create(&trial))
            .and_then(|_| fs::remove_file(&trial))
        {
            // A service that runs survives it, and so does one that starts.
            Err(error) if is_full(error.kind()) => {}
            tried => tried.map_err(bad)?,
        }
        Ok(ring)
    }

    fn lock_if_unlocked(&mut self) -> Result<(), RecordDirectoryError> {
        if self.lock.is_none() {
            self.lock = lock(&self.directory)?;
        }
        if self.lock.is_none() {
            let directory = self.directory.display();
            warn!(%directory, "the directory cannot be locked: nothing keeps a second service from recording there, too");
        }
        Ok(())
    }

    /// Makes and locks the directory again if it was removed: another service may record in a new one by now.
    fn lock_again_if_removed(&mut self) -> io::Result<()> {
        let current = fs::metadata(self.directory.join(LOCK)).ok();
        let held = self.lock.as_ref().and_then(|lock| lock.metadata().ok());
        let is_same = |(held, of_path): (Metadata, Metadata)| {
            (held.dev(), held.ino()) == (of_path.dev(), of_path.ino())
        };
        if !held.zip(current).is_some_and(is_same) {
            create_directory(&self.directory)?;
            self.lock = lock(&self.directory).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// The age of a segment. The wall clock counts only for one that is found for the first time.
    fn age(&mut self, segment: &SegmentFile) -> Duration {
        let first_age = || {
            (
                SystemTime::now()
                    .duration_since(segment.modified)
                    .unwrap_or_default(),
                Instant::now(),
            )
        };
        let (age, at) = *self
            .ages
            .entry(segment.path.clone())
            .or_insert_with(first_age);
        age + at.elapsed()
    }

    /// The segments of a directory, oldest first.
    pub fn segments(directory: &Path) -> io::Result<Vec<SegmentFile>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            // One that is removed meanwhile is none.
            let Some(metadata) = fs::metadata(&path).ok().filter(|about| about.is_file()) else {
                continue;
            };
            if path.extension() == Some(OsStr::new(EXTENSION)) && start_time_ms(&path).is_some() {
                let written = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                found.push(SegmentFile {
                    path,
                    bytes: metadata.len(),
                    modified: written,
                });
            }
        }
        // A name begins with the time, in as many digits as any.
        found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }
}

impl SegmentStore for Ring {
    type Segment = File;

    fn create_segment(&mut self, wall_ms: i64) -> io::Result<File> {
        self.lock_again_if_removed()?;
        // After a clock was set back, what is new must not count as the oldest.
        let latest = Self::segments(&self.directory)?
            .last()
            .and_then(|segment| start_time_ms(&segment.path));
        let wall_ms = latest.map_or(wall_ms, |latest| {
            if wall_ms < latest {
                latest + 1
            } else {
                wall_ms
            }
        });
        // Two in one millisecond must not meet under one name.
        for attempt in 0..1000 {
            let path = self
                .directory
                .join(format!("{wall_ms:015}-{attempt:03}.{EXTENSION}"));
            match OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path)
            {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                opened => {
                    let previous =
                        std::mem::replace(&mut self.latest, opened.is_ok().then_some(path));
                    self.ages
                        .extend(previous.map(|ended| (ended, (Duration::ZERO, Instant::now()))));
                    return opened;
                }
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    fn discard_latest(&mut self) {
        if let Some(segment) = self.latest.take() {
            // If it stays, it is one more file that a replay skips.
            let _ = fs::remove_file(segment);
        }
    }

    fn latest_exists(&self) -> bool {
        self.latest.as_ref().is_none_or(|latest| latest.exists())
    }

    fn sync(&mut self, segment: &File) -> io::Result<()> {
        segment.sync_data()
    }

    fn remove_expired(&mut self) -> io::Result<()> {
        let segments = match Self::segments(&self.directory) {
            // The directory was removed, and is made again for the next segment.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            segments => segments?,
        };
        self.ages.retain(|path, _| {
            segments
                .binary_search_by(|segment| segment.path.cmp(path))
                .is_ok()
        });
        let ages: Vec<Duration> = segments.iter().map(|segment| self.age(segment)).collect();
        let mut kept = 0;
        for (segment, age) in segments.iter().zip(ages).rev().skip(1) {
            kept += segment.bytes;
            if kept > self.limits.max_bytes || age > self.limits.max_age {
                match fs::remove_file(&segment.path) {
                    // Someone else has removed it since.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    outcome => outcome?,
                }
            }
        }
        Ok(())
    }

    fn segment_bytes(&self) -> u64 {
        // So that the ring has some to keep when the oldest goes.
        (self.limits.max_bytes / 8).max(1 << 20)
    }

    fn location(&self) -> String {
        self.directory.display().to_string()
    }
}

fn create_directory(directory: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
}

/// Locks the directory until the process ends, however it ends. Not every file system has locks, and on a full disk there may be
/// no file: then there is no lock.
fn lock(directory: &Path) -> Result<Option<File>, RecordDirectoryError> {
    let opened = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(directory.join(LOCK));
    let file = match opened {
        Err(error) if is_full(error.kind()) => return Ok(None),
        Err(why) => {
            return Err(RecordDirectoryError::Unwritable {
                directory: directory.to_owned(),
                why,
            });
        }
        Ok(file) => file,
    };
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(RecordDirectoryError::InUse {
            directory: directory.to_owned(),
        }),
        Err(TryLockError::Error(_)) => Ok(None),
        Ok(()) => Ok(Some(file)),
    }
}

impl Drop for Ring {
    /// A process that was just started may have the file open, too, for a moment.
    fn drop(&mut self) {
        if let Some(lock) = &self.lock {
            let _ = lock.unlock();
        }
    }
}

/// Whether the disk, or what of it this user may have, is full.
fn is_full(error: io::ErrorKind) -> bool {
    matches!(
        error,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// The time in a segment's name.
fn start_time_ms(segment: &Path) -> Option<i64> {
    segment
        .file_stem()?
        .to_str()?
        .split_once('-')?
        .0
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(directory: &Path, bytes: u64, age: Duration) -> Ring {
        Ring::open(
            directory,
            RingLimits {
                max_bytes: bytes,
                max_age: age,
            },
        )
        .unwrap()
    }

    fn add(ring: &mut Ring, wall_ms: i64, bytes: usize) {
        ring.create_segment(wall_ms)
            .unwrap()
            .write_all(&vec![0; bytes])
            .unwrap();
    }

    fn names(directory: &Path) -> Vec<String> {
        let name = |segment: SegmentFile| {
            segment
                .path
                .file_stem()
                .unwrap()
                .to_string_lossy()
                .into_owned()
        };
        Ring::segments(directory)
            .unwrap()
            .into_iter()
            .map(name)
            .collect()
    }

    #[test]
    fn the_oldest_segments_go_first_and_the_latest_stays_however_large_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let mut ring = ring(directory.path(), 250, Duration::from_secs(3600));
        fs::write(directory.path().join("notes.txt"), "kept").unwrap();
        [100, 100, 100, 1000]
            .into_iter()
            .enumerate()
            .for_each(|(at, bytes)| add(&mut ring, at as i64, bytes));
        ring.remove_expired().unwrap();
        let kept = [
            "000000000000001-000",
            "000000000000002-000",
            "000000000000003-000",
        ];
        assert_eq!(names(directory.path()), kept);
        add(&mut ring, 3, 1);
        ring.remove_expired().unwrap();
        assert_eq!(
            names(directory.path()),
            ["000000000000003-001"],
            "the large one is a closed one now"
        );
        assert!(directory.path().join("notes.txt").exists());
    }

    #[test]
    fn only_files_that_are_called_as_segments_are_its_segments() {
        let directory = tempfile::tempdir().unwrap();
        let mut ring = ring(directory.path(), 1, Duration::from_secs(3600));
        let kept = directory.path().join("kept-by-me.stowrec");
        fs::write(&kept, "kept").unwrap();
        [1, 2].into_iter().for_each(|at| add(&mut ring, at, 100));
        ring.remove_expired().unwrap();
        assert!(kept.exists());
        assert_eq!(
            names(directory.path()),
            ["000000000000002-000"],
            "and it is not taken for the latest"
        );
    }

    /// It has the names of pods and tenants.
    #[test]
    fn only_its_owner_reads_a_recording() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("recording");
        add(&mut ring(&directory, 1, Duration::from_secs(3600)), 1, 100);
        let segment = &Ring::segments(&directory).unwrap()[0].path;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&directory), mode(segment)), (0o700, 0o600));
    }

    #[test]
    fn a_segment_that_is_begun_after_the_clock_was_set_back_is_the_latest_all_the_same() {
        let directory = tempfile::tempdir().unwrap();
        let mut ring = ring(directory.path(), 200, Duration::from_secs(3600));
        [100, 101]
            .into_iter()
            .for_each(|at| add(&mut ring, at, 100));
        for _ in 0..3 {
            ring.create_segment(50)
                .unwrap()
                .write_all(&[1; 100])
                .unwrap();
            ring.remove_expired().unwrap();
        }
        let latest = Ring::segments(directory.path()).unwrap();
        let contents: Vec<u8> = latest
            .iter()
            .map(|segment| fs::read(&segment.path).unwrap()[0])
            .collect();
        assert_eq!(
            contents,
            [1, 1, 1],
            "what is new is kept, and what is old goes"
        );
    }

    #[test]
    fn segments_of_an_earlier_run_beyond_the_age_go() {
        let directory = tempfile::tempdir().unwrap();
        let opened = || ring(directory.path(), 1000, Duration::from_secs(60));
        let mut before = opened();
        (0..3).for_each(|at| add(&mut before, at, 1));
        drop(before);
        let old = OpenOptions::new()
            .write(true)
            .open(&Ring::segments(directory.path()).unwrap()[0].path)
            .unwrap();
        old.set_modified(SystemTime::now() - Duration::from_secs(3600))
            .unwrap();
        drop(opened());
        assert_eq!(
            names(directory.path()),
            ["000000000000001-000", "000000000000002-000"]
        );
    }

    /// What a clock that jumps forward by hours makes of segments that were written minutes ago.
    #[test]
    fn no_segment_goes_because_the_clock_was_set_forward() {
        let directory = tempfile::tempdir().unwrap();
        let opened = || ring(directory.path(), 1000, Duration::from_secs(3600));
        add(&mut opened(), 0, 1);
        let mut ring = opened();
        (1..4).for_each(|at| add(&mut ring, at, 1));
        for segment in Ring::segments(directory.path()).unwrap() {
            let file = OpenOptions::new().write(true).open(&segment.path).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(7200))
                .unwrap();
        }
        ring.remove_expired().unwrap();
        assert_eq!(names(directory.path()).len(), 4);
        ring.limits.max_age = Duration::ZERO;
        ring.remove_expired().unwrap();
        assert_eq!(
            names(directory.path()),
            ["000000000000003-000"],
            "their time passes all the same"
        );
    }

    #[test]
    fn two_services_do_not_record_to_one_directory() {
        let directory = tempfile::tempdir().unwrap();
        let limits = RingLimits {
            max_bytes: 1,
            max_age: Duration::from_secs(1),
        };
        let first = Ring::open(directory.path(), limits).unwrap();
        let error = Ring::open(directory.path(), limits)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("--record {}: ", directory.path().display())),
            "{error}"
        );
        assert!(error.contains("a directory of its own"), "{error}");
        drop(first);
        Ring::open(directory.path(), limits).unwrap();
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_named_with_the_flag() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let limits = RingLimits {
            max_bytes: 1,
            max_age: Duration::from_secs(1),
        };
        let error = Ring::open(&file, limits).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("--record {}: ", file.display())),
            "{error}"
        );
    }
}
