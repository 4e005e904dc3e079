//! The operators' address: metrics, health, the books and the policy as JSON. Read only.

use super::Extender;
use super::reports::tidy;
use super::request::json;
use crate::ids::NodeName;
use crate::report::NodeReport;
use crate::scheduling::audit::{Violation, audit};
use crate::scheduling::ledger::PodEntry;
use crate::scheduling::policy::{Digest, Policy};
use crate::scheduling::snapshot::Snapshot;
use crate::service::{RefusedPolicy, Service};
use crate::units::{Millis, Moment};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Serialize;
use std::collections::BTreeMap;

pub fn router(extender: Extender) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/debug/snapshot", get(snapshot))
        .route("/v1/explain", get(super::explain::answer))
        .route("/debug/reports", get(reports))
        .route("/debug/policy", get(policy))
        .route(
            "/debug/shadow",
            get(async |State(extender): State<Extender>| json(StatusCode::OK, &extender.journal.records())),
        )
        .with_state(extender)
}

async fn metrics(State(extender): State<Extender>) -> Response {
    let service = &extender.service;
    let totals = service.ledger().totals();
    service.metrics.set_totals(&totals);
    // A node that is gone would be the oldest for ever.
    tidy(&extender);
    service.metrics.set_report_ages(extender.board.ages(service.now()));
    service.metrics.leading.set(service.gate.is_leading().into());
    service.metrics.synced.set(service.gate.is_synced().into());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], service.metrics.render())
        .into_response()
}

/// Ready once the books are complete. A replica that does not lead is ready too: it is up to date and stands by.
async fn readyz(State(extender): State<Extender>) -> Response {
    let gate = &extender.service.gate;
    let status = if gate.is_synced() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let text = gate.reason_shut().unwrap_or("ok");
    (status, format!("{text}\n{}", refused_policy(&extender.service))).into_response()
}

/// A second line, if there is something amiss with the policy's files. No reason to take this replica out: it decides by the
/// policy before them, as every other does.
fn refused_policy(service: &Service) -> String {
    let Some(RefusedPolicy { since, headline, .. }) = service.standing.get().refused else {
        return String::new();
    };
    let digest = service.ledger().policy().digest;
    let since = at(service, since);
    format!("policy: refused since {since}, and {digest} stays in force: {}\n", one_line(&headline))
}

/// A person reads seconds.
fn at(service: &Service, moment: Moment) -> String {
    service.clock.to_wall(moment).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// The policy in force with all its settings, where it comes from, and what was refused after it.
async fn policy(State(extender): State<Extender>) -> Response {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Shape<'a> {
        digest: Digest,
        source: &'a str,
        in_force_since: String,
        refused: Option<Refused<'a>>,
        policy: &'a Policy,
    }
    #[derive(Serialize)]
    struct Refused<'a> {
        since: String,
        problems: &'a str,
    }
    let service = &extender.service;
    let (policy, standing) = {
        // A policy comes into force under this lock.
        let ledger = service.ledger();
        (ledger.policy().clone(), service.standing.get())
    };
    let refused = standing.refused.as_ref();
    let refused =
        refused.map(|refused| Refused { since: at(service, refused.since), problems: &refused.problems });
    let in_force_since = at(service, standing.in_force_since);
    let shape =
        Shape { digest: policy.digest, source: &standing.source, in_force_since, refused, policy: &policy };
    json(StatusCode::OK, &shape)
}

async fn snapshot(State(extender): State<Extender>) -> Response {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Shape<'a> {
        policy: Digest,
        snapshot: &'a Snapshot,
        pods: BTreeMap<String, PodEntry>,
        violations: Vec<Violation>,
    }
    let (policy, snapshot, pods, violations) = {
        let mut ledger = extender.service.ledger();
        let pods =
            ledger.entries().into_iter().map(|(uid, entry)| (uid.to_string(), entry.clone())).collect();
        (ledger.policy().digest, ledger.snapshot(), pods, audit(&ledger))
    };
    json(StatusCode::OK, &Shape { policy, snapshot: &snapshot, pods, violations })
}

/// Each node's latest report and how long ago it came.
async fn reports(State(extender): State<Extender>) -> Response {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Shape<'a> {
        received_millis_ago: Millis,
        report: &'a NodeReport,
    }
    tidy(&extender);
    let (now, latest) = (extender.service.now(), extender.board.all());
    let mut shapes: BTreeMap<&NodeName, Shape<'_>> = BTreeMap::new();
    for (node, latest) in &latest {
        shapes.insert(node, Shape { received_millis_ago: latest.age(now), report: &latest.report });
    }
    json(StatusCode::OK, &shapes)
}
