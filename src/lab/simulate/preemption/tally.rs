//! The results of one run, in integers.

use super::workload::{JobSize, WorkloadExtent};
use serde::Serialize;
use stowage_scheduling::units::{Millis, Moment};

/// Thousandths of a GPU for a millisecond.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct GpuTime(pub u64);

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PreemptionTally {
    /// Arrived pods of higher priority.
    pub arrivals: u64,
    /// Of them, those that were placed.
    pub admitted: u64,
    /// Of them, those with victims.
    pub preempted_for: u64,
    pub victims: u64,
    /// Work since the victims' last checkpoints.
    pub lost_work: GpuTime,
    /// The time that they need to load again.
    pub reload: GpuTime,
    /// Searches that reached their limit before they were complete.
    pub cut_short: u64,
    /// GPU time in use, over all GPUs.
    pub used: GpuTime,
    /// What the machines found wrong with placements and evictions, on both days.
    pub broken_promises: u64,
}

/// Adds up events after the warm-up.
#[derive(Debug)]
pub struct Counter {
    extent: WorkloadExtent,
    pub tally: PreemptionTally,
    /// Thousandths of GPUs in use now, and since when.
    in_use: u64,
    since: Moment,
}

impl GpuTime {
    pub fn of(size: JobSize, time: Millis) -> Self {
        Self(size.milli_gpus().saturating_mul(time.0))
    }

    pub fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    pub fn hours(self) -> f64 {
        self.0 as f64 / 1000.0 / 3_600_000.0
    }
}

impl PreemptionTally {
    pub fn lost(&self) -> GpuTime {
        self.lost_work.plus(self.reload)
    }
}

impl Counter {
    pub fn new(extent: WorkloadExtent) -> Self {
        Self {
            extent,
            tally: PreemptionTally::default(),
            in_use: 0,
            since: Moment::default() + extent.warm_up,
        }
    }

    /// Counts it if it happens after the warm-up.
    pub fn note(&mut self, when: Moment, note: impl FnOnce(&mut PreemptionTally)) {
        if self.extent.is_counted(when) {
            note(&mut self.tally);
        }
    }

    /// Advances the time, to the end at most.
    pub fn until(&mut self, now: Moment) {
        let now = now.min(self.extent.ends());
        let passed = now.since(self.since);
        self.tally.used = self.tally.used.plus(GpuTime(self.in_use.saturating_mul(passed.0)));
        self.since = self.since.max(now);
    }

    pub fn begins(&mut self, size: JobSize) {
        self.in_use += size.milli_gpus();
    }

    pub fn ends(&mut self, size: JobSize) {
        self.in_use -= size.milli_gpus();
    }
}
