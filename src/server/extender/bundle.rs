//! `GET /v1/bundle`: what the flight recorder has of the last minutes, for `stowage replay`.

use super::Extender;
use super::operators::{PageClient, stream_page};
use super::server::PeerAddress;
use crate::service::BundleNames;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use std::num::NonZeroU32;
use std::time::Duration;
use stowage_kubernetes_objects::port::OperatorPage;
use tracing::warn;

pub const PATH: &str = "/v1/bundle";
/// Minutes of a bundle by default. A longer segment is given whole: replay begins at its checkpoint.
const DEFAULT_MINUTES: u32 = 15;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BundleQuery {
    /// How many of the last minutes.
    minutes: Option<NonZeroU32>,
    /// Whether names are replaced by pseudonyms.
    #[serde(default)]
    redact: bool,
}

/// Why there is no bundle. The client gets the text.
#[derive(Debug, thiserror::Error)]
enum BundleError {
    #[error("{0}; write {PATH}?minutes=15, and &redact=true for pseudonyms in place of names")]
    Query(String),
    #[error("this Stowage records nothing: start it with `stowage serve --record DIR`")]
    NotRecording,
}

impl IntoResponse for BundleError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Query(_) => StatusCode::BAD_REQUEST,
            Self::NotRecording => StatusCode::NOT_FOUND,
        };
        (status, format!("{self}\n")).into_response()
    }
}

pub async fn answer(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
    query: Result<Query<BundleQuery>, QueryRejection>,
) -> Response {
    let (client, operator_page) = (
        PageClient::new(source, headers),
        OperatorPage::Cluster(PATH),
    );
    let slot = match extender
        .admit_and_take_slot(&client, operator_page, &extender.pages.large)
        .await
    {
        Ok(turn) => turn,
        Err(refused) => return refused.into_response(),
    };
    let BundleQuery { minutes, redact } = match query {
        Ok(Query(query)) => query,
        Err(rejection) => return BundleError::Query(rejection.body_text()).into_response(),
    };
    let Some(bundles) = extender.bundles else {
        return BundleError::NotRecording.into_response();
    };
    let period =
        Duration::from_secs(60 * u64::from(minutes.map_or(DEFAULT_MINUTES, NonZeroU32::get)));
    let names = if redact {
        BundleNames::Pseudonyms
    } else {
        BundleNames::AsRecorded
    };
    stream_page(
        &extender.state,
        slot,
        "application/octet-stream",
        move |out| {
            bundles
                .write_bundle(period, names, out)
                .inspect_err(|error| warn!(%error, "a bundle ends early"))
        },
    )
}
