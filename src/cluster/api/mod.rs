//! The control plane that is a real API server: what Stowage asks of it, each in one request with a limit of its own.
//!
//! No list, and a read only where a caller asks for one or a conflict has to be told from another. Nothing here decides:
//! an outcome says what is known of a write, and who asked for it knows what to do. The client is not throttled: the
//! scheduler sets the pace.

mod evict;
mod failure;
mod status;

use super::events::Notices;
use crate::contract;
use crate::control_plane::{
    BindOrder, BindOutcome, ControlPlane, ControlPlaneError, EvictionOutcome, EvictionReason, Notice,
    PodOnRecord, StatusChange,
};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::service::Service;
use failure::{Failure, Why};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::de::IgnoredAny;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// Who wrote, in `managedFields`.
const FIELD_MANAGER: &str = "stowage";

/// How long one request may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Beyond this a Binding's fate is unknown and is settled by a read.
    pub bind: Duration,
    /// Everything else: reads, patches, evictions.
    pub other: Duration,
}

impl Default for Limits {
    /// A bind, its settling read and some slack fit into what a scheduler waits for an extender, and a Binding sent while
    /// leading arrives before the lease can pass on (five of fifteen seconds are margin).
    fn default() -> Self {
        Self { bind: Duration::from_secs(5), other: Duration::from_secs(5) }
    }
}

pub struct ApiControlPlane {
    client: Client,
    service: Arc<Service>,
    notices: Notices,
    /// The vendor and class before the `=` of a CDI name, such as `nvidia.com/gpu`.
    cdi_kind: String,
    limits: Limits,
}

impl ApiControlPlane {
    pub fn new(
        client: Client,
        service: Arc<Service>,
        notices: Notices,
        cdi_kind: String,
        limits: Limits,
    ) -> Self {
        Self { client, service, notices, cdi_kind, limits }
    }

    fn pods(&self, key: &PodKey) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }

    async fn post_binding(&self, order: &BindOrder) -> BindOutcome {
        if let Some(reason) = self.shut() {
            return BindOutcome::Refused { message: reason.into() };
        }
        let BindOrder { key, uid, demand, placement, .. } = order;
        let binding = contract::binding(key, uid, demand, placement, &self.cdi_kind);
        let (pods, params) = (self.pods(key), post());
        let write = pods.create_subresource::<_, IgnoredAny>("binding", &key.name, &params, &binding);
        match within(self.limits.bind, write).await {
            Ok(_) => BindOutcome::Written,
            Err(failure) => failure.into(),
        }
    }

    async fn get_pod(&self, key: &PodKey) -> Result<Option<PodOnRecord>, ControlPlaneError> {
        let pods = self.pods(key);
        let pod = within(self.limits.other, pods.get_opt(&key.name)).await?;
        pod.map(|pod| on_record(&pod)).transpose()
    }

    async fn patch_status(
        &self,
        key: &PodKey,
        uid: &PodUid,
        change: &StatusChange,
    ) -> Result<(), ControlPlaneError> {
        let patch = status::status_patch(uid, change, &self.service.clock, jiff::Timestamp::now());
        self.patch(key, uid, Subresource::Status, &patch).await
    }

    async fn patch_gate(&self, key: &PodKey, uid: &PodUid) -> Result<(), ControlPlaneError> {
        self.patch(key, uid, Subresource::None, &status::gate_patch(uid)).await
    }

    /// A patch conflicts with writes at the same time when the API server has tried several times to go around them: once
    /// more is worth it if the pod is still the one that is meant.
    async fn patch(
        &self,
        key: &PodKey,
        uid: &PodUid,
        subresource: Subresource,
        patch: &Value,
    ) -> Result<(), ControlPlaneError> {
        match self.patch_once(key, subresource, patch).await {
            Err(Failure { why: Why::Conflict, .. }) if self.is_still(key, uid).await? => {
                self.patch_once(key, subresource, patch).await.map_err(ControlPlaneError::from)
            }
            Err(Failure { why: Why::Conflict, .. }) => Err(ControlPlaneError::Gone),
            outcome => outcome.map_err(ControlPlaneError::from),
        }
    }

    async fn patch_once(&self, key: &PodKey, subresource: Subresource, patch: &Value) -> Result<(), Failure> {
        if let Some(reason) = self.shut() {
            return Err(Failure { why: Why::Refused, message: reason.into() });
        }
        let (pods, patch) = (self.pods(key), Patch::Strategic(patch));
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
        let answer = match subresource {
            Subresource::None => within(self.limits.other, pods.patch(&key.name, &params, &patch)).await,
            Subresource::Status => {
                within(self.limits.other, pods.patch_status(&key.name, &params, &patch)).await
            }
        };
        answer.map(drop)
    }

    /// Whether the pod is there and is the one that is meant.
    async fn is_still(&self, key: &PodKey, uid: &PodUid) -> Result<bool, ControlPlaneError> {
        Ok(self.get_pod(key).await?.is_some_and(|pod| pod.uid == *uid))
    }

    /// The lease may have passed on since whatever asks was decided.
    fn shut(&self) -> Option<&'static str> {
        self.service.gate.reason_shut()
    }

    fn count(&self, kind: &str, outcome: &str) {
        self.service.metrics.writes.with_label_values(&[kind, outcome]).inc();
    }

    fn count_result(&self, kind: &str, result: &Result<(), ControlPlaneError>) {
        let outcome = match result {
            Ok(()) => "written",
            Err(ControlPlaneError::Gone) => "gone",
            Err(_) => "failed",
        };
        self.count(kind, outcome);
    }
}

/// Which part of a pod a patch goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subresource {
    None,
    Status,
}

impl ControlPlane for ApiControlPlane {
    fn bind<'a>(&'a self, order: &'a BindOrder) -> BoxFuture<'a, BindOutcome> {
        Box::pin(async move {
            let outcome = self.post_binding(order).await;
            self.count("bind", code(&outcome));
            outcome
        })
    }

    fn read_pod<'a>(
        &'a self,
        key: &'a PodKey,
    ) -> BoxFuture<'a, Result<Option<PodOnRecord>, ControlPlaneError>> {
        Box::pin(self.get_pod(key))
    }

    fn write_status<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        change: &'a StatusChange,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        Box::pin(async move {
            if change.is_empty() {
                return Ok(());
            }
            let written = self.patch_status(key, uid, change).await;
            self.count_result(change.kind(), &written);
            written
        })
    }

    fn evict<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        why: &'a EvictionReason,
    ) -> BoxFuture<'a, EvictionOutcome> {
        Box::pin(async move {
            let outcome = self.tell_and_evict(key, uid, why).await;
            self.count("evict", evict::code(&outcome));
            outcome
        })
    }

    fn lift_gate<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        Box::pin(async move {
            let lifted = self.patch_gate(key, uid).await;
            self.count_result("gate", &lifted);
            lifted
        })
    }

    fn notify(&self, notice: Notice) {
        self.notices.notify(notice);
    }
}

async fn within<T>(limit: Duration, request: impl Future<Output = kube::Result<T>>) -> Result<T, Failure> {
    match tokio::time::timeout(limit, request).await {
        Ok(answer) => answer.map_err(Failure::from),
        Err(_) => Err(Failure::too_late(limit)),
    }
}

fn post() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() }
}

fn code(outcome: &BindOutcome) -> &'static str {
    match outcome {
        BindOutcome::Written => "written",
        BindOutcome::Conflict => "conflict",
        BindOutcome::Refused { .. } => "refused",
        BindOutcome::Unknown { .. } => "unknown",
    }
}

fn on_record(pod: &Pod) -> Result<PodOnRecord, ControlPlaneError> {
    let unreadable = |error: &dyn std::error::Error| ControlPlaneError::Unknown(error.to_string());
    let (uid, _) = contract::identity(pod).map_err(|error| unreadable(&error))?;
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).filter(|name| !name.is_empty());
    let node = node.map(NodeName::parse).transpose().map_err(|error| unreadable(&error))?;
    Ok(PodOnRecord { uid, node, devices: contract::recorded_devices(pod), refusal: refusal(pod) })
}

/// The scheduler's condition, as long as it says that the pod is not scheduled.
fn refusal(pod: &Pod) -> Option<Arc<str>> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let says = conditions.iter().find(|one| one.type_ == "PodScheduled" && one.status == "False")?;
    says.message.as_deref().filter(|message| !message.is_empty()).map(Arc::from)
}
