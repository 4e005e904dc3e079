//! The few writes the stand-ins make as clients of the API server.

use serde_json::{Value, json};

/// Why a write failed: the API server's answer, or that there was none.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct WriteError(String);

impl From<kube::Error> for WriteError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self(status.message.clone()),
            other => Self(other.to_string()),
        }
    }
}

pub(crate) fn pod_path(namespace: &str, name: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/pods/{name}")
}

pub(crate) fn node_path(name: &str) -> String {
    format!("/api/v1/nodes/{name}")
}

/// A strategic merge patch of an object's status.
pub async fn patch_status(
    client: &kube::Client,
    path: &str,
    status: Value,
) -> Result<(), WriteError> {
    let body = json!({"status": status});
    send(
        client,
        "PATCH",
        &format!("{path}/status"),
        "application/strategic-merge-patch+json",
        &body,
    )
    .await
}

pub async fn delete(client: &kube::Client, path: &str, options: Value) -> Result<(), WriteError> {
    send(client, "DELETE", path, "application/json", &options).await
}

/// Posts a Binding of the pod at `path`; `metadata` names it.
pub async fn bind(
    client: &kube::Client,
    path: &str,
    metadata: Value,
    node: &str,
) -> Result<(), WriteError> {
    let body = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": {"kind": "Node", "name": node},
    });
    send(
        client,
        "POST",
        &format!("{path}/binding"),
        "application/json",
        &body,
    )
    .await
}

async fn send(
    client: &kube::Client,
    method: &str,
    path: &str,
    content_type: &str,
    body: &Value,
) -> Result<(), WriteError> {
    let request = http::Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::CONTENT_TYPE, content_type);
    let request = request
        .body(body.to_string().into_bytes())
        .map_err(|error| WriteError(error.to_string()))?;
    client.request_text(request).await?;
    Ok(())
}
