//! From an HTTP request to an operation on the store, and back.
//!
//! Only translation, counting and ordered faults are here; what a write means is in `write` and `pods`.

use super::Shared;
use super::calls::Call;
use super::error::ApiError;
use super::faults::{Fault, Operation};
use super::patch::PatchKind;
use super::pods;
use super::resource::Target;
use super::selector::Selector;
use super::store::Key;
use super::watch::{self, Watch};
use super::write::{self, Part};
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode, Uri, header};
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// The query parameters that mean something here; all others are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Parameters {
    watch: String,
    resource_version: String,
    field_selector: String,
    label_selector: String,
    send_initial_events: String,
    grace_period_seconds: Option<i64>,
}

/// A request, taken apart.
struct Asked {
    target: Target,
    parameters: Parameters,
    content_type: String,
    body: Bytes,
}

pub async fn handle(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let Some(target) = Target::of_path(uri.path()) else {
        return refusal(&ApiError::no_such_path());
    };
    let header = |name: header::HeaderName| {
        headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    let parameters = Query::try_from_uri(&uri).map(|Query(parameters)| parameters).unwrap_or_default();
    let asked = Asked { target, parameters, content_type: header(header::CONTENT_TYPE), body };
    let Some(verb) = asked.verb(&method) else {
        return refusal(&ApiError::method_not_allowed());
    };
    let resource = asked.target.with_subresource();
    shared.calls.add(Call { client: header(header::USER_AGENT), verb, resource });
    if verb == "watch" {
        return asked.watch(&shared);
    }
    let fault = asked.operation(&method).and_then(|operation| shared.faults.take(operation));
    answer(&shared, verb, &asked, fault).await
}

async fn answer(shared: &Arc<Shared>, verb: &str, asked: &Asked, fault: Option<Fault>) -> Response {
    match fault {
        Some(Fault::Fails) => return refusal(&ApiError::internal("a fault was ordered")),
        Some(Fault::Conflicts) => {
            let name = asked.target.name.as_deref().unwrap_or_default();
            return refusal(&ApiError::conflict(
                &asked.target.with_subresource(),
                name,
                "a fault was ordered",
            ));
        }
        Some(Fault::Forbids) => return refusal(&ApiError::new(403, "Forbidden", "a fault was ordered")),
        Some(Fault::TooMany) => {
            return refusal(&ApiError::too_many_requests("a fault was ordered", None));
        }
        Some(Fault::Hangs) => {
            shared.stop.cancelled().await;
            return refusal(&ApiError::internal("the server stops"));
        }
        Some(Fault::AnswersLate(_)) | None => {}
    }
    let result = asked.perform(shared, verb);
    if let Some(Fault::AnswersLate(delay)) = fault {
        tokio::select! {
            () = shared.stop.cancelled() => {}
            () = tokio::time::sleep(delay) => {}
        }
    }
    match result {
        Ok((code, object)) => json_response(code, &object),
        Err(error) => refusal(&error),
    }
}

impl Target {
    fn with_subresource(&self) -> String {
        match &self.subresource {
            Some(subresource) => format!("{}/{subresource}", self.resource.plural),
            None => self.resource.plural.to_owned(),
        }
    }
}

impl Asked {
    /// Kubernetes' word for the request.
    fn verb(&self, method: &Method) -> Option<&'static str> {
        let watches = matches!(self.parameters.watch.as_str(), "true" | "1");
        match (method.as_str(), &self.target.name) {
            ("GET", _) if watches => Some("watch"),
            ("GET", None) => Some("list"),
            ("GET", Some(_)) => Some("get"),
            ("POST", _) => Some("create"),
            ("PUT", Some(_)) => Some("update"),
            ("PATCH", Some(_)) => Some("patch"),
            ("DELETE", Some(_)) => Some("delete"),
            _ => None,
        }
    }

    /// Which orderable fault the request can meet.
    fn operation(&self, method: &Method) -> Option<Operation> {
        let writes = matches!(method.as_str(), "POST" | "PUT" | "PATCH");
        match (self.target.with_subresource().as_str(), writes) {
            ("pods/binding", true) => Some(Operation::Binding),
            ("pods/eviction", true) => Some(Operation::Eviction),
            ("pods", true) if self.target.name.is_some() => Some(Operation::Pod),
            ("pods/status", true) => Some(Operation::PodStatus),
            ("nodes/status", true) => Some(Operation::NodeStatus),
            ("tokenreviews", true) => Some(Operation::TokenReview),
            ("poddisruptionbudgets", false) => Some(Operation::ListBudgets),
            _ => None,
        }
    }

    fn perform(&self, shared: &Shared, verb: &str) -> Result<(StatusCode, Value), ApiError> {
        let ok = |object: Arc<Value>| (StatusCode::OK, Value::clone(&object));
        let now = Timestamp::now();
        match (verb, self.target.subresource.as_deref()) {
            ("list", None) => Ok((StatusCode::OK, self.list(shared))),
            ("get", None | Some("status")) => shared.store.lock().get(&self.key()?).cloned().map(ok),
            ("create", None) if self.target.resource.is_token_reviews() => {
                Ok((StatusCode::CREATED, shared.tokens.review(self.json()?)))
            }
            ("create", None) => {
                let object = self.json()?;
                let created = shared.write(|store| write::create(store, &self.target, object, now))?;
                Ok((StatusCode::CREATED, Value::clone(&created)))
            }
            ("create", Some("binding")) if self.target.resource.is_pods() => {
                let (key, binding) = (self.key()?, self.json()?);
                shared.write(|store| pods::bind(store, &key, &binding, now))?;
                Ok((StatusCode::CREATED, success()))
            }
            ("create", Some("eviction")) if self.target.resource.is_pods() => {
                let (key, eviction) = (self.key()?, self.json()?);
                shared.write(|store| pods::evict(store, &key, &eviction, now))?;
                Ok((StatusCode::CREATED, success()))
            }
            ("update", _) => {
                let (key, part, object) = (self.key()?, self.part()?, self.json()?);
                shared.write(|store| write::replace(store, &key, part, object)).map(ok)
            }
            ("patch", _) => self.patch(shared).map(ok),
            ("delete", None) => {
                let (key, options) = (self.key()?, self.delete_options()?);
                shared.write(|store| write::delete(store, &key, &options, now)).map(ok)
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    fn patch(&self, shared: &Shared) -> Result<Arc<Value>, ApiError> {
        let (key, part, body) = (self.key()?, self.part()?, self.json()?);
        let kind = PatchKind::of_content_type(&self.content_type)?;
        shared.write(|store| {
            let absent = store.get(&key).is_err();
            if kind == PatchKind::Apply && part == Part::Main && absent {
                let mut object = body;
                super::defaults::object_at(&mut object, "metadata").insert("name".into(), json!(key.name));
                return write::create(store, &self.target, object, Timestamp::now());
            }
            write::patch(store, &key, part, kind, &body)
        })
    }

    fn list(&self, shared: &Shared) -> Value {
        let store = shared.store.lock();
        let resource = self.target.resource;
        let selector = self.selector();
        let items: Vec<&Value> =
            store.list(resource).map(Arc::as_ref).filter(|object| selector.matches(object)).collect();
        json!({
            "kind": format!("{}List", resource.kind), "apiVersion": resource.api_version,
            "metadata": {"resourceVersion": store.revision().to_string()}, "items": items,
        })
    }

    fn watch(&self, shared: &Arc<Shared>) -> Response {
        let asked = &self.parameters.resource_version;
        let initial_bookmark = self.parameters.send_initial_events == "true";
        let after =
            if asked.is_empty() || asked == "0" || initial_bookmark { None } else { asked.parse().ok() };
        let watch =
            Watch { resource: self.target.resource, selector: self.selector(), after, initial_bookmark };
        let body = Body::from_stream(watch::stream(shared.clone(), watch));
        ([(header::CONTENT_TYPE, "application/json")], body).into_response()
    }

    /// A named object is also a selector: `GET …/pods/a?watch` watches that one.
    fn selector(&self) -> Selector {
        let mut fields = self.parameters.field_selector.clone();
        if let Some(name) = &self.target.name {
            fields = format!("{fields},metadata.name={name}");
        }
        Selector::new(&self.target.namespace, &fields, &self.parameters.label_selector)
    }

    fn key(&self) -> Result<Key, ApiError> {
        let name = self.target.name.clone().ok_or_else(ApiError::method_not_allowed)?;
        let namespace =
            if self.target.resource.namespaced { self.target.namespace.clone() } else { String::new() };
        Ok(Key { resource: self.target.resource, namespace, name })
    }

    fn part(&self) -> Result<Part, ApiError> {
        match self.target.subresource.as_deref() {
            None => Ok(Part::Main),
            Some("status") if self.target.resource.has_status() => Ok(Part::Status),
            Some(_) => Err(ApiError::no_such_path()),
        }
    }

    fn json(&self) -> Result<Value, ApiError> {
        serde_json::from_slice(&self.body).map_err(|error| ApiError::bad_request(error.to_string()))
    }

    fn delete_options(&self) -> Result<Value, ApiError> {
        let mut options = if self.body.is_empty() { json!({}) } else { self.json()? };
        if let Some(seconds) = self.parameters.grace_period_seconds {
            super::defaults::fields_of(&mut options).insert("gracePeriodSeconds".into(), json!(seconds));
        }
        Ok(options)
    }
}

fn success() -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})
}

fn refusal(error: &ApiError) -> Response {
    let code = StatusCode::from_u16(error.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(code, &error.to_status());
    if let Some(seconds) = error.retry_after_seconds {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

fn json_response(code: StatusCode, body: &Value) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}
