//! Resources that this replica may not list, for people: in `/readyz`, the log and the metrics. What follows from a refusal
//! is decided where the objects are watched.

use super::FailureStreak;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use stowage_scheduling::units::{Millis, Moment};

/// A refusal that lasts this long is a matter of permissions: an API server that has just started refuses all until it has read its
/// roles.
const PERSISTENT_AFTER: Millis = Millis::seconds(15);
/// A watch that has not failed for this long has recovered: its pauses between attempts are shorter.
const RECOVERED_AFTER: Millis = Millis::seconds(60);

/// Reads that fail, by the name of the resource.
#[derive(Debug, Default)]
pub struct RefusedReads(Mutex<BTreeMap<&'static str, FailedRead>>);

#[derive(Debug, Default)]
struct FailedRead {
    failures: FailureStreak,
    last_failure: Moment,
    /// The status of the refusal, and since when the API server refuses.
    refused: Option<(u16, Moment)>,
}

impl FailedRead {
    /// It has been refused for so long that permissions are missing.
    fn is_persistent(&self) -> bool {
        self.refused
            .is_some_and(|(_, since)| self.last_failure.since(since) >= PERSISTENT_AFTER)
    }
}

/// How a failure compares with what was reported before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadFailure {
    /// It begins, or has lasted twice as long as when it was reported last.
    Due,
    /// It has been refused for so long that permissions are missing.
    Persistent,
    AlreadyReported,
}

impl RefusedReads {
    /// Records a failure, with the status if it is a refusal.
    pub fn record_failure(
        &self,
        resource: &'static str,
        refused: Option<u16>,
        now: Moment,
    ) -> ReadFailure {
        let mut reads = self.0.lock();
        let read = reads.entry(resource).or_default();
        let (since, was_lasting) = (
            read.refused.map_or(now, |(_, since)| since),
            read.is_persistent(),
        );
        (read.last_failure, read.refused) = (now, refused.map(|status| (status, since)));
        let is_due = read.failures.record_failure(now);
        match read.is_persistent() && !was_lasting {
            true => ReadFailure::Persistent,
            false if is_due => ReadFailure::Due,
            false => ReadFailure::AlreadyReported,
        }
    }

    /// Records that the objects were listed. Returns how long the reads failed, if there was one.
    pub(crate) fn record_success(&self, resource: &str, now: Moment) -> Option<Millis> {
        self.0.lock().remove(resource)?.failures.end(now)
    }

    /// Forgets the failures that have not recurred, and returns how long they lasted. A refusal ends with a list.
    pub fn take_recovered(&self, now: Moment) -> Vec<(&'static str, Millis)> {
        let mut reads = self.0.lock();
        let settled = reads.extract_if(.., |_, read| {
            read.refused.is_none() && now.since(read.last_failure) >= RECOVERED_AFTER
        });
        settled
            .filter_map(|(what, mut read)| Some((what, read.failures.end(read.last_failure)?)))
            .collect()
    }

    pub fn is_refused(&self, resource: &str) -> bool {
        self.0
            .lock()
            .get(resource)
            .is_some_and(|read| read.refused.is_some())
    }

    /// What is refused and how that ends; `None` if nothing is.
    pub fn describe(&self) -> Option<String> {
        let reads = self.0.lock();
        let named = reads
            .iter()
            .filter_map(|(what, read)| Some(format!("{what} ({})", read.refused?.0)));
        let named: Vec<String> = named.collect();
        let remedy = match reads.values().any(FailedRead::is_persistent) {
            true => {
                "let Stowage's service account list and watch them, as manifests/base/rbac.yaml does"
            }
            false => "one that has just started refuses all for a moment",
        };
        (!named.is_empty()).then(|| {
            format!(
                "the API server does not show {}; {remedy}",
                named.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment(0) + Millis::seconds(seconds)
    }

    #[test]
    fn a_refused_resource_is_named_until_it_is_listed() {
        let reads = RefusedReads::default();
        assert_eq!(reads.describe(), None);
        assert_eq!(
            reads.record_failure("resourceslices", Some(403), at(1)),
            ReadFailure::Due
        );
        assert_eq!(
            reads.record_failure("resourceslices", Some(403), at(2)),
            ReadFailure::AlreadyReported
        );
        reads.record_failure("pods", Some(401), at(2));
        let text = reads.describe().unwrap();
        assert!(
            text.contains("does not show pods (401), resourceslices (403); one that"),
            "{text}"
        );
        assert!(
            reads.is_refused("pods")
                && reads.record_success("pods", at(5)) == Some(Millis::seconds(3))
        );
        assert_eq!(reads.record_success("pods", at(6)), None);
        assert!(!reads.is_refused("pods") && reads.is_refused("resourceslices"));
    }

    #[test]
    fn missing_permissions_are_reported_once_and_only_for_a_persistent_refusal() {
        let reads = RefusedReads::default();
        let refused = |seconds| reads.record_failure("pods", Some(403), at(seconds));
        assert_eq!(
            [1, 10, 15].map(refused),
            [
                ReadFailure::Due,
                ReadFailure::AlreadyReported,
                ReadFailure::AlreadyReported
            ]
        );
        assert!(!reads.describe().unwrap().contains("rbac"));
        assert_eq!(
            [16, 30].map(refused),
            [ReadFailure::Persistent, ReadFailure::AlreadyReported]
        );
        assert!(reads.describe().unwrap().contains("rbac.yaml"));
        // An API server that is gone first and refuses when it comes back has just started.
        let reads = RefusedReads::default();
        for seconds in [1, 20, 40] {
            assert_ne!(
                reads.record_failure("pods", None, at(seconds)),
                ReadFailure::Persistent
            );
        }
        assert_eq!(
            reads.record_failure("pods", Some(403), at(41)),
            ReadFailure::AlreadyReported,
            "refused for the first time"
        );
        assert_eq!(
            reads.record_failure("pods", Some(403), at(56)),
            ReadFailure::Persistent
        );
    }

    #[test]
    fn an_outage_that_becomes_a_lasting_refusal_says_what_permissions_are_missing() {
        let reads = RefusedReads::default();
        for seconds in [0, 20, 40] {
            reads.record_failure("pods", None, at(seconds));
        }
        reads.record_failure("pods", Some(403), at(45));
        assert_eq!(
            reads.record_failure("pods", Some(403), at(60)),
            ReadFailure::Persistent,
            "although the failure is also due to be reported again"
        );
    }

    #[test]
    fn a_failure_that_lasts_is_reported_at_longer_and_longer_intervals() {
        let reads = RefusedReads::default();
        let reported = (0..4000)
            .step_by(10)
            .filter(|seconds| reads.record_failure("pods", None, at(*seconds)) == ReadFailure::Due);
        assert_eq!(
            reported.collect::<Vec<_>>(),
            [0, 60, 120, 240, 480, 960, 1920, 3840]
        );
    }

    #[test]
    fn a_watch_without_new_failures_has_recovered() {
        let reads = RefusedReads::default();
        reads.record_failure("storageclasses", None, at(10));
        reads.record_failure("storageclasses", None, at(40));
        reads.record_failure("pods", Some(403), at(10));
        assert_eq!(reads.take_recovered(at(99)), []);
        assert_eq!(
            reads.take_recovered(at(100)),
            [("storageclasses", Millis::seconds(30))]
        );
        assert_eq!(
            reads.take_recovered(at(1000)),
            [],
            "a refusal ends with a list"
        );
        assert!(reads.is_refused("pods"));
    }
}
