//! Watches: the change log, filtered by a selector, as a stream of newline-delimited events.
//!
//! A change that moves an object into or out of the selector is an ADDED or a DELETED event of that watch, which clients with
//! `spec.nodeName=` selectors rely on.

use super::ServerState;
use super::connections::WatchFlow;
use super::error::ApiError;
use super::resource::Resource;
use super::selector::ListSelector;
use super::store::StoredChange;
use axum::body::Bytes;
use futures::Stream;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use stowage_server::service::ChangeReceiver;

/// What one watch is about.
pub(crate) struct WatchRequest {
    /// The User-Agent of the client.
    pub client: String,
    pub resource: &'static Resource,
    pub selector: ListSelector,
    /// Changes after this version; `None` starts with the existing objects.
    pub after: Option<u64>,
    /// Whether the client wants the bookmark that ends a streamed list.
    pub initial_bookmark: bool,
}

struct WatchState {
    shared: Arc<ServerState>,
    watch: WatchRequest,
    writes: ChangeReceiver,
    /// Its place among all watches.
    watch_number: u64,
    connection_changes: ChangeReceiver,
    queued_events: VecDeque<Bytes>,
    revision: u64,
    has_failed: bool,
}

/// The event stream. It ends when the server stops, or after the ERROR event of a watch that fell behind.
pub fn stream(
    shared: Arc<ServerState>,
    watch: WatchRequest,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let writes = shared.writes.subscribe();
    let (number, orders) = (
        shared.connections.begin_watch(),
        shared.connections.changes(),
    );
    let mut state = WatchState {
        shared,
        watch,
        writes,
        watch_number: number,
        connection_changes: orders,
        queued_events: VecDeque::new(),
        revision: 0,
        has_failed: false,
    };
    state.begin();
    futures::stream::unfold(state, async |mut state| {
        state.next().await.map(|event| (Ok(event), state))
    })
}

impl WatchState {
    fn begin(&mut self) {
        if let Some(revision) = self.watch.after {
            self.revision = revision;
            return;
        }
        let shared = self.shared.clone();
        let store = shared.store.lock();
        self.revision = store.revision();
        let initial = store
            .list(self.watch.resource)
            .filter(|object| self.watch.selector.matches(object));
        self.queued_events
            .extend(initial.map(|object| event_line("ADDED", object)));
        if self.watch.initial_bookmark {
            self.queued_events.push_back(event_line(
                "BOOKMARK",
                &end_of_initial_events(self.watch.resource, self.revision),
            ));
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        let stopped = self.shared.stop.clone();
        loop {
            self.connection_changes.mark_seen();
            let flow = self.shared.connections.flow(
                &self.watch.client,
                self.watch.resource.plural,
                self.watch_number,
            );
            match flow {
                WatchFlow::Open => {}
                WatchFlow::Ended => return None,
                WatchFlow::Stalled => {
                    tokio::select! {
                        biased;
                        () = stopped.cancelled() => return None,
                        () = self.connection_changes.changed() => {}
                    }
                    continue;
                }
            }
            if let Some(event) = self.queued_events.pop_front() {
                return Some(event);
            }
            if self.has_failed {
                return None;
            }
            self.writes.mark_seen();
            self.read_log();
            if self.queued_events.is_empty() {
                tokio::select! {
                    biased;
                    () = stopped.cancelled() => return None,
                    () = self.writes.changed() => {}
                    () = self.connection_changes.changed() => {}
                }
            }
        }
    }

    fn read_log(&mut self) {
        let shared = self.shared.clone();
        let store = shared.store.lock();
        match store.changes_after(self.revision) {
            Ok(changes) => {
                let ours = changes.filter(|change| change.resource == self.watch.resource);
                self.queued_events
                    .extend(ours.filter_map(|change| event(change, &self.watch.selector)));
                self.revision = store.revision();
            }
            Err(expired) => self.fail(&expired),
        }
    }

    fn fail(&mut self, error: &ApiError) {
        self.queued_events
            .push_back(event_line("ERROR", &error.to_status()));
        self.has_failed = true;
    }
}

fn event(change: &StoredChange, selector: &ListSelector) -> Option<Bytes> {
    let before = change
        .before
        .as_deref()
        .filter(|object| selector.matches(object));
    let after = change
        .after
        .as_deref()
        .filter(|object| selector.matches(object));
    match (before, after) {
        (None, Some(object)) => Some(event_line("ADDED", object)),
        (Some(_), Some(object)) => Some(event_line("MODIFIED", object)),
        (Some(object), None) => Some(event_line("DELETED", &at_revision(object, change.revision))),
        (None, None) => None,
    }
}

/// A deletion carries the version of the deletion, or a client would resume from before it.
fn at_revision(object: &Value, revision: u64) -> Value {
    let mut last = object.clone();
    last["metadata"]["resourceVersion"] = json!(revision.to_string());
    last
}

fn end_of_initial_events(resource: &Resource, revision: u64) -> Value {
    json!({
        "kind": resource.kind, "apiVersion": resource.api_version,
        "metadata": {
            "resourceVersion": revision.to_string(),
            "annotations": {"k8s.io/initial-events-end": "true"},
        },
    })
}

fn event_line(kind: &str, object: &Value) -> Bytes {
    let mut text = json!({"type": kind, "object": object}).to_string();
    text.push('\n');
    text.into()
}
