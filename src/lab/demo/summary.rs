//! The story's summary, as data and as a few lines. Computed elsewhere.

use super::placement_cost::PlacementCalls;
use super::start_times::StartTimesTable;
use serde::Serialize;
use stowage_scheduling::units::{Millis, plural};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Summary {
    pub gpus: usize,
    pub pods_bound: usize,
    pub pods_waiting: usize,
    /// Pods that were evicted so that another could be placed.
    pub evicted: usize,
    pub allocated_bytes: u64,
    pub allocatable_bytes: u64,
    pub allocated_percent: f64,
    pub filter_calls: usize,
    pub bind_calls: usize,
    /// Calls of kube-scheduler for one batch, placed in both ways.
    pub ways: Vec<PlacementCalls>,
    /// From a full KV cache on an engine's page to the first decision that used it.
    pub kv_seen_after_millis: Option<Millis>,
    /// Engines that slept while jobs used their VRAM, asked, and woke.
    pub asked_wakes: usize,
    /// Engines that woke without asking, and lacked memory.
    pub failed_wakes: usize,
    /// Engines that woke without asking, as Stowage counted them.
    pub unasked_wakes: u64,
    /// How well start times are predicted.
    pub start_times: Option<StartTimesTable>,
    /// Broken invariants; empty if all held.
    pub violations: Vec<String>,
}

impl Summary {
    /// Adds the start times, which are played apart from the story.
    pub fn add_start_times(&mut self, start_times: StartTimesTable) {
        self.violations.extend(start_times.violations());
        self.start_times = Some(start_times);
    }

    pub fn lines(&self) -> Vec<String> {
        let verdict = match self.violations.len() {
            0 => "No GPU was ever allocated more than it has, and no exclusive GPU was shared."
                .to_owned(),
            n => format!("{}:", plural(n, "violation")),
        };
        let mut lines = vec![
            String::new(),
            format!(
                "{} share {}: {:.1} % of allocatable VRAM is allocated; {} pending; {} evicted for serving pods.",
                plural(self.pods_bound, "pod"),
                plural(self.gpus, "GPU"),
                self.allocated_percent,
                plural(self.pods_waiting, "pod"),
                plural(self.evicted, "pod"),
            ),
            format!(
                "kube-scheduler called filter {} times and bind {} times.",
                self.filter_calls, self.bind_calls
            ),
        ];
        lines.extend(self.ways.iter().map(|way| format!("{}.", way.line())));
        lines.extend(self.kv_seen_after_millis.map(|Millis(millis)| {
            format!("From a full KV cache on an engine's page to decisions that knew of it: {millis} ms.")
        }));
        lines.push(format!(
            "Engines that asked before they woke, and had their memory: {}. That did not ask, and lacked it: {} (counted: {}).",
            self.asked_wakes, self.failed_wakes, self.unasked_wakes
        ));
        lines.extend(self.start_times.iter().flat_map(StartTimesTable::lines));
        lines.push(verdict);
        lines.extend(
            self.violations
                .iter()
                .map(|violation| format!("  {violation}")),
        );
        lines
    }
}
