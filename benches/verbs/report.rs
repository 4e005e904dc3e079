//! What was measured, as a table.

use std::time::Duration;

#[derive(Default)]
pub struct Samples(Vec<Duration>);

pub struct Row {
    pub way: &'static str,
    pub verb: &'static str,
    pub stowage: Samples,
    pub floor: Samples,
}

impl Samples {
    pub fn add(&mut self, took: Duration) {
        self.0.push(took);
    }

    fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() * percent / 100).map_or(f64::NAN, |took| took.as_secs_f64() * 1e6)
    }
}

pub fn header() {
    println!(
        "{:<11} {:<20} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}",
        "", "", "p50 µs", "p99 µs", "floor p50", "floor p99", "× p50", "× p99"
    );
}

impl Row {
    pub fn print(&self) {
        let (p50, p99) = (self.stowage.percentile(50), self.stowage.percentile(99));
        let (floor50, floor99) = (self.floor.percentile(50), self.floor.percentile(99));
        println!(
            "{:<11} {:<20} {p50:>10.0} {p99:>10.0} {floor50:>10.0} {floor99:>10.0} {:>8.2} {:>8.2}",
            self.way,
            self.verb,
            p50 / floor50,
            p99 / floor99
        );
    }
}
