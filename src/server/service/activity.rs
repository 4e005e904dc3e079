//! What was decided and done recently, for people who look: the latest entries, oldest first.
//!
//! An entry costs one short lock. Nothing decides by it, and it is lost with the process; Events, conditions and the log are
//! what lasts.

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodKey, PodUid};
use stowage_scheduling::units::Moment;

/// Maximum number of entries: several minutes of a busy cluster; some hundred kilobytes.
const MAX_ENTRIES: usize = 500;
/// Maximum bytes of an entry's text: as many as an Event has.
const MAX_TEXT_BYTES: usize = 1024;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActivityKind {
    Bound,
    /// The Binding was not written, or it is unknown whether it was.
    NotBound,
    /// No node fits.
    Refused,
    Reserved,
    ReservationEnded,
    Nominated,
    Evicted,
    /// The API server refused the eviction for good.
    NotEvicted,
    /// Something that needs attention, such as a lost GPU.
    Warning,
    /// The policy changed, or a change was rejected.
    Policy,
    /// What shadow mode would have done.
    Shadow,
}

/// One decision or act, about one pod.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ActivityEntry {
    /// One more than the entry before.
    pub number: u64,
    pub at: Moment,
    #[serde(flatten)]
    pub what: Activity,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Activity {
    pub kind: ActivityKind,
    pub pod: PodKey,
    #[serde(skip)]
    pub uid: PodUid,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeName>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuUuid>,
    /// One word for the reason, as an Event or a condition has it.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub reason: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub text: String,
}

impl Activity {
    /// An activity without node, GPUs, reason and text.
    pub fn new(kind: ActivityKind, pod: &PodKey, uid: &PodUid) -> Self {
        let (pod, uid) = (pod.clone(), uid.clone());
        Self {
            kind,
            pod,
            uid,
            node: None,
            gpus: Vec::new(),
            reason: "",
            text: String::new(),
        }
    }
}

/// The latest entries.
#[derive(Debug, Default)]
pub struct RecentActivity {
    entries: Mutex<ActivityEntries>,
}

#[derive(Debug, Default)]
struct ActivityEntries {
    last_number: u64,
    entries: VecDeque<Arc<ActivityEntry>>,
    latest: FxHashMap<PodUid, LatestOfPod>,
}

/// What happened to a pod last.
#[derive(Debug)]
struct LatestOfPod {
    kind: ActivityKind,
    /// The reasons of its entries since one of another kind.
    reasons: Vec<&'static str>,
    /// The number of entries about this pod.
    entries: usize,
}

impl RecentActivity {
    /// Adds an entry, unless the pod has had one of the same kind and reason, and none of another kind since: a pod that is
    /// refused a thousand times in a row has one, and so has each of two warnings that take turns. Each change of the policy is
    /// another.
    pub fn add(&self, at: Moment, mut what: Activity) {
        what.text
            .truncate(what.text.floor_char_boundary(MAX_TEXT_BYTES));
        let mut entries = self.entries.lock();
        let new_latest = || LatestOfPod {
            kind: what.kind,
            reasons: Vec::new(),
            entries: 0,
        };
        let latest = entries
            .latest
            .entry(what.uid.clone())
            .or_insert_with(new_latest);
        if !latest.record_if_new(&what) {
            return;
        }
        latest.entries += 1;
        entries.last_number += 1;
        let number = entries.last_number;
        entries
            .entries
            .push_back(Arc::new(ActivityEntry { number, at, what }));
        if entries.entries.len() > MAX_ENTRIES {
            entries.remove_oldest();
        }
    }

    /// The entries after the one of this number, oldest first.
    pub fn after(&self, number: u64) -> Vec<Arc<ActivityEntry>> {
        let entries = self.entries.lock();
        let first = entries
            .entries
            .partition_point(|entry| entry.number <= number);
        entries.entries.range(first..).cloned().collect()
    }
}

impl ActivityEntries {
    fn remove_oldest(&mut self) {
        let Some(oldest) = self.entries.pop_front() else {
            return;
        };
        if let Some(latest) = self.latest.get_mut(&oldest.what.uid) {
            latest.entries -= 1;
            // What is shown no more is news when it comes again.
            if latest.kind == oldest.what.kind {
                latest
                    .reasons
                    .retain(|reason| *reason != oldest.what.reason);
            }
            if latest.entries == 0 {
                self.latest.remove(&oldest.what.uid);
            }
        }
    }
}

impl LatestOfPod {
    /// Records `what` as the pod's latest activity. Returns whether it differs from what was recorded before.
    fn record_if_new(&mut self, what: &Activity) -> bool {
        if self.kind != what.kind {
            (self.kind, self.reasons) = (what.kind, Vec::new());
        }
        let is_recorded = self.reasons.contains(&what.reason);
        if !is_recorded {
            self.reasons.push(what.reason);
        }
        !is_recorded || what.kind == ActivityKind::Policy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(pod: usize) -> Activity {
        let name = format!("pod-{pod}");
        let (key, uid) = (
            PodKey::parse("default", &name).unwrap(),
            PodUid::parse(&name).unwrap(),
        );
        let (reason, text) = ("StowageUnschedulable", "ä".repeat(1000));
        Activity {
            reason,
            text,
            ..Activity::new(ActivityKind::Refused, &key, &uid)
        }
    }

    #[test]
    fn only_the_latest_entries_are_kept_and_numbers_continue() {
        let recent = RecentActivity::default();
        (0..MAX_ENTRIES + 3).for_each(|pod| recent.add(Moment(pod as u64), refusal(pod)));
        let all = recent.after(0);
        assert_eq!(
            (all.len(), all[0].number, all[0].what.text.len()),
            (MAX_ENTRIES, 4, MAX_TEXT_BYTES)
        );
        let last: Vec<u64> = recent
            .after(MAX_ENTRIES as u64 + 1)
            .iter()
            .map(|entry| entry.number)
            .collect();
        assert_eq!(last, [MAX_ENTRIES as u64 + 2, MAX_ENTRIES as u64 + 3]);
        assert_eq!(
            recent.entries.lock().latest.len(),
            MAX_ENTRIES,
            "what is forgotten takes no memory"
        );
    }

    #[test]
    fn a_repeated_activity_of_a_pod_is_one_entry() {
        let recent = RecentActivity::default();
        let reserved = || Activity {
            kind: ActivityKind::Reserved,
            reason: "StowageReserved",
            ..refusal(1)
        };
        for what in [refusal(1), refusal(2), refusal(1), reserved(), refusal(1)] {
            recent.add(Moment(0), what);
        }
        let kinds: Vec<_> = recent
            .after(0)
            .iter()
            .map(|entry| (entry.what.kind, entry.what.pod.name.clone()))
            .collect();
        let (refused, reserved) = (ActivityKind::Refused, ActivityKind::Reserved);
        let pod = |name: &str| -> Arc<str> { name.into() };
        assert_eq!(
            kinds,
            [
                (refused, pod("pod-1")),
                (refused, pod("pod-2")),
                (reserved, pod("pod-1")),
                (refused, pod("pod-1"))
            ]
        );
    }

    #[test]
    fn warnings_of_a_pod_that_alternate_are_one_entry_each() {
        let recent = RecentActivity::default();
        let warning = |reason| Activity {
            kind: ActivityKind::Warning,
            reason,
            ..refusal(1)
        };
        for _ in 0..MAX_ENTRIES {
            recent.add(Moment(0), warning("StowageDrift"));
            recent.add(Moment(0), warning("StowageOverGrant"));
        }
        let reasons: Vec<_> = recent
            .after(0)
            .iter()
            .map(|entry| entry.what.reason)
            .collect();
        assert_eq!(reasons, ["StowageDrift", "StowageOverGrant"]);
    }

    #[test]
    fn each_change_of_the_policy_is_an_entry() {
        let recent = RecentActivity::default();
        for text in ["first", "second"] {
            let (reason, text) = ("StowagePolicyApplied", text.to_owned());
            recent.add(
                Moment(0),
                Activity {
                    kind: ActivityKind::Policy,
                    reason,
                    text,
                    ..refusal(1)
                },
            );
        }
        let texts: Vec<_> = recent
            .after(0)
            .iter()
            .map(|entry| entry.what.text.clone())
            .collect();
        assert_eq!(texts, ["first", "second"]);
    }
}
