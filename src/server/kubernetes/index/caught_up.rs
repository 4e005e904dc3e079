//! Tracks up to which takeover the index has every write to pods, so that a new leader need not relist pods after a list that
//! began before it led.
//!
//! All writes of earlier leaders, which go to pods, have landed when a replica begins to lead. A resourceVersion of the pods that
//! is read from then on is as new as the last of them, and a watch shows pods in the order of their resourceVersions: once it
//! shows this one or a later one, it has shown all of those writes. Where a watch is silent nothing follows from that, and pods
//! are listed again.

use super::{ClusterIndex, version};
use k8s_openapi::api::core::v1::Pod;

/// Progress of the latest list of pods and of the watch that continues it.
#[derive(Debug, Default)]
pub(super) struct PodsShown {
    /// The takeover that preceded the latest list.
    listed_after: u64,
    /// The latest takeover before which every write to pods has been shown.
    caught_up: u64,
    /// The newest resourceVersion of a pod since that list began.
    version: u64,
    /// The resourceVersion that the watch must reach for a takeover.
    awaited: Option<Awaited>,
}

#[derive(Debug, Clone, Copy)]
struct Awaited {
    takeover: u64,
    version: u64,
}

impl PodsShown {
    pub(super) fn begin_list(&mut self, takeover: u64) {
        (self.listed_after, self.version) = (takeover, 0);
    }

    /// Records the resourceVersion of a pod that the watch showed, present or deleted.
    pub(super) fn note(&mut self, version: Option<u64>) {
        self.version = self.version.max(version.unwrap_or(0));
    }

    /// Updates `caught_up` after an event of a complete list or of the watch that continues it.
    pub(super) fn note_complete(&mut self) {
        let awaited = self
            .awaited
            .filter(|awaited| awaited.version <= self.version);
        let known = awaited
            .map_or(0, |awaited| awaited.takeover)
            .max(self.listed_after);
        self.caught_up = self.caught_up.max(known);
    }
}

impl ClusterIndex {
    /// The takeover up to which it knows what happened to pods.
    pub(crate) fn pods_caught_up(&self) -> u64 {
        self.pods_shown.caught_up
    }

    /// Whether every write to pods before this takeover has been shown, or the list in progress will show it.
    pub(crate) fn will_know_pods_of(&self, takeover: u64) -> bool {
        self.pods_shown.caught_up >= takeover || self.pods_shown.listed_after >= takeover
    }

    /// The newest resourceVersion that the latest list of pods, or the watch after it, has shown; zero if none.
    pub fn pods_version(&self) -> u64 {
        self.pods_shown.version
    }

    /// A list of pods has ended, and none is in progress.
    pub(crate) fn has_listed_pods(&self) -> bool {
        self.pods_list.is_complete && !self.is_listing_pods
    }

    /// Sets the resourceVersion that a pod must show before the index has caught up with this takeover.
    pub(crate) fn expect_pods_up_to(&mut self, takeover: u64, version: u64) {
        self.pods_shown.awaited = Some(Awaited { takeover, version });
        self.note_pods_complete();
    }

    /// Records the resourceVersion of a pod whose state has been applied to the ledger.
    pub(super) fn note_pod_shown(&mut self, pod: &Pod) {
        self.pods_shown.note(version(pod));
        self.note_pods_complete();
    }

    pub(super) fn note_pods_complete(&mut self) {
        if self.has_listed_pods() {
            self.pods_shown.note_complete();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::{Service, Tenure};
    use serde_json::json;
    use stowage_scheduling::policy::Policy;

    fn pod(version: &str) -> Pod {
        let metadata = json!({ "name": "a", "uid": "a", "resourceVersion": version });
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    }

    #[test]
    fn what_pods_show_counts_up_to_the_version_that_was_read_after_the_takeover() {
        let service = Service::new(Policy::default());
        let mut index = ClusterIndex::default();
        index.reset_pods(&service, &[pod("7")]);
        index.expect_pods_up_to(1, 9);
        for (version, caught_up) in [("8", 0), ("not a number", 0), ("9", 1)] {
            index.apply_pod(&service, &pod(version));
            assert_eq!(index.pods_caught_up(), caught_up, "{version}");
        }
        index.expect_pods_up_to(2, 9);
        assert_eq!(index.pods_caught_up(), 2, "it was shown before it was read");
        index.expect_pods_up_to(3, 10);
        index.delete_pod(&service, &pod("12"));
        assert_eq!(
            index.pods_caught_up(),
            3,
            "a deletion is a change of its own"
        );
    }

    #[test]
    fn a_list_shows_nothing_of_a_takeover_before_its_end() {
        let service = Service::new(Policy::default());
        let mut index = ClusterIndex::default();
        // One that ended before shows nothing either.
        index.reset_pods(&service, &[pod("7")]);
        index.expect_pods_up_to(1, 9);
        index.begin_pods(&service);
        index.apply_pod(&service, &pod("12"));
        assert_eq!(index.pods_caught_up(), 0, "pods of later pages are missing");
        index.end_pods(&service);
        assert_eq!(index.pods_caught_up(), 1);
    }

    /// After a restore of etcd, resourceVersions are smaller than they were.
    #[test]
    fn what_an_earlier_list_showed_does_not_count() {
        let service = Service::new(Policy::default());
        let mut index = ClusterIndex::default();
        index.reset_pods(&service, &[pod("100")]);
        index.reset_pods(&service, &[pod("7")]);
        index.expect_pods_up_to(1, 50);
        assert_eq!(index.pods_caught_up(), 0);
    }

    #[test]
    fn a_list_that_begins_after_the_takeover_needs_no_version() {
        let service = Service::new(Policy::default());
        let mut index = ClusterIndex::default();
        index.begin_pods(&service);
        service.set_tenure(Tenure::without_end());
        index.end_pods(&service);
        assert_eq!(index.pods_caught_up(), 0, "it began before");
        index.reset_pods(&service, &[]);
        assert_eq!(index.pods_caught_up(), 1);
    }
}
