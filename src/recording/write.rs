//! Entries to the bytes of a segment.

use super::entry::{Entry, SegmentHeader};
use super::frame::{self, MAX_FRAME_TEXT_BYTES};
use super::repeats::LatestReports;
use serde::Serialize;
use std::io::{self, Write};

/// A segment that is being written. What was not flushed is lost with it.
#[derive(Debug)]
pub struct SegmentWriter<W> {
    frames: FrameWriter<W>,
    reports: LatestReports,
}

/// Writer that packs text into frames.
#[derive(Debug)]
struct FrameWriter<W> {
    out: W,
    text: Vec<u8>,
    written: u64,
}

impl<W: Write> SegmentWriter<W> {
    /// Begins a segment; its first entry is a checkpoint.
    pub fn begin(out: W, header: &SegmentHeader) -> io::Result<Self> {
        let mut frames = FrameWriter {
            out,
            text: Vec::new(),
            written: 0,
        };
        frames.write_out(&frame::preface())?;
        frames.write_line(header)?;
        Ok(Self {
            frames,
            reports: LatestReports::default(),
        })
    }

    pub fn push(&mut self, entry: Entry) -> io::Result<()> {
        self.frames.write_line(&self.reports.shorten(entry))
    }

    /// Appends a line whose reports are already shortened.
    pub(super) fn push_line(&mut self, line: &impl Serialize) -> io::Result<()> {
        self.frames.write_line(line)
    }

    /// Writes all complete entries: a crash after this keeps them.
    pub fn flush(&mut self) -> io::Result<()> {
        if !self.frames.text.is_empty() {
            self.frames.write_frame(true)?;
        }
        self.frames.out.flush()
    }

    /// Number of bytes written.
    pub fn bytes_written(&self) -> u64 {
        self.frames.written
    }

    /// Number of bytes of text that wait to be flushed.
    pub fn pending_bytes(&self) -> usize {
        self.frames.text.len()
    }

    pub fn get_ref(&self) -> &W {
        &self.frames.out
    }
}

impl<W: Write> FrameWriter<W> {
    fn write_line(&mut self, line: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut *self, line)?;
        self.text.push(b'\n');
        Ok(())
    }

    /// Free bytes of the current frame. One byte is left for the line end.
    fn free_bytes(&self) -> usize {
        (MAX_FRAME_TEXT_BYTES - 1).saturating_sub(self.text.len())
    }

    fn write_frame(&mut self, ends_entry: bool) -> io::Result<()> {
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

impl<W: Write> Write for FrameWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes)?;
        Ok(bytes.len())
    }

    /// An entry comes in hundreds of pieces, and nearly every piece fits into the current frame.
    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while bytes.len() >= self.free_bytes() {
            let (fits, remaining) = bytes.split_at(self.free_bytes());
            self.text.extend_from_slice(fits);
            self.write_frame(false)?;
            bytes = remaining;
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
    use crate::frame::{FRAME_HEADER_BYTES, FrameHeader};

    /// The text of frames, and whether the last of them ends with the end of an entry.
    fn text_of(mut bytes: &[u8]) -> (Vec<u8>, bool) {
        let (mut text, mut ends_entry) = (Vec::new(), false);
        while let Some((head, rest)) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>() {
            let head = FrameHeader::read(head).unwrap();
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
        for first in about(MAX_FRAME_TEXT_BYTES).chain(about(MAX_FRAME_TEXT_BYTES * 7 / 2)) {
            for second in ["", "a short one"] {
                let mut frames = FrameWriter {
                    out: Vec::new(),
                    text: Vec::new(),
                    written: 0,
                };
                frames.write_line(&first).unwrap();
                frames.write_line(&second).unwrap();
                assert!(frames.text.len() <= MAX_FRAME_TEXT_BYTES);
                frames.write_frame(true).unwrap();
                let (text, ends_entry) = text_of(&frames.out);
                assert!(ends_entry && text == format!("\"{first}\"\n\"{second}\"\n").as_bytes());
            }
        }
    }
}
