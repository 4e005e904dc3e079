//! The story's summary, as data and as a few lines. Computed elsewhere.

use super::placement_cost::PlacementCalls;
use super::start_times::StartTimesTable;
use serde::Serialize;
use stowage_scheduling::units::{Bytes, Millis, plural};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    pub(crate) gpus: usize,
    pub(crate) pods_bound: usize,
    pub(crate) pods_waiting: usize,
    /// Pods that were evicted so that another could be placed.
    pub(crate) evicted: usize,
    /// Without what is borrowed.
    pub(crate) allocated_bytes: u64,
    pub(crate) borrowed_bytes: u64,
    pub(crate) allocatable_bytes: u64,
    pub(crate) allocated_percent: f64,
    pub(crate) filter_calls: usize,
    pub(crate) bind_calls: usize,
    /// Calls of kube-scheduler for one batch, placed in both ways.
    pub(crate) ways: Vec<PlacementCalls>,
    /// From a full KV cache on an engine's page to the first decision that used it.
    pub(crate) kv_seen_after_millis: Option<Millis>,
    /// Engines that slept while jobs used their VRAM, asked, and woke.
    pub(crate) asked_wakes: usize,
    /// Engines that woke without asking, and lacked memory.
    pub(crate) failed_wakes: usize,
    /// Engines that woke without asking, as Stowage counted them.
    pub(crate) unasked_wakes: u64,
    /// Allocations beyond a grant that failed, and whose neighbour had all of its own.
    pub(crate) kept_grants: usize,
    /// Jobs that borrowed from an engine that was awake: those that were evicted before it needed their VRAM, and those that the
    /// driver ended for it.
    pub(crate) left_ahead: usize,
    pub(crate) ended_by_driver: usize,
    /// Engines that took back what they lent awake, as Stowage counted them.
    pub(crate) taken_back: u64,
    /// Engines that a busy neighbor slowed beyond their class's limit on latency, and that keep it since a job was evicted.
    pub(crate) kept_latencies: usize,
    /// How well start times are predicted.
    pub(crate) start_times: Option<StartTimesTable>,
    /// Broken invariants; empty if all held.
    pub(crate) violations: Vec<String>,
}

impl Summary {
    /// Whether every invariant held.
    pub fn is_sound(&self) -> bool {
        self.violations.is_empty()
    }

    /// Adds the start times, which are played apart from the story.
    pub(crate) fn add_start_times(&mut self, start_times: StartTimesTable) {
        self.violations.extend(start_times.violations());
        self.start_times = Some(start_times);
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let verdict = match self.violations.len() {
            0 => "No GPU was ever allocated more than it has, and no exclusive GPU was shared."
                .to_owned(),
            n => format!("{}:", plural(n, "violation")),
        };
        let mut lines = vec![
            String::new(),
            format!(
                "{} share {}: {:.1} % of allocatable VRAM is allocated, {} more borrowed; {} pending; {} evicted for serving pods.",
                plural(self.pods_bound, "pod"),
                plural(self.gpus, "GPU"),
                self.allocated_percent,
                Bytes(self.borrowed_bytes),
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
        lines.push(format!(
            "Allocations beyond a grant that took nothing from a neighbour: {}. Jobs that left an awake engine's VRAM ahead: {}; ended by the driver \
             for it: {} (loans taken back: {}).",
            self.kept_grants, self.left_ahead, self.ended_by_driver, self.taken_back
        ));
        lines.push(format!(
            "Engines that a busy neighbor slowed beyond their limit, and that keep it since a job was evicted: {}.",
            self.kept_latencies
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
