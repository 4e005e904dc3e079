//! What replicas request, as the API server's side of their connections sees it: whose tokens are refused, and what is written,
//! whatever comes of it.

use super::binding_writes::BindingWrites;
use super::late_reservations::ReservationWrites;
use super::*;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use http::StatusCode;

#[derive(Default)]
pub(crate) struct ReplicaWrites {
    pub bindings: BindingWrites,
    pub reservations: ReservationWrites,
    /// Replicas whose tokens have expired.
    pub expired_tokens: Mutex<BTreeSet<String>>,
}

impl ReplicaWrites {
    /// The API server as a replica sees it, watched.
    pub fn wrap(self: &Arc<Self>, client: &str, server: axum::Router) -> axum::Router {
        let (this, client) = (self.clone(), client.to_owned());
        server.layer(from_fn(move |request: Request, next: Next| {
            let (this, client) = (this.clone(), client.clone());
            async move { this.handle(&client, request, next).await }
        }))
    }

    async fn handle(&self, client: &str, request: Request, next: Next) -> Response {
        if self.expired_tokens.lock().contains(client) {
            return unauthorized();
        }
        let path = request.uri().path();
        let is_binding = path.ends_with("/binding");
        let is_pod_status = path.contains("/pods/") && path.ends_with("/status");
        if !(is_binding || is_pod_status) {
            return next.run(request).await;
        }
        let (head, body) = request.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.unwrap_or_default();
        let written: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let _until_answered = is_binding.then(|| self.bindings.begin_write(client, &written));
        if is_pod_status {
            self.reservations.record(client, &written);
        }
        next.run(Request::from_parts(head, Body::from(bytes))).await
    }
}

/// The API server's answer to an expired token.
fn unauthorized() -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 401,
        "reason": "Unauthorized", "message": "Unauthorized",
    });
    (StatusCode::UNAUTHORIZED, axum::Json(status)).into_response()
}
