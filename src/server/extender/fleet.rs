//! `GET /v1/fleet`: the whole cluster as data, for people who look at it ([`Fleet`]); and `GET /v1/fleet/events`, the same as it
//! changes ([`live`] makes the events, [`events`] sends them). Read only.
//!
//! It is computed on a copy of the ledger, outside its lock, and written while the client reads it.

pub mod events;
pub mod live;

use super::Extender;
use super::operators::{JSON, PageClient, stream_page};
use super::server::PeerAddress;
use crate::service::ServerState;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use stowage_kubernetes_objects::port::OperatorPage;
use stowage_scheduling::explaining::fleet::Fleet;
use stowage_scheduling::explaining::fleet::history::FleetSums;

/// Pending pods that are listed; the others are counted. More than a person reads, and a fraction of a megabyte.
const MAX_LISTED_PENDING: usize = 500;

/// The cluster at this moment. The ledger is locked for a copy only.
pub(super) fn current_fleet(state: &ServerState) -> Fleet {
    let ledger = state.ledger_copy();
    Fleet::from_ledger(&ledger, MAX_LISTED_PENDING)
}

/// The sums of the cluster at this moment, for the history while no client watches.
fn current_sums(state: &ServerState) -> FleetSums {
    let ledger = state.ledger_copy();
    FleetSums::from_ledger(&ledger)
}

pub async fn answer(
    State(extender): State<Extender>,
    source: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
) -> Response {
    let (client, operator_page) = (
        PageClient::new(source, headers),
        OperatorPage::Cluster("/v1/fleet"),
    );
    let slot = match extender
        .admit_and_take_slot(&client, operator_page, &extender.pages.large)
        .await
    {
        Ok(turn) => turn,
        Err(refused) => return refused.into_response(),
    };
    if let Some(reason) = extender.state.leadership.reason_not_synced() {
        let text = format!("the ledger is not complete yet: {reason}\n");
        return (StatusCode::SERVICE_UNAVAILABLE, text).into_response();
    }
    let state = extender.state;
    let shown = state.clone();
    stream_page(&state, slot, JSON, move |out| {
        Ok(serde_json::to_writer(out, &current_fleet(&shown))?)
    })
}
