//! The story's summary, as data and as a few lines. Computed elsewhere.

use super::placement_cost::PlacementManner;
use crate::units::Millis;
use serde::Serialize;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    pub gpus: usize,
    pub pods_bound: usize,
    pub pods_waiting: usize,
    /// Pods that were evicted so that another could be placed.
    pub evicted: usize,
    pub promised_bytes: u64,
    pub promisable_bytes: u64,
    pub promised_percent: f64,
    pub filter_calls: usize,
    pub bind_calls: usize,
    /// The same batch, placed in both ways.
    pub ways: Vec<PlacementManner>,
    /// From a full KV cache on an engine's page to the first decision that used it.
    pub kv_seen_after_millis: Option<Millis>,
    /// Broken invariants; empty if all held.
    pub violations: Vec<String>,
}

impl Summary {
    pub fn lines(&self) -> Vec<String> {
        let verdict = match self.violations.len() {
            0 => "No GPU was ever promised more than it has, and no exclusive GPU was shared.".to_owned(),
            n => format!("{n} violation(s):"),
        };
        let mut lines = vec![
            String::new(),
            format!(
                "{} pods share {} GPUs: {:.1} % of the VRAM that can be promised is ({} pods wait; evicted for serving pods: {}).",
                self.pods_bound, self.gpus, self.promised_percent, self.pods_waiting, self.evicted
            ),
            format!(
                "The scheduler asked filter {} times and bind {} times.",
                self.filter_calls, self.bind_calls
            ),
        ];
        lines.extend(self.ways.iter().map(|way| format!("{}.", way.line())));
        lines.extend(self.kv_seen_after_millis.map(|Millis(millis)| {
            format!("From a full KV cache on an engine's page to decisions that knew of it: {millis} ms.")
        }));
        lines.push(verdict);
        lines.extend(self.violations.iter().map(|violation| format!("  {violation}")));
        lines
    }
}
