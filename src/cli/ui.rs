//! `stowage ui`: the operators' page in a browser, through a proxy on loopback that adds the token.
//!
//! The proxy has the user's rights, so it answers no other program and no other web page: the path begins with a key that is
//! drawn at each start, the `Host` must be its own address (a name that resolves to loopback is refused), a request that a page
//! of another origin began is refused, and only the operators' pages can be read. A cookie would not do: a browser sends it to
//! every port of the host.

use super::access::{Access, ContextAccessArgs};
use super::address;
use super::operators_client;
use anyhow::{Context, Result, bail};
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use clap::Args;
use http::{HeaderMap, HeaderName, Method, StatusCode, header};
use hyper::body::Incoming;
use serde::de::IgnoredAny;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stowage_server::extender::server::accept::{self, ServedAddress};
use stowage_telemetry::Metrics;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

#[derive(Debug, Args)]
pub struct UiArgs {
    #[command(flatten)]
    access: ContextAccessArgs,

    /// The address to open in a browser; on loopback only. Port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0", value_parser = address::address)]
    listen: SocketAddr,
}

/// Headers of a request that are passed on; [`FORWARDED_RESPONSE_HEADERS`] are those of a response.
const FORWARDED_REQUEST_HEADERS: [HeaderName; 3] = [
    header::ACCEPT,
    header::IF_NONE_MATCH,
    HeaderName::from_static("last-event-id"),
];
const FORWARDED_RESPONSE_HEADERS: [HeaderName; 8] = [
    header::CONTENT_TYPE,
    header::ETAG,
    header::CACHE_CONTROL,
    header::RETRY_AFTER,
    header::CONTENT_SECURITY_POLICY,
    header::X_CONTENT_TYPE_OPTIONS,
    header::REFERRER_POLICY,
    HeaderName::from_static("cross-origin-opener-policy"),
];
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The pages that the page in a browser reads.
const PROXIED_PATHS: [&str; 5] = [
    "/",
    "/v1/fleet",
    "/v1/fleet/events",
    "/v1/explain",
    "/v1/models",
];
const ASSETS: &str = "/assets/";

/// Timeout until a response begins: a page of 5,000 nodes takes a fraction of a second.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Minimum time between two token renewals: an account that may not see the page is refused each time.
const TOKEN_RENEWAL_INTERVAL: Duration = Duration::from_secs(5);
/// As long as a key for symmetric encryption.
const KEY_BYTES: usize = 16;

impl UiArgs {
    pub async fn run(self) -> Result<ExitCode> {
        if !self.listen.ip().is_loopback() {
            bail!(
                "--listen {} can be reached from elsewhere, and any client there would have your rights: write 127.0.0.1:PORT",
                self.listen
            );
        }
        let listener =
            TcpListener::bind(self.listen).with_context(|| format!("--listen {}", self.listen))?;
        listener.set_nonblocking(true)?;
        let own_address = listener.local_addr()?;
        let prefix = format!("/{}", random_key()?);
        let upstream = Upstream::new(self.access.read().await?);
        // An address is worth opening only if a Stowage shows its pages behind it.
        let _: IgnoredAny = operators_client::get(&upstream.access, "/v1/fleet", "fleet").await?;
        let url = format!("http://{own_address}{prefix}/");
        writeln!(
            std::io::stdout(),
            "Open {url}\nCtrl-C ends it. The address is a key: it gives your access to Stowage's pages."
        )?;
        let proxy = Proxy {
            access: self.access,
            own_address,
            prefix,
            upstream: Mutex::new(upstream),
        };
        let router = Router::new().fallback(answer).with_state(Arc::new(proxy));
        let stop = CancellationToken::new();
        let address = ServedAddress::plain("ui", &Metrics::new());
        tokio::select! {
            served = accept::serve(listener, address, router, stop) => served?,
            ended = tokio::signal::ctrl_c() => ended?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn random_key() -> Result<String> {
    let mut bytes = [0; KEY_BYTES];
    let drawn = rustls::crypto::ring::default_provider()
        .secure_random
        .fill(&mut bytes);
    drawn.ok().context("this machine gives no random numbers")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

struct Proxy {
    access: ContextAccessArgs,
    own_address: SocketAddr,
    /// The path that the key opens.
    prefix: String,
    upstream: Mutex<Upstream>,
}

/// A way to the server, with credentials as of some moment.
#[derive(Clone)]
struct Upstream {
    access: Arc<Access>,
    read_at: Instant,
}

impl Upstream {
    fn new(access: Access) -> Self {
        Self {
            access: Arc::new(access),
            read_at: Instant::now(),
        }
    }
}

/// The server's answer, as soon as it begins.
async fn send(access: &Access, path: &str, headers: HeaderMap) -> Result<http::Response<Incoming>> {
    let answer = operators_client::send(access, path, headers);
    let answer = tokio::time::timeout(RESPONSE_TIMEOUT, answer).await;
    let too_slow = || format!("{} takes too long to answer", access.server_name());
    Ok(answer.with_context(too_slow)??)
}

async fn answer(State(proxy): State<Arc<Proxy>>, request: Request) -> Response {
    let (head, _) = request.into_parts();
    let path = match proxy.allowed_path(&head.method, head.uri.path(), &head.headers) {
        Ok(path) => path,
        Err(refused) => return *refused,
    };
    let path_and_query = head
        .uri
        .query()
        .map_or(path.to_owned(), |query| format!("{path}?{query}"));
    proxy
        .fetch_with_renewal(&path_and_query, &head.headers)
        .await
        .unwrap_or_else(|error| {
            let text = format!("{error:#}\n");
            (StatusCode::BAD_GATEWAY, text).into_response()
        })
}

impl Proxy {
    /// The page that is asked for, if the request is from the page that this proxy served.
    fn allowed_path<'a>(
        &self,
        method: &Method,
        path: &'a str,
        headers: &HeaderMap,
    ) -> Result<&'a str, Box<Response>> {
        let refused = |status: StatusCode, text: &'static str| {
            Box::new((status, format!("{text}\n")).into_response())
        };
        if *method != Method::GET {
            return Err(refused(
                StatusCode::METHOD_NOT_ALLOWED,
                "pages are read with GET",
            ));
        }
        let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let hosts = [
            self.own_address.to_string(),
            format!("localhost:{}", self.own_address.port()),
        ];
        if !text(header::HOST).is_some_and(|host| hosts.iter().any(|own| own == host)) {
            return Err(refused(
                StatusCode::FORBIDDEN,
                "open the address that stowage ui printed",
            ));
        }
        if text(FETCH_SITE).is_some_and(|site| !["same-origin", "none"].contains(&site)) {
            return Err(refused(StatusCode::FORBIDDEN, "another page asked for it"));
        }
        let Some(page_path) = path.strip_prefix(&*self.prefix) else {
            let text = "open the whole address that stowage ui printed; it is another one after each start";
            return Err(refused(StatusCode::NOT_FOUND, text));
        };
        match page_path {
            proxied if PROXIED_PATHS.contains(&proxied) => Ok(proxied),
            asset
                if asset
                    .strip_prefix(ASSETS)
                    .is_some_and(|name| !name.contains(['/', '%'])) =>
            {
                Ok(asset)
            }
            // The page's own addresses are relative to the last slash.
            "" => {
                let to = [(header::LOCATION, format!("{}/", self.prefix))];
                Err(Box::new(
                    (StatusCode::PERMANENT_REDIRECT, to).into_response(),
                ))
            }
            _ => Err(refused(StatusCode::NOT_FOUND, "no such page here")),
        }
    }

    /// The server's answer; with a new token, if the one before is not accepted any more.
    async fn fetch_with_renewal(&self, path: &str, headers: &HeaderMap) -> Result<Response> {
        let upstream = self.upstream.lock().await.clone();
        let answer = self.fetch(&upstream, path, headers).await?;
        if answer.status() != StatusCode::UNAUTHORIZED {
            return Ok(answer);
        }
        let renewed = {
            let mut current = self.upstream.lock().await;
            if current.read_at == upstream.read_at
                && current.read_at.elapsed() > TOKEN_RENEWAL_INTERVAL
            {
                let reading = self.access.renew(&current.access);
                // An exec plugin may take a while, and its future stays on one thread.
                let renewed = tokio::task::block_in_place(|| Handle::current().block_on(reading))?;
                *current = Upstream::new(renewed);
            }
            current.clone()
        };
        match renewed.read_at == upstream.read_at {
            true => Ok(answer),
            false => self.fetch(&renewed, path, headers).await,
        }
    }

    async fn fetch(
        &self,
        upstream: &Upstream,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Response> {
        let forwarded = |from: &HeaderMap, names: &[HeaderName]| -> HeaderMap {
            names
                .iter()
                .filter_map(|name| Some((name.clone(), from.get(name)?.clone())))
                .collect()
        };
        let headers = forwarded(headers, &FORWARDED_REQUEST_HEADERS);
        let answer = send(&upstream.access, path, headers).await?;
        let (status, headers) = (
            answer.status(),
            forwarded(answer.headers(), &FORWARDED_RESPONSE_HEADERS),
        );
        Ok((status, headers, Body::new(answer.into_body())).into_response())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_another_one_each_time_and_long() {
        let (one, other) = (random_key().unwrap(), random_key().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.len(), 2 * KEY_BYTES);
    }
}
