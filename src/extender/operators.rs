//! The operators' address: metrics, health, and the books as JSON. Read only.

use super::Extender;
use super::reports::tidy;
use super::request::json;
use crate::ids::NodeName;
use crate::report::NodeReport;
use crate::scheduling::audit::{Violation, audit};
use crate::scheduling::ledger::PodEntry;
use crate::scheduling::snapshot::Snapshot;
use crate::units::Millis;
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
        .route("/debug/reports", get(reports))
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
    (status, format!("{text}\n")).into_response()
}

async fn snapshot(State(extender): State<Extender>) -> Response {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Shape<'a> {
        snapshot: &'a Snapshot,
        pods: BTreeMap<String, PodEntry>,
        violations: Vec<Violation>,
    }
    let (snapshot, pods, violations) = {
        let mut ledger = extender.service.ledger();
        let pods =
            ledger.entries().into_iter().map(|(uid, entry)| (uid.to_string(), entry.clone())).collect();
        (ledger.snapshot(), pods, audit(&ledger))
    };
    json(StatusCode::OK, &Shape { snapshot: &snapshot, pods, violations })
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
