//! A bundle: the ring's segments of the last minutes, one behind the other, with their names or without.

use super::ring::Ring;
use crate::recording::redaction::{NamesSeen, RedactionError};
use crate::recording::whole_entries::copy_whole_entries;
use crate::service::{BundleNames, BundleSource};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

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
    fn write_bundle(&self, last: Duration, names: BundleNames, out: &mut dyn Write) -> io::Result<()> {
        let since = SystemTime::now().checked_sub(last).unwrap_or(SystemTime::UNIX_EPOCH);
        let segments = Ring::segments(&self.directory)?.into_iter();
        let files = segments.filter(|segment| segment.written >= since);
        let files = files.map(|segment| RecordedFile { path: segment.path, bytes: segment.bytes });
        write(&files.collect::<Vec<_>>(), names, out)
    }
}

/// A file of which a part is not in the bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    pub path: PathBuf,
    /// What is cut or damaged begins here.
    pub at: u64,
    /// How many bytes are left out, from there on.
    pub bytes: u64,
}

/// Writes a bundle of a whole recording: a directory of segments, or one file. Answers what is not in it.
pub fn write_bundle_of(
    recording: &Path,
    names: BundleNames,
    out: &mut dyn Write,
) -> io::Result<Vec<LeftOut>> {
    let about = std::fs::metadata(recording)?;
    let files = match about.is_dir() {
        true => {
            let segments = Ring::segments(recording)?.into_iter();
            segments.map(|segment| RecordedFile { path: segment.path, bytes: segment.bytes }).collect()
        }
        false => vec![RecordedFile { path: recording.to_owned(), bytes: about.len() }],
    };
    write(&files, names, out)?;
    left_out(&files)
}

fn left_out(files: &[RecordedFile]) -> io::Result<Vec<LeftOut>> {
    let mut left_out = Vec::new();
    for file in files {
        each(std::slice::from_ref(file), |mut content| {
            let broken_at = copy_whole_entries(&mut content, &mut io::sink())?;
            left_out.extend(broken_at.map(|at| LeftOut {
                path: file.path.clone(),
                at,
                bytes: file.bytes.saturating_sub(at),
            }));
            Ok(())
        })?;
    }
    Ok(left_out)
}

fn write(files: &[RecordedFile], names: BundleNames, out: &mut dyn Write) -> io::Result<()> {
    match names {
        BundleNames::AsRecorded => each(files, |mut file| {
            copy_whole_entries(&mut file, out).map(drop).map_err(RedactionError::Write)
        }),
        BundleNames::Pseudonyms => {
            let mut seen = NamesSeen::default();
            // Nothing is written yet: without this, a client that has gone would not be noticed.
            each(files, |file| out.flush().map_err(RedactionError::Write).and_then(|()| seen.read(file)))?;
            let pseudonyms = seen.pseudonyms();
            each(files, |file| pseudonyms.write(file, &mut *out))
        }
    }
}

fn each(
    files: &[RecordedFile],
    mut take: impl FnMut(BufReader<io::Take<File>>) -> Result<(), RedactionError>,
) -> io::Result<()> {
    for RecordedFile { path, bytes } in files {
        let taken = match File::open(path) {
            Ok(file) => take(BufReader::with_capacity(1 << 18, file.take(*bytes))),
            // The ring went on meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        taken.map_err(|error| match error {
            RedactionError::Write(error) => error,
            error => io::Error::other(format!("{}: {error}", path.display())),
        })?;
    }
    Ok(())
}
