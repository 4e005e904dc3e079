//! The telemetry board: each node's latest report. Last write wins, by (the agent's boot, sequence number).
//!
//! A report counts on the board exactly if it counted in the books: [`Board::take`] lets them have it first. What a report
//! means is not known here. Only nodes that exist have a place, and those that are gone lose it.

use super::validate::ReportError;
use crate::ids::NodeName;
use crate::report::NodeReport;
use crate::units::{Millis, Moment};
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Ended boots remembered per node. A report delayed beyond this many restarts of its agent would pass for new.
const EARLIER_BOOTS: usize = 4;
/// Below so many places nobody looks whether their nodes still exist.
const FEW: usize = 1024;

#[derive(Debug)]
pub struct Board {
    latest: DashMap<NodeName, Latest>,
    /// With so many places it is time to look which nodes are gone: twice as many as were found to exist, so that the
    /// looking costs each new node its share and no more.
    tidy_at: AtomicUsize,
}

#[derive(Debug, Clone)]
pub struct Latest {
    pub report: Arc<NodeReport>,
    /// When it came in, by this process' clock.
    pub received: Moment,
    /// Boots that have ended, so that a late report of theirs is known for what it is.
    earlier_boots: VecDeque<String>,
}

impl Default for Board {
    fn default() -> Self {
        Self { latest: DashMap::new(), tidy_at: AtomicUsize::new(FEW) }
    }
}

impl Board {
    /// Notes the report as its node's latest, unless there is a later one or `apply` refuses it. `apply` gets the one
    /// before it as well; of one node's reports it sees one at a time, in their order.
    pub fn take(
        &self,
        report: NodeReport,
        received: Moment,
        apply: impl FnOnce(Option<&NodeReport>, &NodeReport) -> Result<(), ReportError>,
    ) -> Result<(), ReportError> {
        match self.latest.entry(report.node.clone()) {
            Entry::Vacant(place) => {
                apply(None, &report)?;
                place.insert(Latest { report: Arc::new(report), received, earlier_boots: VecDeque::new() });
            }
            Entry::Occupied(mut place) => {
                let latest = place.get_mut();
                latest.is_before(&report)?;
                apply(Some(&latest.report), &report)?;
                latest.advance(report, received);
            }
        }
        Ok(())
    }

    pub fn latest(&self, node: &NodeName) -> Option<Latest> {
        self.latest.get(node).map(|latest| latest.clone())
    }

    /// Every node's, in order of name.
    pub fn all(&self) -> BTreeMap<NodeName, Latest> {
        self.latest.iter().map(|latest| (latest.key().clone(), latest.value().clone())).collect()
    }

    /// How long ago each node's latest report came in.
    pub fn ages(&self, now: Moment) -> Vec<Millis> {
        self.latest.iter().map(|latest| latest.age(now)).collect()
    }

    /// Whether so many nodes have come that some may have gone.
    pub fn is_to_be_tidied(&self) -> bool {
        self.latest.len() >= self.tidy_at.load(Ordering::Relaxed)
    }

    /// Who has a place, in no order.
    pub fn names(&self) -> Vec<NodeName> {
        self.latest.iter().map(|latest| latest.key().clone()).collect()
    }

    /// These nodes do not exist any more.
    pub fn forget(&self, gone: &[NodeName]) {
        gone.iter().for_each(|name| drop(self.latest.remove(name)));
        self.tidy_at.store(FEW.max(2 * self.latest.len()), Ordering::Relaxed);
    }
}

impl Latest {
    /// Since it came in.
    pub fn age(&self, now: Moment) -> Millis {
        Millis(now.0.saturating_sub(self.received.0))
    }

    fn is_before(&self, report: &NodeReport) -> Result<(), ReportError> {
        let (sequence, known) = (report.sequence, self.report.sequence);
        match self.report.boot_id == report.boot_id {
            true if sequence <= known => Err(ReportError::Old { sequence, known }),
            false if self.earlier_boots.contains(&report.boot_id) => Err(ReportError::EarlierBoot),
            _ => Ok(()),
        }
    }

    fn advance(&mut self, report: NodeReport, received: Moment) {
        if self.report.boot_id != report.boot_id {
            self.earlier_boots.push_front(self.report.boot_id.clone());
            self.earlier_boots.truncate(EARLIER_BOOTS);
        }
        self.report = Arc::new(report);
        self.received = received;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn report(node: &str, boot: &str, sequence: u64) -> NodeReport {
        let report = serde_json::json!({ "node": node, "bootId": boot, "sequence": sequence, "gpus": [] });
        serde_json::from_value(report).unwrap()
    }

    fn take(board: &Board, boot: &str, sequence: u64) -> Result<(), ReportError> {
        board.take(report("a", boot, sequence), Moment(sequence), |_, _| Ok(()))
    }

    #[test]
    fn a_report_that_the_books_refuse_leaves_the_one_before_it() {
        let board = Board::default();
        take(&board, "one", 1).unwrap();
        let refusal = ReportError::EarlierBoot;
        let refused = board.take(report("a", "one", 2), Moment(2), |_, _| Err(refusal.clone()));
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
            assert_eq!(take(&board, boot, 99), Err(ReportError::EarlierBoot), "{boot}");
        }
        assert_eq!(take(&board, "6", 1), Ok(()));
        assert_eq!(take(&board, "1", 99), Ok(()), "five restarts ago");
    }

    #[test]
    fn who_is_forgotten_begins_anew_and_the_next_look_is_at_twice_as_many() {
        let board = Board::default();
        let name = |n: usize| NodeName::parse(&format!("node-{n}")).unwrap();
        for n in 0..FEW {
            assert!(!board.is_to_be_tidied());
            board.take(report(name(n).as_str(), "boot", 7), Moment(0), |_, _| Ok(())).unwrap();
        }
        assert!(board.is_to_be_tidied());
        board.forget(&[name(3)]);
        assert!(!board.is_to_be_tidied());
        assert_eq!((board.names().len(), board.latest(&name(3)).is_none()), (FEW - 1, true));
        board.take(report("node-3", "boot", 1), Moment(0), |_, _| Ok(())).unwrap();
    }

    proptest! {
        /// Whatever arrives in whatever order: what stands is the greatest number of the boot that began last.
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
                let seen = (latest.report.boot_id.clone(), latest.report.sequence);
                prop_assert_eq!(Some(seen), standing.map(|(boot, sequence)| (boot.to_string(), sequence)));
            }
        }
    }
}
