//! Bugs that are there on purpose: an oracle that never failed proves nothing.
//!
//! The service is not changed. A bug stands at an edge, between a replica's client and the API server, or is a setting that no
//! installation can have.

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use futures::StreamExt;
use http::{Method, StatusCode};
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlantedBug {
    /// A Binding that the API server refuses counts as written.
    ConfirmsRefusedBindings,
    /// Bindings, patches and evictions name no UID: they meet whatever pod has the name now.
    NamesNoUid,
    /// A replica that lists pods again gets the list it got first.
    SkipsRelists,
    /// Deletions of pods are not shown by watches.
    ForgetsDeletions,
    /// A replica that has seen a Lease sees it like that forever.
    TrustsOldLeases,
    /// A replica expects that writes land within a fraction of the time they may take.
    ShortWriteTimes,
}

/// The text is no planted bug's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no planted bug \"{0}\"")]
pub struct UnknownBug(String);

impl FromStr for PlantedBug {
    type Err = UnknownBug;

    fn from_str(text: &str) -> Result<Self, UnknownBug> {
        let found = Self::ALL.into_iter().find(|bug| bug.name() == text);
        found.ok_or_else(|| UnknownBug(text.to_owned()))
    }
}

impl PlantedBug {
    pub const ALL: [Self; 6] = [
        Self::ConfirmsRefusedBindings,
        Self::NamesNoUid,
        Self::SkipsRelists,
        Self::ForgetsDeletions,
        Self::TrustsOldLeases,
        Self::ShortWriteTimes,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::ConfirmsRefusedBindings => "e01-confirms-refused-bindings",
            Self::NamesNoUid => "e02-names-no-uid",
            Self::SkipsRelists => "e03-skips-relists",
            Self::ForgetsDeletions => "e04-forgets-deletions",
            Self::TrustsOldLeases => "e05-trusts-old-leases",
            Self::ShortWriteTimes => "e06-short-write-times",
        }
    }

    /// The API server as a replica with this bug sees it.
    pub fn wrap(self, server: Router) -> Router {
        let recorded_answers = Arc::new(Mutex::new(BTreeMap::new()));
        server.layer(from_fn(move |request: Request, next: Next| {
            let remembered = recorded_answers.clone();
            async move { self.handle(request, next, &remembered).await }
        }))
    }

    async fn handle(
        self,
        request: Request,
        next: Next,
        remembered: &Mutex<BTreeMap<String, Bytes>>,
    ) -> Response {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let is_watch = request
            .uri()
            .query()
            .is_some_and(|query| query.contains("watch=true"));
        let query = request.uri().query().unwrap_or_default().to_owned();
        match self {
            Self::ConfirmsRefusedBindings if path.ends_with("/binding") => {
                let mut answer = next.run(request).await;
                if answer.status() == StatusCode::CONFLICT {
                    *answer.status_mut() = StatusCode::CREATED;
                    *answer.body_mut() =
                        Body::from(r#"{"kind":"Status","apiVersion":"v1","status":"Success"}"#);
                }
                answer
            }
            Self::NamesNoUid if method != Method::GET => next.run(without_uid(request).await).await,
            Self::SkipsRelists if method == Method::GET && path.ends_with("/pods") && !is_watch => {
                replay_first_answer(format!("{path}?{query}"), request, next, remembered).await
            }
            Self::TrustsOldLeases if method == Method::GET && path.contains("/leases/") => {
                replay_first_answer(path, request, next, remembered).await
            }
            Self::ForgetsDeletions if path.ends_with("/pods") && is_watch => {
                next.run(request).await.map(|body| {
                    let shown = body.into_data_stream().filter(|line| {
                        let is_deletion = line
                            .as_ref()
                            .is_ok_and(|line| line.windows(9).any(|word| word == b"\"DELETED\""));
                        futures::future::ready(!is_deletion)
                    });
                    Body::from_stream(shown)
                })
            }
            _ => next.run(request).await,
        }
    }
}

/// Answers a repeated request with its first successful answer.
async fn replay_first_answer(
    what: String,
    request: Request,
    next: Next,
    remembered: &Mutex<BTreeMap<String, Bytes>>,
) -> Response {
    let recorded = remembered.lock().get(&what).cloned();
    let answer = next.run(request).await;
    let (mut head, body) = answer.into_parts();
    if let Some(body_before) = recorded {
        head.status = StatusCode::OK;
        return Response::from_parts(head, Body::from(body_before));
    }
    let Ok(body) = to_bytes(body, usize::MAX).await else {
        return Response::from_parts(head, Body::empty());
    };
    if head.status.is_success() {
        remembered.lock().insert(what, body.clone());
    }
    Response::from_parts(head, Body::from(body))
}

async fn without_uid(request: Request) -> Request {
    let (head, body) = request.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let body = match serde_json::from_slice::<Value>(&bytes) {
        Ok(mut object) => {
            for at in [
                "/metadata",
                "/deleteOptions/preconditions",
                "/preconditions",
            ] {
                if let Some(fields) = object.pointer_mut(at).and_then(Value::as_object_mut) {
                    fields.remove("uid");
                }
            }
            Body::from(object.to_string())
        }
        Err(_) => Body::from(bytes),
    };
    Request::from_parts(head, body)
}
