//! How many replicas each model needs: evaluated every fifteen seconds from the agents' latest reports, and answered at
//! `GET /v1/models/desired-replicas?model=MODEL` and as a metric. Read only: an HPA or KEDA changes replicas.
//!
//! The leader and its standby evaluate alike, because both get the reports: a new leader goes on where the other one was.

use super::Extender;
use super::operators::{PageClient, with_slot};
use super::request::json;
use super::server::PeerAddress;
use crate::service::WorkKind;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;
use stowage_kubernetes_objects::port::OperatorPage;
use stowage_scheduling::autoscaling::{Autoscaler, DesiredReplicas, SignalNeed, loads};
use stowage_scheduling::ids::ModelId;
use stowage_scheduling::units::{Millis, Moment};
use tokio::time::MissedTickBehavior;

pub const PATH: &str = "/v1/models/desired-replicas";

/// Time between two evaluations: as often as an HPA reads them (`--horizontal-pod-autoscaler-sync-period`).
pub const EVALUATION_INTERVAL: Duration = Duration::from_secs(15);
/// Time between two checks whether the watches have synced: before that there is nothing to evaluate.
const SYNC_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// What is remembered of every model, and the latest answers.
#[derive(Debug, Default)]
pub struct ModelAutoscaling {
    /// Locked over a whole evaluation. Take no other lock of this after `latest`.
    autoscaler: Mutex<Autoscaler>,
    latest: Mutex<Option<Evaluation>>,
}

#[derive(Debug)]
struct Evaluation {
    at: Moment,
    desired: BTreeMap<ModelId, DesiredReplicas>,
}

impl ModelAutoscaling {
    /// The latest answer for a model; `None` before there is one.
    pub fn desired(&self, model: &ModelId) -> Option<DesiredReplicas> {
        self.latest.lock().as_ref()?.desired.get(model).cloned()
    }
}

/// Evaluates at this interval until it is dropped.
pub async fn run(extender: Extender, interval: Duration) {
    let mut waiting = tokio::time::interval(SYNC_POLL_INTERVAL);
    while !extender.state.leadership.is_synced() {
        waiting.tick().await;
    }
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (state, extender) = (extender.state.clone(), extender.clone());
        // Thousands of reports and all pods are gone through: not on a thread that answers the scheduler.
        let evaluating = state
            .heavy_work
            .spawn_in_background(WorkKind::DesiredReplicas, move || evaluate(&extender));
        // If it panicked, the next evaluation tries again.
        let _ = evaluating.await;
    }
}

/// Evaluates all models once. Without a synced ledger nothing changes: the answers before stay.
pub fn evaluate(extender: &Extender) {
    let state = &extender.state;
    let leadership = &state.leadership;
    let now = state.now();
    if !leadership.is_synced() || state.api_server_contact.unreachable_for(now).is_some() {
        return;
    }
    let ledger = state.ledger_copy();
    let engines = extender
        .board
        .engine_samples(now, ledger.policy().telemetry.stale);
    let engine_loads = loads(&ledger, &engines);
    let autoscaling = &extender.autoscaling;
    let desired =
        autoscaling
            .autoscaler
            .lock()
            .evaluate(&ledger.policy().autoscaling, engine_loads, now);
    state.metrics.autoscaling.set(&desired);
    *autoscaling.latest.lock() = Some(Evaluation { at: now, desired });
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DesiredReplicasQuery {
    model: String,
}

/// Why there is no answer. The client gets the text.
#[derive(Debug, thiserror::Error)]
enum DesiredReplicasError {
    #[error("{0}; write {PATH}?model=MODEL, with the model's name as its engines report it")]
    Query(String),
    #[error("model is {0:?}, which is no model's name")]
    Model(String),
    #[error("replicas per model are not evaluated yet: {0}")]
    NotSynced(&'static str),
    #[error(
        "no replica of the model {0} is known. Look whether its engines report it (`stowage models`), and whether the name is \
         the one that they report. To have an answer while it has no replica, name it in the policy under autoscaling.models"
    )]
    UnknownModel(ModelId),
}

impl IntoResponse for DesiredReplicasError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Query(_) | Self::Model(_) => StatusCode::BAD_REQUEST,
            Self::NotSynced(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::UnknownModel(_) => StatusCode::NOT_FOUND,
        };
        (status, format!("{self}\n")).into_response()
    }
}

/// The answer for one model. KEDA reads `desiredReplicas`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DesiredReplicasPage<'a> {
    model: &'a ModelId,
    desired_replicas: u32,
    current_replicas: u32,
    /// What the load asks for, before windows, steps and bounds.
    asked_replicas: u32,
    serving_replicas: u32,
    starting_replicas: u32,
    asleep_replicas: u32,
    /// Sleeping replicas to wake before others start.
    wake_replicas: u32,
    reason: &'static str,
    message: String,
    signals: &'a [SignalNeed],
    evaluated_millis_ago: Millis,
}

pub async fn answer(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
    query: Result<Query<DesiredReplicasQuery>, QueryRejection>,
) -> Response {
    let (client, operator_page) = (
        PageClient::new(source, headers),
        OperatorPage::Cluster(PATH),
    );
    let slot = match extender
        .admit_and_take_slot(&client, operator_page, &extender.pages.small)
        .await
    {
        Ok(turn) => turn,
        Err(refused) => return refused.into_response(),
    };
    // A client that may not see the page learns nothing of what it takes.
    match parse_query(query).and_then(|model| answer_for(&extender, model)) {
        Ok(answer) => with_slot(answer, slot),
        Err(error) => error.into_response(),
    }
}

fn parse_query(
    query: Result<Query<DesiredReplicasQuery>, QueryRejection>,
) -> Result<ModelId, DesiredReplicasError> {
    let Query(query) =
        query.map_err(|rejection| DesiredReplicasError::Query(rejection.body_text()))?;
    ModelId::parse(&query.model).map_err(|_| DesiredReplicasError::Model(query.model))
}

fn answer_for(extender: &Extender, model: ModelId) -> Result<Response, DesiredReplicasError> {
    if let Some(reason) = extender.state.leadership.reason_not_synced() {
        return Err(DesiredReplicasError::NotSynced(reason));
    }
    let now = extender.state.now();
    let latest = extender.autoscaling.latest.lock();
    let evaluation = latest.as_ref();
    let evaluation = evaluation.ok_or(DesiredReplicasError::NotSynced(
        "the first evaluation is under way",
    ))?;
    let Some(desired) = evaluation.desired.get(&model) else {
        return Err(DesiredReplicasError::UnknownModel(model));
    };
    let desired_replicas_page = DesiredReplicasPage {
        model: &model,
        desired_replicas: desired.replicas,
        current_replicas: desired.current(),
        asked_replicas: desired.requested,
        serving_replicas: desired.serving,
        starting_replicas: desired.starting,
        asleep_replicas: desired.asleep,
        wake_replicas: desired.wake,
        reason: desired.by.into(),
        message: desired.message(),
        signals: &desired.needs,
        evaluated_millis_ago: now.since(evaluation.at),
    };
    Ok(json(StatusCode::OK, &desired_replicas_page))
}
