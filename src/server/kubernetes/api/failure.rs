//! Classifies the API server's error to a write: whether it was written, and why not.

use crate::kubernetes::request::ApiRequestError;
use kube::core::Status;
use kube::core::response::StatusCause;
use std::time::Duration;
use stowage_kubernetes_objects::port::BindOutcome;
use stowage_scheduling::control_loop::ControlPlaneError;

/// A request that failed, or whose result is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiFailure {
    pub why: FailureCause,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureCause {
    /// 404, or a patch that names a UID found another pod of that name.
    Gone,
    /// 409: a conflicting write; for requests with a UID as precondition also another UID.
    Conflict,
    /// 429, and how long to wait, if the answer says so.
    TooManyRequests { after: Option<Duration> },
    /// 429 to an eviction that a disruption budget refuses, and how long to wait, if the answer says so.
    Budget { after: Option<Duration> },
    /// An eviction of a pod that several disruption budgets cover: the API server refuses it, whatever they allow, with a 500.
    SeveralBudgets,
    /// Nothing was written: it was refused, or never sent.
    Refused,
    /// It may have been written.
    Unknown,
}

impl ApiFailure {
    /// Whether disruption budgets refused an eviction.
    pub(crate) fn is_refused_by_budgets(&self) -> bool {
        matches!(
            self.why,
            FailureCause::Budget { .. } | FailureCause::SeveralBudgets
        )
    }
}

impl From<ApiRequestError> for ApiFailure {
    fn from(error: ApiRequestError) -> Self {
        match error {
            ApiRequestError::Failed(error) => (*error).into(),
            ApiRequestError::TimedOut(_) => Self {
                why: FailureCause::Unknown,
                message: error.to_string(),
            },
        }
    }
}

impl From<kube::Error> for ApiFailure {
    fn from(error: kube::Error) -> Self {
        Self {
            why: failure_cause(&error),
            message: error.to_string(),
        }
    }
}

/// In the API server's answer to an eviction (`registry/core/pod/storage/eviction.go`).
const SEVERAL_BUDGETS: &str = "more than one PodDisruptionBudget";

/// The cause that the API server names where a budget refuses (`DisruptionBudgetCause` of `policy/v1`). API Priority and Fairness
/// and admission webhooks answer 429 without it.
const BUDGET_CAUSE: &str = "DisruptionBudget";

/// Cause of an error. After an answer that leaves open whether it was written, the object has to be read.
fn failure_cause(error: &kube::Error) -> FailureCause {
    match error {
        kube::Error::Api(status) => match status.code {
            404 => FailureCause::Gone,
            409 => FailureCause::Conflict,
            429 => {
                let seconds = status
                    .details
                    .as_ref()
                    .map_or(0, |details| details.retry_after_seconds);
                let after = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
                let is_refused_by_budget = causes(status).any(|cause| cause.reason == BUDGET_CAUSE);
                if is_refused_by_budget {
                    FailureCause::Budget { after }
                } else {
                    FailureCause::TooManyRequests { after }
                }
            }
            // An overloaded server or a proxy in front of it answers this, whatever happened to the request.
            408 => FailureCause::Unknown,
            422 if is_uid_mismatch(status) => FailureCause::Gone,
            400..500 => FailureCause::Refused,
            500 if status.message.contains(SEVERAL_BUDGETS) => FailureCause::SeveralBudgets,
            _ => FailureCause::Unknown,
        },
        // The request was never sent.
        kube::Error::BuildRequest(_) | kube::Error::HttpError(_) => FailureCause::Refused,
        _ => FailureCause::Unknown,
    }
}

/// A patch cannot change a UID, so it is refused if it names another UID than the pod has.
fn is_uid_mismatch(status: &Status) -> bool {
    causes(status).any(|cause| cause.field == "metadata.uid")
}

fn causes(status: &Status) -> impl Iterator<Item = &StatusCause> {
    status.details.iter().flat_map(|details| &details.causes)
}

impl From<ApiFailure> for BindOutcome {
    fn from(ApiFailure { why, message }: ApiFailure) -> Self {
        match why {
            FailureCause::Conflict => Self::Conflict,
            FailureCause::Gone | FailureCause::Refused | FailureCause::SeveralBudgets => {
                Self::Refused { message }
            }
            // A proxy may answer this after it has passed the request on, and a Binding must not be repeated without a read.
            FailureCause::TooManyRequests { .. }
            | FailureCause::Budget { .. }
            | FailureCause::Unknown => Self::Unknown { message },
        }
    }
}

impl From<ApiFailure> for ControlPlaneError {
    fn from(ApiFailure { why, message }: ApiFailure) -> Self {
        match why {
            FailureCause::Gone => Self::Gone,
            FailureCause::Refused | FailureCause::SeveralBudgets => Self::Refused(message),
            FailureCause::Conflict
            | FailureCause::TooManyRequests { .. }
            | FailureCause::Budget { .. }
            | FailureCause::Unknown => Self::Unknown(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(code: u16) -> ApiFailure {
        let status = kube::core::Status::failure("no", "Because").with_code(code);
        kube::Error::Api(Box::new(status)).into()
    }

    #[test]
    fn an_eviction_that_several_budgets_refuse_is_one_that_budgets_refuse() {
        let said = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        let failed = |message: &str| -> ApiFailure {
            let status = kube::core::Status::failure(message, "InternalError").with_code(500);
            kube::Error::Api(Box::new(status)).into()
        };
        let (several, other) = (failed(said), failed("etcdserver: request timed out"));
        assert_eq!(
            (several.why, several.is_refused_by_budgets()),
            (FailureCause::SeveralBudgets, true)
        );
        assert_eq!(
            (other.why, other.is_refused_by_budgets()),
            (FailureCause::Unknown, false)
        );
    }

    #[test]
    fn a_throttled_eviction_is_not_one_that_a_budget_refuses() {
        let refused = |details: serde_json::Value| -> ApiFailure {
            let mut status = Status::failure("no", "TooManyRequests").with_code(429);
            status.details = Some(serde_json::from_value(details).unwrap());
            kube::Error::Api(Box::new(status)).into()
        };
        let of_a_budget =
            [serde_json::json!({ "reason": "DisruptionBudget", "message": "none left" })];
        assert!(refused(serde_json::json!({ "causes": of_a_budget })).is_refused_by_budgets());
        // API Priority and Fairness, and an admission webhook that moves the pod instead.
        let of_a_webhook = [serde_json::json!({ "reason": "Migrating", "message": "it is moved" })];
        for details in [
            serde_json::json!({ "retryAfterSeconds": 1 }),
            serde_json::json!({ "causes": of_a_webhook }),
        ] {
            assert!(
                !refused(details.clone()).is_refused_by_budgets(),
                "{details}"
            );
        }
        assert!(!answered(429).is_refused_by_budgets());
    }

    #[test]
    fn only_what_says_that_nothing_was_written_counts_as_refused() {
        let outcome = |code| match answered(code).into() {
            BindOutcome::Written => "written",
            BindOutcome::Conflict => "conflict",
            BindOutcome::Refused { .. } => "refused",
            BindOutcome::Unknown { .. } => "unknown",
        };
        assert_eq!(outcome(409), "conflict");
        for refused in [400, 401, 403, 404, 422] {
            assert_eq!(outcome(refused), "refused", "{refused}");
        }
        for unknown in [0, 302, 408, 429, 500, 502, 503, 504] {
            assert_eq!(outcome(unknown), "unknown", "{unknown}");
        }
        let garbled = serde_json::from_str::<u8>("<html>").unwrap_err();
        let failure = ApiFailure::from(kube::Error::SerdeError(garbled));
        assert_eq!(
            failure.why,
            FailureCause::Unknown,
            "an answer that cannot be read says nothing"
        );
    }

    #[test]
    fn a_missing_pod_is_reported_as_gone_and_not_retried() {
        assert_eq!(
            ControlPlaneError::from(answered(404)),
            ControlPlaneError::Gone
        );
        assert!(matches!(
            answered(403).into(),
            ControlPlaneError::Refused(_)
        ));
        for unknown in [409, 429, 500] {
            assert!(
                matches!(answered(unknown).into(), ControlPlaneError::Unknown(_)),
                "{unknown}"
            );
        }
    }

    #[test]
    fn a_patch_refused_for_its_uid_means_that_the_pod_is_gone() {
        let refused = |field: &str| {
            let mut status = Status::failure("no", "Invalid").with_code(422);
            status.details = Some(
                serde_json::from_value(serde_json::json!({ "causes": [{ "field": field }] }))
                    .unwrap(),
            );
            ApiFailure::from(kube::Error::Api(Box::new(status))).why
        };
        assert_eq!(refused("metadata.uid"), FailureCause::Gone);
        assert_eq!(refused("spec.nodeName"), FailureCause::Refused);
    }

    #[test]
    fn retry_after_is_taken_from_the_answer() {
        let told = |seconds: u32| {
            let mut status = kube::core::Status::failure("no", "TooManyRequests").with_code(429);
            status.details =
                serde_json::from_value(serde_json::json!({ "retryAfterSeconds": seconds }))
                    .unwrap();
            ApiFailure::from(kube::Error::Api(Box::new(status))).why
        };
        assert_eq!(
            told(10),
            FailureCause::TooManyRequests {
                after: Some(Duration::from_secs(10))
            }
        );
        assert_eq!(told(0), FailureCause::TooManyRequests { after: None });
        assert_eq!(
            answered(429).why,
            FailureCause::TooManyRequests { after: None }
        );
    }
}
