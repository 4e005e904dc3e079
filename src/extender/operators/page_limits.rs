//! How many pages are made and read at one time, and how a large one is written: in chunks, as fast as its reader takes them.
//!
//! A client that does not read holds its turn until the connection's time to write is over, and no memory but a few chunks.

use crate::extender::server::accept::GuardedBody;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// A page that was read a moment ago has its turn free by then; whoever waits longer is better told so.
const PATIENCE: Duration = Duration::from_secs(2);
const CHUNK: usize = 64 << 10;
/// Chunks that are made before they are read.
const AHEAD: usize = 4;

/// How many pages of each sort may be under way.
#[derive(Debug, Clone)]
pub struct PageLimits {
    /// Those with every pod or node: one, which costs the memory of what changes in the books while it is read.
    pub large: Arc<Semaphore>,
    /// Scrapes: two Prometheuses, and somebody with curl.
    pub metrics: Arc<Semaphore>,
    /// Of one pod or policy; in full on a large cluster some ten megabytes.
    pub small: Arc<Semaphore>,
}

impl Default for PageLimits {
    fn default() -> Self {
        let turns = |most| Arc::new(Semaphore::new(most));
        Self { large: turns(1), metrics: turns(4), small: turns(4) }
    }
}

/// A turn, if one comes soon.
pub async fn turn(turns: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    tokio::time::timeout(PATIENCE, turns.clone().acquire_owned()).await.ok()?.ok()
}

/// The page, whose turn lasts until it is read.
pub fn held(page: Response, turn: OwnedSemaphorePermit) -> Response {
    page.map(|body| Body::new(GuardedBody::new(body, turn)))
}

/// A JSON page that is written on a thread beside those that answer, as it is read.
pub fn streamed(
    turn: OwnedSemaphorePermit,
    write: impl FnOnce(&mut dyn Write) -> serde_json::Result<()> + Send + 'static,
) -> Response {
    let (chunks, coming) = mpsc::channel(AHEAD);
    tokio::task::spawn_blocking(move || {
        let mut out = BufWriter::with_capacity(CHUNK, Chunks(chunks.clone()));
        let written = write(&mut out).map_err(io::Error::from).and_then(|()| out.flush());
        if let Err(error) = written {
            // The reader is gone, or else learns that this is not all.
            let _ = chunks.blocking_send(Err(error));
        }
        drop(turn);
    });
    let body = futures::stream::unfold(coming, |mut coming| async {
        let chunk: io::Result<Bytes> = coming.recv().await?;
        Some((chunk, coming))
    });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(body)).into_response()
}

/// Writes into the channel; fails when nobody reads any more.
struct Chunks(mpsc::Sender<io::Result<Bytes>>);

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
        sent.map(|()| bytes.len()).map_err(|_| ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
