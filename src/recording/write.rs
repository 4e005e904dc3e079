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

/// Text into frames.
#[derive(Debug)]
struct Frames<W> {
    out: W,
    text: Vec<u8>,
    written: u64,
}

impl<W: Write> SegmentWriter<W> {
    /// Begins a segment; its first entry is a checkpoint.
    pub fn begin(out: W, header: &SegmentHeader) -> io::Result<Self> {
        let mut frames = Frames { out, text: Vec::new(), written: 0 };
        frames.write_out(&frame::preface())?;
        frames.line(header)?;
        Ok(Self { frames, reports: LatestReports::default() })
    }

    pub fn push(&mut self, entry: Entry) -> io::Result<()> {
        self.frames.line(&self.reports.shorten(entry))
    }

    /// An entry that is short already.
    pub(super) fn push_line(&mut self, line: &impl Serialize) -> io::Result<()> {
        self.frames.line(line)
    }

    /// Writes what is complete: a crash after this keeps it.
    pub fn flush(&mut self) -> io::Result<()> {
        if !self.frames.text.is_empty() {
            self.frames.frame(true)?;
        }
        self.frames.out.flush()
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.frames.written
    }

    /// Bytes of text that wait to be flushed.
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
        // A byte is left for the end of the line.
        let room = FRAME_BYTES - 1 - self.text.len().min(FRAME_BYTES - 1);
        let taken = bytes.len().min(room);
        self.text.extend_from_slice(&bytes[..taken]);
        if taken == room {
            self.frame(false)?;
        }
        // Nothing fitted, and now there is room.
        if taken == 0 && !bytes.is_empty() { self.write(bytes) } else { Ok(taken) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
