//! What a new leader waits for before it acts: that the watch of pods has shown what earlier leaders wrote.
//!
//! It has listed pods while it waited for the last landing of those writes. This list serves if the watch after it is up to date,
//! which shows within milliseconds where pods change all the time. Where none changes, or the resourceVersion of the pods says
//! nothing, they are listed once more.

use super::WatchFeed;
use crate::service::SeenCount;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use std::time::Duration;

/// How long the watch of pods may show nothing new before pods are relisted.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often the watch's progress is checked; a takeover is delayed by at most this.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Time limit for reading the resourceVersion. An API server whose cache lags answers after three seconds.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// Pause after a failed read of the resourceVersion; some ten reads fit into the time limit.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Ends when pods must be relisted: this replica has begun to lead, and the watch of pods does not show that it has caught up.
/// A list that begins from then on is up to date.
pub(crate) async fn stays_behind(client: &Client, feed: &WatchFeed, takeovers: &mut SeenCount) {
    takeovers.changed().await;
    loop {
        let takeover = takeovers.see();
        tokio::select! {
            // In this order, so that a simulation is reproducible.
            biased;
            () = takeovers.changed() => {}
            () = stays_behind_takeover(client, feed, takeover) => return,
        }
    }
}

/// Ends when pods must be relisted for one takeover; never, if the watch has caught up with it or the list in progress will.
async fn stays_behind_takeover(client: &Client, feed: &WatchFeed, takeover: u64) {
    let is_shown = || feed.index.lock().will_know_pods_of(takeover);
    let mut shown = loop {
        let is_listing = !feed.index.lock().has_listed_pods();
        let shown = feed.index.lock().pods_version();
        match newest_version(client).await {
            // Where resourceVersions went back, as after a restore of etcd, what is known is of another history.
            Some(NewestVersion::Number(version)) if version >= shown => {
                feed.expect_pods_up_to(takeover, version);
                break shown;
            }
            _ if is_shown() => return std::future::pending().await,
            // The list in progress takes its time, too.
            None if is_listing => {}
            _ => return,
        }
    };
    let mut silent_for = Duration::ZERO;
    while silent_for < PATIENCE {
        if is_shown() {
            return std::future::pending().await;
        }
        tokio::time::sleep(LOOK_EVERY).await;
        let index = feed.index.lock();
        let is_silent = index.has_listed_pods() && index.pods_version() == shown;
        silent_for = if is_silent {
            silent_for + LOOK_EVERY
        } else {
            Duration::ZERO
        };
        shown = index.pods_version();
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
async fn newest_version(client: &Client) -> Option<NewestVersion> {
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
                Err(error) => {
                    tracing::warn!(%error, "could not read the resourceVersion of the pods")
                }
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    };
    tokio::time::timeout(READ_WITHIN, reading).await.ok()
}

impl WatchFeed {
    fn expect_pods_up_to(&self, takeover: u64, version: u64) {
        let mut index = self.index.lock();
        index.expect_pods_up_to(takeover, version);
        self.note_sync(&index);
    }
}
