//! Translates HTTP requests into operations on the store, and results into answers.
//!
//! Only translation and counting are here; `write` and `pods` perform writes, and `delivery` decides when they land.

use super::ServerState;
use super::calls::ApiCall;
use super::delivery::deliver;
use super::error::ApiError;
use super::faults::Operation;
use super::pages::{FrozenList, ListPage};
use super::patch::PatchKind;
use super::pods;
use super::resource::{RequestTarget, Resource};
use super::selector::ListSelector;
use super::store::ObjectKey;
use super::watch::{self, WatchRequest};
use super::write::{self, ObjectPart};
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Method, StatusCode, Uri, header};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// The query parameters that are used here; all others are ignored.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Parameters {
    watch: String,
    resource_version: String,
    field_selector: String,
    label_selector: String,
    send_initial_events: String,
    grace_period_seconds: Option<i64>,
    limit: Option<usize>,
    #[serde(rename = "continue")]
    continue_token: String,
    timeout: String,
}

/// A request, taken apart.
pub(crate) struct ApiRequest {
    pub shared: Arc<ServerState>,
    /// Its User-Agent.
    pub client: String,
    /// The requested `timeout`, if any.
    pub timeout: Option<Duration>,
    verb: &'static str,
    target: RequestTarget,
    parameters: Parameters,
    content_type: String,
    body: Bytes,
}

/// The discovery answer: the resources of one API group version.
fn discovery(version: &str, resources: &[&Resource]) -> Response {
    let one = |resource: &&Resource| {
        json!({
            "name": resource.plural, "singularName": "", "kind": resource.kind, "namespaced": resource.namespaced,
            "verbs": ["get", "list", "watch"],
        })
    };
    let resources: Vec<Value> = resources.iter().map(one).collect();
    axum::Json(json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources,
    }))
    .into_response()
}

pub async fn handle(
    State(shared): State<Arc<ServerState>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let discovered = Resource::in_version(uri.path());
    if let (&Method::GET, [first, ..]) = (&method, &discovered[..]) {
        return discovery(first.api_version, &discovered);
    }
    let Some(target) = RequestTarget::from_path(uri.path()) else {
        return error_response(&ApiError::no_such_path());
    };
    let header = |name: header::HeaderName| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
            .to_owned()
    };
    let parameters: Parameters = Query::try_from_uri(&uri)
        .map(|Query(read)| read)
        .unwrap_or_default();
    let Some(verb) = verb(&method, &target, &parameters) else {
        return error_response(&ApiError::method_not_allowed());
    };
    let Ok(timeout) = parse_timeout(&parameters.timeout) else {
        return error_response(&ApiError::bad_request(
            "invalid timeout specified in the request URL",
        ));
    };
    let (client, content_type) = (header(header::USER_AGENT), header(header::CONTENT_TYPE));
    let request = ApiRequest {
        shared,
        client,
        timeout,
        verb,
        target,
        parameters,
        content_type,
        body,
    };
    request.answer().await
}

/// Kubernetes' word for the request.
fn verb(method: &Method, target: &RequestTarget, parameters: &Parameters) -> Option<&'static str> {
    let watches = matches!(parameters.watch.as_str(), "true" | "1");
    match (method.as_str(), &target.name) {
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

/// A duration as Go writes it: `5s`, `1m30s`.
fn parse_timeout(text: &str) -> Result<Option<Duration>, jiff::Error> {
    if text.is_empty() {
        return Ok(None);
    }
    Duration::try_from(text.parse::<jiff::SignedDuration>()?).map(Some)
}

impl RequestTarget {
    fn with_subresource(&self) -> String {
        match &self.subresource {
            Some(subresource) => format!("{}/{subresource}", self.resource.plural),
            None => self.resource.plural.to_owned(),
        }
    }
}

impl ApiRequest {
    async fn answer(self) -> Response {
        let (shared, client) = (self.shared.clone(), self.client.clone());
        shared.connections.until_connected(&client).await;
        shared.calls.record(ApiCall {
            client: client.clone(),
            verb: self.verb,
            resource: self.resource(),
        });
        let fault = self
            .operation()
            .and_then(|operation| Some((operation, shared.faults.take(&client, operation)?)));
        let answer = deliver(Arc::new(self), fault).await;
        shared.connections.until_connected(&client).await;
        answer
    }

    /// The kind of fault that may apply to the request.
    fn operation(&self) -> Option<Operation> {
        match (self.target.with_subresource().as_str(), self.verb) {
            ("pods/binding", "create") => Some(Operation::Binding),
            ("pods/eviction", "create") => Some(Operation::Eviction),
            ("pods", "update" | "patch") => Some(Operation::Pod),
            ("pods/status", "update" | "patch") => Some(Operation::PodStatus),
            ("nodes/status", "update" | "patch") => Some(Operation::NodeStatus),
            ("leases", "create" | "update" | "patch") => Some(Operation::Lease),
            ("secrets", "update" | "patch") => Some(Operation::Secret),
            ("configmaps", "update" | "patch") => Some(Operation::ConfigMap),
            ("secrets", "get") => Some(Operation::GetSecret),
            ("tokenreviews", "create") => Some(Operation::TokenReview),
            ("pods", "get") => Some(Operation::GetPod),
            ("leases", "get") => Some(Operation::GetLease),
            ("pods", "list") => Some(Operation::ListPods),
            ("nodes", "list") => Some(Operation::ListNodes),
            ("poddisruptionbudgets", "list") => Some(Operation::ListBudgets),
            ("pods", "watch") => Some(Operation::WatchPods),
            ("nodes", "watch") => Some(Operation::WatchNodes),
            ("poddisruptionbudgets", "watch") => Some(Operation::WatchBudgets),
            _ => None,
        }
    }

    /// `pods`, `pods/binding`, …
    pub fn resource(&self) -> String {
        self.target.with_subresource()
    }

    /// The object's name; empty where the request is about many objects.
    pub fn name(&self) -> &str {
        self.target.name.as_deref().unwrap_or_default()
    }

    /// Waits until the test releases it.
    pub async fn wait_for_release(&self, operation: Operation) {
        self.shared
            .held_requests
            .hold(&self.client, operation, self.name())
            .await;
    }

    /// Waits, but not beyond the server's end.
    pub(crate) async fn until_stop(&self, wait: impl Future<Output = ()>) {
        self.shared.stop.run_until_cancelled(wait).await;
    }

    /// Performs the request now.
    pub fn perform(&self) -> Response {
        if self.verb == "watch" {
            return self.watch();
        }
        match self.execute(&self.shared) {
            Ok((code, object)) => json_response(code, &object),
            Err(error) => error_response(&error),
        }
    }

    fn execute(&self, shared: &ServerState) -> Result<(StatusCode, Value), ApiError> {
        let ok = |object: Arc<Value>| (StatusCode::OK, Value::clone(&object));
        let now = (shared.clock)();
        match (self.verb, self.target.subresource.as_deref()) {
            ("list", None) => self.list(shared).map(|list| (StatusCode::OK, list)),
            ("get", None | Some("status")) => {
                shared.store.lock().get(&self.key()?).cloned().map(ok)
            }
            ("create", None) if self.target.resource.is_token_reviews() => {
                Ok((StatusCode::CREATED, shared.tokens.review(self.json()?)))
            }
            ("create", None) if self.target.resource.is_access_reviews() => Ok((
                StatusCode::CREATED,
                shared.tokens.review_access(self.json()?),
            )),
            ("create", None) => {
                let object = self.json()?;
                let created =
                    shared.write(|store| write::create(store, &self.target, object, now))?;
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
                shared
                    .write(|store| write::replace(store, &key, part, object))
                    .map(ok)
            }
            ("patch", _) => self.patch(shared).map(ok),
            ("delete", None) => {
                let (key, options) = (self.key()?, self.delete_options()?);
                shared
                    .write(|store| write::delete(store, &key, &options, now))
                    .map(ok)
            }
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    fn patch(&self, shared: &ServerState) -> Result<Arc<Value>, ApiError> {
        let (key, part, body) = (self.key()?, self.part()?, self.json()?);
        let kind = PatchKind::from_content_type(&self.content_type)?;
        shared.write(|store| {
            let absent = store.get(&key).is_err();
            if kind == PatchKind::Apply && part == ObjectPart::Main && absent {
                let mut object = body;
                super::defaults::object_at(&mut object, "metadata")
                    .insert("name".into(), json!(key.name));
                return write::create(store, &self.target, object, (shared.clock)());
            }
            write::patch(store, &key, part, kind, &body)
        })
    }

    fn list(&self, shared: &ServerState) -> Result<Value, ApiError> {
        let resource = self.target.resource;
        let limit = self.parameters.limit.filter(|limit| *limit > 0);
        let list_page = match self.parameters.continue_token.as_str() {
            "" => shared.paged_lists.first(self.frozen_list(shared), limit),
            token => shared.paged_lists.next(resource, token, limit)?,
        };
        let ListPage {
            revision,
            items,
            next,
        } = list_page;
        let mut metadata = json!({"resourceVersion": revision.to_string()});
        if let Some((token, left)) = next {
            metadata["continue"] = json!(token);
            metadata["remainingItemCount"] = json!(left);
        }
        let items: Vec<&Value> = items.iter().map(Arc::as_ref).collect();
        Ok(json!({
            "kind": format!("{}List", resource.kind), "apiVersion": resource.api_version,
            "metadata": metadata, "items": items,
        }))
    }

    fn frozen_list(&self, shared: &ServerState) -> FrozenList {
        let (resource, selector, store) =
            (self.target.resource, self.selector(), shared.store.lock());
        let items = store
            .list(resource)
            .filter(|object| selector.matches(object))
            .cloned()
            .collect();
        FrozenList {
            resource,
            revision: store.revision(),
            items,
        }
    }

    fn watch(&self) -> Response {
        let resource_version = &self.parameters.resource_version;
        let initial_bookmark = self.parameters.send_initial_events == "true";
        let after = if resource_version.is_empty() || resource_version == "0" || initial_bookmark {
            None
        } else {
            resource_version.parse().ok()
        };
        let (client, resource, selector) =
            (self.client.clone(), self.target.resource, self.selector());
        let watch = WatchRequest {
            client,
            resource,
            selector,
            after,
            initial_bookmark,
        };
        let body = Body::from_stream(watch::stream(self.shared.clone(), watch));
        ([(header::CONTENT_TYPE, "application/json")], body).into_response()
    }

    /// A named object is also a selector: `GET …/pods/a?watch` watches that one.
    fn selector(&self) -> ListSelector {
        let mut fields = self.parameters.field_selector.clone();
        if let Some(name) = &self.target.name {
            fields = format!("{fields},metadata.name={name}");
        }
        ListSelector::new(
            &self.target.namespace,
            &fields,
            &self.parameters.label_selector,
        )
    }

    fn key(&self) -> Result<ObjectKey, ApiError> {
        let name = self
            .target
            .name
            .clone()
            .ok_or_else(ApiError::method_not_allowed)?;
        let namespace = if self.target.resource.namespaced {
            self.target.namespace.clone()
        } else {
            String::new()
        };
        Ok(ObjectKey {
            resource: self.target.resource,
            namespace,
            name,
        })
    }

    fn part(&self) -> Result<ObjectPart, ApiError> {
        match self.target.subresource.as_deref() {
            None => Ok(ObjectPart::Main),
            Some("status") if self.target.resource.has_status() => Ok(ObjectPart::Status),
            Some(_) => Err(ApiError::no_such_path()),
        }
    }

    fn json(&self) -> Result<Value, ApiError> {
        serde_json::from_slice(&self.body).map_err(|error| ApiError::bad_request(error.to_string()))
    }

    fn delete_options(&self) -> Result<Value, ApiError> {
        let mut options = if self.body.is_empty() {
            json!({})
        } else {
            self.json()?
        };
        if let Some(seconds) = self.parameters.grace_period_seconds {
            super::defaults::fields_of(&mut options)
                .insert("gracePeriodSeconds".into(), json!(seconds));
        }
        Ok(options)
    }
}

fn success() -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})
}

pub fn error_response(error: &ApiError) -> Response {
    let code = StatusCode::from_u16(error.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_response(code, &error.to_status());
    if let Some(seconds) = error.retry_after_seconds {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

fn json_response(code: StatusCode, body: &Value) -> Response {
    (
        code,
        [(header::CONTENT_TYPE, "application/json")],
        body.to_string(),
    )
        .into_response()
}
