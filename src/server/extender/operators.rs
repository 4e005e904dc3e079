//! The operators' address: metrics, health, the ledger and the policy as JSON. Read only.
//!
//! Every page except the probes and the files of the [`page`](super::page) in a browser checks the client's access first
//! ([`PageAuth`](super::page_auth::PageAuth)). A page is rendered from a copy of the ledger, outside the lock, and no more pages
//! at a time than [`PageLimits`] allow. The pages that grow with the cluster are written in chunks as the client reads them.

mod page_limits;
mod pages;

pub(crate) use page_limits::PageLimits;
pub(super) use page_limits::{stream_page, with_slot};

use super::Extender;
use super::page_auth::METRICS;
use super::request::{BadRequest, json};
use super::server::PeerAddress;
use crate::service::{RejectedPolicy, ServerState, WorkKind};
use axum::Router;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use serde::Serialize;
use std::net::IpAddr;
use std::sync::Arc;
use stowage_kubernetes_objects::port::OperatorPage;
use stowage_scheduling::ids::comma_separated;
use stowage_scheduling::policy::{Digest, Policy};
use stowage_scheduling::units::Moment;
use stowage_telemetry::scrape;
use tokio::sync::Semaphore;

/// The type of the large pages.
pub(super) const JSON: &str = "application/json";

/// What a client needs to see a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    /// Nothing: the kubelet's probes have no token, and the page in a browser has no data in itself.
    None,
    /// `get` of the page's path, as a non-resource URL.
    Path,
    /// `get` of the pod that the page is about; other pods are named as far as the client may see them.
    Pod,
}

/// Every page and its guard. The router has these and no others.
fn routes() -> [(&'static str, Guard, MethodRouter<Extender>); 15] {
    [
        ("/", Guard::None, get(super::page::index)),
        ("/assets/{file}", Guard::None, get(super::page::asset)),
        ("/healthz", Guard::None, get(|| async { "ok\n" })),
        ("/readyz", Guard::None, get(readyz)),
        ("/metrics", Guard::Path, get(metrics)),
        ("/debug/snapshot", Guard::Path, get(snapshot)),
        ("/debug/reports", Guard::Path, get(reports)),
        ("/debug/policy", Guard::Path, get(policy)),
        ("/debug/shadow", Guard::Path, get(shadow)),
        ("/v1/fleet", Guard::Path, get(super::fleet::answer)),
        (
            "/v1/fleet/events",
            Guard::Path,
            get(super::fleet::events::answer),
        ),
        ("/v1/models", Guard::Path, get(super::models::answer)),
        (
            super::autoscaling::PATH,
            Guard::Path,
            get(super::autoscaling::answer),
        ),
        (super::bundle::PATH, Guard::Path, get(super::bundle::answer)),
        ("/v1/explain", Guard::Pod, get(super::explain::answer)),
    ]
}

/// Every page's path and its guard.
pub fn guards() -> impl Iterator<Item = (&'static str, Guard)> {
    routes().into_iter().map(|(path, guard, _)| (path, guard))
}

pub fn router(extender: Extender) -> Router {
    let routes = routes()
        .into_iter()
        .fold(Router::new(), |router, (path, _, handler)| {
            router.route(path, handler)
        });
    routes.fallback(no_such_page).with_state(extender)
}

async fn no_such_page() -> (StatusCode, String) {
    let pages = comma_separated(guards().map(|(path, _)| path));
    (
        StatusCode::NOT_FOUND,
        format!("this is the operators' address (--admin), with the pages {pages}\n"),
    )
}

/// The client of a page: its source address and the head of its request.
pub(super) struct PageClient {
    pub source: IpAddr,
    pub headers: HeaderMap,
}

impl PageClient {
    pub fn new(source: Option<Extension<PeerAddress>>, headers: HeaderMap) -> Self {
        Self {
            source: PeerAddress::from_extension(source),
            headers,
        }
    }
}

impl Extender {
    /// Waits for a slot to render this page, after checking that the client may see it.
    pub(super) async fn admit_and_take_slot(
        &self,
        client: &PageClient,
        operator_page: OperatorPage,
        slots: &Arc<Semaphore>,
    ) -> Result<tokio::sync::OwnedSemaphorePermit, BadRequest> {
        self.page_auth
            .admit(&client.headers, client.source, operator_page)
            .await?;
        self.take_slot(slots).await
    }

    /// Waits for a slot to render a page for a client that was admitted already.
    pub(super) async fn take_slot(
        &self,
        slots: &Arc<Semaphore>,
    ) -> Result<tokio::sync::OwnedSemaphorePermit, BadRequest> {
        let slot = page_limits::take_slot(slots).await;
        slot.ok_or_else(|| {
            self.state.metrics.edge.limited_requests.with_label_values(&["operators", "pages"]).inc();
            BadRequest::Crowded {
                code: "pages-at-limit",
                message: "as many of these pages are being read as may be at one time; try again in a second"
                    .into(),
            }
        })
    }
}

/// Renders a page on a blocking thread. The page keeps its slot until it is read.
async fn render_page(
    extender: Extender,
    client: PageClient,
    path: &'static str,
    slots: Arc<Semaphore>,
    render: impl FnOnce(&Extender) -> Response + Send + 'static,
) -> Response {
    let slot = match extender
        .admit_and_take_slot(&client, OperatorPage::Cluster(path), &slots)
        .await
    {
        Ok(turn) => turn,
        Err(refused) => return refused.into_response(),
    };
    let state = extender.state.clone();
    let making = state
        .heavy_work
        .with_panic_count(WorkKind::Page, move || render(&extender));
    let made = tokio::task::spawn_blocking(making).await;
    made.map_or_else(
        |_| StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        |response| with_slot(response, slot),
    )
}

async fn metrics(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
) -> Response {
    let slots = extender.pages.metrics.clone();
    let (client, operator_page) = (
        PageClient::new(source, headers),
        OperatorPage::Cluster(METRICS),
    );
    match extender
        .admit_and_take_slot(&client, operator_page, &slots)
        .await
    {
        Ok(slot) => {
            let state = extender.state.clone();
            stream_page(&state, slot, scrape::CONTENT_TYPE, move |out| {
                pages::metrics(&extender, out)
            })
        }
        Err(refused) => refused.into_response(),
    }
}

/// Ready once the ledger is complete and the agents' address has a certificate, and while the API server answers. A replica that
/// does not lead is ready too: it is up to date and on standby.
async fn readyz(State(extender): State<Extender>) -> Response {
    let state = &extender.state;
    let leadership = &state.leadership;
    let lost = state.api_server_contact.unreachable_for(state.now());
    let lost = lost.map(|silence| {
        format!(
            "the API server has not answered for {} s: what is known of the cluster is as old",
            silence.0 / 1000
        )
    });
    // Agents that would report to this replica could not.
    let problem = lost.or_else(|| state.missing_certificate_reason.borrow().clone());
    let is_ready = leadership.is_synced() && problem.is_none();
    let status = if is_ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let refused = state
        .refused_reads
        .describe()
        .filter(|_| !leadership.is_synced());
    let refused = refused.map(|refused| format!("the watches have not synced yet: {refused}"));
    let text = problem
        .or(refused)
        .unwrap_or_else(|| leadership.reason_not_leading().unwrap_or("ok").into());
    (status, format!("{text}\n{}", refused_policy(state))).into_response()
}

/// A second line if the policy's files are rejected. That is no reason to take this replica out of service: it uses the
/// previous policy, as every other replica does.
fn refused_policy(state: &ServerState) -> String {
    let Some(RejectedPolicy {
        since, headline, ..
    }) = state.policy_status.get().rejected
    else {
        return String::new();
    };
    let digest = state.cluster().ledger().policy().digest;
    let since = utc_text(state, since);
    format!(
        "policy: files rejected since {since}, and {digest} stays in force: {}\n",
        one_line(&headline)
    )
}

/// The wall time of a moment as text, in whole seconds for readability.
fn utc_text(state: &ServerState, moment: Moment) -> String {
    state
        .clock
        .to_wall(moment)
        .strftime("%Y-%m-%dT%H:%M:%SZ")
        .to_string()
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// The current policy with all its settings, its source, and the change that was rejected after it.
async fn policy(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
) -> Response {
    let slots = extender.pages.small.clone();
    render_page(
        extender,
        PageClient::new(source, headers),
        "/debug/policy",
        slots,
        |extender| {
            let state = &extender.state;
            let (policy, status) = {
                // A policy becomes current under this lock.
                let cluster = state.cluster();
                (cluster.ledger().policy().clone(), state.policy_status.get())
            };
            let refused = status.rejected.as_ref();
            let refused = refused.map(|refused| RefusedPolicyPart {
                since: utc_text(state, refused.since),
                problems: &refused.problems,
            });
            let in_force_since = utc_text(state, status.in_force_since);
            let (digest, source) = (policy.digest, &*status.source);
            json(
                StatusCode::OK,
                &PolicyInForce {
                    digest,
                    source,
                    in_force_since,
                    refused,
                    policy: &policy,
                },
            )
        },
    )
    .await
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PolicyInForce<'a> {
    digest: Digest,
    source: &'a str,
    in_force_since: String,
    refused: Option<RefusedPolicyPart<'a>>,
    policy: &'a Policy,
}

#[derive(Serialize)]
struct RefusedPolicyPart<'a> {
    since: String,
    problems: &'a str,
}

async fn shadow(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
) -> Response {
    let slots = extender.pages.small.clone();
    render_page(
        extender,
        PageClient::new(source, headers),
        "/debug/shadow",
        slots,
        |extender| json(StatusCode::OK, &extender.journal.records()),
    )
    .await
}

async fn snapshot(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
) -> Response {
    let (client, operator_page) = (
        PageClient::new(source, headers),
        OperatorPage::Cluster("/debug/snapshot"),
    );
    match extender
        .admit_and_take_slot(&client, operator_page, &extender.pages.large)
        .await
    {
        Ok(slot) => {
            let ledger = extender.state.ledger_copy();
            stream_page(&extender.state, slot, JSON, move |out| {
                Ok(pages::snapshot(ledger, out)?)
            })
        }
        Err(refused) => refused.into_response(),
    }
}

/// Each node's latest report and its age.
async fn reports(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
) -> Response {
    let (client, operator_page) = (
        PageClient::new(source, headers),
        OperatorPage::Cluster("/debug/reports"),
    );
    match extender
        .admit_and_take_slot(&client, operator_page, &extender.pages.large)
        .await
    {
        Ok(slot) => {
            let state = extender.state.clone();
            stream_page(&state, slot, JSON, move |out| {
                Ok(pages::reports(&extender, out)?)
            })
        }
        Err(refused) => refused.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extender::request::RequestLimits;
    use crate::kubernetes::dump::{Dump, DumpControlPlane};
    use crate::kubernetes::index::ClusterIndex;
    use std::path::Path;
    use std::sync::mpsc::channel;
    use std::time::Duration;
    use stowage_scheduling::units::Millis;
    use tower::ServiceExt;

    fn extender() -> Extender {
        let state = ServerState::new(Policy::default());
        let dump = Dump::from_text(
            r#"{"items":[{"kind":"Node","metadata":{"name":"node-a"}}]}"#.into(),
            Path::new("test"),
        );
        let control_plane =
            DumpControlPlane::load(&dump, &state, &mut ClusterIndex::default()).unwrap();
        Extender::new(state, Arc::new(control_plane), RequestLimits::default())
    }

    fn scraped(extender: &Extender, ledger: &stowage_scheduling::ledger::Ledger) -> String {
        let mut text = Vec::new();
        pages::write_metrics(extender, ledger, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_scrape_is_written_without_the_ledgers_lock() {
        let extender = extender();
        let ledger = extender.state.cluster().ledger().clone();
        let (done, outcome) = channel();
        let state = extender.state.clone();
        let _filter = state.cluster();
        std::thread::spawn(move || {
            let text = scraped(&extender, &ledger);
            let mut snapshot = Vec::new();
            pages::snapshot(ledger, &mut snapshot).unwrap();
            done.send((text, String::from_utf8(snapshot).unwrap()))
                .unwrap();
        });
        let outcome = outcome.recv_timeout(Duration::from_secs(60));
        let (text, snapshot) = outcome.expect("a page waits for the lock of the ledger");
        assert!(text.contains("\nstowage_nodes 1\n"), "{text}");
        assert!(snapshot.contains(r#""violations":[]"#), "{snapshot}");
    }

    /// In a debug build, what is written under the lock panics.
    #[tokio::test]
    async fn no_page_is_rendered_under_the_lock() {
        let pages = router(extender());
        for path in [
            "/metrics",
            "/debug/snapshot",
            "/debug/reports",
            "/debug/policy",
            "/debug/shadow",
            "/v1/fleet",
            "/v1/models",
        ] {
            let request = axum::extract::Request::get(path)
                .body(axum::body::Body::empty())
                .unwrap();
            let answer = pages.clone().oneshot(request).await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            let body = axum::body::to_bytes(answer.into_body(), 1 << 20).await;
            assert!(body.is_ok_and(|body| !body.is_empty()), "{path}");
        }
    }

    #[tokio::test]
    async fn readyz_names_refused_resources_and_the_remedy() {
        let extender = extender();
        let text = async || {
            let answer = readyz(State(extender.clone())).await;
            let body = axum::body::to_bytes(answer.into_body(), 1 << 16)
                .await
                .unwrap();
            String::from_utf8(body.to_vec()).unwrap()
        };
        let refused = |seconds| {
            let at = Moment(0) + Millis::seconds(seconds);
            extender
                .state
                .refused_reads
                .record_failure("resourceslices", Some(403), at);
        };
        refused(1);
        assert_eq!(text().await, "ok\n", "it has listed them before");
        extender.state.leadership.require_relist();
        let said = text().await;
        assert!(
            said.contains("does not show resourceslices (403); one that has just started"),
            "{said}"
        );
        refused(20);
        assert!(
            text()
                .await
                .contains("(403); let Stowage's service account")
        );
        extender
            .state
            .refused_reads
            .record_success("resourceslices", Moment(0));
        assert_eq!(text().await, "the watches have not synced yet\n");
    }

    #[tokio::test]
    async fn a_replica_is_not_ready_while_the_api_server_is_unreachable() {
        let extender = extender();
        let ready = async || readyz(State(extender.clone())).await.status();
        assert_eq!(ready().await, StatusCode::OK, "a dump has no API server");
        let now = extender.state.now();
        extender
            .state
            .api_server_contact
            .record_contact(now.before(Millis::seconds(16)));
        assert_eq!(ready().await, StatusCode::SERVICE_UNAVAILABLE);
        let ledger = extender.state.cluster().ledger().clone();
        assert!(scraped(&extender, &ledger).contains("\nstowage_synced 0\n"));
        extender.state.api_server_contact.record_contact(now);
        assert_eq!(ready().await, StatusCode::OK);
    }
}
