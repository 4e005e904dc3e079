//! Whether a model's weights are in the kernel's page cache, so that the next engine need not wait for the disk.
//!
//! Samples single bytes with a non-blocking read (`RWF_NOWAIT`): the kernel refuses if the page is not in memory. It may fetch
//! that page all the same, so each round samples other places, and few.

use super::walk::open_regular;
use super::weights::WeightFile;
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::IoSliceMut;

/// Bytes sampled of one model in a round. Engines read weights from end to end, so most models are cached completely or not at
/// all, and 16 samples are enough; what the kernel fetches for them is 64 KiB a round, too little to make a model appear
/// cached.
const SAMPLES: u64 = 16;

/// The offset between the samples of consecutive rounds, as a part of a step of 2^16: the golden ratio, which stays away
/// longest from earlier places.
const GOLDEN_RATIO: u64 = 40_503;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageCacheProbe {
    InMemory,
    OnDisk,
    /// The file system does not support the check; network disks do not.
    Unknown,
}

/// Whether more than half of the samples are in memory. A file system without support counts as "no".
pub(crate) fn is_mostly_cached(files: &[WeightFile], round: u64) -> bool {
    let mut opened = OpenFile::default();
    is_majority_in_memory(samples(files, round).map(|(file, at)| opened.probe(file, at)))
}

fn is_majority_in_memory(probes: impl Iterator<Item = PageCacheProbe>) -> bool {
    let (cached, total) = probes.fold((0, 0), |(cached, probed), probe| {
        (
            cached + u64::from(probe == PageCacheProbe::InMemory),
            probed + 1,
        )
    });
    total > 0 && 2 * cached > total
}

/// The bytes to sample, spread evenly over all files: which file, and the offset in it.
fn samples(files: &[WeightFile], round: u64) -> impl Iterator<Item = (&WeightFile, u64)> {
    let total: u64 = files.iter().map(|file| file.bytes.0).sum();
    let step = (total / SAMPLES).max(1);
    let shift =
        ((u128::from(round.wrapping_mul(GOLDEN_RATIO) & 0xffff) * u128::from(step)) >> 16) as u64;
    let offsets = (0..SAMPLES)
        .map(move |n| n * step + shift)
        .filter(move |at| *at < total);
    offsets.filter_map(|at| file_at(files, at))
}

fn file_at(files: &[WeightFile], mut at: u64) -> Option<(&WeightFile, u64)> {
    for file in files {
        match at.checked_sub(file.bytes.0) {
            Some(beyond) => at = beyond,
            None => return Some((file, at)),
        }
    }
    None
}

/// The last file sampled: samples are in order.
#[derive(Default)]
struct OpenFile<'a>(Option<(&'a WeightFile, Option<File>)>);

impl<'a> OpenFile<'a> {
    fn probe(&mut self, file: &'a WeightFile, at: u64) -> PageCacheProbe {
        if self.0.as_ref().is_none_or(|(opened, _)| *opened != file) {
            self.0 = Some((file, open(file)));
        }
        match &self.0 {
            Some((_, Some(file))) => is_in_memory(file, at),
            _ => PageCacheProbe::Unknown,
        }
    }
}

fn open(file: &WeightFile) -> Option<File> {
    let file = open_regular(&file.path).ok()??;
    // Without it the kernel would also read ahead around every byte.
    fadvise(&file, 0, None, Advice::Random).ok()?;
    Some(file)
}

fn is_in_memory(file: &File, at: u64) -> PageCacheProbe {
    let mut byte = [0];
    match preadv2(
        file,
        &mut [IoSliceMut::new(&mut byte)],
        at,
        ReadWriteFlags::NOWAIT,
    ) {
        Ok(1..) => PageCacheProbe::InMemory,
        Err(Errno::AGAIN) => PageCacheProbe::OnDisk,
        // It has become shorter, or does not support the check.
        Ok(0) | Err(_) => PageCacheProbe::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::path::Path;
    use stowage_scheduling::units::Bytes;

    fn file(path: impl AsRef<Path>, bytes: u64) -> WeightFile {
        WeightFile {
            path: path.as_ref().into(),
            bytes: Bytes(bytes),
        }
    }

    #[test]
    fn more_than_half_is_most_and_what_cannot_be_asked_is_not() {
        use PageCacheProbe::{InMemory, OnDisk, Unknown};
        assert!(is_majority_in_memory(
            [InMemory, InMemory, OnDisk].into_iter()
        ));
        assert!(!is_majority_in_memory([InMemory, OnDisk].into_iter()));
        assert!(!is_majority_in_memory(
            [InMemory, Unknown, Unknown].into_iter()
        ));
        assert!(!is_majority_in_memory([].into_iter()));
    }

    #[test]
    fn a_file_just_written_is_in_memory_where_the_file_system_can_be_asked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let can_be_asked = is_in_memory(&File::open(&path).unwrap(), 0) != PageCacheProbe::Unknown;
        assert_eq!(is_mostly_cached(&[file(&path, 1 << 20)], 3), can_be_asked);
    }

    #[test]
    fn a_file_that_is_gone_or_shorter_than_it_was_is_not_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, "1").unwrap();
        assert!(!is_mostly_cached(&[file(&path, 1 << 20)], 1));
        assert!(!is_mostly_cached(&[file(folder.path().join("gone"), 9)], 0));
        assert!(!is_mostly_cached(&[], 0));
    }

    #[test]
    fn each_round_samples_other_offsets() {
        let files = [file("a", 10 << 30)];
        let rounds = (0..1000).flat_map(|round| {
            samples(&files, round)
                .map(|(_, at)| at >> 12)
                .collect::<Vec<_>>()
        });
        assert_eq!(
            rounds.collect::<BTreeSet<_>>().len(),
            1000 * SAMPLES as usize
        );
    }

    proptest! {
        #[test]
        fn every_sample_lies_in_its_file(sizes in proptest::collection::vec(0u64..1 << 40, 0..9), round: u64) {
            let files: Vec<_> = sizes.iter().map(|size| file("a", *size)).collect();
            let total: u64 = sizes.iter().sum();
            let samples: Vec<_> = samples(&files, round).collect();
            prop_assert_eq!(samples.len() as u64, total.min(SAMPLES));
            for (file, at) in samples {
                prop_assert!(at < file.bytes.0);
            }
        }
    }
}
