//! The control plane of a real API server: each operation is one request with its own deadline.
//!
//! It never lists, and reads only where a caller asks for it or two kinds of conflict have to be distinguished. Nothing here
//! decides: an outcome says what is known about a write, and the caller decides what to do. The client is not throttled:
//! kube-scheduler sets the pace.

mod evict;
mod failure;
mod status;

use super::events::EventRecorder;
use crate::service::ServerState;
use failure::{ApiFailure, FailureCause};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::de::IgnoredAny;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::port::{BindOrder, BindOutcome, ControlPlane, IsDue, WriteTimes};
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, FreshPod, PodEvent, PodEventReason,
    StatusChange,
};
use stowage_scheduling::ids::{LeaderEpoch, NodeName, PodKey, PodUid};

/// The writer's name in `managedFields`.
const FIELD_MANAGER: &str = "stowage";

pub struct ApiControlPlane {
    client: Client,
    state: Arc<ServerState>,
    event_recorder: EventRecorder,
    /// The vendor and class before the `=` of a CDI name, such as `nvidia.com/gpu`.
    cdi_kind: String,
    times: WriteTimes,
}

impl ApiControlPlane {
    pub fn new(
        client: Client,
        state: Arc<ServerState>,
        event_recorder: EventRecorder,
        cdi_kind: String,
        times: WriteTimes,
    ) -> Self {
        Self {
            client,
            state,
            event_recorder,
            cdi_kind,
            times,
        }
    }

    fn pods(&self, key: &PodKey) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &key.namespace)
    }

    async fn post_binding(&self, order: &BindOrder) -> BindOutcome {
        let epoch = match self.acting_epoch() {
            Ok(epoch) => epoch,
            Err(reason) => {
                return BindOutcome::Refused {
                    message: reason.into(),
                };
            }
        };
        if order.epoch.as_ref() != Some(&epoch) {
            let message =
                "the placement was chosen in another epoch: another replica may have led since"
                    .into();
            return BindOutcome::Refused { message };
        }
        let BindOrder {
            key,
            uid,
            demand,
            placement,
            legacy_runtime,
            ..
        } = order;
        let cdi_kind = (!legacy_runtime).then_some(&*self.cdi_kind);
        let binding = objects::binding(key, uid, demand, placement, cdi_kind, &epoch);
        let (pods, params) = (self.pods(key), post_params());
        let write =
            pods.create_subresource::<_, IgnoredAny>("binding", &key.name, &params, &binding);
        match within(self.times.client, write).await {
            Ok(_) => {
                let mut keys = objects::nri_keys(demand, cdi_kind);
                if let Some((container, _)) = keys.find(|(_, key)| key.is_none())
                    && !placement.has_vram_limits
                {
                    let text = format!(
                        "The name of container {container} is too long for the key of an annotation that names its GPUs to \
                         NVIDIA's NRI plugin: where that plugin hands out GPUs, it gets none. Give it one of at most 53 characters."
                    );
                    let (key, uid, kind) =
                        (key.clone(), uid.clone(), PodEventReason::NoNriAnnotation);
                    self.record_event(PodEvent {
                        key,
                        uid,
                        kind,
                        text,
                    });
                }
                BindOutcome::Written
            }
            Err(failure) => failure.into(),
        }
    }

    async fn get_pod(&self, key: &PodKey) -> Result<Option<FreshPod>, ControlPlaneError> {
        let pods = self.pods(key);
        let pod = within(self.times.client, pods.get_opt(&key.name)).await?;
        pod.map(|pod| pod_on_record(&pod)).transpose()
    }

    async fn patch_status(
        &self,
        key: &PodKey,
        uid: &PodUid,
        change: &StatusChange,
    ) -> Result<(), ControlPlaneError> {
        let epoch = self
            .acting_epoch()
            .map_err(|reason| ControlPlaneError::Refused(reason.into()))?;
        let (clock, now) = (&self.state.clock, self.state.clock.wall());
        let patch = status::status_patch(key, uid, change, &epoch, clock, now);
        self.patch(key, uid, Subresource::Status, &patch).await
    }

    async fn patch_scheduling_gate(
        &self,
        key: &PodKey,
        uid: &PodUid,
    ) -> Result<(), ControlPlaneError> {
        self.patch(
            key,
            uid,
            Subresource::None,
            &status::scheduling_gate_patch(uid),
        )
        .await
    }

    /// A patch conflicts with concurrent writes after the API server has retried it several times: one more attempt is
    /// worthwhile if the pod is still the intended one.
    async fn patch(
        &self,
        key: &PodKey,
        uid: &PodUid,
        subresource: Subresource,
        patch: &Value,
    ) -> Result<(), ControlPlaneError> {
        match self.patch_once(key, subresource, patch).await {
            Err(ApiFailure {
                why: FailureCause::Conflict,
                ..
            }) if self.is_same_pod(key, uid).await? => self
                .patch_once(key, subresource, patch)
                .await
                .map_err(ControlPlaneError::from),
            Err(ApiFailure {
                why: FailureCause::Conflict,
                ..
            }) => Err(ControlPlaneError::Gone),
            outcome => outcome.map_err(ControlPlaneError::from),
        }
    }

    async fn patch_once(
        &self,
        key: &PodKey,
        subresource: Subresource,
        patch: &Value,
    ) -> Result<(), ApiFailure> {
        if let Err(reason) = self.acting_epoch() {
            return Err(ApiFailure {
                why: FailureCause::Refused,
                message: reason.into(),
            });
        }
        let (pods, patch) = (self.pods(key), Patch::Strategic(patch));
        let params = PatchParams {
            field_manager: Some(FIELD_MANAGER.into()),
            ..PatchParams::default()
        };
        let answer = match subresource {
            Subresource::None => {
                within(self.times.client, pods.patch(&key.name, &params, &patch)).await
            }
            Subresource::Status => {
                within(
                    self.times.client,
                    pods.patch_status(&key.name, &params, &patch),
                )
                .await
            }
        };
        answer.map(drop)
    }

    /// Whether the pod exists and has this UID.
    async fn is_same_pod(&self, key: &PodKey, uid: &PodUid) -> Result<bool, ControlPlaneError> {
        Ok(self.get_pod(key).await?.is_some_and(|pod| pod.uid == *uid))
    }

    /// The epoch of a write that begins now, or why none may begin: the Lease may have ended since the decision.
    fn acting_epoch(&self) -> Result<LeaderEpoch, &'static str> {
        self.state.leadership.acting_epoch()
    }

    fn count(&self, kind: &str, outcome: &str) {
        self.state
            .metrics
            .writes
            .with_label_values(&[kind, outcome])
            .inc();
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

/// The part of a pod that a patch changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subresource {
    None,
    Status,
}

impl ControlPlane for ApiControlPlane {
    fn max_commit_delay(&self) -> Duration {
        self.times.max_commit_delay()
    }

    fn bind<'a>(&'a self, order: &'a BindOrder) -> BoxFuture<'a, BindOutcome> {
        Box::pin(async move {
            let outcome = self.post_binding(order).await;
            self.count("bind", outcome.code());
            outcome
        })
    }

    fn read_pod<'a>(
        &'a self,
        key: &'a PodKey,
    ) -> BoxFuture<'a, Result<Option<FreshPod>, ControlPlaneError>> {
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
        is_due: &'a IsDue<'a>,
    ) -> BoxFuture<'a, EvictionOutcome> {
        Box::pin(async move {
            let outcome = self.mark_and_evict(key, uid, why, is_due).await;
            self.count("evict", outcome.code());
            outcome
        })
    }

    fn remove_scheduling_gate<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        Box::pin(async move {
            let removed = self.patch_scheduling_gate(key, uid).await;
            self.count_result("gate", &removed);
            removed
        })
    }

    fn record_event(&self, event: PodEvent) {
        self.event_recorder.record_event(event);
    }
}

async fn within<T>(
    limit: Duration,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, ApiFailure> {
    super::request::within(limit, request)
        .await
        .map_err(ApiFailure::from)
}

fn post_params() -> PostParams {
    PostParams {
        field_manager: Some(FIELD_MANAGER.into()),
        ..PostParams::default()
    }
}

fn pod_on_record(pod: &Pod) -> Result<FreshPod, ControlPlaneError> {
    let unreadable = |error: &dyn std::error::Error| ControlPlaneError::Unknown(error.to_string());
    let (uid, _) = objects::identity(pod).map_err(|error| unreadable(&error))?;
    let node = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.node_name.as_deref())
        .filter(|name| !name.is_empty());
    let node = node
        .map(NodeName::parse)
        .transpose()
        .map_err(|error| unreadable(&error))?;
    let (devices, borrows) = (objects::recorded_devices(pod), objects::borrows(pod));
    Ok(FreshPod {
        uid,
        node,
        devices,
        has_started: objects::has_started(pod),
        is_over: objects::is_finished(pod) || pod.metadata.deletion_timestamp.is_some(),
        borrows,
        refusal: refusal(pod),
    })
}

/// kube-scheduler's condition, while it says that the pod is not scheduled.
fn refusal(pod: &Pod) -> Option<Arc<str>> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let pod_scheduled = conditions
        .iter()
        .find(|one| one.type_ == "PodScheduled" && one.status == "False")?;
    pod_scheduled
        .message
        .as_deref()
        .filter(|message| !message.is_empty())
        .map(Arc::from)
}
