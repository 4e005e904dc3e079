//! Measured times, and how they are printed.

use std::time::Duration;

#[derive(Default)]
pub struct Samples(Vec<Duration>);

impl Samples {
    pub fn add(&mut self, took: Duration) {
        self.0.push(took);
    }

    pub fn append(&mut self, mut others: Self) {
        self.0.append(&mut others.0);
    }

    pub fn merged(one: &Self, other: &Self) -> Self {
        Self(one.0.iter().chain(&other.0).copied().collect())
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    pub fn longer_than(&self, time: Duration) -> usize {
        self.0.iter().filter(|took| **took > time).count()
    }

    /// Longest sample in microseconds.
    pub fn longest(&self) -> f64 {
        self.0
            .iter()
            .max()
            .map_or(f64::NAN, |took| took.as_secs_f64() * 1e6)
    }

    /// Percentile in microseconds; NaN if nothing was measured.
    pub fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted
            .get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1)))
            .map_or(f64::NAN, |took| took.as_secs_f64() * 1e6)
    }
}
