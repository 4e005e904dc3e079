//! The bytes of a recording back to its entries.
//!
//! A recording may be cut anywhere, because a process died or a copy ended early: every entry that is complete is read, then
//! [`ReadError::Cut`] says where. Anything else that does not belong is an error that names its byte. Memory is bounded by one
//! entry, however long the recording is.

use super::entry::{Entry, SegmentHeader};
use super::frame::{FORMAT, FRAME_HEADER_BYTES, FrameError, FrameHeader, MAGIC, PREFACE_BYTES};
use super::repeats::{LatestReports, Line};
use super::whole_entries::fill;
use std::io::{self, Read};

/// Maximum length of an entry in bytes: a checkpoint of a million pods takes two thirds of it.
pub(super) const MAX_ENTRY_BYTES: usize = 2 << 30;

/// Part of a recording.
#[derive(Debug, Clone)]
pub enum RecordingPart {
    /// A segment begins.
    Segment(SegmentHeader),
    Entry(Entry),
}

/// Part of a recording, with reports still shortened as they are stored.
#[derive(Debug)]
pub(super) enum RawPart {
    Segment(SegmentHeader),
    Line(Box<Line>),
}

/// Why a recording cannot be read on. Each variant names the byte.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(
        "this is no recording of Stowage: it does not begin with `STOWREC`. Take one with `stowage bundle`, or name a segment of the \
         directory that `serve --record` writes"
    )]
    NotARecording,
    #[error("it is empty: nothing was recorded, or the copy failed")]
    Empty,
    #[error(
        "the segment at byte {at} has format {found}, and this build of stowage reads format {FORMAT}: use the version of stowage \
         that recorded it"
    )]
    OtherFormat { at: u64, found: u32 },
    #[error("the recording is cut at byte {at}. Copy it again to have the rest")]
    Cut { at: u64 },
    #[error(
        "at byte {at} of the recording, {why}: it was changed or damaged after it was written. Copy it again, or leave out the damaged \
         part: `stowage bundle --from RECORDING`"
    )]
    Damaged { at: u64, why: FrameError },
    #[error(
        "an entry that ends in the frame at byte {at} cannot be read: {why}. If the recording is of another version of stowage, use \
         that one"
    )]
    Entry { at: u64, why: String },
    #[error("the recording cannot be read at byte {at}: {why}")]
    Io { at: u64, why: io::Error },
}

/// Reads a recording from its beginning.
#[derive(Debug)]
pub struct Reader<R> {
    bytes: R,
    /// Number of bytes read.
    position: u64,
    /// Byte at which the latest frame begins.
    frame_start: u64,
    /// Decompressed text, consumed up to `consumed`.
    text: Vec<u8>,
    consumed: usize,
    /// Up to here `text` has no line end after `consumed`: an entry may be a thousand frames long.
    searched: usize,
    /// Whether the next line is a segment's header.
    expects_header: bool,
    reports: LatestReports,
    /// Whether the recording ended, or cannot be read on.
    is_over: bool,
    max_entry_bytes: usize,
}

impl<R: Read> Reader<R> {
    pub fn new(bytes: R) -> Self {
        Self::with_max_entry_bytes(MAX_ENTRY_BYTES, bytes)
    }

    /// Reader that rejects entries longer than this many bytes.
    pub(super) fn with_max_entry_bytes(max_entry_bytes: usize, bytes: R) -> Self {
        Self {
            bytes,
            position: 0,
            frame_start: 0,
            text: Vec::new(),
            consumed: 0,
            searched: 0,
            expects_header: false,
            reports: LatestReports::default(),
            is_over: false,
            max_entry_bytes,
        }
    }

    fn next_part(&mut self) -> Result<Option<RecordingPart>, ReadError> {
        match self.next_line()? {
            None => Ok(None),
            Some(RawPart::Segment(header)) => Ok(Some(RecordingPart::Segment(header))),
            Some(RawPart::Line(line)) => {
                let entry = self
                    .reports
                    .restore(*line)
                    .map_err(|why| self.unreadable(why))?;
                Ok(Some(RecordingPart::Entry(entry)))
            }
        }
    }

    /// Next part as it is stored. After an error there is nothing more.
    pub(super) fn next_line(&mut self) -> Result<Option<RawPart>, ReadError> {
        if self.is_over {
            return Ok(None);
        }
        let line = self.read_line();
        self.is_over = !matches!(line, Ok(Some(_)));
        line
    }

    fn read_line(&mut self) -> Result<Option<RawPart>, ReadError> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.text[self.searched..]) {
                let line = self.consumed..self.searched + end;
                self.consumed = line.end + 1;
                self.searched = self.consumed;
                return self.parse_line(line).map(Some);
            }
            self.text.drain(..std::mem::take(&mut self.consumed));
            self.searched = self.text.len();
            if self.text.len() > self.max_entry_bytes {
                return Err(self.unreadable("it is longer than any entry is"));
            }
            if !self.read_frame()? {
                return Ok(None);
            }
        }
    }

    fn parse_line(&mut self, line: std::ops::Range<usize>) -> Result<RawPart, ReadError> {
        let line = &self.text[line];
        let read = match std::mem::take(&mut self.expects_header) {
            true => serde_json::from_slice(line).map(RawPart::Segment),
            false => serde_json::from_slice(line).map(RawPart::Line),
        };
        read.map_err(|why| self.unreadable(why))
    }

    /// Reads the next frame, or the preface of a segment. Returns whether there was one.
    fn read_frame(&mut self) -> Result<bool, ReadError> {
        self.frame_start = self.position;
        let mut head = [0; FRAME_HEADER_BYTES];
        match self.fill(&mut head)? {
            0 if self.text.is_empty() && self.position > 0 && !self.expects_header => {
                return Ok(false);
            }
            0 if self.position == 0 => return Err(ReadError::Empty),
            n if n < FRAME_HEADER_BYTES
                && self.frame_start == 0
                && !MAGIC.starts_with(&head[..n.min(8)]) =>
            {
                return Err(ReadError::NotARecording);
            }
            n if n < FRAME_HEADER_BYTES => {
                return Err(ReadError::Cut {
                    at: self.frame_start,
                });
            }
            _ => {}
        }
        const { assert!(FRAME_HEADER_BYTES == PREFACE_BYTES) };
        if let Some(format) = head.strip_prefix(&MAGIC) {
            let found = u32::from_le_bytes([format[0], format[1], format[2], format[3]]);
            if found != FORMAT {
                return Err(ReadError::OtherFormat {
                    at: self.frame_start,
                    found,
                });
            }
            // An entry that a crash left unfinished ends with its segment.
            (self.text, self.searched) = (Vec::new(), 0);
            (self.expects_header, self.reports) = (true, LatestReports::default());
            return Ok(true);
        }
        if self.frame_start == 0 {
            return Err(ReadError::NotARecording);
        }
        let damaged = |why| ReadError::Damaged {
            at: self.frame_start,
            why,
        };
        let frame = FrameHeader::read(&head).map_err(damaged)?;
        let mut stored = vec![0; frame.stored];
        if self.fill(&mut stored)? < frame.stored {
            return Err(ReadError::Cut {
                at: self.frame_start,
            });
        }
        let text = frame.text(&stored).map_err(|why| ReadError::Damaged {
            at: self.frame_start,
            why,
        })?;
        self.text.extend(text);
        Ok(true)
    }

    /// Fills the buffer as far as there are bytes; returns how many.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, ReadError> {
        let filled = fill(&mut self.bytes, buffer).map_err(|why| ReadError::Io {
            at: self.position,
            why,
        })?;
        self.position += filled as u64;
        Ok(filled)
    }

    fn unreadable(&self, why: impl ToString) -> ReadError {
        ReadError::Entry {
            at: self.frame_start,
            why: why.to_string(),
        }
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = Result<RecordingPart, ReadError>;

    /// After an error there is nothing more.
    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let part = self.next_part().transpose();
        self.is_over = !matches!(part, Some(Ok(_)));
        part
    }
}
