//! `GET /v1/fleet`: the whole cluster as data, for people who look at it ([`Fleet`]); and `GET /v1/fleet/events`, the same as it
//! changes ([`live`] makes the events, [`events`] sends them). Read only.
//!
//! It is computed on a copy of the ledger, outside its lock, and written while the client reads it.

pub mod events;
pub mod live;

use super::Extender;
use super::operators::{Asker, JSON, streamed};
use super::server::PeerAddress;
use crate::service::Service;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use stowage_kubernetes_objects::port::OperatorPage;
use stowage_scheduling::explaining::fleet::Fleet;
use stowage_scheduling::explaining::fleet::history::FleetSums;

/// Pending pods that are listed; the others are counted. More than a person reads, and a fraction of a megabyte.
const MOST_PENDING: usize = 500;

/// The cluster at this moment. The ledger is locked for a copy only.
pub(super) fn at_present(service: &Service) -> Fleet {
    let ledger = service.ledger_to_read();
    Fleet::of(&ledger, MOST_PENDING)
}

/// The sums of the cluster at this moment, for the history while no client watches.
fn sums_at_present(service: &Service) -> FleetSums {
    let ledger = service.ledger_to_read();
    FleetSums::of_ledger(&ledger)
}

pub async fn answer(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
) -> Response {
    let (asker, page) = (
        Asker::new(source, headers),
        OperatorPage::OfCluster("/v1/fleet"),
    );
    let turn = match extender.turn(&asker, page, &extender.pages.large).await {
        Ok(turn) => turn,
        Err(refused) => return refused.into_response(),
    };
    if let Some(reason) = extender.service.leadership.reason_not_synced() {
        let text = format!("the ledger is not complete yet: {reason}\n");
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    }
    let service = extender.service;
    let shown = service.clone();
    streamed(&service, turn, JSON, move |out| {
        Ok(serde_json::to_writer(out, &at_present(&shown))?)
    })
}
