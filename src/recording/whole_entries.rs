//! Copies a recording up to the end of its last whole entry, without decompressing it: what a bundle is made of, while the last
//! segment is still written.

use super::frame::{FrameHead, HEAD_BYTES, MAGIC};
use std::io::{self, Read, Write};

/// Copies all entries up to the first that is cut, or that its checksum does not confirm. Answers where the whole entries end, if
/// there is such a one: nothing after it is in the copy.
pub fn copy_whole_entries(from: &mut dyn Read, to: &mut dyn Write) -> io::Result<Option<u64>> {
    let mut unfinished = Vec::new();
    let (mut read, mut whole, mut begins_segment) = (0, 0, false);
    let mut head = [0; HEAD_BYTES];
    Ok(loop {
        match fill(from, &mut head)? {
            // A segment without an entry is none.
            0 if unfinished.is_empty() || begins_segment => break None,
            n if n < HEAD_BYTES => break Some(whole),
            _ => {}
        }
        begins_segment = head.starts_with(&MAGIC);
        if begins_segment {
            unfinished = head.to_vec();
            read += HEAD_BYTES as u64;
            continue;
        }
        let Ok(frame) = FrameHead::read(&head) else { break Some(whole) };
        let mut stored = vec![0; frame.stored];
        if fill(from, &mut stored)? < stored.len() || frame.check(&stored).is_err() {
            break Some(whole);
        }
        read += (HEAD_BYTES + stored.len()) as u64;
        unfinished.extend(head);
        unfinished.extend(stored);
        if frame.ends_entry {
            to.write_all(&unfinished)?;
            unfinished.clear();
            whole = read;
        }
    })
}

/// Fills the buffer as far as there are bytes. Answers how far.
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
