//! What a loop came to, counted while it is played.

use super::demand::RecordedBinding;
use crate::ids::PodUid;
use crate::scheduling::explaining::fragmentation::fragmented_vram;
use crate::scheduling::verbs::Cluster;
use crate::units::{Bytes, Millis, Moment};
use std::collections::BTreeMap;

/// Of one loop.
#[derive(Debug, Default)]
pub struct Tally {
    /// By the recorded pod; what became of it first.
    pub pods: BTreeMap<PodUid, FirstPlacement>,
    /// Of every pod that waited, those that came back after an eviction too, until it was bound.
    pub waits: Vec<Millis>,
    /// Pods that came back after an eviction.
    pub returned: u64,
    pub evictions: u64,
    /// VRAM at each sample, summed up, and how many there were.
    samples: u64,
    allocated: u128,
    capacity: u128,
    stranded: u128,
    stranded_last: Bytes,
}

/// A pod that came, and where it went first.
#[derive(Debug, Clone, Default)]
pub struct FirstPlacement {
    /// From when on it could have been placed; `None` if it never came.
    pub came: Option<Moment>,
    pub place: Option<RecordedBinding>,
    pub evictions: u64,
}

impl Tally {
    pub fn sample(&mut self, cluster: &Cluster) {
        let totals = cluster.totals();
        self.stranded_last = fragmented_vram(cluster);
        self.samples += 1;
        self.allocated += u128::from(totals.charged.0);
        self.capacity += u128::from(totals.capacity.0);
        self.stranded += u128::from(self.stranded_last.0);
    }

    /// Of allocatable VRAM, the part that was allocated on average, in percent; `None` of a cluster without GPUs.
    pub fn allocated_percent(&self) -> Option<f64> {
        (self.capacity > 0).then(|| (self.allocated * 10_000 / self.capacity) as f64 / 100.0)
    }

    /// Free VRAM that pods like the latest cannot use: on average over the recording, and at its end.
    pub fn stranded(&self) -> (Bytes, Bytes) {
        let mean = self.stranded / u128::from(self.samples.max(1));
        (Bytes(u64::try_from(mean).unwrap_or(u64::MAX)), self.stranded_last)
    }
}
