//! Tracks up to which takeover the index has every write to pods, so that a new leader need not relist pods after a list that
//! began before it led.
//!
//! All writes of earlier leaders, which go to pods, have landed when a replica begins to lead. A resourceVersion of the pods that
//! is read from then on is as new as the last of them, and a watch shows pods in the order of their resourceVersions: once it
//! shows this one or a later one, it has shown all of those writes. Where a watch is silent nothing follows from that, and pods
//! are listed again.

use super::{ClusterIndex, resource_version};
use k8s_openapi::api::core::v1::Pod;

/// Progress of the latest list of pods and of the watch that continues it.
#[derive(Debug, Default)]
pub(super) struct PodWatchProgress {
    /// The takeover that preceded the latest list.
    listed_after: u64,
    /// The latest takeover before which every write to pods has been shown.
    caught_up: u64,
    /// The newest resourceVersion of a pod since that list began.
    newest_version: u64,
    /// The resourceVersion that the watch must reach for a takeover.
    awaited: Option<AwaitedVersion>,
}

#[derive(Debug, Clone, Copy)]
struct AwaitedVersion {
    takeover: u64,
    version: u64,
}

impl PodWatchProgress {
    pub(super) fn begin_list(&mut self, takeover: u64) {
        (self.listed_after, self.newest_version) = (takeover, 0);
    }

    /// Records the resourceVersion of a pod that the watch showed, present or deleted.
    pub(super) fn record_version(&mut self, version: Option<u64>) {
        self.newest_version = self.newest_version.max(version.unwrap_or(0));
    }

    /// Updates `caught_up` after an event of a complete list or of the watch that continues it.
    pub(super) fn update_caught_up(&mut self) {
        let awaited = self
            .awaited
            .filter(|awaited| awaited.version <= self.newest_version);
        let caught_up = awaited
            .map_or(0, |awaited| awaited.takeover)
            .max(self.listed_after);
        self.caught_up = self.caught_up.max(caught_up);
    }
}

impl ClusterIndex {
    /// The takeover up to which it knows what happened to pods.
    pub(crate) fn caught_up_takeover(&self) -> u64 {
        self.pod_watch_progress.caught_up
    }

    /// Whether every write to pods before this takeover has been shown, or the list in progress will show it.
    pub(crate) fn will_catch_up_with(&self, takeover: u64) -> bool {
        self.pod_watch_progress.caught_up >= takeover
            || self.pod_watch_progress.listed_after >= takeover
    }

    /// The newest resourceVersion that the latest list of pods, or the watch after it, has shown; zero if none.
    pub fn newest_pod_version(&self) -> u64 {
        self.pod_watch_progress.newest_version
    }

    /// A list of pods has ended, and none is in progress.
    pub(crate) fn has_listed_pods(&self) -> bool {
        self.pods_list.is_complete && !self.is_listing_pods
    }

    /// Sets the resourceVersion that a pod must show before the index has caught up with this takeover.
    pub(crate) fn await_pod_version(&mut self, takeover: u64, version: u64) {
        self.pod_watch_progress.awaited = Some(AwaitedVersion { takeover, version });
        self.update_pods_caught_up();
    }

    /// Records the resourceVersion of a pod whose state has been applied to the ledger.
    pub(super) fn record_pod_version(&mut self, pod: &Pod) {
        self.pod_watch_progress
            .record_version(resource_version(pod));
        self.update_pods_caught_up();
    }

    pub(super) fn update_pods_caught_up(&mut self) {
        if self.has_listed_pods() {
            self.pod_watch_progress.update_caught_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::{ServerState, Tenure};
    use serde_json::json;
    use stowage_scheduling::policy::Policy;

    fn pod(version: &str) -> Pod {
        let metadata = json!({ "name": "a", "uid": "a", "resourceVersion": version });
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    }

    #[test]
    fn the_index_has_caught_up_once_a_pod_shows_the_version_read_after_the_takeover() {
        let state = ServerState::new(Policy::default());
        let mut index = ClusterIndex::default();
        index.replace_pods(&state, &[pod("7")]);
        index.await_pod_version(1, 9);
        for (version, caught_up) in [("8", 0), ("not a number", 0), ("9", 1)] {
            index.apply_pod(&state, &pod(version));
            assert_eq!(index.caught_up_takeover(), caught_up, "{version}");
        }
        index.await_pod_version(2, 9);
        assert_eq!(
            index.caught_up_takeover(),
            2,
            "it was shown before it was read"
        );
        index.await_pod_version(3, 10);
        index.delete_pod(&state, &pod("12"));
        assert_eq!(
            index.caught_up_takeover(),
            3,
            "a deletion is a change of its own"
        );
    }

    #[test]
    fn an_unfinished_list_does_not_catch_up_with_a_takeover() {
        let state = ServerState::new(Policy::default());
        let mut index = ClusterIndex::default();
        // One that ended before shows nothing either.
        index.replace_pods(&state, &[pod("7")]);
        index.await_pod_version(1, 9);
        index.begin_pod_list(&state);
        index.apply_pod(&state, &pod("12"));
        assert_eq!(
            index.caught_up_takeover(),
            0,
            "pods of later pages are missing"
        );
        index.end_pod_list(&state);
        assert_eq!(index.caught_up_takeover(), 1);
    }

    /// After a restore of etcd, resourceVersions are smaller than they were.
    #[test]
    fn versions_from_an_earlier_list_do_not_count() {
        let state = ServerState::new(Policy::default());
        let mut index = ClusterIndex::default();
        index.replace_pods(&state, &[pod("100")]);
        index.replace_pods(&state, &[pod("7")]);
        index.await_pod_version(1, 50);
        assert_eq!(index.caught_up_takeover(), 0);
    }

    #[test]
    fn a_list_that_begins_after_the_takeover_needs_no_version() {
        let state = ServerState::new(Policy::default());
        let mut index = ClusterIndex::default();
        index.begin_pod_list(&state);
        state.set_tenure(Tenure::without_end());
        index.end_pod_list(&state);
        assert_eq!(index.caught_up_takeover(), 0, "it began before");
        index.replace_pods(&state, &[]);
        assert_eq!(index.caught_up_takeover(), 1);
    }
}
