//! Copies a recording up to the end of its last whole entry, without decompressing it: what a bundle is made of, while the last
//! segment is still written.

use super::frame::{FORMAT, FRAME_HEADER_BYTES, FrameHeader, MAGIC};
use super::read::MAX_ENTRY_BYTES;
use std::fmt;
use std::io::{self, Read, Write};

/// End of a copy that stops before its recording does: nothing from there on is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyEnd {
    /// Byte of the recording.
    pub at: u64,
    pub why: CopyEndReason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyEndReason {
    /// An entry that is cut, or that its checksum does not confirm.
    BrokenEntry,
    /// A segment of another format.
    OtherFormat(u32),
}

impl fmt::Display for CopyEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, why } = self;
        match why {
            CopyEndReason::BrokenEntry => write!(f, "is cut or damaged at byte {at}"),
            CopyEndReason::OtherFormat(found) => {
                write!(
                    f,
                    "has format {found} at byte {at}, and this build of stowage reads format {FORMAT}"
                )
            }
        }
    }
}

/// Copies all entries up to the first incomplete one. Returns where the copy ends, if that is before the recording does.
pub fn copy_whole_entries(from: &mut dyn Read, to: &mut dyn Write) -> io::Result<Option<CopyEnd>> {
    let mut unfinished = Vec::new();
    let (mut read, mut whole, mut text, mut begins_segment) = (0, 0, 0, false);
    let mut head = [0; FRAME_HEADER_BYTES];
    let end_copy = |at, why| Ok(Some(CopyEnd { at, why }));
    loop {
        match fill(from, &mut head)? {
            // A segment without an entry is none.
            0 if unfinished.is_empty() || begins_segment => return Ok(None),
            n if n < FRAME_HEADER_BYTES => return end_copy(whole, CopyEndReason::BrokenEntry),
            _ => {}
        }
        begins_segment = head.starts_with(&MAGIC);
        if begins_segment {
            let format = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
            if format != FORMAT {
                return end_copy(whole, CopyEndReason::OtherFormat(format));
            }
            (unfinished, text) = (head.to_vec(), 0);
            read += FRAME_HEADER_BYTES as u64;
            continue;
        }
        let Ok(frame) = FrameHeader::read(&head) else {
            return end_copy(whole, CopyEndReason::BrokenEntry);
        };
        let mut stored = vec![0; frame.stored];
        text += frame.raw;
        if fill(from, &mut stored)? < stored.len()
            || frame.verify(&stored).is_err()
            || text > MAX_ENTRY_BYTES
        {
            return end_copy(whole, CopyEndReason::BrokenEntry);
        }
        read += (FRAME_HEADER_BYTES + stored.len()) as u64;
        unfinished.extend(head);
        unfinished.extend(stored);
        if frame.ends_entry {
            to.write_all(&unfinished)?;
            unfinished.clear();
            (whole, text) = (read, 0);
        }
    }
}

/// Fills the buffer as far as there are bytes. Returns how many.
pub(super) fn fill(from: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
