//! The scheduler's writes: the PodScheduled condition, nominations, victims' deletion, default bindings.
//!
//! A write that would change nothing is not made: its event would wake the pod. A failed write is dropped, because the real
//! scheduler only logs it.

use super::extender::ExtenderClient;
use super::objects::SchedulerPod;
use super::preemption::DryRunCandidate;
use super::view::SchedulerCache;
use crate::demo::writes;
use crate::demo::writes::WriteError;
use jiff::Timestamp;
use serde_json::{Value, json};
use std::sync::Arc;

/// The new condition and nomination.
pub(crate) struct SchedulingFailure<'a> {
    pub reason: &'static str,
    pub message: &'a str,
    /// `None` leaves the nomination, `Some(None)` clears it.
    pub nomination: Option<Option<&'a str>>,
}

pub(crate) async fn report_failure(
    client: &kube::Client,
    pod: &SchedulerPod,
    failure: &SchedulingFailure<'_>,
) {
    let mut status = serde_json::Map::new();
    if !has_condition(pod, failure) {
        status.insert("conditions".to_owned(), json!([condition(pod, failure)]));
    }
    if let Some(nomination) = failure.nomination
        && nomination != pod.nominated_node.as_deref()
    {
        status.insert("nominatedNodeName".to_owned(), json!(nomination));
    }
    if !status.is_empty() {
        let path = writes::pod_path(&pod.namespace, &pod.name);
        ignore(writes::patch_status(client, &path, Value::Object(status)).await);
    }
}

/// Marks and deletes the victims, and clears the nominations of lower priority to that node.
pub async fn evict(
    client: &kube::Client,
    preemptor: &SchedulerPod,
    candidate: &DryRunCandidate,
    view: &SchedulerCache,
) {
    for victim in candidate
        .victims
        .iter()
        .filter(|victim| !victim.is_terminating)
    {
        let path = writes::pod_path(&victim.namespace, &victim.name);
        let text = format!(
            "{}: preempting to accommodate a higher priority pod",
            preemptor.scheduler_name
        );
        let condition = json!({
            "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": text,
            "lastProbeTime": null, "lastTransitionTime": now(),
        });
        ignore(writes::patch_status(client, &path, json!({"conditions": [condition]})).await);
        ignore(writes::delete(client, &path, json!({})).await);
    }
    let lower = view
        .nominated_to(&candidate.node)
        .filter(|other| other.priority < preemptor.priority);
    for pod in lower.cloned().collect::<Vec<Arc<SchedulerPod>>>() {
        let path = writes::pod_path(&pod.namespace, &pod.name);
        ignore(writes::patch_status(client, &path, json!({"nominatedNodeName": null})).await);
    }
}

/// Binds through the extender if it manages the pod; directly, if an ignorable extender failed.
pub async fn bind(
    client: &kube::Client,
    extender: &ExtenderClient,
    pod: &SchedulerPod,
    node: &str,
) -> Result<(), String> {
    if extender.is_interested(pod) {
        let bound = extender.bind(pod, node).await;
        if bound.is_ok() || !extender.config.ignorable {
            return bound;
        }
    }
    let path = writes::pod_path(&pod.namespace, &pod.name);
    let metadata = json!({"name": pod.name, "namespace": pod.namespace, "uid": pod.uid});
    let bound = writes::bind(client, &path, metadata, node).await;
    bound.map_err(|error| format!("running Bind plugin \"DefaultBinder\": {error}"))
}

fn has_condition(pod: &SchedulerPod, failure: &SchedulingFailure<'_>) -> bool {
    pod.condition("PodScheduled").is_some_and(|current| {
        current["status"] == "False"
            && current["reason"] == failure.reason
            && current["message"] == failure.message
            && current["observedGeneration"] == pod.object["metadata"]["generation"]
    })
}

fn condition(pod: &SchedulerPod, failure: &SchedulingFailure<'_>) -> Value {
    let current = pod
        .condition("PodScheduled")
        .filter(|current| current["status"] == "False");
    let since = current.map_or_else(
        || json!(now()),
        |current| current["lastTransitionTime"].clone(),
    );
    json!({
        "type": "PodScheduled", "status": "False", "reason": failure.reason, "message": failure.message,
        "observedGeneration": pod.object["metadata"]["generation"], "lastProbeTime": null, "lastTransitionTime": since,
    })
}

fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn ignore(_: Result<(), WriteError>) {}
