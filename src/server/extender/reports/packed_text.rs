//! Compressed text. A report of eight GPUs and their engines has 6 KiB and repeats itself. A packed text takes no
//! more than it needs, however long the texts before it were.

use lz4_flex::block;

#[derive(Debug, Clone, Default)]
pub(super) struct PackedText {
    /// Its length once it is unpacked, in bytes.
    length: usize,
    packed: Box<[u8]>,
}

impl PackedText {
    pub(super) fn compress(text: &[u8]) -> Self {
        Self {
            length: text.len(),
            packed: block::compress(text).into_boxed_slice(),
        }
    }

    pub(super) fn decompress(&self) -> Vec<u8> {
        if self.length == 0 {
            return Vec::new();
        }
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
            let packed = PackedText::compress(text.as_bytes());
            prop_assert_eq!(packed.decompress(), text.as_bytes());
        }
    }

    #[test]
    fn texts_of_all_lengths_come_out_again() {
        // From 64 KiB on, the compressor works otherwise.
        for length in [0, 1, 65_534, 65_535, 65_536, 1 << 20] {
            let text: Vec<u8> = (0u64..length).map(|at| (at * at / 7) as u8).collect();
            assert_eq!(PackedText::compress(&text).decompress(), text, "{length}");
        }
        assert_eq!(PackedText::default().decompress(), b"");
    }

    #[test]
    fn what_repeats_itself_takes_little() {
        let text = r#"{"uuid":"GPU-1","health":"healthy"},"#.repeat(100);
        assert!(PackedText::compress(text.as_bytes()).packed.len() < text.len() / 10);
    }
}
