//! Entries to the bytes of a segment.

use super::entry::{Entry, SegmentHeader};
use super::frame::{self, FRAME_BYTES};
use super::repeats::LatestReports;
use serde::Serialize;
use std::io::{self, Write};

/// A segment that is being written. What was not flushed is lost with it.
#[derive(Debug)]
pub struct SegmentWriter<W> {
    frames: Frames<W>,
    reports: LatestReports,
}

/// Writer that packs text into frames.
#[derive(Debug)]
struct Frames<W> {
    out: W,
    text: Vec<u8>,
    written: u64,
}

impl<W: Write> SegmentWriter<W> {
    /// Begins a segment; its first entry is a checkpoint.
    pub fn begin(out: W, header: &SegmentHeader) -> io::Result<Self> {
        let mut frames = Frames {
            out,
            text: Vec::new(),
            written: 0,
        };
        frames.write_out(&frame::preface())?;
        frames.line(header)?;
        Ok(Self {
            frames,
            reports: LatestReports::default(),
        })
    }

    pub fn push(&mut self, entry: Entry) -> io::Result<()> {
        self.frames.line(&self.reports.shorten(entry))
    }

    /// Appends a line whose reports are already shortened.
    pub(super) fn push_line(&mut self, line: &impl Serialize) -> io::Result<()> {
        self.frames.line(line)
    }

    /// Writes all complete entries: a crash after this keeps them.
    pub fn flush(&mut self) -> io::Result<()> {
        if !self.frames.text.is_empty() {
            self.frames.frame(true)?;
        }
        self.frames.out.flush()
    }

    /// Number of bytes written.
    pub fn written(&self) -> u64 {
        self.frames.written
    }

    /// Number of bytes of text that wait to be flushed.
    pub fn pending(&self) -> usize {
        self.frames.text.len()
    }

    pub fn get_ref(&self) -> &W {
        &self.frames.out
    }
}

impl<W: Write> Frames<W> {
    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut *self, line)?;
        self.text.push(b'\n');
        Ok(())
    }

    /// Free bytes of the current frame. One byte is left for the line end.
    fn room(&self) -> usize {
        (FRAME_BYTES - 1).saturating_sub(self.text.len())
    }

    fn frame(&mut self, ends_entry: bool) -> io::Result<()> {
        let frame = frame::encode(&self.text, ends_entry);
        self.text.clear();
        self.write_out(&frame)
    }

    fn write_out(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        Ok(())
    }
}

impl<W: Write> Write for Frames<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes)?;
        Ok(bytes.len())
    }

    /// An entry comes in hundreds of pieces, and nearly every piece fits into the current frame.
    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while bytes.len() >= self.room() {
            let (fits, rest) = bytes.split_at(self.room());
            self.text.extend_from_slice(fits);
            self.frame(false)?;
            bytes = rest;
        }
        self.text.extend_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{FrameHead, HEAD_BYTES};

    /// The text of frames, and whether the last of them ends with the end of an entry.
    fn text_of(mut bytes: &[u8]) -> (Vec<u8>, bool) {
        let (mut text, mut ends_entry) = (Vec::new(), false);
        while let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() {
            let head = FrameHead::read(head).unwrap();
            let (stored, rest) = rest.split_at(head.stored);
            text.extend(head.text(stored).unwrap());
            (bytes, ends_entry) = (rest, head.ends_entry);
        }
        assert_eq!(bytes, b"");
        (text, ends_entry)
    }

    #[test]
    fn lines_of_every_length_about_that_of_a_frame_are_written_whole() {
        // Quotes and the end of the line are three bytes.
        let about = |bytes: usize| (bytes - 6..bytes + 3).map(|length| "x".repeat(length));
        for first in about(FRAME_BYTES).chain(about(FRAME_BYTES * 7 / 2)) {
            for second in ["", "a short one"] {
                let mut frames = Frames {
                    out: Vec::new(),
                    text: Vec::new(),
                    written: 0,
                };
                frames.line(&first).unwrap();
                frames.line(&second).unwrap();
                assert!(frames.text.len() <= FRAME_BYTES);
                frames.frame(true).unwrap();
                let (text, ends_entry) = text_of(&frames.out);
                assert!(ends_entry && text == format!("\"{first}\"\n\"{second}\"\n").as_bytes());
            }
        }
    }
}
