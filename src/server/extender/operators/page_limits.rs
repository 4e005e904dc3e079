//! Limits on pages that are rendered and read at one time, and how a large page is written: in chunks, as fast as the client
//! reads them.
//!
//! A client that does not read keeps its slot until the connection's write timeout, and costs no memory beyond a few chunks.

use crate::extender::server::accept::GuardedBody;
use crate::service::{ServerState, WorkKind, assert_cluster_unlocked};
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// How long a client waits for a slot. A page that is being read normally frees its slot by then; after that the client gets an
/// error.
const SLOT_TIMEOUT: Duration = Duration::from_secs(2);
const CHUNK_BYTES: usize = 64 << 10;
/// Chunks that are rendered ahead of the reader.
const CHUNKS_AHEAD: usize = 4;

/// Clients that watch at one time: some operators, a screen on a wall, and tabs that were left open.
const MAX_WATCHERS: usize = 24;

/// How many pages of each kind may be in progress.
#[derive(Debug, Clone)]
pub struct PageLimits {
    /// Pages with every pod or node: one at a time. It costs the memory of whatever changes in the ledger while it is read.
    pub large: Arc<Semaphore>,
    /// Scrapes: two Prometheus servers, and one person with curl.
    pub metrics: Arc<Semaphore>,
    /// Clients that watch the cluster; each costs a few events, and what two of them are sent of the whole.
    pub watchers: Arc<Semaphore>,
    /// Pages about one pod or policy; in full on a large cluster some ten megabytes.
    pub small: Arc<Semaphore>,
}

impl Default for PageLimits {
    fn default() -> Self {
        let slots = |most| Arc::new(Semaphore::new(most));
        Self {
            large: slots(1),
            metrics: slots(4),
            small: slots(4),
            watchers: slots(MAX_WATCHERS),
        }
    }
}

/// A slot, if one becomes free soon.
pub async fn take_slot(slots: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    tokio::time::timeout(SLOT_TIMEOUT, slots.clone().acquire_owned())
        .await
        .ok()?
        .ok()
}

/// The page together with its slot, which is freed when the page has been read.
pub fn with_slot(response: Response, slot: OwnedSemaphorePermit) -> Response {
    response.map(|body| Body::new(GuardedBody::new(body, slot)))
}

/// A page of this type that is written on a blocking thread while it is read.
pub fn stream_page(
    state: &ServerState,
    slot: OwnedSemaphorePermit,
    content_type: &'static str,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static,
) -> Response {
    let (chunks, receiver) = mpsc::channel(CHUNKS_AHEAD);
    let writing = state.heavy_work.with_panic_count(WorkKind::Page, move || {
        // Dropped after `out`.
        let _end = PanicToError(chunks.clone());
        let mut out = BufWriter::with_capacity(CHUNK_BYTES, Chunks(chunks.clone()));
        let written = write(&mut out).and_then(|()| out.flush());
        if let Err(error) = written {
            // The client has disconnected, or learns from the broken body that this is not all.
            let _ = chunks.blocking_send(Err(error));
        }
        drop(slot);
    });
    tokio::task::spawn_blocking(writing);
    let body = futures::stream::unfold(receiver, |mut coming| async {
        let chunk: io::Result<Bytes> = coming.recv().await?;
        Some((chunk, coming))
    });
    (
        [(header::CONTENT_TYPE, content_type)],
        Body::from_stream(body),
    )
        .into_response()
}

/// Sends an error to the client if the page panics, so that it does not end like a whole one.
struct PanicToError(mpsc::Sender<io::Result<Bytes>>);

impl Drop for PanicToError {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.0.blocking_send(Err(io::Error::other(
                "the page could not be written to its end",
            )));
        }
    }
}

/// Writes into the channel; fails when the client has stopped reading.
struct Chunks(mpsc::Sender<io::Result<Bytes>>);

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        assert_cluster_unlocked();
        let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
        sent.map(|()| bytes.len())
            .map_err(|_| ErrorKind::BrokenPipe.into())
    }

    /// Fails if the client has disconnected: a check for work that produces no chunk for a while.
    fn flush(&mut self) -> io::Result<()> {
        if self.0.is_closed() {
            Err(ErrorKind::BrokenPipe.into())
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;
    use stowage_scheduling::policy::Policy;

    #[tokio::test]
    async fn a_page_that_fails_half_way_does_not_end_like_a_whole_one() {
        let state = ServerState::new(Policy::default());
        let limits = PageLimits::default();
        let failures: [fn() -> io::Result<()>; 2] =
            [|| Err(ErrorKind::Other.into()), || panic!("planted")];
        for fails in failures {
            let slot = take_slot(&limits.large).await.expect("it is free again");
            let response = stream_page(&state, slot, "text/plain", move |out| {
                out.write_all(b"the first half")?;
                fails()
            });
            assert!(response.into_body().collect().await.is_err());
        }
        let slot = take_slot(&limits.large).await.expect("it is free again");
        let response = stream_page(&state, slot, "text/plain", |out| {
            out.write_all(b"all of it")
        });
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "all of it"
        );
    }
}
