//! One eviction: the victim's condition, the Eviction request, and its outcome.
//!
//! It is tried once here; only reads are repeated. The planner decides when to try again and when to give up.

use super::failure::{ApiFailure, FailureCause};
use super::{ApiControlPlane, post, within};
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::api::DeleteParams;
use serde::de::IgnoredAny;
use stowage_kubernetes_objects::port::{ControlPlane, IsDue};
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionCondition, EvictionOutcome, EvictionReason, PodEvent,
    PodEventReason, StatusChange,
};
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::units::Millis;

impl ApiControlPlane {
    pub(super) async fn mark_and_evict(
        &self,
        key: &PodKey,
        uid: &PodUid,
        why: &EvictionReason,
        is_due: &IsDue<'_>,
    ) -> EvictionOutcome {
        if self.open().is_err() {
            return EvictionOutcome::TryLater { after: None };
        }
        // The victim is evicted even if its condition cannot be written: the Event has the reason too.
        let told = self
            .mark(key, uid, EvictionCondition::Evicting(why.clone()))
            .await;
        if told == Err(ControlPlaneError::Gone) {
            return EvictionOutcome::Gone;
        }
        // Writing the condition may have taken long.
        if self.open().is_err() {
            return EvictionOutcome::TryLater { after: None };
        }
        if !is_due() {
            return EvictionOutcome::CalledOff;
        }
        let outcome = match self.post_eviction_or_delete(key, uid, is_due).await {
            Ok(()) => EvictionOutcome::Evicted,
            Err(failure) => self.not_evicted(key, uid, failure).await,
        };
        match outcome {
            EvictionOutcome::Evicted => {
                self.service
                    .metrics
                    .evictions
                    .with_label_values(&[why.code()])
                    .inc();
                self.record_event(evicted(key, uid, why));
            }
            EvictionOutcome::Refused { .. } => {
                // If this fails, the planner does it, as long as the pod shows that it is evicted.
                let _ = self.mark(key, uid, EvictionCondition::Cancelled).await;
            }
            _ => {}
        }
        outcome
    }

    async fn mark(
        &self,
        key: &PodKey,
        uid: &PodUid,
        mark: EvictionCondition,
    ) -> Result<(), ControlPlaneError> {
        self.write_status(key, uid, &StatusChange::eviction(mark))
            .await
    }

    /// Uses the Eviction API, and deletes the pod only if nothing but a budget that the pod's class ignores refuses the
    /// eviction.
    async fn post_eviction_or_delete(
        &self,
        key: &PodKey,
        uid: &PodUid,
        is_due: &IsDue<'_>,
    ) -> Result<(), ApiFailure> {
        let refused = match self.post_eviction(key, uid).await {
            Err(failure) if failure.is_of_budgets() => failure,
            answer => return answer,
        };
        // A statement of its own, so that the lock is not held while the API server is asked.
        let waits = self.service.cluster().ledger().waits_for_budgets(uid);
        if waits || self.open().is_err() || !is_due() {
            Err(refused)
        } else {
            self.delete(key, uid).await
        }
    }

    /// A victim's grace period in seconds; Kubernetes' default if the ledger does not have the pod, whose own may be 0, which frees its
    /// name and not its GPUs. For a pod that is being deleted already, the API server applies it if it is shorter than what remains
    /// of the pod's own, and checks no disruption budget.
    fn grace(&self, uid: &PodUid) -> u32 {
        let cluster = self.service.cluster();
        let known = cluster.ledger().pod_state(uid);
        let grace = known.map_or(Millis::seconds(30), |pod_state| {
            cluster.ledger().eviction_grace(pod_state)
        });
        (grace.0 / 1000) as u32
    }

    async fn delete(&self, key: &PodKey, uid: &PodUid) -> Result<(), ApiFailure> {
        let preconditions = kube::api::Preconditions {
            uid: Some(uid.to_string()),
            resource_version: None,
        };
        let mut params = DeleteParams::default().preconditions(preconditions);
        params.grace_period_seconds = Some(self.grace(uid));
        let pods = self.pods(key);
        within(self.times.client, pods.delete(&key.name, &params))
            .await
            .map(drop)
    }

    async fn post_eviction(&self, key: &PodKey, uid: &PodUid) -> Result<(), ApiFailure> {
        let preconditions = Preconditions {
            uid: Some(uid.to_string()),
            ..Preconditions::default()
        };
        let eviction = Eviction {
            metadata: ObjectMeta {
                name: Some(key.name.to_string()),
                namespace: Some(key.namespace.to_string()),
                ..ObjectMeta::default()
            },
            delete_options: Some(DeleteOptions {
                preconditions: Some(preconditions),
                grace_period_seconds: Some(self.grace(uid).into()),
                ..DeleteOptions::default()
            }),
        };
        let (pods, params) = (self.pods(key), post());
        let write =
            pods.create_subresource::<_, IgnoredAny>("eviction", &key.name, &params, &eviction);
        within(self.times.client, write).await.map(drop)
    }

    async fn not_evicted(
        &self,
        key: &PodKey,
        uid: &PodUid,
        failure: ApiFailure,
    ) -> EvictionOutcome {
        let ApiFailure { why, message } = failure;
        match why {
            FailureCause::Gone => EvictionOutcome::Gone,
            FailureCause::TooMany { after } | FailureCause::Budget { after } => {
                EvictionOutcome::TryLater { after }
            }
            FailureCause::Refused | FailureCause::SeveralBudgets => {
                EvictionOutcome::Refused { message }
            }
            FailureCause::Unknown => EvictionOutcome::Unknown { message },
            // Another UID, or too many writes of the pod at the same time.
            FailureCause::Conflict => match self.is_still(key, uid).await {
                Ok(true) => EvictionOutcome::TryLater { after: None },
                Ok(false) | Err(ControlPlaneError::Gone) => EvictionOutcome::Gone,
                Err(error) => EvictionOutcome::Unknown {
                    message: error.to_string(),
                },
            },
        }
    }
}

fn evicted(key: &PodKey, uid: &PodUid, why: &EvictionReason) -> PodEvent {
    let (kind, text) = (PodEventReason::Evicted, why.told_to(key));
    PodEvent {
        key: key.clone(),
        uid: uid.clone(),
        kind,
        text,
    }
}
