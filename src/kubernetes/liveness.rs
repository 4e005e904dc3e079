//! Whether the API server is there: a small question whenever nothing else has been heard of it for a while.
//!
//! Where much happens the watches say enough, and nothing is asked. The answer changes what `/readyz` and the metrics say, and
//! no decision.

use crate::service::Service;
use crate::units::Millis;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client};
use std::sync::Arc;
use std::time::Duration;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A third of the time after which it counts as gone: two questions may be lost.
const QUIET: Millis = Millis::seconds(4);
const PATIENCE: Duration = Duration::from_secs(3);

/// Asks as long as it runs.
pub async fn run(client: Client, service: Arc<Service>) {
    service.contact.heard(service.now());
    let nodes: Api<Node> = Api::all(client);
    // The name of one node, as it is stored now: one that answers from its memory may be cut off from what is stored.
    let one = ListParams::default().limit(1);
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let asked = service.now();
        if service.contact.silence(asked).is_some_and(|silence| silence < QUIET) {
            continue;
        }
        if let Ok(Ok(_)) = tokio::time::timeout(PATIENCE, nodes.list_metadata(&one)).await {
            service.contact.heard(asked);
        }
    }
}
