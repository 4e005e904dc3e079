//! One GET of one page of a pod, over plain HTTP/1.1, within limits of time and size.
//!
//! A pod may answer anything. No redirect is followed, no compressed body is unpacked, and no slow answer is waited for;
//! connections are kept for the next round.

use super::address::MetricsAddress;
use super::limits::EngineLimits;
use crate::engine_metrics::scan::whole_lines;
use crate::units::Bytes;
use http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("nothing listens at {0}")]
    Refused(Uri),
    #[error("{0} cannot be reached: {1}")]
    Unreachable(Uri, String),
    #[error("{0} has not answered in full within {1:?}")]
    TimedOut(Uri, Duration),
    #[error("{0} answers {1}{hint}", hint = hint(*.1))]
    Status(Uri, StatusCode),
    #[error("{0} answers more than {1}, which is no metrics page")]
    TooLong(Uri, Bytes),
    #[error("{0} answers in an encoding that was not asked for")]
    Encoded(Uri),
    #[error("{0} broke off: {1}")]
    Broken(Uri, String),
}

/// How to treat an answer that is not a page.
fn hint(status: StatusCode) -> &'static str {
    match status {
        StatusCode::NOT_FOUND => "; say where its metrics are with the annotation stowage.dev/metrics-path",
        StatusCode::NOT_IMPLEMENTED => "; llama.cpp has metrics if started with --metrics",
        status if status.is_redirection() => "; redirects are not followed, name the page itself",
        _ => "",
    }
}

impl FetchError {
    /// The kernel reports that no process has this port open.
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Refused(_))
    }

    /// A server answers that it is not ready.
    pub fn is_not_ready(&self) -> bool {
        matches!(self, Self::Status(_, StatusCode::SERVICE_UNAVAILABLE))
    }
}

/// A connection is kept from one round to the next, and closed before the server closes it (Python's usual one, after five
/// seconds).
const IDLE: Duration = Duration::from_secs(4);

/// Of an answer's head, in bytes: all pods of a node may answer at once, and no head of an engine takes a tenth of it.
const HEAD: usize = 16 << 10;

#[derive(Debug)]
pub struct Fetcher {
    client: Client<HttpConnector, Empty<bytes::Bytes>>,
    /// Held while a page is read on beyond [`EngineLimits::medium_page`].
    medium: Semaphore,
    /// Held while a page is read on beyond [`EngineLimits::large_page`].
    large: Semaphore,
    limits: EngineLimits,
}

impl Fetcher {
    pub fn new(limits: EngineLimits) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(limits.connect));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new())
            // Metrics and health at once.
            .pool_max_idle_per_host(2)
            .pool_idle_timeout(IDLE)
            .pool_timer(TokioTimer::new())
            .http1_max_buf_size(HEAD)
            .build(connector);
        let medium = Semaphore::new(limits.medium_pages);
        Self { client, medium, large: Semaphore::new(1), limits }
    }

    /// The body of a page with status 200.
    pub async fn get(&self, ip: IpAddr, address: &MetricsAddress) -> Result<Vec<u8>, FetchError> {
        let uri = uri(ip, address);
        match timeout(self.limits.answer, self.ask(&uri)).await {
            Ok(answer) => answer,
            Err(_) => Err(FetchError::TimedOut(uri, self.limits.answer)),
        }
    }

    async fn ask(&self, uri: &Uri) -> Result<Vec<u8>, FetchError> {
        let request = Request::get(uri)
            .header(ACCEPT, "text/plain;version=0.0.4, */*;q=0.1")
            .body(Empty::new())
            .expect("an address makes a valid request");
        let answer = self.client.request(request).await.map_err(|error| failure(uri, &error))?;
        if answer.status() != StatusCode::OK {
            return Err(FetchError::Status(uri.clone(), answer.status()));
        }
        if answer.headers().get(CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
            return Err(FetchError::Encoded(uri.clone()));
        }
        self.read(uri, answer).await
    }

    async fn read<B>(&self, uri: &Uri, answer: Response<B>) -> Result<Vec<u8>, FetchError>
    where
        B: BodyExt<Data = bytes::Bytes, Error: Display> + Unpin,
    {
        let too_long = || FetchError::TooLong(uri.clone(), Bytes(self.limits.page as u64));
        let is_framed =
            [CONTENT_LENGTH, TRANSFER_ENCODING].iter().any(|name| answer.headers().contains_key(name));
        let mut body = answer.into_body();
        if body.size_hint().lower() > self.limits.page as u64 {
            return Err(too_long());
        }
        let mut page = Vec::new();
        let (mut medium, mut large) = (None, None);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| FetchError::Broken(uri.clone(), error.to_string()))?;
            let Ok(data) = frame.into_data() else { continue };
            if page.len() + data.len() > self.limits.page {
                return Err(too_long());
            }
            let length = page.len() + data.len();
            if length > self.limits.medium_page && medium.is_none() {
                medium = Some(self.medium.acquire().await.expect("it is never closed"));
            }
            if length > self.limits.large_page && large.is_none() {
                large = Some(self.large.acquire().await.expect("it is never closed"));
            }
            page.extend_from_slice(&data);
        }
        // If only the end of the connection ends the page, a complete last line cannot be distinguished from half of one.
        if !is_framed {
            page.truncate(whole_lines(&page).len());
        }
        Ok(page)
    }
}

fn uri(ip: IpAddr, address: &MetricsAddress) -> Uri {
    Uri::builder()
        .scheme("http")
        .authority(SocketAddr::new(ip, address.port).to_string())
        .path_and_query(address.path.clone())
        .build()
        .expect("an IP address, a port and a path make a URI")
}

fn failure(uri: &Uri, error: &Error) -> FetchError {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let is_refused = cause
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    match (is_refused, error.is_connect()) {
        (true, _) => FetchError::Refused(uri.clone()),
        (false, true) => FetchError::Unreachable(uri.clone(), cause.to_string()),
        (false, false) => FetchError::Broken(uri.clone(), cause.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use futures::future::{self, join_all};
    use futures::{StreamExt, stream};
    use http::uri::PathAndQuery;
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    const FRAME: usize = 16 << 10;

    /// A page just below a megabyte that never ends, and what was read of it.
    fn page(read: &Arc<AtomicUsize>) -> Response<Body> {
        let read = read.clone();
        let frames = stream::iter(0..60).map(move |_| {
            read.fetch_add(FRAME, Ordering::Relaxed);
            Ok::<_, Infallible>(bytes::Bytes::from_static(&[b'x'; FRAME]))
        });
        Response::new(Body::from_stream(frames.chain(stream::pending())))
    }

    #[tokio::test]
    async fn pods_that_answer_long_pages_at_once_do_not_add_up() {
        let fetcher = Fetcher::new(EngineLimits::default());
        let uri = Uri::from_static("http://10.0.0.7:8000/metrics");
        let read = Arc::new(AtomicUsize::new(0));
        // As many pods as a node has.
        let reads = join_all((0..250).map(|_| fetcher.read(&uri, page(&read))));
        assert!(futures::poll!(std::pin::pin!(reads)).is_pending());
        let mib = read.load(Ordering::Relaxed) >> 20;
        assert!(mib <= 40, "{mib} MiB at once, and the agent has 64");
    }

    #[tokio::test]
    async fn the_head_of_an_answer_is_limited() {
        let pod = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = pod.local_addr().unwrap().port();
        let endless = tokio::spawn(async move {
            let (mut client, _) = pod.accept().await.unwrap();
            assert!(client.read(&mut [0; 1024]).await.unwrap() > 0, "the request");
            client.write_all(b"HTTP/1.1 200 OK\r\nX-Long: ").await.unwrap();
            client.write_all(&[b'a'; 64 << 10]).await.unwrap();
            future::pending::<()>().await;
        });
        let address = MetricsAddress { port, path: PathAndQuery::from_static("/metrics") };
        let patient = EngineLimits { answer: Duration::from_secs(10), ..EngineLimits::default() };
        let answer = Fetcher::new(patient).get(IpAddr::from([127, 0, 0, 1]), &address).await;
        // A hundred pods of a node may do this at once.
        assert!(matches!(answer, Err(FetchError::Broken(..))), "{answer:?}");
        endless.abort();
    }
}
