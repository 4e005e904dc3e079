//! The watch of ResourceSlices, which not every API server has.

use super::{
    REFUSED_RETRY_INTERVAL, WatchEnd, WatchFeed, WatchHandler, refusal_code, retry_or_relist,
    watch_once,
};
use crate::kubernetes::index::ClusterIndex;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Client;
use kube::runtime::watcher::{self, Event};
use std::time::Duration;

const SLICES: &str = "resourceslices";
const SLICES_VERSION: &str = "resource.k8s.io/v1";
/// Slices in one page of a list: a slice may have 128 devices, each with a kilobyte of attributes.
const SLICE_LIST_PAGE_SIZE: u32 = 50;
/// How often to check again an API server that does not serve ResourceSlices: it may after its next upgrade.
const UNSERVED_RECHECK_INTERVAL: Duration = Duration::from_secs(60);
/// First pause after an unanswered discovery request; doubles with each failure.
const DISCOVERY_RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Before 1.34 no API server serves `resource.k8s.io/v1`: that is no failure, and it is looked for again from time to time. Where
/// it is served nothing is placed before all slices are known.
pub async fn slices(client: Client, feed: WatchFeed) {
    let handler = WatchHandler {
        apply: WatchFeed::apply_slice_event,
        on_error: on_slice_error,
        while_unreadable: "nothing is placed before they have been listed, and what DRA drivers publish afterwards is not seen,",
        expect_list: ClusterIndex::expect_slice_list,
        page_size: SLICE_LIST_PAGE_SIZE,
    };
    let mut terms = feed.state.leadership.watch_list_generation();
    let (mut is_served, mut is_absence_logged, mut retry_pause) =
        (false, false, DISCOVERY_RETRY_PAUSE);
    loop {
        let term = terms.mark_seen();
        feed.index.lock().expect_slice_list(term);
        let has_slices = if is_served {
            Ok(true)
        } else {
            has_slices(&client).await
        };
        is_served = matches!(has_slices, Ok(true));
        let end = match has_slices {
            Ok(true) => watch_once(client.clone(), &feed, SLICES, &handler, &mut terms).await,
            Ok(false) => WatchEnd::NotServed,
            Err(error) => {
                feed.record_read_failure(SLICES, &error);
                drop(tokio::time::timeout(retry_pause, terms.changed()).await);
                retry_pause = (retry_pause * 2).min(REFUSED_RETRY_INTERVAL);
                continue;
            }
        };
        retry_pause = DISCOVERY_RETRY_PAUSE;
        match end {
            WatchEnd::RelistNow => {
                tracing::info!(
                    what = SLICES,
                    "relisting: the earlier list is no longer valid"
                );
            }
            WatchEnd::NotServed => {
                is_served = false;
                if !std::mem::replace(&mut is_absence_logged, true) {
                    tracing::info!(
                        "the API server does not serve resource.k8s.io/v1: GPUs that a DRA driver publishes in an older version are not seen"
                    );
                }
                {
                    let mut index = feed.index.lock();
                    index.mark_slices_not_served();
                    feed.record_success(SLICES);
                    feed.update_sync(&index);
                }
                drop(tokio::time::timeout(UNSERVED_RECHECK_INTERVAL, terms.changed()).await);
            }
            WatchEnd::RelistAfterPause | WatchEnd::Retry | WatchEnd::Ended => {
                drop(tokio::time::timeout(REFUSED_RETRY_INTERVAL, terms.changed()).await);
            }
        }
    }
}

/// Whether the API server serves ResourceSlices. One that refuses the discovery request counts as serving them.
async fn has_slices(client: &Client) -> Result<bool, kube::Error> {
    match client.list_api_group_resources(SLICES_VERSION).await {
        Ok(served) => Ok(served
            .resources
            .iter()
            .any(|resource| resource.name == SLICES)),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
        Err(kube::Error::Api(status)) if matches!(status.code, 401 | 403) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Without slices a GPU could be allocated twice: nothing is placed until they may be read. A replica that has listed them goes on
/// with what it knows, as it does with pods and nodes, until it has to list them again.
fn on_slice_error(feed: &WatchFeed, error: &watcher::Error) -> WatchEnd {
    match refusal_code(error) {
        Some(404) => WatchEnd::NotServed,
        _ => retry_or_relist(feed, error),
    }
}

impl WatchFeed {
    pub(super) fn apply_slice_event(&self, event: Event<ResourceSlice>) {
        let mut index = self.index.lock();
        let pod_events = match event {
            Event::Init => {
                index.begin_slice_list(&self.state);
                Vec::new()
            }
            Event::InitApply(slice) | Event::Apply(slice) => index.apply_slice(&self.state, &slice),
            Event::Delete(slice) => index.delete_slice(&self.state, &slice),
            Event::InitDone => index.end_slice_list(&self.state),
        };
        self.update_sync(&index);
        drop(index);
        pod_events
            .into_iter()
            .for_each(|notice| self.record_event_if_leading(notice));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::testing::Recorder;
    use crate::service::ServerState;
    use std::sync::Arc;
    use stowage_scheduling::policy::Policy;

    const SLICES_SERVED: &str = r#"{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"resource.k8s.io/v1",
        "resources":[{"name":"resourceslices","singularName":"","kind":"ResourceSlice","namespaced":false,"verbs":[]}]}"#;
    const NO_SLICES: &str = r#"{"kind":"ResourceSliceList","apiVersion":"resource.k8s.io/v1",
        "metadata":{"resourceVersion":"1"},"items":[]}"#;

    /// A client of an API server that answers so: status and body, by path and query.
    fn client_answering(
        answer: impl Fn(&str) -> (u16, &'static str) + Clone + Send + 'static,
    ) -> Client {
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (status, body) = answer(&request.uri().to_string());
            let body = kube::client::Body::from(body.as_bytes().to_vec());
            std::future::ready(Ok::<_, std::io::Error>(
                http::Response::builder().status(status).body(body).unwrap(),
            ))
        });
        Client::new(service, "default")
    }

    /// A feed in which everything is listed but slices, and the task that watches these.
    fn waiting_for_slices(client: Client) -> (WatchFeed, tokio::task::JoinHandle<()>) {
        let state = ServerState::new(Policy::default());
        let feed = WatchFeed {
            state,
            index: Arc::default(),
            control_plane: Arc::new(Recorder::default()),
        };
        feed.apply_empty_lists();
        assert!(!feed.state.leadership.is_synced());
        (feed.clone(), tokio::spawn(slices(client, feed)))
    }

    async fn is_synced_soon(feed: &WatchFeed) -> bool {
        soon(|| feed.state.leadership.is_synced().then_some(()))
            .await
            .is_some()
    }

    async fn soon<T>(found: impl Fn() -> Option<T>) -> Option<T> {
        for _ in 0..6000 {
            if let Some(found) = found() {
                return Some(found);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        None
    }

    #[tokio::test]
    async fn a_server_without_slices_holds_nothing_up() {
        const NOT_FOUND: &str = "404 page not found";
        let (feed, task) = waiting_for_slices(client_answering(|_| (404, NOT_FOUND)));
        assert!(is_synced_soon(&feed).await);
        task.abort();
    }

    #[tokio::test]
    async fn where_slices_are_served_nothing_is_placed_before_they_are_listed() {
        const FORBIDDEN: &str = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","message":"no","reason":"Forbidden","code":403}"#;
        let is_allowed = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let allowed = is_allowed.clone();
        let answer =
            move |path: &str| match (path, allowed.load(std::sync::atomic::Ordering::Relaxed)) {
                (path, _) if path.ends_with("resource.k8s.io/v1") => (200, SLICES_SERVED),
                (_, false) => (403, FORBIDDEN),
                (path, true) if path.contains("watch=") => (200, ""),
                (_, true) => (200, NO_SLICES),
            };
        let (feed, task) = waiting_for_slices(client_answering(answer));
        let refused = soon(|| feed.state.refused_reads.describe()).await.unwrap();
        assert!(!feed.state.leadership.is_synced(), "slices may not be read");
        assert!(refused.contains("resourceslices (403)"), "{refused}");
        is_allowed.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(is_synced_soon(&feed).await);
        assert_eq!(feed.state.refused_reads.describe(), None);
        task.abort();
    }
}
