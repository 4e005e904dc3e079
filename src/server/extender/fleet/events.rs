//! `GET /v1/fleet/events`: server-sent events, first the whole cluster and then what changes ([`live`](super::live)).
//!
//! A client that reads slowly is sent the whole again where it would have missed a change. One that does not read at all is
//! ended by its connection's write timeout. A stream ends by itself before a request would have taken too long; its client
//! connects again with the id of the last event that it has, and misses nothing.

use super::live::{LiveFleet, PublishedFleet, WatchGuard};
use crate::extender::Extender;
use crate::extender::operators::PageClient;
use crate::extender::server::PeerAddress;
use crate::service::{ServerState, WorkKind};
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, HeaderName, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::port::OperatorPage;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, sleep_until, timeout};

/// The id of the last event that a client has, when it connects again.
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// A part of the whole that is handed on at once.
const CHUNK_BYTES: usize = 64 << 10;
/// How long a client waits to be sent the whole while others are. Then its stream ends, and it connects again.
const WHOLE_SLOT_TIMEOUT: Duration = Duration::from_secs(10);

pub async fn answer(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
) -> Response {
    let operator_page = OperatorPage::Cluster("/v1/fleet/events");
    let client = PageClient::new(source, headers);
    let slot = match extender
        .admit_and_take_slot(&client, operator_page, &extender.pages.watchers)
        .await
    {
        Ok(turn) => turn,
        Err(refused) => return refused.into_response(),
    };
    let last = client
        .headers
        .get(LAST_EVENT_ID)
        .and_then(|id| extender.live.parse_event_id(id.to_str().ok()?));
    let (watching, published) = extender.live.watch();
    // A fifth is left for what is on its way when the stream ends.
    let ends = Instant::now() + extender.limits.connections.request / 5 * 4;
    let (state, live) = (extender.state.clone(), extender.live.clone());
    let (queue, whole) = (VecDeque::new(), None);
    let stream = EventStream {
        state,
        live,
        published,
        last_number: last,
        queue,
        whole_slot: whole,
        ends_at: ends,
        _watch_guard: watching,
        _slot: slot,
    };
    let body = futures::stream::unfold(stream, |mut stream| async {
        let event = stream.next().await?;
        Some((Ok::<_, Infallible>(event), stream))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, Body::from_stream(body)).into_response()
}

/// One client's stream.
struct EventStream {
    state: Arc<ServerState>,
    live: Arc<LiveFleet>,
    published: watch::Receiver<Option<Arc<PublishedFleet>>>,
    /// The number of the view that the client has when the queue is sent.
    last_number: Option<u64>,
    queue: VecDeque<Bytes>,
    /// Held while the queue is a whole.
    whole_slot: Option<OwnedSemaphorePermit>,
    ends_at: Instant,
    _watch_guard: WatchGuard,
    _slot: OwnedSemaphorePermit,
}

impl EventStream {
    /// `None` if the stream is over.
    async fn next(&mut self) -> Option<Bytes> {
        while self.queue.is_empty() {
            self.whole_slot = None;
            let last = self.last_number;
            let is_new = |latest: &Option<Arc<PublishedFleet>>| {
                latest
                    .as_ref()
                    .is_some_and(|latest| Some(latest.number) != last)
            };
            let latest = tokio::select! {
                latest = self.published.wait_for(is_new) => latest.ok()?.clone()?,
                () = self.live.stopped.cancelled() => return None,
                () = sleep_until(self.ends_at) => return None,
            };
            match last.and_then(|last| latest.changes_since(last)) {
                Some(changes) => self.queue.extend(changes),
                None => self.queue_whole(latest.clone()).await?,
            }
            self.last_number = Some(latest.number);
        }
        self.queue.pop_front()
    }

    async fn queue_whole(&mut self, latest: Arc<PublishedFleet>) -> Option<()> {
        self.whole_slot = Some(
            timeout(
                WHOLE_SLOT_TIMEOUT,
                self.live.whole_slots.clone().acquire_owned(),
            )
            .await
            .ok()?
            .ok()?,
        );
        let (live, state) = (self.live.clone(), self.state.clone());
        let heavy_work = state.heavy_work.clone();
        let whole =
            heavy_work.with_panic_count(WorkKind::Page, move || live.whole(&state, &latest));
        let mut remaining = tokio::task::spawn_blocking(whole).await.ok()?;
        while !remaining.is_empty() {
            self.queue
                .push_back(remaining.split_to(CHUNK_BYTES.min(remaining.len())));
        }
        Some(())
    }
}
