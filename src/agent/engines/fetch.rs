//! One GET of one page of a pod, over HTTP/1.1 with or without TLS, within limits of time and size.
//!
//! A pod may answer anything. No redirect is followed, no compressed body is unpacked, and no slow answer is waited for;
//! connections are kept for the next round.

use super::address::{MetricsAddress, Scheme};
use super::limits::EngineLimits;
use http::header::{ACCEPT, CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Empty};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::ClientConfig;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use stowage_report::engine_metrics::scan::whole_lines;
use stowage_scheduling::units::Bytes;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
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
    #[error("{0} speaks TLS, and refuses the connection: {1}")]
    Tls(Uri, rustls::Error),
}

/// The fix for a response with this status, for the error's text.
fn hint(status: StatusCode) -> &'static str {
    match status {
        StatusCode::NOT_FOUND => {
            "; say where its metrics are with the annotation stowage.dev/metrics-path"
        }
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

    /// The server may speak the other scheme: a plain request to a TLS port is broken off, answered with an alert or with 400,
    /// and a handshake on a plain port with something else.
    fn may_be_other_scheme(&self) -> bool {
        match self {
            Self::Broken(..) | Self::Tls(_, rustls::Error::InvalidMessage(_)) => true,
            Self::Status(uri, status) => {
                *status == StatusCode::BAD_REQUEST && uri.scheme_str() == Some("http")
            }
            _ => false,
        }
    }

    /// A server answers that it is not ready.
    pub(crate) fn is_not_ready(&self) -> bool {
        matches!(self, Self::Status(_, StatusCode::SERVICE_UNAVAILABLE))
    }
}

/// A connection is kept from one round to the next, and closed before the server closes it (Python's usual one, after five
/// seconds).
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Maximum head of a response: all pods of a node may answer at once, and no head of an engine takes a tenth of it.
const MAX_HEAD_BYTES: usize = 16 << 10;

#[derive(Debug)]
pub(crate) struct Fetcher {
    client: Client<HttpsConnector<HttpConnector>, Empty<bytes::Bytes>>,
    /// Held while a page is read on beyond [`EngineLimits::medium_page_bytes`].
    medium_permits: Semaphore,
    /// Held while a page is read on beyond [`EngineLimits::large_page_bytes`].
    large_permits: Semaphore,
    limits: EngineLimits,
}

impl Fetcher {
    pub fn new(limits: EngineLimits) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(limits.connect_timeout));
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls_config())
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let client = Client::builder(TokioExecutor::new())
            // Metrics and health at once.
            .pool_max_idle_per_host(2)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_timer(TokioTimer::new())
            .http1_max_buf_size(MAX_HEAD_BYTES)
            .build(connector);
        let medium = Semaphore::new(limits.concurrent_medium_pages);
        Self {
            client,
            medium_permits: medium,
            large_permits: Semaphore::new(1),
            limits,
        }
    }

    /// The body of a page with status 200, and the scheme by which it came: that of the address, or, if the server does not
    /// speak that, the other one.
    pub async fn get(
        &self,
        ip: IpAddr,
        address: &MetricsAddress,
    ) -> Result<(Vec<u8>, Scheme), FetchError> {
        let deadline = Instant::now() + self.limits.response_timeout;
        let first = uri(ip, address, address.scheme);
        let error = match timeout_at(deadline, self.get_once(&first)).await {
            Ok(Ok(metrics_page)) => return Ok((metrics_page, address.scheme)),
            Ok(Err(error)) if error.may_be_other_scheme() => error,
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(FetchError::TimedOut(first, self.limits.response_timeout)),
        };
        let other = if address.scheme == Scheme::Http {
            Scheme::Https
        } else {
            Scheme::Http
        };
        match timeout_at(deadline, self.get_once(&uri(ip, address, other))).await {
            Ok(Ok(metrics_page)) => Ok((metrics_page, other)),
            Ok(Err(error @ (FetchError::Tls(..) | FetchError::Status(..))))
                if !error.may_be_other_scheme() =>
            {
                Err(error)
            }
            Ok(Err(error @ (FetchError::TooLong(..) | FetchError::Encoded(_)))) => Err(error),
            // It speaks neither: what it said to the first is the reason.
            _ => Err(error),
        }
    }

    async fn get_once(&self, uri: &Uri) -> Result<Vec<u8>, FetchError> {
        let request = Request::get(uri)
            .header(ACCEPT, "text/plain;version=0.0.4, */*;q=0.1")
            .body(Empty::new())
            .expect("an address makes a valid request");
        let answer = self
            .client
            .request(request)
            .await
            .map_err(|error| fetch_error(uri, &error))?;
        if answer.status() != StatusCode::OK {
            return Err(FetchError::Status(uri.clone(), answer.status()));
        }
        if answer
            .headers()
            .get(CONTENT_ENCODING)
            .is_some_and(|encoding| encoding != "identity")
        {
            return Err(FetchError::Encoded(uri.clone()));
        }
        self.read_body(uri, answer).await
    }

    async fn read_body<B>(&self, uri: &Uri, answer: Response<B>) -> Result<Vec<u8>, FetchError>
    where
        B: BodyExt<Data = bytes::Bytes, Error: Display> + Unpin,
    {
        let too_long =
            || FetchError::TooLong(uri.clone(), Bytes(self.limits.max_page_bytes as u64));
        let is_framed = [CONTENT_LENGTH, TRANSFER_ENCODING]
            .iter()
            .any(|name| answer.headers().contains_key(name));
        let mut body = answer.into_body();
        if body.size_hint().lower() > self.limits.max_page_bytes as u64 {
            return Err(too_long());
        }
        let mut metrics_page = Vec::new();
        let (mut medium, mut large) = (None, None);
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|error| FetchError::Broken(uri.clone(), error.to_string()))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if metrics_page.len() + data.len() > self.limits.max_page_bytes {
                return Err(too_long());
            }
            let length = metrics_page.len() + data.len();
            if length > self.limits.medium_page_bytes && medium.is_none() {
                medium = Some(
                    self.medium_permits
                        .acquire()
                        .await
                        .expect("it is never closed"),
                );
            }
            if length > self.limits.large_page_bytes && large.is_none() {
                large = Some(
                    self.large_permits
                        .acquire()
                        .await
                        .expect("it is never closed"),
                );
            }
            metrics_page.extend_from_slice(&data);
        }
        // If only the end of the connection ends the page, a complete last line cannot be distinguished from half of one.
        if !is_framed {
            metrics_page.truncate(whole_lines(&metrics_page).len());
        }
        Ok(metrics_page)
    }
}

fn uri(ip: IpAddr, address: &MetricsAddress, scheme: Scheme) -> Uri {
    Uri::builder()
        .scheme(if scheme == Scheme::Http {
            "http"
        } else {
            "https"
        })
        .authority(SocketAddr::new(ip, address.port).to_string())
        .path_and_query(address.path.clone())
        .build()
        .expect("an IP address, a port and a path make a URI")
}

fn fetch_error(uri: &Uri, error: &Error) -> FetchError {
    let mut cause: &(dyn std::error::Error + 'static) = error;
    let mut tls = None;
    let mut is_too_long = false;
    loop {
        // An I/O error's source is that of the error which it carries.
        let carried = cause
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        tls = tls.or_else(|| cause.downcast_ref::<rustls::Error>());
        is_too_long |= cause
            .downcast_ref::<hyper::Error>()
            .is_some_and(hyper::Error::is_parse_too_large);
        match carried
            .map(|carried| carried as &(dyn std::error::Error + 'static))
            .or_else(|| cause.source())
        {
            Some(source) => cause = source,
            None => break,
        }
    }
    let is_refused = cause
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
    match (is_refused, tls, error.is_connect()) {
        _ if is_too_long => FetchError::TooLong(uri.clone(), Bytes(MAX_HEAD_BYTES as u64)),
        (true, ..) => FetchError::Refused(uri.clone()),
        (false, Some(tls), _) => FetchError::Tls(uri.clone(), tls.clone()),
        (false, None, true) => FetchError::Unreachable(uri.clone(), cause.to_string()),
        (false, None, false) => FetchError::Broken(uri.clone(), cause.to_string()),
    }
}

/// No connection is resumed: what that would keep of each pod is more than a handshake costs.
fn tls_config() -> ClientConfig {
    let provider = Arc::new(default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone());
    let builder = builder
        .with_safe_default_protocol_versions()
        .expect("ring has the usual versions");
    let mut config = builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    config
}

/// Takes every certificate. An engine has one that names a Service, signed by whoever the cluster's operators chose, and is read at
/// its pod's IP on this very node: who could answer there in its place has the pod or the node. Nothing secret is sent, and what is
/// read are figures that the pod's own process may print as it likes.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
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
        let reads = join_all((0..250).map(|_| fetcher.read_body(&uri, page(&read))));
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
            assert!(
                client.read(&mut [0; 1024]).await.unwrap() > 0,
                "the request"
            );
            client
                .write_all(b"HTTP/1.1 200 OK\r\nX-Long: ")
                .await
                .unwrap();
            client.write_all(&[b'a'; 64 << 10]).await.unwrap();
            future::pending::<()>().await;
        });
        let address = MetricsAddress {
            scheme: Scheme::Http,
            port,
            path: PathAndQuery::from_static("/metrics"),
        };
        let patience = Duration::from_secs(60);
        let patient = EngineLimits {
            connect_timeout: patience,
            response_timeout: patience,
            ..EngineLimits::default()
        };
        let answer = Fetcher::new(patient)
            .get(IpAddr::from([127, 0, 0, 1]), &address)
            .await;
        // A hundred pods of a node may do this at once.
        assert!(matches!(answer, Err(FetchError::TooLong(..))), "{answer:?}");
        endless.abort();
    }
}
