//! Probes the API server with a small request whenever it has been silent for a while.
//!
//! In an active cluster the watches receive enough and no probe is sent. The result affects `/readyz` and the metrics, and no
//! decision.

use crate::service::ServerState;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client};
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::units::Millis;

/// How often the silence is checked: a probe is this much late at most.
const CONTACT_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Silence after which the API server is probed: a third of that after which it counts as unreachable, so two probes may be lost.
const SILENCE_BEFORE_PROBE: Millis = Millis::seconds(4);
/// Time limit of a probe; with the check interval it is as long as the silence before the first probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// Probes until it is dropped.
pub async fn run(client: Client, state: Arc<ServerState>) {
    state.api_server_contact.record_contact(state.now());
    let nodes: Api<Node> = Api::all(client);
    // Lists one node, as it is stored now: an API server that answers from its cache may be cut off from the store.
    let limit_one = ListParams::default().limit(1);
    loop {
        tokio::time::sleep(CONTACT_CHECK_INTERVAL).await;
        let asked_at = state.now();
        for (what, lasted) in state.refused_reads.take_recovered(asked_at) {
            tracing::info!(what, seconds = lasted.0 / 1000, "the watch works again");
        }
        if state
            .api_server_contact
            .silence(asked_at)
            .is_some_and(|silence| silence < SILENCE_BEFORE_PROBE)
        {
            continue;
        }
        if let Ok(Ok(_)) =
            tokio::time::timeout(PROBE_TIMEOUT, nodes.list_metadata(&limit_one)).await
        {
            state.api_server_contact.record_contact(asked_at);
        }
    }
}
