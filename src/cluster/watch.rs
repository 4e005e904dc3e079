//! The watches: every pod and every node, into the index.
//!
//! Nothing is decided here. A watch that breaks goes on where it was, or lists anew; the index takes either. No object
//! outlives its event.

use super::index::Index;
use crate::control_plane::{ControlPlane, Notice};
use crate::service::Service;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use std::sync::Arc;

/// Objects in one page of a list. A pod is some ten kilobytes of JSON on the wire: a page, read and parsed, stays in
/// the low megabytes.
const PAGE: u32 = 250;
/// A server ends a watch after this many seconds and we resume it; a connection that died silently is noticed then.
const WATCH_SECONDS: u32 = 60;

/// What every watch feeds.
#[derive(Clone)]
pub struct Feed {
    pub service: Arc<Service>,
    pub index: Arc<Mutex<Index>>,
    /// Whom to tell what is remarkable about a pod.
    pub control_plane: Arc<dyn ControlPlane>,
}

pub async fn pods(client: Client, feed: Feed) {
    watch::<Pod>(client, &feed, "pods", |feed, event| feed.pod(event), Index::expect_pods).await;
}

pub async fn nodes(client: Client, feed: Feed) {
    watch::<Node>(client, &feed, "nodes", |feed, event| feed.node(event), Index::expect_nodes).await;
}

/// Feeds what a watch shows, and begins it anew with a list whenever the gate asks for one.
async fn watch<K>(
    client: Client,
    feed: &Feed,
    what: &'static str,
    take: impl Fn(&Feed, Event<K>),
    expect_list: impl Fn(&mut Index),
) where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
{
    loop {
        let mut events = events::<K>(client.clone(), what);
        let mut relist = std::pin::pin!(feed.service.gate.relist());
        loop {
            tokio::select! {
                biased;
                () = &mut relist => break,
                event = events.next() => match event {
                    Some(event) => take(feed, event),
                    None => return,
                },
            }
        }
        expect_list(&mut feed.index.lock());
        tracing::info!(what, "listing anew: this replica begins to lead");
    }
}

impl Feed {
    fn pod(&self, event: Event<Pod>) {
        let mut index = self.index.lock();
        let notice = match event {
            Event::Init => {
                index.begin_pods(&self.service);
                None
            }
            Event::InitApply(pod) | Event::Apply(pod) => index.apply_pod(&self.service, &pod),
            Event::Delete(pod) => {
                index.delete_pod(&self.service, &pod);
                None
            }
            Event::InitDone => {
                index.end_pods(&self.service);
                None
            }
        };
        self.note_sync(&index);
        drop(index);
        notice.into_iter().for_each(|notice| self.tell(notice));
    }

    fn node(&self, event: Event<Node>) {
        let mut index = self.index.lock();
        match event {
            Event::Init => index.begin_nodes(),
            Event::InitApply(node) | Event::Apply(node) => index.apply_node(&self.service, &node),
            Event::Delete(node) => index.delete_node(&self.service, &node),
            Event::InitDone => index.end_nodes(&self.service),
        }
        self.note_sync(&index);
    }

    fn note_sync(&self, index: &Index) {
        if index.is_complete() && !self.service.gate.is_synced() {
            self.service.gate.set_synced();
            self.service.metrics.synced.set(1);
            tracing::info!(nodes = index.nodes().len(), "the watches have synced");
        }
    }

    /// Of replicas that all see the same, one speaks.
    fn tell(&self, notice: Notice) {
        if self.service.gate.is_open() {
            self.control_plane.notify(notice);
        }
    }
}

/// The events of a watch that never ends. Failures are logged and retried, each after a longer pause.
fn events<K>(client: Client, what: &'static str) -> impl Stream<Item = Event<K>> + Unpin
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let config = watcher::Config::default().page_size(PAGE).timeout(WATCH_SECONDS);
    watcher(Api::<K>::all(client), config)
        // Who last wrote which field is half of an object and of no use here.
        .modify(|object| object.meta_mut().managed_fields = None)
        .default_backoff()
        .filter_map(move |event| {
            let event =
                event.inspect_err(|error| tracing::warn!(what, %error, "the watch failed and is retried"));
            std::future::ready(event.ok())
        })
        .boxed()
}
