//! The bytes of a segment: a preface, then frames.
//!
//! ```text
//! preface   "STOWREC\n"  format: u32
//! frame     stored: u32  raw: u32  checksum: u32  stored bytes
//! ```
//!
//! Numbers are little-endian. A frame holds at most [`MAX_FRAME_TEXT_BYTES`] of text, compressed; the checksum is of both lengths
//! and the stored bytes, so no bit of a frame can change unnoticed. The top bit of `raw` says that the text ends with the end of
//! an entry: a copy of a recording that is still written ends there. A preface begins with bytes that no length has, so it
//! shows where the next segment begins.

use crc32fast::Hasher;

/// Magic number at the beginning of a segment.
pub const MAGIC: [u8; 8] = *b"STOWREC\n";
/// Version of the format. Rises with every change that an older reader would misread.
pub const FORMAT: u32 = 1;
/// Maximum length of a frame's text in bytes: compression gains little beyond, and a reader keeps no more in memory.
pub const MAX_FRAME_TEXT_BYTES: usize = 1 << 20;
/// Maximum length of a compressed frame in bytes: that of its text, and the worst case of LZ4, which adds less than a hundredth.
const MAX_STORED_BYTES: usize = MAX_FRAME_TEXT_BYTES + MAX_FRAME_TEXT_BYTES / 64;
/// Set in `raw` if the frame ends with the end of an entry.
const ENDS_ENTRY_BIT: u32 = 1 << 31;

/// Length of a preface in bytes.
pub const PREFACE_BYTES: usize = MAGIC.len() + 4;
/// Length of a frame's header in bytes.
pub(crate) const FRAME_HEADER_BYTES: usize = 12;

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Length of the stored (compressed) bytes that follow.
    pub stored: usize,
    /// Length of the text that they decompress to, in bytes.
    pub raw: usize,
    /// Whether the text ends with the end of an entry.
    pub ends_entry: bool,
    checksum: u32,
}

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame says that it is longer than any frame is")]
    Length,
    #[error("the checksum of a frame does not match its bytes")]
    Checksum,
    #[error("a frame does not decompress to the length that it says")]
    Compression,
}

pub fn preface() -> [u8; PREFACE_BYTES] {
    let mut preface = [0; PREFACE_BYTES];
    preface[..MAGIC.len()].copy_from_slice(&MAGIC);
    preface[MAGIC.len()..].copy_from_slice(&FORMAT.to_le_bytes());
    preface
}

/// Encodes a frame of this text, which is at most [`MAX_FRAME_TEXT_BYTES`] long.
pub fn encode(text: &[u8], ends_entry: bool) -> Vec<u8> {
    debug_assert!(text.len() <= MAX_FRAME_TEXT_BYTES);
    let packed = lz4_flex::block::compress(text);
    let raw = text.len() as u32 | if ends_entry { ENDS_ENTRY_BIT } else { 0 };
    let stored = packed.len() as u32;
    let mut frame = Vec::with_capacity(FRAME_HEADER_BYTES + packed.len());
    frame.extend(stored.to_le_bytes());
    frame.extend(raw.to_le_bytes());
    frame.extend(checksum(stored, raw, &packed).to_le_bytes());
    frame.extend(packed);
    frame
}

impl FrameHeader {
    pub fn read(head: &[u8; FRAME_HEADER_BYTES]) -> Result<Self, FrameError> {
        let number =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (stored, raw, checksum) = (number(0), number(4), number(8));
        let (stored, ends_entry, raw) = (
            stored as usize,
            raw & ENDS_ENTRY_BIT != 0,
            (raw & !ENDS_ENTRY_BIT) as usize,
        );
        if stored > MAX_STORED_BYTES || raw > MAX_FRAME_TEXT_BYTES {
            return Err(FrameError::Length);
        }
        Ok(Self {
            stored,
            raw,
            ends_entry,
            checksum,
        })
    }

    /// Verifies the stored bytes against the checksum.
    pub fn verify(&self, stored: &[u8]) -> Result<(), FrameError> {
        let raw = self.raw as u32 | if self.ends_entry { ENDS_ENTRY_BIT } else { 0 };
        match checksum(stored.len() as u32, raw, stored) == self.checksum {
            true => Ok(()),
            false => Err(FrameError::Checksum),
        }
    }

    /// Verifies and decompresses the stored bytes.
    pub fn text(&self, stored: &[u8]) -> Result<Vec<u8>, FrameError> {
        self.verify(stored)?;
        let text =
            lz4_flex::block::decompress(stored, self.raw).map_err(|_| FrameError::Compression)?;
        if text.len() == self.raw {
            Ok(text)
        } else {
            Err(FrameError::Compression)
        }
    }
}

fn checksum(stored: u32, raw: u32, bytes: &[u8]) -> u32 {
    let mut hasher = Hasher::new();
    hasher.update(&stored.to_le_bytes());
    hasher.update(&raw.to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}
