//! The accept loop of one address: admission, the TLS handshake, HTTP/1, and the end of a connection.
//!
//! HTTP is hyper's; [`Peer`] says when a connection has timed out, and [`ConnectionAdmission`] which connections are admitted.
//! Every connection that is rejected or ended by this side is counted by address and cause. Requests are not interpreted here.

use super::admission::{ConnectionAdmission, ConnectionSlot};
use super::limits::ConnectionLimits;
use super::peer::{CloseCause, Peer, PeerStream, RequestInProgress, TimedStream};
use super::{PeerAddress, SHUTDOWN_TIMEOUT};
use crate::extender::tls::Tls;
use axum::Router;
use axum::body::{Body, HttpBody};
use bytes::Bytes;
use http::{Request, Response};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use stowage_telemetry::listening;
use stowage_telemetry::{EdgeMetrics, Metrics};
use strum::VariantArray;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

/// First and longest pause after the kernel failed to accept a connection; doubled each time.
const ACCEPT_BACK_OFF: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// An address and its rules.
#[derive(Clone)]
pub struct ServedAddress {
    /// Its label in metrics and the log.
    pub name: &'static str,
    pub tls: Option<Tls>,
    pub limits: ConnectionLimits,
    /// Maximum connections in all. An eighth of them is reserved for connections that are being closed.
    pub max_connections: usize,
    /// Read buffer: for a request's head, and for one read of a body.
    pub read_buffer: usize,
    /// Kernel send buffer for a client that does not read; `None` leaves it to the kernel, which keeps megabytes.
    pub send_buffer: Option<usize>,
    pub metrics: EdgeMetrics,
}

impl ServedAddress {
    /// Without TLS, and with the limits of the scheduler's address.
    pub fn plain(name: &'static str, metrics: &Metrics) -> Self {
        let limits = ConnectionLimits::default();
        let (most, metrics) = (limits.scheduler, metrics.edge.clone());
        Self {
            name,
            tls: None,
            limits,
            max_connections: most,
            read_buffer: super::SCHEDULER_READ_BUFFER,
            send_buffer: None,
            metrics,
        }
    }
}

/// Serves until `stop`; then requests in progress may end, for a while.
pub async fn serve(
    listener: std::net::TcpListener,
    address: ServedAddress,
    router: Router,
    stop: CancellationToken,
) -> io::Result<()> {
    if let Some(bytes) = address.send_buffer {
        // Connections inherit it from their listener.
        SockRef::from(&listener).set_send_buffer_size(bytes)?;
    }
    let listener = TcpListener::from_std(listener)?;
    let router = listening::with_browser_guard(router, listener.local_addr()?.ip());
    address.metrics.export_drop_reasons(
        address.name,
        CloseCause::VARIANTS.iter().map(CloseCause::into_str),
    );
    let (connections, cut) = (TaskTracker::new(), CancellationToken::new());
    let _cut_on_drop = cut.clone().drop_guard();
    let accepting = accept_all(&listener, &address, router, &connections, &stop, &cut);
    stop.run_until_cancelled(accepting).await;
    drop(listener);
    connections.close();
    if timeout(SHUTDOWN_TIMEOUT, connections.wait()).await.is_err() {
        cut.cancel();
        connections.wait().await;
    }
    Ok(())
}

async fn accept_all(
    listener: &TcpListener,
    address: &ServedAddress,
    router: Router,
    connections: &TaskTracker,
    stop: &CancellationToken,
    cut: &CancellationToken,
) {
    let admission = ConnectionAdmission::new(
        address.limits.per_source,
        address.max_connections - address.max_connections / 8,
    );
    let sockets = Arc::new(Semaphore::new(address.max_connections));
    let mut back_off = ACCEPT_BACK_OFF.0;
    loop {
        let socket = sockets
            .clone()
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        let (stream, source) = match listener.accept().await {
            Ok(accepted) => accepted,
            // The client disconnected before it was accepted.
            Err(error) if is_client_error(&error) => continue,
            Err(error) => {
                address
                    .metrics
                    .count_dropped(address.name, CloseCause::AcceptFailed.into_str());
                tracing::error!(
                    address = address.name,
                    "no connection can be accepted: {error}"
                );
                sleep(back_off).await;
                back_off = (back_off * 2).min(ACCEPT_BACK_OFF.1);
                continue;
            }
        };
        back_off = ACCEPT_BACK_OFF.0;
        let slot = match admission.admit(canonical(source)) {
            Ok(slot) => slot,
            Err(cause) => {
                address
                    .metrics
                    .count_dropped(address.name, cause.into_str());
                continue;
            }
        };
        let connection = ServedConnection {
            slot,
            address: address.clone(),
            router: router.clone(),
            stop: stop.clone(),
            cut: cut.clone(),
        };
        connections.spawn(async move {
            connection.run(stream).await;
            drop(socket);
        });
    }
}

fn is_client_error(error: &io::Error) -> bool {
    use ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted
    )
}

/// An IPv4 client has one address, whichever way the listener was opened.
fn canonical(source: SocketAddr) -> IpAddr {
    source.ip().to_canonical()
}

struct ServedConnection {
    slot: ConnectionSlot,
    address: ServedAddress,
    router: Router,
    stop: CancellationToken,
    /// Cancelled when the time for an orderly end is over.
    cut: CancellationToken,
}

impl ServedConnection {
    async fn run(self, stream: TcpStream) {
        let ServedAddress { name, metrics, .. } = &self.address;
        let _open = metrics.count_open(name);
        // An answer is one write; Nagle's algorithm would only delay it.
        let _ = stream.set_nodelay(true);
        let ended = match self.complete_handshake(stream).await {
            Ok(Some(stream)) => {
                self.slot.peer.record_connected();
                self.serve_http(stream).await
            }
            Ok(None) => None,
            Err(cause) => Some(cause),
        };
        if let Some(cause) = ended {
            metrics.count_dropped(name, cause.into_str());
        }
    }

    /// The stream after its TLS handshake, if this address uses TLS; `None` if the process stops meanwhile.
    async fn complete_handshake(
        &self,
        stream: TcpStream,
    ) -> Result<Option<PeerStream>, CloseCause> {
        let Some(tls) = &self.address.tls else {
            return Ok(Some(PeerStream::Plain(stream)));
        };
        let shaking = TlsAcceptor::from(tls.current()).accept(stream);
        tokio::select! {
            shaken = timeout(self.address.limits.handshake, shaking) => match shaken {
                Ok(Ok(stream)) => Ok(Some(PeerStream::Tls(Box::new(stream)))),
                Ok(Err(error)) => {
                    tracing::debug!(address = self.address.name, source = %self.peer().source, "no TLS: {error}");
                    Err(CloseCause::HandshakeFailed)
                }
                Err(_) => Err(CloseCause::HandshakeTimeout),
            },
            () = self.peer().displaced.cancelled() => Err(CloseCause::Displaced),
            () = self.stop.cancelled() => Ok(None),
        }
    }

    /// Serves requests until the client disconnects, the process stops or a limit is reached; returns which.
    async fn serve_http(&self, stream: PeerStream) -> Option<CloseCause> {
        let peer = self.peer();
        let io = TokioIo::new(TimedStream::new(stream, peer.clone()));
        let service =
            service_fn(|request: Request<Incoming>| route_request(&self.router, peer, request));
        let mut builder = Builder::new();
        // The limits on heads and idle connections are the peer's: hyper has one timer for both.
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(None)
            .max_buf_size(self.address.read_buffer);
        let mut connection = pin!(builder.serve_connection(io, service));
        let mut stop = pin!(self.stop.cancelled());
        let mut is_stopping = false;
        let mut watch = pin!(self.wait_for_timeout());
        poll_fn(|cx| {
            if !is_stopping && stop.as_mut().poll(cx).is_ready() {
                is_stopping = true;
                connection.as_mut().graceful_shutdown();
                if peer.is_quiet() {
                    return Poll::Ready(None);
                }
            }
            if let Poll::Ready(outcome) = connection.as_mut().poll(cx) {
                return Poll::Ready(
                    outcome
                        .err()
                        .filter(hyper::Error::is_parse)
                        .map(|_| CloseCause::BadHttp),
                );
            }
            watch.as_mut().poll(cx)
        })
        .await
    }

    /// Waits until the connection has timed out, is displaced, or is cut off at shutdown.
    async fn wait_for_timeout(&self) -> Option<CloseCause> {
        let mut timer = pin!(sleep_until(self.peer().deadline(&self.address.limits).0));
        let mut displaced = pin!(self.peer().displaced.cancelled());
        let mut cut = pin!(self.cut.cancelled());
        let cause = poll_fn(|cx| {
            if displaced.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Some(CloseCause::Displaced));
            }
            if cut.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            loop {
                // A later deadline is checked when the timer expires; otherwise each request would reset the timer.
                let (deadline, cause) = self.peer().deadline(&self.address.limits);
                if deadline <= Instant::now() {
                    return Poll::Ready(Some(cause));
                }
                if deadline < timer.deadline() || timer.is_elapsed() {
                    timer.as_mut().reset(deadline);
                }
                if timer.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
            }
        })
        .await;
        if matches!(
            cause,
            None | Some(CloseCause::NotReading | CloseCause::SlowRequest)
        ) {
            self.peer().discard_unsent();
        }
        cause
    }

    fn peer(&self) -> &Arc<Peer> {
        &self.slot.peer
    }
}

/// Passes one request to the router.
fn route_request(
    router: &Router,
    peer: &Arc<Peer>,
    request: Request<Incoming>,
) -> impl Future<Output = Result<Response<GuardedBody<RequestInProgress>>, Infallible>> + use<> {
    let in_progress = peer.begin_request();
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(PeerAddress(peer.source));
    let answering = router.clone().oneshot(request);
    async move {
        let answer = answering.await?;
        Ok(answer.map(|body| GuardedBody::new(body, in_progress)))
    }
}

/// An answer's body, with a guard that lasts until the body is written or abandoned.
pub(crate) struct GuardedBody<T> {
    body: Body,
    _guard: T,
}

impl<T> GuardedBody<T> {
    pub fn new(body: Body, guard: T) -> Self {
        Self {
            body,
            _guard: guard,
        }
    }
}

impl<T: Unpin> HttpBody for GuardedBody<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
