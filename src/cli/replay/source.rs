//! Where a recording comes from: a directory of segments, a file, or standard input.

use crate::flight_recorder::Ring;
use crate::recording::read::Reader;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

/// The files of a recording, in order.
pub struct Source {
    files: std::vec::IntoIter<(String, PathBuf)>,
    /// A directory has what a killed process left.
    may_be_torn: bool,
}

/// One file of it.
pub struct RecordedFile {
    pub name: String,
    pub reader: Reader<Box<dyn Read>>,
    pub may_be_torn: bool,
}

impl Source {
    pub fn open(path: &Path) -> Result<Self> {
        let unread = || {
            format!(
                "the recording {} cannot be read; name a directory that `stowage serve --record` writes, a segment of it, or a \
                 file of `stowage bundle`",
                path.display()
            )
        };
        if path == Path::new("-") {
            let files = vec![("standard input".into(), path.to_owned())].into_iter();
            return Ok(Self { files, may_be_torn: false });
        }
        if !std::fs::metadata(path).with_context(unread)?.is_dir() {
            let files = vec![(path.display().to_string(), path.to_owned())].into_iter();
            return Ok(Self { files, may_be_torn: false });
        }
        let mut segments = Ring::segments(path).with_context(unread)?;
        // A full disk leaves such.
        segments.retain(|segment| segment.bytes > 0);
        if segments.is_empty() {
            bail!(
                "{} has no segments: name a directory that `stowage serve --record` writes",
                path.display()
            );
        }
        let named = |path: PathBuf| (path.display().to_string(), path);
        let files: Vec<_> = segments.into_iter().map(|segment| named(segment.path)).collect();
        Ok(Self { files: files.into_iter(), may_be_torn: true })
    }
}

impl Iterator for Source {
    type Item = RecordedFile;

    fn next(&mut self) -> Option<RecordedFile> {
        let (name, path) = self.files.next()?;
        let bytes: Box<dyn Read> = match path == Path::new("-") {
            true => Box::new(std::io::stdin().lock()),
            false => match File::open(&path) {
                Ok(file) => Box::new(BufReader::with_capacity(1 << 18, file)),
                Err(error) => Box::new(Unreadable(Some(error))),
            },
        };
        Some(RecordedFile { name, reader: Reader::new(bytes), may_be_torn: self.may_be_torn })
    }
}

/// A file that went away, or may not be read: its reader says why.
struct Unreadable(Option<std::io::Error>);

impl Read for Unreadable {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        self.0.take().map_or(Ok(0), Err)
    }
}
