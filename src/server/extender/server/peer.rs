//! One connection as the limits see it: its source, its state, and its deadline in that state.
//!
//! ```text
//!  handshake ─► silent ─► head ─► request ─► idle ─┐
//!                          ▲                       │
//!                          └───────────────────────┘
//! ```
//!
//! The stream records each step ([`TimedStream`]); the task that drives the connection asks when it times out. Nothing here
//! accepts, closes or counts.

use super::limits::ConnectionLimits;
use parking_lot::Mutex;
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;

/// Why this side rejected or ended a connection; the label in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum CloseCause {
    /// The address has as many connections as it may have, and each is in the middle of a request.
    AddressFull,
    /// One source has as many connections as it may have, and each is in the middle of a request.
    SourceFull,
    /// It was displaced by a newer connection.
    Displaced,
    /// The kernel could not accept a connection, such as for lack of descriptors.
    AcceptFailed,
    HandshakeTimeout,
    HandshakeFailed,
    /// No byte of a request arrived.
    NoRequest,
    /// The head of a request came too slowly.
    SlowHead,
    /// The received bytes are no HTTP/1 request.
    BadHttp,
    /// Idle between two requests for too long.
    Idle,
    /// The client does not read its answer.
    NotReading,
    /// A request and its answer took too long as a whole.
    SlowRequest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PeerStage {
    Handshake,
    /// Connected, and no byte of a request has arrived.
    Silent,
    /// Part of a request's head has arrived.
    Head,
    /// A request is being read or answered.
    Request,
    /// Between two requests.
    Idle,
}

/// How long a new connection counts as about to send a request: a handshake and a head take two or three round trips.
const FIRST_REQUEST_GRACE: Duration = Duration::from_secs(1);

/// How expendable a connection is when a newer one needs its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DisplacementOrder {
    /// It has had its time to send a whole head, and has not.
    Unproven,
    /// Idle between two requests, or so new that its first may be on its way.
    Idle,
    /// It is never displaced.
    Busy,
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub source: IpAddr,
    /// Cancelled when a newer connection takes its slot.
    pub displaced: CancellationToken,
    state: Mutex<PeerState>,
    /// Whether the kernel discards unsent data when the connection closes.
    discards_unsent: AtomicBool,
}

#[derive(Debug)]
struct PeerState {
    stage: PeerStage,
    stage_since: Instant,
    opened: Instant,
    /// When a write began to wait for the client to read.
    write_stalled_since: Option<Instant>,
    /// Whether it has sent a whole head.
    is_proven: bool,
}

impl Peer {
    pub fn new(source: IpAddr) -> Arc<Self> {
        let now = Instant::now();
        let state = PeerState {
            stage: PeerStage::Handshake,
            stage_since: now,
            opened: now,
            write_stalled_since: None,
            is_proven: false,
        };
        Arc::new(Self {
            source,
            displaced: CancellationToken::new(),
            state: Mutex::new(state),
            discards_unsent: AtomicBool::new(false),
        })
    }

    /// Records that the connection is ready for requests, after its handshake if there was one.
    pub(crate) fn record_connected(&self) {
        self.enter(PeerStage::Silent);
    }

    /// How expendable it is, and since when it has been in its state.
    pub fn displacement_order(&self) -> (DisplacementOrder, Instant) {
        let state = self.state.lock();
        let order = match state.stage {
            PeerStage::Request => DisplacementOrder::Busy,
            _ if !state.is_proven && state.opened.elapsed() > FIRST_REQUEST_GRACE => {
                DisplacementOrder::Unproven
            }
            _ if !state.is_proven => DisplacementOrder::Idle,
            PeerStage::Idle => DisplacementOrder::Idle,
            PeerStage::Handshake | PeerStage::Silent | PeerStage::Head => DisplacementOrder::Busy,
        };
        (order, state.stage_since)
    }

    /// Whether no request is being read or answered.
    pub fn is_quiet(&self) -> bool {
        matches!(
            self.state.lock().stage,
            PeerStage::Handshake | PeerStage::Silent | PeerStage::Idle
        )
    }

    /// The deadline of the present state, and the cause that is reported after it.
    pub fn deadline(&self, limits: &ConnectionLimits) -> (Instant, CloseCause) {
        let state = self.state.lock();
        let (time, reason) = match state.stage {
            PeerStage::Handshake => (limits.handshake, CloseCause::HandshakeTimeout),
            PeerStage::Silent => (limits.first_byte, CloseCause::NoRequest),
            PeerStage::Head => (limits.head, CloseCause::SlowHead),
            PeerStage::Request => (limits.request, CloseCause::SlowRequest),
            PeerStage::Idle => (limits.idle, CloseCause::Idle),
        };
        let stage_deadline = (state.stage_since + time, reason);
        let write_deadline = state
            .write_stalled_since
            .map(|since| (since + limits.write, CloseCause::NotReading));
        write_deadline
            .filter(|(at, _)| *at < stage_deadline.0)
            .unwrap_or(stage_deadline)
    }

    /// Records a request in progress until its answer is written or abandoned.
    pub(crate) fn begin_request(self: &Arc<Self>) -> RequestInProgress {
        let mut state = self.state.lock();
        (state.stage, state.stage_since, state.is_proven) =
            (PeerStage::Request, Instant::now(), true);
        RequestInProgress(self.clone())
    }

    /// Ends the connection now; unsent data is discarded.
    pub fn discard_unsent(&self) {
        self.discards_unsent.store(true, Ordering::Release);
    }

    fn enter(&self, stage: PeerStage) {
        let mut state = self.state.lock();
        (state.stage, state.stage_since) = (stage, Instant::now());
    }

    fn record_received(&self) {
        let mut state = self.state.lock();
        if matches!(state.stage, PeerStage::Silent | PeerStage::Idle) {
            (state.stage, state.stage_since) = (PeerStage::Head, Instant::now());
        }
    }

    fn record_write<T>(&self, outcome: &Poll<io::Result<T>>) {
        let mut state = self.state.lock();
        match outcome {
            Poll::Pending => drop(state.write_stalled_since.get_or_insert_with(Instant::now)),
            Poll::Ready(_) => state.write_stalled_since = None,
        }
    }
}

/// A request in progress; its connection is idle when this is dropped.
#[derive(Debug)]
pub(crate) struct RequestInProgress(Arc<Peer>);

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        self.0.enter(PeerStage::Idle);
    }
}

#[derive(Debug)]
pub(crate) enum PeerStream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A stream that records each step.
#[derive(Debug)]
pub(crate) struct TimedStream {
    stream: PeerStream,
    peer: Arc<Peer>,
}

impl TimedStream {
    pub fn new(stream: PeerStream, peer: Arc<Peer>) -> Self {
        Self { stream, peer }
    }
}

impl Drop for TimedStream {
    fn drop(&mut self) {
        if self.peer.discards_unsent.load(Ordering::Acquire) {
            let tcp = match &self.stream {
                PeerStream::Plain(stream) => stream,
                PeerStream::Tls(stream) => stream.get_ref().0,
            };
            // Where it cannot be set the kernel keeps unsent data for a while.
            let _ = tcp.set_zero_linger();
        }
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let outcome = match &mut self.stream {
            PeerStream::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            PeerStream::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        };
        ready!(outcome)?;
        if buf.filled().len() > before {
            self.peer.record_received();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = match &mut self.stream {
            PeerStream::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            PeerStream::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        };
        self.peer.record_write(&outcome);
        outcome
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = match &mut self.stream {
            PeerStream::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            PeerStream::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        };
        self.peer.record_write(&outcome);
        outcome
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            PeerStream::Plain(stream) => stream.is_write_vectored(),
            PeerStream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = match &mut self.stream {
            PeerStream::Plain(stream) => Pin::new(stream).poll_flush(cx),
            PeerStream::Tls(stream) => Pin::new(stream).poll_flush(cx),
        };
        // A plain stream has nothing to flush, and would always report success. A session has what its socket did not take.
        if outcome.is_pending() || matches!(self.stream, PeerStream::Tls(_)) {
            self.peer.record_write(&outcome);
        }
        outcome
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            PeerStream::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            PeerStream::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extender::tls::from_pem;
    use rustls::{ClientConfig, RootCertStore};
    use std::net::Ipv4Addr;
    use tokio::io::{AsyncWriteExt, copy, sink};
    use tokio::net::TcpListener;
    use tokio_rustls::{TlsAcceptor, TlsConnector, client};

    async fn tls_connection(peer: &Arc<Peer>) -> (TimedStream, client::TlsStream<TcpStream>) {
        let made = rcgen::generate_simple_self_signed(["stowage".to_owned()]).unwrap();
        let tls = from_pem(&made.cert.pem(), &made.signing_key.serialize_pem()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        let trusting =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let (server, client) = futures::join!(
            TlsAcceptor::from(tls.current()).accept(server),
            TlsConnector::from(Arc::new(trusting)).connect("stowage".try_into().unwrap(), client),
        );
        (
            TimedStream::new(PeerStream::Tls(Box::new(server.unwrap())), peer.clone()),
            client.unwrap(),
        )
    }

    #[tokio::test]
    async fn a_tls_client_that_reads_late_is_not_reported_as_not_reading() {
        let peer = Peer::new(Ipv4Addr::LOCALHOST.into());
        let (mut server, mut client) = tls_connection(&peer).await;
        let is_stalled = || peer.state.lock().write_stalled_since.is_some();
        while !is_stalled() {
            // The session takes what the kernel does not: a flush finds that out.
            assert!(server.write(&[b'x'; 8 << 10]).await.is_ok());
            let _ = futures::poll!(std::pin::pin!(server.flush()));
        }
        let reading = tokio::spawn(async move { copy(&mut client, &mut sink()).await });
        server.flush().await.unwrap();
        assert!(!is_stalled(), "it has read everything");
        reading.abort();
    }
}
