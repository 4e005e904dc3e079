//! Bindings whose result is unknown: one record for each pod, at most one settling loop for each of its placements, and when an
//! allocation may be forgotten.
//!
//! A Binding may land for a limited time after it was sent, which was before it was given up; the edge knows the limit. Until then
//! only a read that shows the pod bound or gone settles it, whatever a later attempt was answered.

use crate::ids::PodUid;
use crate::units::{Millis, Moment};
use crate::vocabulary::placement::Placement;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::hash::{BuildHasher, BuildHasherDefault};

/// Pauses between two reads of one pod: the first and the longest.
const READ_PAUSES: (Millis, Millis) = (Millis(200), Millis::seconds(5));

/// Records of assumed pods, so no more than there are assumed pods.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OpenBindings {
    open: FxHashMap<PodUid, OpenBinding>,
}

/// The open Bindings of one pod.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OpenBinding {
    /// Writes that have not been answered yet.
    under_way: u32,
    /// When the latest write was given up that may have been written.
    #[serde(rename = "may_land")]
    abandoned_at: Option<Moment>,
    /// Placements that have a settling loop: the pod's own, and one that was given up until its loop's next read.
    settling: Vec<Placement>,
    /// Reads of the settling loops so far.
    reads: u32,
}

impl OpenBindings {
    /// A Binding of the pod is about to be written.
    pub fn begin_write(&mut self, uid: &PodUid) {
        self.open.entry(uid.clone()).or_default().under_way += 1;
    }

    /// A write has been answered or has timed out by now; `is_open` if it may have been written all the same.
    pub fn end_write(&mut self, uid: &PodUid, now: Moment, is_open: bool) {
        let Some(record) = self.open.get_mut(uid) else {
            return;
        };
        record.under_way = record.under_way.saturating_sub(1);
        if is_open {
            record.abandoned_at = record.abandoned_at.max(Some(now));
        }
        self.drop_if_done(uid);
    }

    /// Whether none of the pod's Bindings could be committed any more at `then`.
    pub(crate) fn no_write_may_commit(
        &self,
        uid: &PodUid,
        then: Moment,
        max_commit_delay: Millis,
    ) -> bool {
        self.open.get(uid).is_none_or(|record| {
            record.under_way == 0
                && record
                    .abandoned_at
                    .is_none_or(|abandoned_at| abandoned_at + max_commit_delay < then)
        })
    }

    /// Returns whether to start a settling loop: there is one for each placement.
    pub fn begin_settling(&mut self, uid: &PodUid, placement: &Placement) -> bool {
        let record = self.open.entry(uid.clone()).or_default();
        let begins = !record.settling.contains(placement);
        if begins {
            record.settling.push(placement.clone());
        }
        begins
    }

    /// How long the settling loop pauses before its next read.
    pub(crate) fn next_pause(&mut self, uid: &PodUid) -> Millis {
        let Some(record) = self.open.get_mut(uid) else {
            return pause(uid, 0);
        };
        record.reads = record.reads.saturating_add(1);
        pause(uid, record.reads - 1)
    }

    /// None of the pod's Bindings can land any more: it is bound, or gone, or their time is over. A settling loop sees that with
    /// its next read.
    pub(crate) fn clear_pending_writes(&mut self, uid: &PodUid) {
        if let Some(record) = self.open.get_mut(uid) {
            record.abandoned_at = None;
        }
        self.drop_if_done(uid);
    }

    /// The settling loop of this placement has ended.
    pub fn end_settling(&mut self, uid: &PodUid, placement: &Placement) {
        if let Some(record) = self.open.get_mut(uid) {
            record.settling.retain(|settling| settling != placement);
            record.reads = 0;
        }
        self.drop_if_done(uid);
    }

    /// Pods with an unsettled Binding.
    pub fn unsettled_count(&self) -> usize {
        self.open.len()
    }

    fn drop_if_done(&mut self, uid: &PodUid) {
        let is_done = |record: &OpenBinding| {
            record.under_way == 0 && record.abandoned_at.is_none() && record.settling.is_empty()
        };
        if self.open.get(uid).is_some_and(is_done) {
            self.open.remove(uid);
        }
    }
}

/// The pause before the `nth` read of the pod. It grows with each read and differs between pods, so that Bindings left open by
/// the same outage are not read at the same moment.
fn pause(uid: &PodUid, nth: u32) -> Millis {
    let (first, longest) = READ_PAUSES;
    let full = Millis((first.0 << nth.min(16)).min(longest.0));
    let jitter = BuildHasherDefault::<rustc_hash::FxHasher>::default().hash_one((uid, nth));
    Millis(full.0 / 2 + jitter % (full.0 / 2 + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{node, uid};

    const LANDING: Millis = Millis::seconds(16);

    fn at(seconds: u64) -> Moment {
        Moment(0) + Millis::seconds(seconds)
    }

    fn on(name: &str) -> Placement {
        Placement::from_plugin(node(name))
    }

    #[test]
    fn one_loop_settles_a_placement_however_many_binds_were_left_open() {
        let mut bindings = OpenBindings::default();
        let pod = uid("a");
        for second in 0..10 {
            bindings.begin_write(&pod);
            bindings.end_write(&pod, at(second), true);
            assert_eq!(bindings.begin_settling(&pod, &on("n")), second == 0);
        }
        assert!(
            bindings.begin_settling(&uid("b"), &on("n")),
            "another pod has a loop of its own"
        );
        assert!(
            bindings.begin_settling(&pod, &on("m")),
            "another placement has one, too"
        );
        bindings.end_settling(&pod, &on("n"));
        assert!(!bindings.begin_settling(&pod, &on("m")), "it runs still");
        bindings.end_settling(&pod, &on("m"));
        bindings.end_settling(&uid("b"), &on("n"));
        assert!(
            !bindings.no_write_may_commit(&pod, at(10), LANDING),
            "no loop's end says that nothing may land"
        );
        bindings.clear_pending_writes(&pod);
        assert_eq!(
            bindings.unsettled_count(),
            0,
            "nothing is kept of what is settled"
        );
    }

    #[test]
    fn nothing_is_forgotten_while_another_write_is_in_progress_or_may_commit() {
        let mut bindings = OpenBindings::default();
        let pod = uid("a");
        bindings.begin_write(&pod);
        bindings.end_write(&pod, at(0), true);
        assert!(!bindings.no_write_may_commit(&pod, at(16), LANDING));
        assert!(bindings.no_write_may_commit(&pod, at(17), LANDING));
        bindings.begin_write(&pod);
        assert!(
            !bindings.no_write_may_commit(&pod, at(17), LANDING),
            "a second one is under way"
        );
        bindings.begin_write(&pod);
        bindings.end_write(&pod, at(17), false);
        assert!(
            !bindings.no_write_may_commit(&pod, at(60), LANDING),
            "one of two is answered"
        );
        bindings.end_write(&pod, at(17), true);
        assert!(!bindings.no_write_may_commit(&pod, at(33), LANDING));
        assert!(bindings.no_write_may_commit(&pod, at(34), LANDING));
    }

    #[test]
    fn pauses_grow_to_a_limit_and_differ_from_pod_to_pod() {
        let pauses: Vec<Millis> = (0..40).map(|nth| pause(&uid("a"), nth)).collect();
        assert!(
            pauses
                .iter()
                .all(|pause| (Millis(100)..=Millis::seconds(5)).contains(pause)),
            "{pauses:?}"
        );
        assert!(pauses[20..].iter().all(|pause| *pause >= Millis(2500)));
        let others: Vec<Millis> = (0..40).map(|nth| pause(&uid("b"), nth)).collect();
        assert_ne!(pauses, others);
    }
}
