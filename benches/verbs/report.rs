//! The measurements as a table.

use crate::samples::Samples;

pub struct VerbRow {
    pub way: &'static str,
    pub verb: &'static str,
    pub stowage: Samples,
    pub floor: Samples,
}

pub fn header() {
    println!(
        "{:<11} {:<20} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}",
        "", "", "p50 µs", "p99 µs", "floor p50", "floor p99", "× p50", "× p99"
    );
}

impl VerbRow {
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
