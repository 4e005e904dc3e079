//! What a new leader waits for before it acts: that the watch of pods has shown what earlier leaders wrote.
//!
//! It has listed pods while it waited for the last landing of those writes. This list serves if the watch after it is up to date,
//! which shows within milliseconds where pods change all the time. Where none changes, or the resourceVersion of the pods says
//! nothing, they are listed once more.

use super::WatchFeed;
use crate::service::ChangeReceiver;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use std::time::Duration;

/// How long the watch of pods may show nothing new before pods are relisted.
const SILENT_WATCH_TIMEOUT: Duration = Duration::from_secs(1);
/// How often the watch's progress is checked; a takeover is delayed by at most this.
const PROGRESS_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time limit for reading the resourceVersion. An API server whose cache lags answers after three seconds.
const VERSION_READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a failed read of the resourceVersion; some ten reads fit into the time limit.
const VERSION_READ_RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Ends when pods must be relisted: this replica has begun to lead, and the watch of pods does not show that it has caught up.
/// A list that begins from then on is up to date.
pub(crate) async fn until_relist_needed(
    client: &Client,
    feed: &WatchFeed,
    takeovers: &mut ChangeReceiver,
) {
    takeovers.changed().await;
    loop {
        let takeover = takeovers.mark_seen();
        tokio::select! {
            // In this order, so that a simulation is reproducible.
            biased;
            () = takeovers.changed() => {}
            () = until_relist_needed_for(client, feed, takeover) => return,
        }
    }
}

/// Ends when pods must be relisted for one takeover; never, if the watch has caught up with it or the list in progress will.
async fn until_relist_needed_for(client: &Client, feed: &WatchFeed, takeover: u64) {
    let is_caught_up = || feed.index.lock().will_catch_up_with(takeover);
    let mut shown_version = loop {
        let is_listing = !feed.index.lock().has_listed_pods();
        let newest_shown = feed.index.lock().newest_pod_version();
        match newest_version(client, feed).await {
            // Where resourceVersions went back, as after a restore of etcd, what is known is of another history.
            Some(NewestVersion::Number(version)) if version >= newest_shown => {
                feed.await_pod_version(takeover, version);
                break newest_shown;
            }
            _ if is_caught_up() => return std::future::pending().await,
            // The list in progress takes its time, too.
            None if is_listing => {}
            _ => return,
        }
    };
    let mut silent_for = Duration::ZERO;
    while silent_for < SILENT_WATCH_TIMEOUT {
        if is_caught_up() {
            return std::future::pending().await;
        }
        tokio::time::sleep(PROGRESS_POLL_INTERVAL).await;
        let index = feed.index.lock();
        let is_silent = index.has_listed_pods() && index.newest_pod_version() == shown_version;
        silent_for = if is_silent {
            silent_for + PROGRESS_POLL_INTERVAL
        } else {
            Duration::ZERO
        };
        shown_version = index.newest_pod_version();
    }
}

/// The resourceVersion in a list's metadata.
enum NewestVersion {
    Number(u64),
    /// Nothing that can be compared.
    Other,
}

/// The resourceVersion of the pods as they are now; `None` if it could not be read. A list that asks for no resourceVersion is
/// never older than its request.
async fn newest_version(client: &Client, feed: &WatchFeed) -> Option<NewestVersion> {
    let (pods, one) = (
        Api::<Pod>::all(client.clone()),
        ListParams::default().limit(1),
    );
    let reading = async {
        loop {
            match pods.list(&one).await {
                Ok(list) => {
                    let number = list
                        .metadata
                        .resource_version
                        .and_then(|version| version.parse().ok());
                    return number.map_or(NewestVersion::Other, NewestVersion::Number);
                }
                Err(error) => feed.record_read_failure("pods", &error),
            }
            tokio::time::sleep(VERSION_READ_RETRY_INTERVAL).await;
        }
    };
    tokio::time::timeout(VERSION_READ_TIMEOUT, reading)
        .await
        .ok()
}

impl WatchFeed {
    fn await_pod_version(&self, takeover: u64, version: u64) {
        let mut index = self.index.lock();
        index.await_pod_version(takeover, version);
        self.update_sync(&index);
    }
}
