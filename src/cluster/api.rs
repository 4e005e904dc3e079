//! The control plane that is a real API server: what Stowage asks of it, each in one request with a limit of its own.
//!
//! No list, and a read only where a caller asks for one. Nothing here decides or retries: an outcome says what is known
//! of a write, and who asked for it knows what to do. The client is not throttled: the scheduler sets the pace.

use super::events::Notices;
use crate::contract::{self, HoldMessage};
use crate::control_plane::{BindOrder, BindOutcome, ControlPlane, ControlPlaneError, Notice, PodOnRecord};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::scheduling::decision::Hold;
use crate::service::Service;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::de::IgnoredAny;
use std::sync::Arc;
use std::time::Duration;

/// Who wrote, in `managedFields`.
const FIELD_MANAGER: &str = "stowage";
/// The condition's reason once nothing is held any more.
const HOLD_ENDED: &str = "Ended";

/// How long one request may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Beyond this a Binding's fate is unknown and is settled by a read.
    pub bind: Duration,
    /// Reads, and patches of status.
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
        // The lease may have passed on since the request came in.
        if let Some(reason) = self.service.gate.reason_shut() {
            return BindOutcome::Refused { message: reason.into() };
        }
        let BindOrder { key, uid, demand, placement, .. } = order;
        let binding = contract::binding(key, uid, demand, placement, &self.cdi_kind);
        let (pods, params) = (
            self.pods(key),
            PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() },
        );
        let write = pods.create_subresource::<_, IgnoredAny>("binding", &key.name, &params, &binding);
        match tokio::time::timeout(self.limits.bind, write).await {
            Ok(answer) => bind_outcome(answer.map(|_| ())),
            Err(_) => BindOutcome::Unknown { message: too_late(self.limits.bind) },
        }
    }

    async fn get_pod(&self, key: &PodKey) -> Result<Option<PodOnRecord>, ControlPlaneError> {
        let pods = self.pods(key);
        let pod = self.limited(pods.get_opt(&key.name)).await?;
        pod.map(|pod| on_record(&pod)).transpose()
    }

    async fn patch_condition(
        &self,
        key: &PodKey,
        uid: &PodUid,
        condition: PodCondition,
    ) -> Result<(), ControlPlaneError> {
        // Conditions merge by type; a pod of another UID answers 409 and is left alone.
        let patch = Patch::Strategic(serde_json::json!({
            "metadata": { "uid": uid },
            "status": { "conditions": [condition] },
        }));
        let (pods, params) = (
            self.pods(key),
            PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() },
        );
        self.limited(pods.patch_status(&key.name, &params, &patch)).await.map(|_| ())
    }

    fn hold_condition(&self, hold: Option<&Hold>) -> PodCondition {
        let now = jiff::Timestamp::now();
        let Some(hold) = hold else { return contract::ended_hold_condition(HOLD_ENDED, now) };
        let message = HoldMessage {
            node: hold.node.clone(),
            devices: hold.devices.clone(),
            victims: hold.victims.clone(),
            deadline: self.service.clock.to_wall(hold.deadline),
        };
        message.condition(now)
    }

    async fn limited<T>(
        &self,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, ControlPlaneError> {
        match tokio::time::timeout(self.limits.other, request).await {
            Ok(answer) => answer.map_err(|error| ControlPlaneError(error.to_string())),
            Err(_) => Err(ControlPlaneError(too_late(self.limits.other))),
        }
    }

    fn count(&self, kind: &str, outcome: &str) {
        self.service.metrics.writes.with_label_values(&[kind, outcome]).inc();
    }
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

    fn write_hold<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        hold: Option<&'a Hold>,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        Box::pin(async move {
            let written = self.patch_condition(key, uid, self.hold_condition(hold)).await;
            self.count("hold", if written.is_ok() { "written" } else { "failed" });
            written
        })
    }

    fn wake<'a>(&'a self, key: &'a PodKey, uid: &'a PodUid) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        Box::pin(async move {
            let condition = contract::retry_condition(jiff::Timestamp::now());
            let written = self.patch_condition(key, uid, condition).await;
            self.count("wake", if written.is_ok() { "written" } else { "failed" });
            written
        })
    }

    fn notify(&self, notice: Notice) {
        self.notices.notify(notice);
    }
}

/// What an answer says of the Binding. Whatever leaves it open is unknown, and has to be read.
fn bind_outcome(answer: kube::Result<()>) -> BindOutcome {
    let error = match answer {
        Ok(()) => return BindOutcome::Written,
        Err(error) => error,
    };
    let message = error.to_string();
    match error {
        kube::Error::Api(status) => match status.code {
            409 => BindOutcome::Conflict,
            // An overloaded server or a proxy before it answers these, whatever became of the request.
            408 | 429 => BindOutcome::Unknown { message },
            400..500 => BindOutcome::Refused { message },
            _ => BindOutcome::Unknown { message },
        },
        // It was never sent.
        kube::Error::BuildRequest(_) | kube::Error::HttpError(_) => BindOutcome::Refused { message },
        _ => BindOutcome::Unknown { message },
    }
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
    let (uid, _) = contract::identity(pod).map_err(|error| ControlPlaneError(error.to_string()))?;
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).filter(|name| !name.is_empty());
    let node = node.map(NodeName::parse).transpose().map_err(|error| ControlPlaneError(error.to_string()))?;
    Ok(PodOnRecord { uid, node, devices: contract::recorded_devices(pod) })
}

fn too_late(limit: Duration) -> String {
    format!("the API server did not answer within {limit:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome_of(code: u16) -> &'static str {
        let status = kube::core::Status::failure("no", "Because").with_code(code);
        super::code(&bind_outcome(Err(kube::Error::Api(Box::new(status)))))
    }

    #[test]
    fn only_what_says_that_nothing_was_written_counts_as_refused() {
        assert_eq!(bind_outcome(Ok(())), BindOutcome::Written);
        assert_eq!(outcome_of(409), "conflict");
        for refused in [400, 401, 403, 404, 422] {
            assert_eq!(outcome_of(refused), "refused", "{refused}");
        }
        for unknown in [0, 302, 408, 429, 500, 502, 503, 504] {
            assert_eq!(outcome_of(unknown), "unknown", "{unknown}");
        }
        let garbled = serde_json::from_str::<u8>("<html>").unwrap_err();
        let answer = bind_outcome(Err(kube::Error::SerdeError(garbled)));
        assert!(matches!(answer, BindOutcome::Unknown { .. }), "an answer that cannot be read says nothing");
    }
}
