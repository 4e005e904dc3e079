//! Listens on the addresses of the scheduler, the agents and the operators until shutdown.
//!
//! Each is separate, because binding pods, reporting for a node and reading pages are three different permissions. The agents'
//! and the operators' address also have a thread each ([`background_thread`]): kube-scheduler waits for one answer at a time, and
//! would wait behind hundreds of reports, or behind a page with every pod on it. All three have one accept loop ([`accept`]) and
//! the same kinds of limits ([`limits`]); [`admission`] decides which connections are admitted, and [`peer`] how long each step
//! may take.

pub mod accept;
mod admission;
mod background_thread;
pub mod limits;
mod peer;

use super::request::{
    BadRequest, RequestLimits, check_announced_length, json, json_from_bytes, parse, read_body,
};
use super::tls::Tls;
use super::wire::{BindingArgs, ExtenderArgs, PreemptionArgs, RequestNodes};
use super::{Extender, bind, filter, operators, preempt, prioritize, reports, webhook};
use crate::service::WorkKind;
use accept::ServedAddress;
use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, post};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::OptionFuture;
use k8s_openapi::api::core::v1::Pod;
use limits::ConnectionLimits;
use std::any::Any;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::time::{Duration, SystemTime};
use stowage_kubernetes_objects as objects;
use stowage_telemetry::traces::PodSpan;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;

/// How long connections and writes in progress may take to end after shutdown begins.
pub(crate) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum bytes of a body with reports: more than an agent that keeps to a report's limits ever needs.
const MAX_REPORTS_BODY: usize = stowage_report::limits::MAX_BYTES;

/// Read buffer of the scheduler's address: its bodies can be tens of megabytes.
const SCHEDULER_READ_BUFFER: usize = 400 << 10;
/// A head with a token of 8 KiB fits several times.
const SMALL_READ_BUFFER: usize = 32 << 10;
/// Kernel send buffer for a client that does not read; it counts twice as much against the container's memory. Enough for
/// megabytes a second over a slow link.
const SMALL_SEND_BUFFER: usize = 128 << 10;

/// The source address of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress(pub IpAddr);

impl PeerAddress {
    /// The source of a request; unspecified for a request that did not arrive over a connection.
    pub fn from_extension(found: Option<Extension<Self>>) -> IpAddr {
        found.map_or(Ipv4Addr::UNSPECIFIED.into(), |Extension(source)| source.0)
    }
}

/// A listening address, with or without TLS.
pub struct Endpoint {
    pub listener: TcpListener,
    pub tls: Option<Tls>,
}

impl Endpoint {
    pub fn plain(listener: TcpListener) -> Self {
        Self {
            listener,
            tls: None,
        }
    }
}

pub struct Endpoints {
    pub scheduler: Endpoint,
    pub agents: Endpoint,
    pub operators: Endpoint,
    /// Where the API server has pods completed.
    pub webhook: Option<Endpoint>,
}

/// The router of the scheduler's address: kube-scheduler's verbs.
pub fn scheduler_router(extender: Extender) -> Router {
    Router::new()
        .route("/scheduler/filter", post(filter_verb))
        .route("/scheduler/prioritize", post(prioritize_verb))
        .route("/scheduler/prioritize-claims", post(prioritize_claims_verb))
        .route("/scheduler/preempt", post(preempt_verb))
        .route("/scheduler/bind", post(bind_verb))
        .route(
            "/v1/reports",
            any(|| wrong_address("agents post to their own address: see --agents, by default 127.0.0.1:9446")),
        )
        .fallback(|| {
            wrong_address(
                "this is the scheduler's address (--listen), with POST /scheduler/filter, prioritize, prioritize-claims, \
                 preempt and bind; the operators' pages are on --admin, by default 127.0.0.1:9445",
            )
        })
        .layer(CatchPanicLayer::custom(on_panic(&extender, "any")))
        .with_state(extender)
}

/// The router of the agents' address.
pub fn agents_router(extender: Extender) -> Router {
    Router::new()
        .route("/v1/reports", post(reports_endpoint))
        .fallback(|| {
            wrong_address("agents post to /v1/reports; the scheduler's verbs are on --listen")
        })
        .layer(CatchPanicLayer::custom(on_panic(&extender, "reports")))
        .with_state(extender)
}

/// Connections to the webhook's address, of which each may have a review in memory. API servers keep a few open.
const WEBHOOK_CONNECTIONS: usize = 256;
/// So that no pod alone shuts API servers out.
const WEBHOOK_CONNECTIONS_PER_SOURCE: usize = 64;

/// The router of the webhook's address.
pub fn webhook_router(extender: Extender) -> Router {
    Router::new()
        .route("/admission/pods", post(webhook::complete_pod))
        .fallback(|| wrong_address("the API server posts reviews of pods to /admission/pods"))
        .layer(CatchPanicLayer::custom(on_panic(&extender, "webhook")))
        .with_state(extender)
}

async fn wrong_address(text: &'static str) -> (StatusCode, String) {
    (StatusCode::NOT_FOUND, format!("{text}\n"))
}

fn on_panic(
    extender: &Extender,
    verb: &'static str,
) -> impl Fn(Box<dyn Any + Send>) -> Response + Clone + Send + Sync + 'static {
    let panics = extender.state.metrics.panics.clone();
    move |_| {
        panics.with_label_values(&[verb]).inc();
        let answer = BadRequest::unprocessable(
            "panic",
            "Stowage failed on this request; its log says where",
        );
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            answer.into_response().into_body(),
        )
            .into_response()
    }
}

/// Serves all addresses until `shutdown`, then lets requests in progress end.
pub async fn serve(
    extender: Extender,
    endpoints: Endpoints,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let state = extender.state.clone();
    let stop = shutdown.child_token();
    let limits = extender.limits.connections;
    let metrics = &extender.state.metrics.edge;
    let small_address = |name, tls, most| {
        let (buffer, unread) = (SMALL_READ_BUFFER, Some(SMALL_SEND_BUFFER));
        ServedAddress {
            name,
            tls,
            limits,
            max_connections: most,
            read_buffer: buffer,
            send_buffer: unread,
            metrics: metrics.clone(),
        }
    };
    let Endpoints {
        scheduler,
        agents,
        operators,
        webhook,
    } = endpoints;
    let for_scheduler = ServedAddress {
        read_buffer: SCHEDULER_READ_BUFFER,
        send_buffer: None,
        ..small_address("scheduler", scheduler.tls, limits.scheduler)
    };
    let for_agents = small_address("agents", agents.tls, limits.agents);
    let for_operators = small_address("operators", operators.tls, limits.operators);
    let webhook = webhook.map(|webhook| {
        let served = ServedAddress {
            limits: ConnectionLimits {
                per_source: WEBHOOK_CONNECTIONS_PER_SOURCE,
                ..limits
            },
            ..small_address("webhook", webhook.tls, WEBHOOK_CONNECTIONS)
        };
        let router = webhook_router(extender.clone());
        background_thread::serve_on_background_thread("webhook", stop.child_token(), |stop| {
            accept::serve(webhook.listener, served, router, stop)
        })
    });
    let reports = agents_router(extender.clone());
    let pages = operators::router(extender.clone()).layer(CatchPanicLayer::custom(on_panic(
        &extender,
        WorkKind::Page.into_str(),
    )));
    tokio::try_join!(
        accept::serve(
            scheduler.listener,
            for_scheduler,
            scheduler_router(extender.clone()),
            stop.clone()
        ),
        background_thread::serve_on_background_thread("agents", stop.child_token(), |stop| {
            accept::serve(agents.listener, for_agents, reports, stop)
        }),
        background_thread::serve_on_background_thread("operators", stop.child_token(), |stop| {
            let live = extender
                .live
                .clone()
                .run(extender.state.clone(), stop.clone());
            let serving = accept::serve(operators.listener, for_operators, pages, stop);
            async { futures::join!(serving, live).0 }
        }),
        OptionFuture::from(webhook).map(|served| served.unwrap_or(Ok(()))),
        async {
            stop.cancelled().await;
            state.leadership.set_stopping();
            Ok(())
        },
    )?;
    extender.writes.close();
    // After this time the API server's answer is lost, as in a crash; the next start reads the pods.
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, extender.writes.wait()).await;
    Ok(())
}

async fn filter_verb(State(extender): State<Extender>, headers: HeaderMap, body: Body) -> Response {
    answer_verb(&extender, "filter", headers, body, async |body, arrived| {
        decide_about_nodes(&extender, "filter", &body, arrived, |args, nodes| {
            Ok(json_from_bytes(
                StatusCode::OK,
                filter::filter(&extender, args, nodes)?.to_json(),
            ))
        })
    })
    .await
}

async fn prioritize_verb(
    State(extender): State<Extender>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    answer_verb(
        &extender,
        "prioritize",
        headers,
        body,
        async |body, arrived| {
            decide_about_nodes(&extender, "prioritize", &body, arrived, |args, nodes| {
                Ok(json(
                    StatusCode::OK,
                    &prioritize::prioritize(&extender, args, nodes)?,
                ))
            })
        },
    )
    .await
}

async fn prioritize_claims_verb(
    State(extender): State<Extender>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    answer_verb(
        &extender,
        "prioritize",
        headers,
        body,
        async |body, arrived| {
            decide_about_nodes(&extender, "prioritize", &body, arrived, |args, nodes| {
                Ok(json(
                    StatusCode::OK,
                    &prioritize::prioritize_claims(&extender, args, nodes)?,
                ))
            })
        },
    )
    .await
}

async fn preempt_verb(
    State(extender): State<Extender>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    answer_verb(
        &extender,
        "preempt",
        headers,
        body,
        async |body, arrived| {
            let args: PreemptionArgs<'_> = parse(&body)?;
            let call = call_span(&extender, "preempt", arrived, &args.pod);
            Ok(json(
                StatusCode::OK,
                &call.instrument(preempt::preempt(&extender, &args)).await?,
            ))
        },
    )
    .await
}

async fn bind_verb(State(extender): State<Extender>, headers: HeaderMap, body: Body) -> Response {
    answer_verb(&extender, "bind", headers, body, async |body, arrived| {
        let args: BindingArgs = parse(&body)?;
        Ok(json(
            StatusCode::OK,
            &bind::bind_arrived_at(&extender, &args, arrived).await?,
        ))
    })
    .await
}

/// Takes the reports of one request, whether this replica leads or not. The sender is authenticated before the body is read.
async fn reports_endpoint(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let received = extender.state.now();
    let taken = async {
        let sender = extender
            .agent_auth
            .admit(&headers, PeerAddress::from_extension(source))
            .await?;
        let larger = "an agent's own reports are smaller: send fewer in one batch";
        let limits = RequestLimits {
            body: extender.limits.body.min(MAX_REPORTS_BODY),
            too_large_advice: larger,
            ..extender.limits
        };
        check_announced_length(&headers, limits)?;
        let bytes = reports::announced_bytes(&body, limits.body);
        let _room = extender.report_bodies.acquire(&sender, bytes).await?;
        let body = tokio::select! {
            body = read_body(&headers, body, limits) => body?,
            slow = extender.report_bodies.time_is_up() => return Err(slow),
        };
        Ok(json(
            StatusCode::OK,
            &reports::reports(&extender, &sender, received, &body)?,
        ))
    };
    let answer = respond(&extender, "reports", taken.await);
    background_thread::yield_core();
    answer
}

/// The span of a call about this pod. A pod without a name or a UID is refused, and has none.
fn call_span(
    extender: &Extender,
    verb: &'static str,
    arrived: Option<SystemTime>,
    pod: &Pod,
) -> PodSpan {
    // Nothing is parsed for a span that is not recorded.
    if arrived.is_none() {
        return PodSpan::default();
    }
    match objects::identity(pod) {
        Ok((uid, key)) => extender.state.traces().call(verb, arrived, &uid, &key),
        Err(_) => PodSpan::default(),
    }
}

/// Answers a verb: reads the body, checks leadership, measures the time, and counts malformed requests.
async fn answer_verb<F>(
    extender: &Extender,
    name: &'static str,
    headers: HeaderMap,
    body: Body,
    decide: impl FnOnce(Bytes, Option<SystemTime>) -> F,
) -> Response
where
    F: Future<Output = Result<Response, BadRequest>>,
{
    let outcome = async {
        let arrived = extender.state.traces().arrival_time();
        let body = read_body(&headers, body, extender.limits).await?;
        if let Some(reason) = extender.state.leadership.reason_not_leading() {
            return Err(BadRequest::Unavailable(reason));
        }
        let _timer = extender
            .state
            .metrics
            .verb_seconds
            .with_label_values(&[name])
            .start_timer();
        decide(body, arrived).await
    };
    respond(extender, name, outcome.await)
}

pub(super) fn respond(
    extender: &Extender,
    name: &str,
    outcome: Result<Response, BadRequest>,
) -> Response {
    outcome.unwrap_or_else(|bad| {
        extender
            .state
            .metrics
            .bad_requests
            .with_label_values(&[name, bad.code()])
            .inc();
        bad.into_response()
    })
}

/// Parses the pod and the nodes of filter or prioritize, and decides within a span that has their number.
fn decide_about_nodes(
    extender: &Extender,
    verb: &'static str,
    body: &Bytes,
    arrived: Option<SystemTime>,
    decide: impl FnOnce(&ExtenderArgs<'_>, &RequestNodes<'_>) -> Result<Response, BadRequest>,
) -> Result<Response, BadRequest> {
    let args: ExtenderArgs<'_> = parse(body)?;
    let missing = || BadRequest::unprocessable("no-nodes", "neither Nodes nor NodeNames is there");
    let nodes = args
        .request_nodes()
        .ok_or_else(missing)?
        .map_err(|error| BadRequest::Malformed(error.to_string()))?;
    let call = call_span(extender, verb, arrived, &args.pod);
    let _within = call.enter();
    call.set("stowage.nodes.asked", nodes.len() as i64);
    decide(&args, &nodes)
}
