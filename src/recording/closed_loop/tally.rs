//! What a loop came to, counted while it is played.

use super::demand::RecordedBinding;
use serde::Serialize;
use std::collections::BTreeMap;
use stowage_scheduling::explaining::fragmentation::fragmented_vram;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::verbs::Cluster;

/// Counters of one loop.
#[derive(Debug, Default)]
pub struct Tally {
    /// First placement of each pod, by the UID of the recorded pod.
    pub pods: BTreeMap<PodUid, FirstPlacement>,
    /// Waiting times of all pods until they were bound, including those that came back after an eviction.
    pub waits: Vec<Millis>,
    /// Pods that came back after an eviction.
    pub returned: u64,
    pub evictions: u64,
    /// The cluster from time to time, in order.
    pub samples: Vec<LoopSample>,
}

/// VRAM and waiting pods of a loop at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoopSample {
    /// Time since the recording began.
    pub after: Millis,
    pub capacity: Bytes,
    pub allocated: Bytes,
    /// Free VRAM that pods like the latest cannot use.
    pub stranded: Bytes,
    /// Pods that could have a place and have none.
    pub waiting: u64,
}

/// A pod that came, and where it went first.
#[derive(Debug, Clone, Default)]
pub(crate) struct FirstPlacement {
    /// From when on it could have been placed; `None` if it never came.
    pub arrived_at: Option<Moment>,
    pub binding: Option<RecordedBinding>,
    pub evictions: u64,
}

impl Tally {
    pub fn sample(&mut self, cluster: &Cluster, began: Moment, waiting: usize) {
        let totals = cluster.ledger().totals();
        self.samples.push(LoopSample {
            after: cluster.ledger().now().since(began),
            capacity: totals.capacity,
            allocated: totals.charged,
            stranded: fragmented_vram(cluster.ledger()),
            waiting: waiting as u64,
        });
    }

    /// Average allocated share of allocatable VRAM, in per cent; `None` for a cluster without GPUs.
    pub fn allocated_percent(&self) -> Option<f64> {
        let [allocated, capacity] = [
            self.sum(|sample| sample.allocated),
            self.sum(|sample| sample.capacity),
        ];
        (capacity > 0).then(|| (allocated * 10_000 / capacity) as f64 / 100.0)
    }

    /// Free VRAM that pods like the latest cannot use: on average over the recording, and at its end.
    pub fn stranded(&self) -> (Bytes, Bytes) {
        let mean = self.sum(|sample| sample.stranded) / (self.samples.len() as u128).max(1);
        let last = self.samples.last().map(|sample| sample.stranded);
        (
            Bytes(u64::try_from(mean).unwrap_or(u64::MAX)),
            last.unwrap_or_default(),
        )
    }

    fn sum(&self, figure: impl Fn(&LoopSample) -> Bytes) -> u128 {
        self.samples
            .iter()
            .map(|sample| u128::from(figure(sample).0))
            .sum()
    }
}
