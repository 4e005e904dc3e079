//! The webhook that completes new pods where the API server has no policies that do (before Kubernetes 1.36).
//!
//! What it answers is what the policies of `manifests/components/pod-defaults` would do. It decides about nothing, so every replica
//! answers, and whoever asks learns only what follows from its own question.

use super::Extender;
use super::request::{BadRequest, RequestLimits, json, parse, read_body};
use super::server::respond;
use crate::service::DefaultRuntimeClass;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::time::Duration;
use stowage_kubernetes_objects::admission::{AdmittedPod, PatchOp, debug_defaults, defaults};

/// Several times what pods come to. As many are in memory at most as the address has connections.
const MAX_REVIEW_BYTES: usize = 1 << 20;
/// The API server waits two seconds.
const REVIEW_TIME: Duration = Duration::from_secs(2);
/// Of one pod, of any kind: more than any runs, and few enough to be answered at once.
const MAX_CONTAINERS: usize = 256;

const API_VERSION: &str = "admission.k8s.io/v1";

/// An AdmissionReview, as far as it is read here.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review<'a> {
    #[serde(borrow)]
    api_version: Cow<'a, str>,
    #[serde(borrow)]
    request: ReviewRequest<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReviewRequest<'a> {
    #[serde(borrow)]
    uid: Cow<'a, str>,
    #[serde(borrow, default)]
    sub_resource: Option<Cow<'a, str>>,
    #[serde(borrow)]
    object: &'a RawValue,
    #[serde(borrow, default)]
    old_object: Option<&'a RawValue>,
}

/// Answers with the patch of one pod. An error admits it as it is, because the webhook's failure policy is `Ignore`.
pub(super) async fn complete_pod(
    State(extender): State<Extender>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let limits = RequestLimits {
        body: MAX_REVIEW_BYTES,
        too_large_advice: "no pod should be so large",
        body_time: REVIEW_TIME,
        ..extender.limits
    };
    let answer = async {
        let body = read_body(&headers, body, limits).await?;
        let class = extender.state.default_runtime_class.borrow().clone();
        review(&body, &class)
    };
    respond(&extender, "webhook", answer.await)
}

fn review(body: &[u8], class: &DefaultRuntimeClass) -> Result<Response, BadRequest> {
    let Review {
        api_version,
        request,
    } = parse(body)?;
    if api_version != API_VERSION {
        return Err(BadRequest::Malformed(format!(
            "apiVersion is not {API_VERSION}: list v1 in the webhook's admissionReviewVersions"
        )));
    }
    let patch = patch(&request, class)?;
    let mut response = json!({ "uid": request.uid, "allowed": true });
    if !patch.is_empty() {
        let patch = serde_json::to_vec(&patch).expect("names and texts only");
        response["patchType"] = "JSONPatch".into();
        response["patch"] = BASE64_STANDARD.encode(patch).into();
    }
    let answer =
        json!({ "apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response });
    Ok(json(StatusCode::OK, &answer))
}

fn patch(
    request: &ReviewRequest<'_>,
    class: &DefaultRuntimeClass,
) -> Result<Vec<PatchOp>, BadRequest> {
    let pod = pod(request.object)?;
    if request.sub_resource.as_deref() == Some("ephemeralcontainers") {
        let before = request.old_object.ok_or_else(|| {
            BadRequest::Malformed("an update of ephemeral containers has no oldObject".into())
        })?;
        return Ok(debug_defaults(&pod, &self::pod(before)?));
    }
    match class {
        // A pod without it would start, and see no GPU.
        DefaultRuntimeClass::Unknown if pod.asks_for_vram() && !pod.names_runtime_class() => Err(
            BadRequest::Unavailable("whether the cluster has the runtime class was not read yet"),
        ),
        DefaultRuntimeClass::Named(name) => Ok(defaults(&pod, Some(name))),
        DefaultRuntimeClass::Unknown | DefaultRuntimeClass::None => Ok(defaults(&pod, None)),
    }
}

fn pod(object: &RawValue) -> Result<AdmittedPod<'_>, BadRequest> {
    let pod: AdmittedPod<'_> = parse(object.get().as_bytes())?;
    match pod.container_count() {
        count if count > MAX_CONTAINERS => Err(BadRequest::unprocessable(
            "too-many-containers",
            format!(
                "the pod has {count} containers, and one of at most {MAX_CONTAINERS} is completed"
            ),
        )),
        _ => Ok(pod),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    const POD: &str = r#"{"metadata": {"name": "llm"}, "spec": {"schedulerName": "default-scheduler", "containers": [
        {"name": "engine", "image": "\u0076llm", "resources": {"limits": {"stowage.dev/vram": "40Gi"}}}]}}"#;

    fn ask(request: &str, class: &DefaultRuntimeClass) -> Result<Value, BadRequest> {
        let body = format!(
            r#"{{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {{"uid": "u-1", {request}}}}}"#
        );
        let answer = review(body.as_bytes(), class)?;
        let body = axum::body::to_bytes(answer.into_body(), usize::MAX);
        let body = futures::executor::block_on(body).unwrap();
        Ok(serde_json::from_slice(&body).unwrap())
    }

    fn paths(answer: &Value) -> Vec<String> {
        let patch = BASE64_STANDARD.decode(answer["response"]["patch"].as_str().unwrap());
        let patch: Vec<Value> = serde_json::from_slice(&patch.unwrap()).unwrap();
        let path = |op: &Value| op["path"].as_str().unwrap().to_owned();
        patch.iter().map(path).collect()
    }

    #[test]
    fn a_pod_that_asks_for_vram_is_completed_and_any_other_is_admitted_as_it_is() {
        let named = DefaultRuntimeClass::Named("nvidia".into());
        let answer = ask(
            &format!(r#""operation": "CREATE", "object": {POD}"#),
            &named,
        )
        .unwrap();
        assert_eq!(
            (
                &answer["kind"],
                &answer["response"]["uid"],
                &answer["response"]["allowed"]
            ),
            (&json!("AdmissionReview"), &json!("u-1"), &json!(true))
        );
        assert_eq!(answer["response"]["patchType"], "JSONPatch");
        let expected = [
            "/spec/schedulerName",
            "/spec/containers/0/env",
            "/spec/containers/0/env/0",
            "/spec/containers/0/env/0",
            "/spec/runtimeClassName",
        ];
        assert_eq!(paths(&answer), expected);
        let without = ask(&format!(r#""object": {POD}"#), &DefaultRuntimeClass::None).unwrap();
        assert_eq!(paths(&without), expected[..4]);
        let other = POD.replace("40Gi", "0");
        let admitted = ask(
            &format!(r#""object": {other}"#),
            &DefaultRuntimeClass::Unknown,
        );
        assert_eq!(
            admitted.unwrap()["response"],
            json!({"uid": "u-1", "allowed": true})
        );
    }

    #[test]
    fn a_container_that_kubectl_debug_adds_sees_no_gpu() {
        let with = |containers: &str| {
            POD.replace(
                r#""spec": {"#,
                &format!(r#""spec": {{"ephemeralContainers": [{containers}], "#),
            )
        };
        let old = r#"{"name": "old"}"#;
        let new = r#"{"name": "new", "env": [{"name": "A", "value": "b"}]}"#;
        let (before, after) = (with(old), with(&format!("{old}, {new}")));
        let request = format!(
            r#""subResource": "ephemeralcontainers", "object": {after}, "oldObject": {before}"#
        );
        let answer = ask(&request, &DefaultRuntimeClass::Unknown).unwrap();
        assert_eq!(paths(&answer), ["/spec/ephemeralContainers/1/env/0"]);
    }

    #[test]
    fn what_cannot_be_answered_has_a_reason() {
        let refused = |request: &str| {
            ask(request, &DefaultRuntimeClass::None)
                .unwrap_err()
                .to_string()
        };
        let named = POD.replace(r#""spec": {"#, r#""spec": {"runtimeClassName": "own", "#);
        let named = format!(r#""object": {named}"#);
        assert!(
            ask(&named, &DefaultRuntimeClass::Unknown).is_ok(),
            "none is added to it"
        );
        let class = ask(
            &format!(r#""object": {POD}"#),
            &DefaultRuntimeClass::Unknown,
        );
        assert!(
            matches!(class, Err(BadRequest::Unavailable(_))),
            "it would see no GPU"
        );
        assert!(refused(r#""object": {"spec": {}}"#).contains("containers"));
        assert!(refused(r#""object": null"#).contains("null"));
        let update = format!(r#""subResource": "ephemeralcontainers", "object": {POD}"#);
        assert!(refused(&update).contains("oldObject"));
        let beta =
            r#"{"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "", "object": {}}}"#;
        let error = review(beta.as_bytes(), &DefaultRuntimeClass::None).unwrap_err();
        assert!(
            error.to_string().contains("is not admission.k8s.io/v1"),
            "{error}"
        );
        let many = r#"{"name": "a"},"#.repeat(256);
        let many = format!(r#""object": {{"spec": {{"containers": [{many} {{"name": "b"}}]}}}}"#);
        assert!(refused(&many).contains("257 containers"));
    }
}
