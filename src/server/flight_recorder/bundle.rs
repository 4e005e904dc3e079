//! A bundle: the ring's segments of the last minutes, one behind the other, with their names or without.

use super::ring::Ring;
use crate::service::{BundleNames, BundleSource};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use stowage_recording::redaction::{NameCollector, RedactionError};
use stowage_recording::whole_entries::{CopyEnd, copy_whole_entries};

/// The recordings of a directory.
#[derive(Debug, Clone)]
pub struct Recordings {
    pub directory: PathBuf,
}

/// A file of a recording, as long as it was when it was found: it may grow meanwhile.
struct RecordedFile {
    path: PathBuf,
    bytes: u64,
}

impl BundleSource for Recordings {
    fn write_bundle(
        &self,
        period: Duration,
        names: BundleNames,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let since = SystemTime::now()
            .checked_sub(period)
            .unwrap_or(SystemTime::UNIX_EPOCH);
        let segments = Ring::segments(&self.directory)?.into_iter();
        let files = segments.filter(|segment| segment.modified >= since);
        let files = files.map(|segment| RecordedFile {
            path: segment.path,
            bytes: segment.bytes,
        });
        write_files(&files.collect::<Vec<_>>(), names, out)
    }
}

/// A file of which a part is not in the bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    pub path: PathBuf,
    /// Where the part that is left out begins.
    pub end: CopyEnd,
    /// How many bytes are left out, from there on; `None` of a pipe.
    pub bytes: Option<u64>,
}

/// Why there is no bundle of a recording.
#[derive(Debug, thiserror::Error)]
pub enum RecordingBundleError {
    #[error("{}: {why}", path.display())]
    Unreadable { path: PathBuf, why: io::Error },
    #[error(
        "pseudonyms need the recording twice, and a pipe can be read once: write it to a file first"
    )]
    ReadOnce,
    #[error(transparent)]
    Failed(io::Error),
}

/// Writes a bundle of a whole recording: a directory of segments, a file, a pipe, or standard input as `-`. Answers what is not
/// in it.
pub fn write_recording_bundle(
    recording: &Path,
    names: BundleNames,
    out: &mut dyn Write,
) -> Result<Vec<LeftOut>, RecordingBundleError> {
    let unread = |why| RecordingBundleError::Unreadable {
        path: recording.to_owned(),
        why,
    };
    let is_standard_input = recording == Path::new("-");
    let metadata = if is_standard_input {
        None
    } else {
        Some(std::fs::metadata(recording).map_err(unread)?)
    };
    let files = match &metadata {
        Some(about) if about.is_dir() => {
            let segments = Ring::segments(recording).map_err(unread)?.into_iter();
            segments
                .map(|segment| RecordedFile {
                    path: segment.path,
                    bytes: segment.bytes,
                })
                .collect()
        }
        Some(about) if about.is_file() => {
            vec![RecordedFile {
                path: recording.to_owned(),
                bytes: about.len(),
            }]
        }
        _ if names == BundleNames::Pseudonyms => {
            return Err(RecordingBundleError::ReadOnce);
        }
        _ => {
            let file: Box<dyn Read> = match is_standard_input {
                true => Box::new(io::stdin().lock()),
                false => Box::new(File::open(recording).map_err(unread)?),
            };
            let end = copy_whole_entries(&mut BufReader::new(file), out).map_err(unread)?;
            let left_out = |end| LeftOut {
                path: recording.to_owned(),
                end,
                bytes: None,
            };
            return Ok(end.map(left_out).into_iter().collect());
        }
    };
    write_files(&files, names, out)
        .and_then(|()| left_out(&files))
        .map_err(RecordingBundleError::Failed)
}

fn left_out(files: &[RecordedFile]) -> io::Result<Vec<LeftOut>> {
    let mut left_out = Vec::new();
    for file in files {
        for_each_file(std::slice::from_ref(file), |mut content| {
            let end = copy_whole_entries(&mut content, &mut io::sink())?;
            left_out.extend(end.map(|end| LeftOut {
                path: file.path.clone(),
                end,
                bytes: Some(file.bytes.saturating_sub(end.at)),
            }));
            Ok(())
        })?;
    }
    Ok(left_out)
}

fn write_files(files: &[RecordedFile], names: BundleNames, out: &mut dyn Write) -> io::Result<()> {
    match names {
        BundleNames::AsRecorded => for_each_file(files, |mut file| {
            copy_whole_entries(&mut file, out)
                .map(drop)
                .map_err(RedactionError::Write)
        }),
        BundleNames::Pseudonyms => {
            let mut names_seen = NameCollector::default();
            // Nothing is written yet: without this, a client that has gone would not be noticed.
            for_each_file(files, |file| {
                out.flush()
                    .map_err(RedactionError::Write)
                    .and_then(|()| names_seen.collect(file))
            })?;
            let pseudonyms = names_seen.pseudonyms();
            for_each_file(files, |file| pseudonyms.write(file, &mut *out))
        }
    }
}

fn for_each_file(
    files: &[RecordedFile],
    mut visit: impl FnMut(BufReader<io::Take<File>>) -> Result<(), RedactionError>,
) -> io::Result<()> {
    for RecordedFile { path, bytes } in files {
        let taken = match File::open(path) {
            Ok(file) => visit(BufReader::with_capacity(1 << 18, file.take(*bytes))),
            // The ring went on meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => Err(RedactionError::Write(error)),
        };
        taken.map_err(|error| {
            let kind = match &error {
                RedactionError::Write(error) => error.kind(),
                _ => io::ErrorKind::Other,
            };
            io::Error::new(kind, format!("{}: {error}", path.display()))
        })?;
    }
    Ok(())
}
