//! A text in a fraction of its memory. A report of eight GPUs and their engines has 6 KiB, and a quarter of that packed; packing
//! takes a few microseconds, and what it takes in memory does not depend on how long the texts before it were.

use lz4_flex::block;

#[derive(Debug, Clone)]
pub(super) struct PackedText {
    /// Its length once it is unpacked, in bytes.
    length: usize,
    packed: Box<[u8]>,
}

impl Default for PackedText {
    fn default() -> Self {
        Self::of(b"")
    }
}

impl PackedText {
    pub(super) fn of(text: &[u8]) -> Self {
        Self { length: text.len(), packed: block::compress(text).into_boxed_slice() }
    }

    pub(super) fn unpacked(&self) -> Vec<u8> {
        block::decompress(&self.packed, self.length).expect("it was packed here")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_packed_comes_out_again(text in ".{0,300}", times in 0usize..40) {
            let text = text.repeat(times);
            let packed = PackedText::of(text.as_bytes());
            prop_assert_eq!(packed.unpacked(), text.as_bytes());
        }
    }

    #[test]
    fn what_repeats_itself_takes_little() {
        let text = r#"{"uuid":"GPU-1","health":"healthy"},"#.repeat(100);
        assert!(PackedText::of(text.as_bytes()).packed.len() < text.len() / 10);
    }
}
