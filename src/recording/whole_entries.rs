//! Copies a recording up to the end of its last whole entry, without decompressing it: what a bundle is made of, while the last
//! segment is still written.

use super::frame::{FrameHead, HEAD_BYTES, MAGIC};
use std::io::{self, Read, Write};

/// The copy ends before what is cut, and before what its checksum does not confirm. Answers how many bytes it has.
pub fn copy_whole_entries(from: &mut dyn Read, to: &mut dyn Write) -> io::Result<u64> {
    let (mut copied, mut unfinished) = (0, Vec::new());
    let mut head = [0; HEAD_BYTES];
    while read_all(from, &mut head)? {
        if head.starts_with(&MAGIC) {
            // A segment without an entry is none.
            unfinished = head.to_vec();
            continue;
        }
        let Ok(frame) = FrameHead::read(&head) else { break };
        let mut stored = vec![0; frame.stored];
        if !read_all(from, &mut stored)? || frame.check(&stored).is_err() {
            break;
        }
        unfinished.extend(head);
        unfinished.extend(stored);
        if frame.ends_entry {
            to.write_all(&unfinished)?;
            copied += unfinished.len() as u64;
            unfinished.clear();
        }
    }
    Ok(copied)
}

/// Whether the buffer could be filled.
fn read_all(from: &mut dyn Read, buffer: &mut [u8]) -> io::Result<bool> {
    match from.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}
