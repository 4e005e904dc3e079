//! One eviction: the victim's condition, the Eviction request, and its outcome.
//!
//! It is tried once here; only reads are repeated. The planner decides when to try again and when to give up.

use super::failure::{ApiFailure, FailureCause};
use super::{ApiControlPlane, post_params, within};
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
        if self.acting_epoch().is_err() {
            return EvictionOutcome::TryLater { after: None };
        }
        // The victim is evicted even if its condition cannot be written: the Event has the reason too.
        let marked = self
            .write_eviction_condition(key, uid, EvictionCondition::Evicting(why.clone()))
            .await;
        if marked == Err(ControlPlaneError::Gone) {
            return EvictionOutcome::Gone;
        }
        // Writing the condition may have taken long.
        if self.acting_epoch().is_err() {
            return EvictionOutcome::TryLater { after: None };
        }
        if !is_due() {
            return EvictionOutcome::CalledOff;
        }
        let outcome = match self.post_eviction_or_delete(key, uid, is_due).await {
            Ok(()) => EvictionOutcome::Evicted,
            Err(failure) => self.outcome_of_failure(key, uid, failure).await,
        };
        match outcome {
            EvictionOutcome::Evicted => {
                self.state
                    .metrics
                    .evictions
                    .with_label_values(&[why.code()])
                    .inc();
                self.record_event(evicted_event(key, uid, why));
            }
            EvictionOutcome::Refused { .. } => {
                // If this fails, the planner does it, as long as the pod shows that it is evicted.
                let _ = self
                    .write_eviction_condition(key, uid, EvictionCondition::Cancelled)
                    .await;
            }
            _ => {}
        }
        outcome
    }

    async fn write_eviction_condition(
        &self,
        key: &PodKey,
        uid: &PodUid,
        condition: EvictionCondition,
    ) -> Result<(), ControlPlaneError> {
        self.write_status(key, uid, &StatusChange::eviction(condition))
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
            Err(failure) if failure.is_refused_by_budgets() => failure,
            answer => return answer,
        };
        // A statement of its own, so that the lock is not held while the API server is asked.
        let waits_for_budgets = self.state.cluster().ledger().honors_budgets(uid);
        if waits_for_budgets || self.acting_epoch().is_err() || !is_due() {
            Err(refused)
        } else {
            self.delete(key, uid).await
        }
    }

    /// A victim's grace period in seconds; Kubernetes' default if the ledger does not have the pod, whose own may be 0, which frees its
    /// name and not its GPUs. For a pod that is being deleted already, the API server applies it if it is shorter than what remains
    /// of the pod's own, and checks no disruption budget.
    fn grace_period_seconds(&self, uid: &PodUid) -> u32 {
        let cluster = self.state.cluster();
        let victim = cluster.ledger().pod_state(uid);
        let grace = victim.map_or(Millis::seconds(30), |pod_state| {
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
        params.grace_period_seconds = Some(self.grace_period_seconds(uid));
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
                grace_period_seconds: Some(self.grace_period_seconds(uid).into()),
                ..DeleteOptions::default()
            }),
        };
        let (pods, params) = (self.pods(key), post_params());
        let write =
            pods.create_subresource::<_, IgnoredAny>("eviction", &key.name, &params, &eviction);
        within(self.times.client, write).await.map(drop)
    }

    async fn outcome_of_failure(
        &self,
        key: &PodKey,
        uid: &PodUid,
        failure: ApiFailure,
    ) -> EvictionOutcome {
        let ApiFailure { why, message } = failure;
        match why {
            FailureCause::Gone => EvictionOutcome::Gone,
            FailureCause::TooManyRequests { after } | FailureCause::Budget { after } => {
                EvictionOutcome::TryLater { after }
            }
            FailureCause::Refused | FailureCause::SeveralBudgets => {
                EvictionOutcome::Refused { message }
            }
            FailureCause::Unknown => EvictionOutcome::Unknown { message },
            // Another UID, or too many writes of the pod at the same time.
            FailureCause::Conflict => match self.is_same_pod(key, uid).await {
                Ok(true) => EvictionOutcome::TryLater { after: None },
                Ok(false) | Err(ControlPlaneError::Gone) => EvictionOutcome::Gone,
                Err(error) => EvictionOutcome::Unknown {
                    message: error.to_string(),
                },
            },
        }
    }
}

fn evicted_event(key: &PodKey, uid: &PodUid, why: &EvictionReason) -> PodEvent {
    let (kind, text) = (PodEventReason::Evicted, why.text_for(key));
    PodEvent {
        key: key.clone(),
        uid: uid.clone(),
        kind,
        text,
    }
}
