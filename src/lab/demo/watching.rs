//! Watches for the stand-ins: kube's own watcher over JSON, forwarded into a channel.
//!
//! Shared by the scheduler and the kubelet, which interpret the objects.

use futures::StreamExt;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedSender;

/// One step of a watch.
#[derive(Debug)]
pub(crate) enum WatchNotice {
    /// A list begins: objects that it does not contain are gone.
    Relisting,
    Applied(Arc<Value>),
    Deleted(Arc<Value>),
    /// The list is complete.
    Synced,
}

/// A core/v1 kind.
pub fn core_resource(kind: &str, plural: &str) -> ApiResource {
    ApiResource {
        group: String::new(),
        version: "v1".to_owned(),
        api_version: "v1".to_owned(),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}

/// Watches a kind in all namespaces until the receiver is dropped.
pub(crate) async fn forward_watch<T>(
    client: kube::Client,
    resource: ApiResource,
    sender: UnboundedSender<T>,
    wrap: impl Fn(WatchNotice) -> T,
) {
    let api: Api<DynamicObject> = Api::all_with(client, &resource);
    let mut events = watcher::watcher(api, watcher::Config::default())
        .default_backoff()
        .boxed();
    while let Some(event) = events.next().await {
        // The watcher recovers from errors by itself.
        let Some(notice) = event.ok().and_then(to_notice) else {
            continue;
        };
        if sender.send(wrap(notice)).is_err() {
            return;
        }
    }
}

fn to_notice(event: Event<DynamicObject>) -> Option<WatchNotice> {
    let json = |object: DynamicObject| serde_json::to_value(object).ok().map(Arc::new);
    match event {
        Event::Init => Some(WatchNotice::Relisting),
        Event::InitApply(object) | Event::Apply(object) => json(object).map(WatchNotice::Applied),
        Event::Delete(object) => json(object).map(WatchNotice::Deleted),
        Event::InitDone => Some(WatchNotice::Synced),
    }
}
