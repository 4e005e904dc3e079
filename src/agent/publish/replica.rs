//! One replica of Stowage: the connection to its address, and the results of reports sent there.

use super::destination::Destination;
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioExecutor;
use rustls::ClientConfig;
use serde::Deserialize;
use std::convert::Infallible;
use std::error::Error;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use stowage_scheduling::coded::coded;
use tower::Service;
use tracing::{info, warn};

/// An extender's answer is a sentence; a longer one is not an extender's.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// Maximum length of a stored reason.
const MAX_REASON_BYTES: usize = 500;
/// How often a reason is logged whose figures change every second.
const LOG_REPEAT_INTERVAL: Duration = Duration::from_secs(60);

coded! {
    /// The result of one report at one replica.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum PublishOutcome {
        "accepted" Accepted, "accepted";
        /// The replica has a later one.
        "dropped" Dropped, "dropped: a later one is known there";
        "rejected" Refused { status: StatusCode, reason: String }, "refused ({}): {reason}", status.as_u16();
        /// No answer, or none in time.
        "unreachable" Unreachable { reason: String }, "unreachable: {reason}";
        /// It was not sent.
        "unsent" Unsent { reason: String }, "not sent: {reason}";
    }
}

impl PublishOutcome {
    fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    fn is_same_kind(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Refused { status: one, .. }, Self::Refused { status: other, .. }) => {
                one == other
            }
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

/// The state of one replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaState {
    pub latest: PublishOutcome,
    pub accepted: u64,
    /// Reports with any other outcome.
    pub failed: u64,
}

pub(crate) struct ReplicaClient {
    name: String,
    uri: Uri,
    address: SocketAddr,
    client: HttpsClient,
    state: Option<ReplicaState>,
    logged: Option<(PublishOutcome, Instant)>,
}

type HttpsClient = Client<HttpsConnector<HttpConnector<PinnedResolver>>, Full<Bytes>>;

impl ReplicaClient {
    /// Connects to `address` instead of resolving the destination's name, and expects a certificate for that name.
    pub fn new(destination: &Destination, address: SocketAddr, tls: &ClientConfig) -> Self {
        let name = format!("{destination} at {}", address.ip());
        Self {
            name,
            uri: destination.uri(),
            address,
            client: client(address, tls),
            state: None,
            logged: None,
        }
    }

    /// Sets the trusted CAs. Connections made before are not used any more.
    pub fn set_trusted_cas(&mut self, tls: &ClientConfig) {
        self.client = client(self.address, tls);
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn state(&self) -> Option<&ReplicaState> {
        self.state.as_ref()
    }

    /// Posts one report and records the result.
    pub async fn post(
        &mut self,
        report: Bytes,
        authorization: Option<HeaderValue>,
        limit: Duration,
    ) {
        let outcome = match tokio::time::timeout(limit, self.send(report, authorization)).await {
            Ok(outcome) => outcome,
            Err(_) => PublishOutcome::Unreachable {
                reason: format!("no answer within {limit:?}"),
            },
        };
        self.record(outcome);
    }

    /// Whether the latest report did not get through.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.state
            .as_ref()
            .is_some_and(|state| state.latest.is_unreachable())
    }

    pub fn record(&mut self, outcome: PublishOutcome) {
        let state = self.state.get_or_insert(ReplicaState {
            latest: outcome.clone(),
            accepted: 0,
            failed: 0,
        });
        match outcome {
            PublishOutcome::Accepted => state.accepted += 1,
            _ => state.failed += 1,
        }
        state.latest = outcome.clone();
        self.log_change(outcome);
    }

    /// Logs a change once, not each second.
    fn log_change(&mut self, outcome: PublishOutcome) {
        if let Some((logged, when)) = &self.logged
            && (*logged == outcome
                || logged.is_same_kind(&outcome) && when.elapsed() < LOG_REPEAT_INTERVAL)
        {
            return;
        }
        match &outcome {
            PublishOutcome::Accepted => info!("reports to {}: {outcome}", self.name),
            _ => warn!("reports to {}: {outcome}", self.name),
        }
        self.logged = Some((outcome, Instant::now()));
    }

    async fn send(&self, report: Bytes, authorization: Option<HeaderValue>) -> PublishOutcome {
        let mut request = Request::post(self.uri.clone())
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(report))
            .expect("a URI and a body make a request");
        if let Some(authorization) = authorization {
            request
                .headers_mut()
                .insert(header::AUTHORIZATION, authorization);
        }
        let answer = match self.client.request(request).await {
            Ok(answer) => answer,
            Err(error) => {
                return PublishOutcome::Unreachable {
                    reason: error_chain(&error),
                };
            }
        };
        let status = answer.status();
        match Limited::new(answer.into_body(), MAX_ANSWER_BYTES)
            .collect()
            .await
        {
            Ok(body) => parse_outcome(status, &body.to_bytes()),
            Err(error) => PublishOutcome::Unreachable {
                reason: error_chain(&*error),
            },
        }
    }
}

fn client(address: SocketAddr, tls: &ClientConfig) -> HttpsClient {
    let mut http = HttpConnector::new_with_resolver(PinnedResolver(address));
    http.enforce_http(false);
    http.set_nodelay(true);
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(tls.clone())
        .https_or_http()
        .enable_http1()
        .wrap_connector(http);
    Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(1)
        .build(connector)
}

/// Parses an extender's answer about the one report it was sent.
fn parse_outcome(status: StatusCode, body: &[u8]) -> PublishOutcome {
    #[derive(Deserialize)]
    struct Taken {
        accepted: u64,
        dropped: u64,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Failure {
        error: String,
    }
    if status.is_success() {
        return match serde_json::from_slice(body) {
            Ok(Taken { accepted: 1.., .. }) => PublishOutcome::Accepted,
            Ok(Taken { dropped: 1.., .. }) => PublishOutcome::Dropped,
            _ => PublishOutcome::Refused {
                status,
                reason: "the answer is not Stowage's".into(),
            },
        };
    }
    let text = || String::from_utf8_lossy(body).trim().to_owned();
    let mut reason =
        serde_json::from_slice(body).map_or_else(|_| text(), |Failure { error }| error);
    reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
    PublishOutcome::Refused { status, reason }
}

/// An error with its causes: the outermost alone only says that something failed.
fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let one = error.to_string();
        if !text.contains(&one) {
            text = format!("{text}: {one}");
        }
        cause = error.source();
    }
    text
}

/// A resolver that answers every name with one address.
#[derive(Clone)]
struct PinnedResolver(SocketAddr);

impl Service<Name> for PinnedResolver {
    type Response = std::iter::Once<SocketAddr>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Name) -> Self::Future {
        ready(Ok(std::iter::once(self.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_what_became_of_the_report() {
        let ok = StatusCode::OK;
        assert_eq!(
            parse_outcome(ok, br#"{"accepted":1,"dropped":0}"#),
            PublishOutcome::Accepted
        );
        assert_eq!(
            parse_outcome(ok, br#"{"accepted":0,"dropped":1}"#),
            PublishOutcome::Dropped
        );
        for other in [
            &b"<html>hello</html>"[..],
            b"",
            br#"{"accepted":0,"dropped":0}"#,
        ] {
            assert!(
                matches!(parse_outcome(ok, other), PublishOutcome::Refused { .. }),
                "{other:?}"
            );
        }
        let refused = |body: &[u8]| match parse_outcome(StatusCode::FORBIDDEN, body) {
            PublishOutcome::Refused {
                status: StatusCode::FORBIDDEN,
                reason,
            } => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(br#"{"Error":"another node"}"#), "another node");
        assert_eq!(refused(b"no such page\n"), "no such page");
        assert_eq!(refused("ä".repeat(1000).as_bytes()).len(), MAX_REASON_BYTES);
    }

    #[test]
    fn a_reason_whose_figures_change_is_no_other_outcome() {
        let refused = |status, reason: &str| PublishOutcome::Refused {
            status,
            reason: reason.into(),
        };
        let one = refused(StatusCode::UNPROCESSABLE_ENTITY, "1 of 2");
        assert!(one.is_same_kind(&refused(StatusCode::UNPROCESSABLE_ENTITY, "3 of 4")));
        assert!(!one.is_same_kind(&refused(StatusCode::FORBIDDEN, "1 of 2")));
        assert!(!one.is_same_kind(&PublishOutcome::Accepted));
    }
}
