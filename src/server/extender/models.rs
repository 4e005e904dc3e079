//! `GET /v1/models[?model=MODEL]`: where models are, and how long until a pod of each answers. Read only.
//!
//! The answer is computed on a copy of the ledger, outside its lock, and has at most [`MOST`] entries and one node's engines.

use super::Extender;
use super::operators::{PageClient, with_slot};
use super::request::json;
use super::server::PeerAddress;
use crate::service::WorkKind;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use stowage_kubernetes_objects::port::OperatorPage;
use stowage_scheduling::explaining::models::{PageRequest, list_models, locate};
use stowage_scheduling::ids::{ModelId, NodeName};
use stowage_scheduling::ledger::Ledger;

/// Entries of one answer, unless the client asks for another number: a few hundred kilobytes.
const DEFAULT_LIMIT: usize = 1000;
/// Entries of one answer at most: some megabytes.
const MOST: usize = 10_000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelsQuery {
    /// This model, in every place; without it all models, by their counts.
    model: Option<String>,
    limit: Option<usize>,
    /// The `next` of the page before.
    after: Option<String>,
}

/// Why there is no answer. The client gets the text.
#[derive(Debug, thiserror::Error)]
enum ModelsError {
    #[error("{0}; write /v1/models?model=MODEL&limit=N&after=NEXT, or leave any of them out")]
    Query(String),
    #[error("model is {0:?}, which is no model's name")]
    Model(String),
    #[error("after is {0:?}; give the `next` of the page before")]
    After(String),
    #[error("limit is {0}; write a whole number from 1 to {MOST}")]
    Limit(usize),
    #[error("the ledger is not complete yet: {0}")]
    NotSynced(&'static str),
}

impl IntoResponse for ModelsError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Query(_) | Self::Model(_) | Self::After(_) | Self::Limit(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::NotSynced(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        (status, format!("{self}\n")).into_response()
    }
}

/// A parsed query.
#[derive(Debug)]
enum ModelsRequest {
    All(PageRequest<ModelId>),
    One(ModelId, PageRequest<NodeName>),
}

pub async fn answer(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
    query: Result<Query<ModelsQuery>, QueryRejection>,
) -> Response {
    let (client, operator_page) = (
        PageClient::new(source, headers),
        OperatorPage::Cluster("/v1/models"),
    );
    let slot = match extender
        .admit_and_take_slot(&client, operator_page, &extender.pages.small)
        .await
    {
        Ok(turn) => turn,
        Err(refused) => return refused.into_response(),
    };
    let query = query.map_err(|rejection| ModelsError::Query(rejection.body_text()));
    let request = match query.and_then(|Query(query)| parse_query(query)) {
        Ok(request) => request,
        Err(error) => return error.into_response(),
    };
    if let Some(reason) = extender.state.leadership.reason_not_synced() {
        return ModelsError::NotSynced(reason).into_response();
    }
    let state = extender.state;
    let making = {
        let state = state.clone();
        move || render_page(&state.ledger_copy(), &request)
    };
    let made =
        tokio::task::spawn_blocking(state.heavy_work.with_panic_count(WorkKind::Page, making))
            .await;
    made.map_or_else(
        |_| StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        |response| with_slot(response, slot),
    )
}

fn parse_query(query: ModelsQuery) -> Result<ModelsRequest, ModelsError> {
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MOST).contains(&limit) {
        return Err(ModelsError::Limit(limit));
    }
    let cursor = query.after.as_deref();
    let bad = |_| ModelsError::After(cursor.unwrap_or_default().into());
    Ok(match query.model {
        Some(text) => {
            let model = ModelId::parse(&text).map_err(|_| ModelsError::Model(text))?;
            ModelsRequest::One(
                model,
                PageRequest {
                    limit,
                    after: cursor.map(NodeName::parse).transpose().map_err(bad)?,
                },
            )
        }
        None => ModelsRequest::All(PageRequest {
            limit,
            after: cursor.map(ModelId::parse).transpose().map_err(bad)?,
        }),
    })
}

fn render_page(ledger: &Ledger, request: &ModelsRequest) -> Response {
    match request {
        ModelsRequest::All(page_request) => {
            json(StatusCode::OK, &list_models(ledger, page_request))
        }
        ModelsRequest::One(model, page_request) => {
            json(StatusCode::OK, &locate(ledger, model, page_request))
        }
    }
}
