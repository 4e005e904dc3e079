//! What a new leader waits for before it acts: that the watch of pods has shown what earlier leaders wrote.
//!
//! It has listed pods while it waited for the last landing of those writes. This list serves if the watch after it is up to date,
//! which shows within milliseconds where pods change. Where none changes, or the watch lags, pods are listed once more.

use super::WatchFeed;
use crate::kubernetes::request::within;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use std::time::Duration;

/// How long the watch of pods may show nothing new before they are listed.
const PATIENCE: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(50);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Ends when this replica has begun to lead and the watch of pods does not show that it is up to date.
pub async fn stays_behind(client: &Client, feed: &WatchFeed) {
    let mut takeovers = feed.service.leadership.takeovers();
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

/// The same for one takeover: never ends if the watch has shown what happened to pods by then.
async fn stays_behind_takeover(client: &Client, feed: &WatchFeed, takeover: u64) {
    if feed.has_caught_up(takeover) {
        return std::future::pending().await;
    }
    // A resourceVersion that is no number is compared with none.
    let Some(version) = newest_version(client).await else { return };
    feed.expect_pods_up_to(takeover, version);
    let mut silent_for = Duration::ZERO;
    while silent_for < PATIENCE {
        if feed.has_caught_up(takeover) {
            return std::future::pending().await;
        }
        tokio::time::sleep(LOOK_EVERY).await;
        // A list takes as long as it takes.
        silent_for = match feed.index.lock().has_listed_pods() {
            true => silent_for + LOOK_EVERY,
            false => Duration::ZERO,
        };
    }
}

/// The resourceVersion of the pods as they are now. A list without a resourceVersion of its own is never older than the request.
async fn newest_version(client: &Client) -> Option<u64> {
    let (pods, one) = (Api::<Pod>::all(client.clone()), ListParams::default().limit(1));
    loop {
        match within(REQUEST_TIMEOUT, pods.list(&one)).await {
            Ok(list) => return list.metadata.resource_version?.parse().ok(),
            Err(error) => {
                tracing::warn!(%error, "could not read the resourceVersion of pods, and tries again");
                tokio::time::sleep(RETRY_AFTER).await;
            }
        }
    }
}

impl WatchFeed {
    fn has_caught_up(&self, takeover: u64) -> bool {
        self.index.lock().pods_caught_up() >= takeover
    }

    fn expect_pods_up_to(&self, takeover: u64, version: u64) {
        let mut index = self.index.lock();
        index.expect_pods_up_to(takeover, version);
        self.note_sync(&index);
    }
}
