//! The telemetry board: each node's latest report. The last write wins, ordered by (the agent's boot, sequence number).
//!
//! A report counts on the board exactly if it counted in the ledger: [`Board::record`] applies it to the ledger first. The board
//! does not interpret reports. Only nodes that exist have an entry; nodes that are gone lose theirs.
//!
//! A report is stored as the text that was received, compressed. Few are ever read again, and freeing five thousand a second with
//! their hundreds of parts would cost more than parsing the few. What is read of each again and again is stored beside it.

use super::origin::{MAX_REPORT_DELAY, ReportOrigins};
use super::packed_text::PackedText;
use super::validate::{self, ReportError};
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use stowage_report::{EngineSummary, NodeReport, ReportFinding};
use stowage_scheduling::autoscaling::EngineSample;
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::vocabulary::node::NodeIdentity;

/// Ended boots remembered per node. A report that is delayed beyond this many restarts of its agent would pass for new, and so
/// would one that comes when the later boot has been silent for [`MAX_REPORT_DELAY`].
const MAX_EARLIER_BOOTS: usize = 4;
/// Below this many entries the board does not check whether their nodes still exist.
const MIN_NODE_CHECK: usize = 1024;
/// Ten times the size of a full node's report. A longer text is stored without the fields that this version does not know.
const MAX_TEXT_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub struct Board {
    entries: DashMap<NodeName, BoardEntry>,
    pub origins: ReportOrigins,
    /// With this many entries the board checks which nodes are gone: twice as many as were found to exist, so that each new
    /// node pays a constant share of the check.
    check_nodes_at: AtomicUsize,
}

/// A node's latest report.
#[derive(Debug, Clone)]
pub struct LatestReport {
    pub report: NodeReport,
    /// When it was received, by this process' clock.
    pub received: Moment,
}

/// The stored entry before a report of the same node.
#[derive(Debug, Default)]
pub struct PreviousReport<'a> {
    /// What the latest report found.
    pub findings: &'a [ReportFinding],
    /// Pods whose limits are not kept, each with the number of reports in a row that said so.
    pub unkept_limits: &'a [(PodUid, u32)],
    /// The Node that had the name when a report of the same boot of the agent counted last.
    pub counted_under: Option<&'a NodeIdentity>,
}

/// The stored part of a report.
#[derive(Debug, Default)]
struct BoardEntry {
    boot_id: String,
    /// The Node that had the name then.
    counted_under: Option<NodeIdentity>,
    sequence: u64,
    received: Moment,
    findings: Vec<ReportFinding>,
    /// In order of UID.
    unkept_limits: Vec<(PodUid, u32)>,
    legacy_runtime: bool,
    /// Its engines: neither a scrape nor a count of replicas parses a report.
    engines: Box<[EngineSummary]>,
    /// The whole report, as JSON.
    text: PackedText,
    /// Boots that have ended, by which late reports of theirs are recognized.
    earlier_boots: VecDeque<String>,
}

impl Default for Board {
    fn default() -> Self {
        Self {
            entries: DashMap::new(),
            origins: ReportOrigins::default(),
            check_nodes_at: AtomicUsize::new(MIN_NODE_CHECK),
        }
    }
}

impl Board {
    /// Stores the report as its node's latest, unless there is a later one or `apply` rejects it. `text` is what it was parsed
    /// from. `apply` also gets the entry before it and returns the Node that has the name; for one node it is called for one
    /// report at a time, in their order.
    pub fn record(
        &self,
        report: &NodeReport,
        text: &str,
        received: Moment,
        apply: impl FnOnce(PreviousReport<'_>) -> Result<Option<NodeIdentity>, ReportError>,
    ) -> Result<(), ReportError> {
        match self.entries.entry(report.node.clone()) {
            Entry::Vacant(entry) => {
                let counted_under = apply(PreviousReport::default())?;
                let boot_id = report.boot_id.clone();
                entry
                    .insert(BoardEntry {
                        boot_id,
                        counted_under,
                        ..BoardEntry::default()
                    })
                    .advance(report, text, received);
            }
            Entry::Occupied(mut entry) => {
                let entry = entry.get_mut();
                entry.check_order(report, received)?;
                let counted_under = entry
                    .counted_under
                    .as_ref()
                    .filter(|_| entry.boot_id == report.boot_id);
                let previous = PreviousReport {
                    findings: &entry.findings,
                    unkept_limits: &entry.unkept_limits,
                    counted_under,
                };
                entry.counted_under = apply(previous)?;
                entry.advance(report, text, received);
            }
        }
        Ok(())
    }

    pub fn latest(&self, node: &NodeName) -> Option<LatestReport> {
        let (text, received) = self.entries.get(node).map(|entry| entry.text_and_time())?;
        Some(LatestReport::read(&text, received))
    }

    /// Whether the node's container runtime is a legacy one, by its latest report.
    pub(crate) fn has_legacy_runtime(&self, node: &NodeName) -> bool {
        self.entries
            .get(node)
            .is_some_and(|entry| entry.legacy_runtime)
    }

    /// Every node's entry, in order of name.
    pub fn all(&self) -> BTreeMap<NodeName, LatestReport> {
        // Copied first, so that reports are not blocked until all entries have been parsed.
        let kept: Vec<_> = self
            .entries
            .iter()
            .map(|entry| (entry.key().clone(), entry.text_and_time()))
            .collect();
        kept.into_iter()
            .map(|(node, (text, received))| (node, LatestReport::read(&text, received)))
            .collect()
    }

    /// The engines of every node, in no order. Figures that are older than `stale` count as none.
    pub(crate) fn engine_samples(&self, now: Moment, stale: Millis) -> Vec<EngineSample> {
        let mut samples = Vec::new();
        // One entry at a time, so that reports are not blocked for long.
        for node in self.names() {
            if let Some(entry) = self.entries.get(&node) {
                let age = now.since(entry.received);
                samples.extend(
                    entry
                        .engines
                        .iter()
                        .map(|engine| engine.sample(&node, age, stale)),
                );
            }
        }
        samples
    }

    /// The age of each node's latest report, in order of name.
    pub fn ages(&self, now: Moment) -> Vec<(NodeName, Millis)> {
        let mut ages: Vec<_> = self
            .entries
            .iter()
            .map(|entry| (entry.key().clone(), now.since(entry.received)))
            .collect();
        ages.sort_unstable();
        ages
    }

    /// The engines of all reports that were received within this time, in order of node.
    pub fn engines(&self, now: Moment, max_age: Millis) -> Vec<EngineSummary> {
        let recent = self
            .entries
            .iter()
            .filter(|entry| now.since(entry.received) <= max_age);
        let mut by_node: Vec<_> = recent
            .map(|entry| (entry.key().clone(), entry.engines.to_vec()))
            .collect();
        // In which order sums of fractions are made shows in their last digit.
        by_node.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        by_node
            .into_iter()
            .flat_map(|(_, engines)| engines)
            .collect()
    }

    /// Whether so many nodes were added that some may be gone.
    pub(crate) fn needs_node_check(&self) -> bool {
        self.entries.len().max(self.origins.len()) >= self.check_nodes_at.load(Ordering::Relaxed)
    }

    /// The nodes with an entry, in no order.
    pub fn names(&self) -> Vec<NodeName> {
        self.entries
            .iter()
            .map(|entry| entry.key().clone())
            .collect()
    }

    /// Removes the entries of nodes that do not exist any more.
    pub fn retain_nodes(&self, exists: impl Fn(&NodeName) -> bool) {
        let gone = |names: Vec<NodeName>| names.into_iter().filter(|name| !exists(name));
        gone(self.names()).for_each(|name| drop(self.entries.remove(&name)));
        gone(self.origins.names()).for_each(|name| self.origins.remove(&name));
        self.check_nodes_at.store(
            MIN_NODE_CHECK.max(2 * self.entries.len()),
            Ordering::Relaxed,
        );
    }
}

impl LatestReport {
    /// The age of the report: the time since it was received.
    pub fn age(&self, now: Moment) -> Millis {
        now.since(self.received)
    }

    fn read(text: &PackedText, received: Moment) -> Self {
        let report = serde_json::from_slice(&text.decompress()).expect("it was read when it came");
        Self {
            report: validate::check(report).expect("it was checked when it came"),
            received,
        }
    }
}

impl BoardEntry {
    fn text_and_time(&self) -> (PackedText, Moment) {
        (self.text.clone(), self.received)
    }

    fn check_order(&self, report: &NodeReport, received: Moment) -> Result<(), ReportError> {
        let (sequence, newest) = (report.sequence, self.sequence);
        // A boot that reports for longer than one that has ended could was taken for an earlier one by mistake.
        let may_be_late = received < self.received + MAX_REPORT_DELAY;
        match self.boot_id == report.boot_id {
            true if sequence <= newest => Err(ReportError::Old {
                sequence,
                known: newest,
            }),
            false if may_be_late && self.earlier_boots.contains(&report.boot_id) => {
                Err(ReportError::EarlierBoot)
            }
            _ => Ok(()),
        }
    }

    fn advance(&mut self, report: &NodeReport, text: &str, received: Moment) {
        if self.boot_id != report.boot_id {
            self.earlier_boots.retain(|boot| *boot != report.boot_id);
            self.earlier_boots
                .push_front(std::mem::replace(&mut self.boot_id, report.boot_id.clone()));
            self.earlier_boots.truncate(MAX_EARLIER_BOOTS);
        }
        self.sequence = report.sequence;
        self.received = received;
        self.findings.clone_from(&report.findings);
        self.unkept_limits = reports_in_a_row(&self.unkept_limits, report);
        self.legacy_runtime = report.legacy_runtime;
        let previous = std::mem::take(&mut self.engines);
        let engines = report
            .engines
            .iter()
            .filter_map(EngineSummary::from_report)
            .enumerate();
        self.engines = engines
            .map(|(index, engine)| engine.sharing_names_with(previous.get(index)))
            .collect();
        self.text = match text.len() <= MAX_TEXT_BYTES {
            true => PackedText::compress(text.as_bytes()),
            false => {
                PackedText::compress(&serde_json::to_vec(report).expect("a report is plain data"))
            }
        };
    }
}

/// The pods whose limits the report shows not to be kept, with the number of reports in a row that did.
fn reports_in_a_row(before: &[(PodUid, u32)], report: &NodeReport) -> Vec<(PodUid, u32)> {
    let gpus = report.gpus.iter().flatten();
    let cgroups = gpus.flat_map(|gpu| &gpu.cgroups);
    let unkept = cgroups.filter(|cgroup| cgroup.unkept_limit().is_some());
    let pods: BTreeSet<&PodUid> = unkept.map(|cgroup| &cgroup.pod).collect();
    let next = |pod: &PodUid| {
        let count = before.iter().find(|(before, _)| before == pod);
        (
            pod.clone(),
            count.map_or(0, |(_, count)| *count).saturating_add(1),
        )
    };
    pods.into_iter().map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(node: &str, boot: &str, sequence: u64) -> String {
        serde_json::json!({ "node": node, "bootId": boot, "sequence": sequence, "gpus": [] })
            .to_string()
    }

    fn take_of(board: &Board, node: &str, boot: &str, sequence: u64) -> Result<(), ReportError> {
        let text = text(node, boot, sequence);
        board.record(
            &serde_json::from_str(&text).unwrap(),
            &text,
            Moment(sequence),
            |_| Ok(None),
        )
    }

    fn take(board: &Board, boot: &str, sequence: u64) -> Result<(), ReportError> {
        take_of(board, "a", boot, sequence)
    }

    #[test]
    fn a_report_that_the_ledger_refuses_leaves_the_one_before_it() {
        let board = Board::default();
        take(&board, "one", 1).unwrap();
        let refusal = ReportError::EarlierBoot;
        let text = text("a", "one", 2);
        let report = serde_json::from_str(&text).unwrap();
        let refused = board.record(&report, &text, Moment(2), |_| Err(refusal.clone()));
        assert_eq!(refused, Err(refusal));
        let node = NodeName::parse("a").unwrap();
        assert_eq!(board.latest(&node).unwrap().received, Moment(1));
        assert_eq!(take(&board, "one", 2), Ok(()), "its number is not used up");
    }

    #[test]
    fn an_ended_boot_stays_ended_for_as_long_as_it_is_remembered() {
        let board = Board::default();
        for boot in ["1", "2", "3", "4", "5"] {
            assert_eq!(take(&board, boot, 1), Ok(()));
        }
        for boot in ["1", "2", "3", "4"] {
            assert_eq!(
                take(&board, boot, 99),
                Err(ReportError::EarlierBoot),
                "{boot}"
            );
        }
        assert_eq!(take(&board, "6", 1), Ok(()));
        assert_eq!(take(&board, "1", 99), Ok(()), "five restarts ago");
    }

    #[test]
    fn a_boot_that_reports_after_the_later_one_went_silent_counts_again() {
        let board = Board::default();
        assert_eq!(take(&board, "1", 1), Ok(()));
        assert_eq!(take(&board, "2", 2), Ok(()));
        let late = MAX_REPORT_DELAY.0 + 1;
        assert_eq!(take(&board, "1", late), Err(ReportError::EarlierBoot));
        assert_eq!(take(&board, "1", late + 1), Ok(()));
        assert_eq!(take(&board, "2", late + 2), Err(ReportError::EarlierBoot));
        assert_eq!(take(&board, "1", late + 3), Ok(()));
    }

    #[test]
    fn a_removed_node_starts_anew_and_the_next_check_is_at_twice_the_size() {
        let board = Board::default();
        let name = |n: usize| NodeName::parse(&format!("node-{n}")).unwrap();
        for n in 0..MIN_NODE_CHECK {
            assert!(!board.needs_node_check());
            take_of(&board, name(n).as_str(), "boot", 7).unwrap();
        }
        assert!(board.needs_node_check());
        board.retain_nodes(|node| *node != name(3));
        assert!(!board.needs_node_check());
        assert_eq!(
            (board.names().len(), board.latest(&name(3)).is_none()),
            (MIN_NODE_CHECK - 1, true)
        );
        take_of(&board, "node-3", "boot", 1).unwrap();
    }

    #[test]
    fn a_long_text_is_stored_without_unknown_fields() {
        let board = Board::default();
        let filler = "x".repeat(MAX_TEXT_BYTES);
        let text = text("a", "boot", 1).replacen('{', &format!(r#"{{"unknown":"{filler}","#), 1);
        let report: NodeReport = serde_json::from_str(&text).unwrap();
        board
            .record(&report, &text, Moment(1), |_| Ok(None))
            .unwrap();
        assert_eq!(board.latest(&report.node).unwrap().report, report);
        assert!(
            board
                .entries
                .get(&report.node)
                .unwrap()
                .text
                .decompress()
                .len()
                < 200
        );
    }

    proptest! {
        /// Whatever the order of arrival, the entry is the greatest sequence number of the boot that began last.
        #[test]
        fn the_last_write_wins(arrivals in prop::collection::vec((0u8..3, 0u64..6), 1..40)) {
            let board = Board::default();
            let mut ended: Vec<u8> = Vec::new();
            let mut standing: Option<(u8, u64)> = None;
            for (boot, sequence) in arrivals {
                let counts = match standing {
                    None => true,
                    Some((current, known)) if current == boot => sequence > known,
                    Some(_) => !ended.contains(&boot),
                };
                if counts {
                    ended.extend(standing.map(|(current, _)| current).filter(|current| *current != boot));
                    standing = Some((boot, sequence));
                }
                prop_assert_eq!(take(&board, &boot.to_string(), sequence).is_ok(), counts);
                let latest = board.latest(&NodeName::parse("a").unwrap()).unwrap();
                let seen = (latest.report.boot_id, latest.report.sequence);
                prop_assert_eq!(Some(seen), standing.map(|(boot, sequence)| (boot.to_string(), sequence)));
            }
        }
    }
}
