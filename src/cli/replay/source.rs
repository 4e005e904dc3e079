//! Where a recording comes from: a directory of segments, a file, or standard input.

use crate::cli::standard_input::is_standard_input;
use anyhow::{Result, anyhow, bail};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use stowage_recording::entry::{Entry, Gap};
use stowage_recording::read::{ReadError, Reader, RecordingPart};
use stowage_server::flight_recorder::Ring;

/// The parts of a recording, in order, of all its files.
pub struct RecordingSource {
    files: std::vec::IntoIter<(String, PathBuf)>,
    /// Whether a segment may end early: a directory has what a killed process left.
    may_be_torn: bool,
    current: Option<RecordedFile>,
    /// The segment that ended without an end, until the next one says whether something is missing between the two.
    torn: Option<RecordingReadError>,
    /// How many segments have no end.
    torn_segments: u64,
}

/// One open file of a recording.
struct RecordedFile {
    name: String,
    reader: Reader<Box<dyn Read>>,
}

/// Why a file of a recording cannot be read on.
#[derive(Debug, thiserror::Error)]
#[error("{name}: {why}")]
pub struct RecordingReadError {
    name: String,
    why: ReadError,
}

impl RecordingSource {
    pub fn open(path: &Path) -> Result<Self> {
        let unread = |error: std::io::Error| {
            let hint = match error.kind() {
                std::io::ErrorKind::PermissionDenied => {
                    "only the user of the service that recorded it may read it"
                }
                _ => {
                    "name a directory that `stowage serve --record` writes, a segment of it, or a file of `stowage bundle`"
                }
            };
            anyhow!(
                "the recording {} cannot be read: {error}; {hint}",
                path.display()
            )
        };
        if path == Path::new("-") {
            return Ok(Self::new(
                vec![("standard input".into(), path.to_owned())],
                false,
            ));
        }
        if !std::fs::metadata(path).map_err(unread)?.is_dir() {
            return Ok(Self::new(
                vec![(path.display().to_string(), path.to_owned())],
                false,
            ));
        }
        let mut segments = Ring::segments(path).map_err(unread)?;
        // A full disk leaves such.
        segments.retain(|segment| segment.bytes > 0);
        if segments.is_empty() {
            bail!(
                "{} has no segments: name a directory that `stowage serve --record` writes",
                path.display()
            );
        }
        let named = |path: PathBuf| (path.display().to_string(), path);
        Ok(Self::new(
            segments
                .into_iter()
                .map(|segment| named(segment.path))
                .collect(),
            true,
        ))
    }

    fn new(files: Vec<(String, PathBuf)>, may_be_torn: bool) -> Self {
        Self {
            files: files.into_iter(),
            may_be_torn,
            current: None,
            torn: None,
            torn_segments: 0,
        }
    }

    /// How many segments ended before their last entry did, as a killed process leaves them.
    pub fn torn_segments(&self) -> u64 {
        self.torn_segments
    }

    /// The name of the file that the latest part is from.
    pub fn name(&self) -> &str {
        self.current
            .as_ref()
            .map_or("the recording", |file| &file.name)
    }

    fn next_file(&mut self) -> Option<&mut RecordedFile> {
        let (name, path) = self.files.next()?;
        let bytes: Box<dyn Read> = match path == Path::new("-") {
            true => Box::new(std::io::stdin().lock()),
            false => match File::open(&path) {
                Ok(file) => Box::new(BufReader::with_capacity(1 << 18, file)),
                Err(error) => Box::new(Unreadable(Some(error))),
            },
        };
        Some(self.current.insert(RecordedFile {
            name,
            reader: Reader::new(bytes),
        }))
    }
}

impl Iterator for RecordingSource {
    type Item = Result<RecordingPart, RecordingReadError>;

    /// After an error there is nothing more that belongs to what came before.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if self.current.is_none() && self.next_file().is_none() {
                self.torn_segments += u64::from(self.torn.take().is_some());
                return None;
            }
            let file = self.current.as_mut()?;
            match file.reader.next() {
                None => self.current = None,
                Some(Ok(part)) => {
                    // A segment that goes on where the one before ends says that nothing is missing.
                    let goes_on = matches!(&part, RecordingPart::Entry(Entry::Checkpoint(one)) if one.after == Gap::None);
                    let torn = if matches!(part, RecordingPart::Segment(_)) {
                        None
                    } else {
                        self.torn.take()
                    };
                    return Some(match torn {
                        Some(torn) if goes_on => Err(torn),
                        torn => {
                            self.torn_segments += u64::from(torn.is_some());
                            Ok(part)
                        }
                    });
                }
                Some(Err(why)) => {
                    let unread = RecordingReadError {
                        name: file.name.clone(),
                        why,
                    };
                    if !self.may_be_torn || !matches!(unread.why, ReadError::Cut { .. }) {
                        return Some(Err(unread));
                    }
                    self.current = None;
                    self.torn_segments += u64::from(self.torn.replace(unread).is_some());
                }
            }
        }
    }
}

/// Whether the recording can be read a second time: a pipe cannot.
pub fn can_be_read_twice(path: &Path) -> bool {
    !is_standard_input(path)
        && std::fs::metadata(path).is_ok_and(|about| about.is_file() || about.is_dir())
}

/// A file that went away, or may not be read: its reader says why.
struct Unreadable(Option<std::io::Error>);

impl Read for Unreadable {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        self.0.take().map_or(Ok(0), Err)
    }
}
