//! Copies a recording up to the end of its last whole entry, without decompressing it: what a bundle is made of, while the last
//! segment is still written.

use super::frame::{FORMAT, FrameHead, HEAD_BYTES, MAGIC};
use super::read::MOST_ENTRY_BYTES;
use std::fmt;
use std::io::{self, Read, Write};

/// End of a copy that stops before its recording does: nothing from there on is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyEnd {
    /// Byte of the recording.
    pub at: u64,
    pub why: CopyEndsAt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyEndsAt {
    /// An entry that is cut, or that its checksum does not confirm.
    BrokenEntry,
    /// A segment of another format.
    OtherFormat(u32),
}

impl fmt::Display for CopyEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, why } = self;
        match why {
            CopyEndsAt::BrokenEntry => write!(f, "is cut or damaged at byte {at}"),
            CopyEndsAt::OtherFormat(found) => {
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
    let mut head = [0; HEAD_BYTES];
    let ends = |at, why| Ok(Some(CopyEnd { at, why }));
    loop {
        match fill(from, &mut head)? {
            // A segment without an entry is none.
            0 if unfinished.is_empty() || begins_segment => return Ok(None),
            n if n < HEAD_BYTES => return ends(whole, CopyEndsAt::BrokenEntry),
            _ => {}
        }
        begins_segment = head.starts_with(&MAGIC);
        if begins_segment {
            let format = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
            if format != FORMAT {
                return ends(whole, CopyEndsAt::OtherFormat(format));
            }
            (unfinished, text) = (head.to_vec(), 0);
            read += HEAD_BYTES as u64;
            continue;
        }
        let Ok(frame) = FrameHead::read(&head) else {
            return ends(whole, CopyEndsAt::BrokenEntry);
        };
        let mut stored = vec![0; frame.stored];
        text += frame.raw;
        if fill(from, &mut stored)? < stored.len()
            || frame.check(&stored).is_err()
            || text > MOST_ENTRY_BYTES
        {
            return ends(whole, CopyEndsAt::BrokenEntry);
        }
        read += (HEAD_BYTES + stored.len()) as u64;
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
