//! Whether the cluster has the runtime class that the webhook adds to pods: with another name they would be refused, without it they
//! would see no GPU.

use super::request::within;
use crate::service::{DefaultRuntimeClass, ServerState};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::{Api, Client};
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};

/// How often it is read: a class that is made or deleted counts this much later.
const RUNTIME_CLASS_READ_INTERVAL: Duration = Duration::from_secs(10);
/// A read that takes longer is given up.
const RUNTIME_CLASS_READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads until it is dropped. What was read last counts while the API server does not answer.
pub async fn run(client: Client, state: Arc<ServerState>, name: String) {
    let classes: Api<RuntimeClass> = Api::all(client);
    let mut has_failed = false;
    loop {
        match within(RUNTIME_CLASS_READ_TIMEOUT, classes.get_metadata_opt(&name)).await {
            Ok(found) => {
                has_failed = false;
                let found = found.map_or(DefaultRuntimeClass::None, |_| {
                    DefaultRuntimeClass::Named(name.clone())
                });
                let is_new = state.default_runtime_class.send_if_modified(|known| {
                    let is_new = *known != found;
                    *known = found.clone();
                    is_new
                });
                if is_new {
                    let adds = found != DefaultRuntimeClass::None;
                    info!(
                        class = name,
                        adds, "the runtime class that the webhook adds to pods"
                    );
                }
            }
            Err(error) if !has_failed => {
                has_failed = true;
                warn!(
                    "the runtime class {name} cannot be read: {error}; until it was read once, pods that ask for VRAM are not completed"
                );
            }
            Err(_) => {}
        }
        tokio::time::sleep(RUNTIME_CLASS_READ_INTERVAL).await;
    }
}
