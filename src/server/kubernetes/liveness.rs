//! Probes the API server with a small request whenever it has been silent for a while.
//!
//! In an active cluster the watches receive enough and no probe is sent. The result affects `/readyz` and the metrics, and no
//! decision.

use crate::service::Service;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client};
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::units::Millis;

/// How often the silence is checked: a probe is this much late at most.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Silence after which the API server is probed: a third of that after which it counts as unreachable, so two probes may be lost.
const QUIET: Millis = Millis::seconds(4);
/// Time limit of a probe; with the check interval it is as long as the silence before the first probe.
const PATIENCE: Duration = Duration::from_secs(3);

/// Probes until it is dropped.
pub async fn run(client: Client, service: Arc<Service>) {
    service.contact.heard(service.now());
    let nodes: Api<Node> = Api::all(client);
    // Lists one node, as it is stored now: an API server that answers from its cache may be cut off from the store.
    let one = ListParams::default().limit(1);
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let asked = service.now();
        for (what, lasted) in service.refused_reads.settled(asked) {
            tracing::info!(what, seconds = lasted.0 / 1000, "the watch works again");
        }
        if service
            .contact
            .silence(asked)
            .is_some_and(|silence| silence < QUIET)
        {
            continue;
        }
        if let Ok(Ok(_)) = tokio::time::timeout(PATIENCE, nodes.list_metadata(&one)).await {
            service.contact.heard(asked);
        }
    }
}
