//! Certificates that Stowage keeps in a Secret: the command before the stand-in API server, and rotation under load.

mod processes;
mod rotation;

use serde_json::json;
use stowage_lab::demo::api_server::ApiServer;

const SECRET: &str = "secrets/kube-system/stowage-agents-tls";
const CONFIG_MAP: &str = "configmaps/kube-system/stowage-agents-ca";

/// Both objects, empty, as the manifests have them.
pub fn create_empty(api: &ApiServer) {
    let named = |name: &str| json!({ "metadata": { "name": name, "namespace": "kube-system" } });
    let mut secret = named("stowage-agents-tls");
    secret["type"] = json!("Opaque");
    api.create("secrets", secret).unwrap();
    api.create("configmaps", named("stowage-agents-ca"))
        .unwrap();
}

/// What agents are to trust, PEM; empty before anything is published.
fn published(api: &ApiServer) -> String {
    let config_map = api.get(CONFIG_MAP);
    let bundle = config_map
        .as_ref()
        .and_then(|map| map["data"]["ca.crt"].as_str());
    bundle.unwrap_or_default().to_owned()
}
