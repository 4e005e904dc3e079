//! API errors, as the `Status` object that Kubernetes answers.
//!
//! Texts are the real API server's, because clients show them to users (never compare them).

use super::resource::Resource;
use serde_json::{Value, json};

/// An error: HTTP code, machine-readable reason, text; for an eviction also the causes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
    pub cause: Option<StatusCause>,
    pub retry_after_seconds: Option<u64>,
}

/// One of a `Status`' causes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusCause {
    pub reason: &'static str,
    pub message: String,
    /// The field it is about, if any.
    pub field: Option<&'static str>,
}

impl ApiError {
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            cause: None,
            retry_after_seconds: None,
        }
    }

    /// A disruption budget prevents an eviction.
    pub fn disruption_budget(why: impl Into<String>, retry_after_seconds: Option<u64>) -> Self {
        let message = "Cannot evict pod as it would violate the pod's disruption budget.";
        let cause = Some(StatusCause {
            reason: "DisruptionBudget",
            message: why.into(),
            field: None,
        });
        Self {
            cause,
            ..Self::too_many_requests(message, retry_after_seconds)
        }
    }

    pub(crate) fn too_many_requests(message: &str, retry_after_seconds: Option<u64>) -> Self {
        Self {
            retry_after_seconds,
            ..Self::new(429, "TooManyRequests", message)
        }
    }

    pub fn not_found(resource: &Resource, name: &str) -> Self {
        Self::new(
            404,
            "NotFound",
            format!("{} \"{name}\" not found", resource.qualified()),
        )
    }

    pub(crate) fn no_such_path() -> Self {
        Self::new(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )
    }

    pub(crate) fn already_exists(resource: &Resource, name: &str) -> Self {
        Self::new(
            409,
            "AlreadyExists",
            format!("{} \"{name}\" already exists", resource.qualified()),
        )
    }

    pub fn conflict(what: &str, name: &str, why: impl std::fmt::Display) -> Self {
        Self::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on {what} \"{name}\": {why}"),
        )
    }

    pub fn invalid(resource: &Resource, name: &str, why: impl std::fmt::Display) -> Self {
        Self::new(
            422,
            "Invalid",
            format!("{} \"{name}\" is invalid: {why}", resource.kind),
        )
    }

    /// A patch would give the object another UID: it was meant for another object of that name.
    pub fn other_uid(resource: &Resource, name: &str, uid: &str) -> Self {
        let message = format!("Invalid value: \"{uid}\": field is immutable");
        let invalid = Self::invalid(resource, name, format!("metadata.uid: {message}"));
        Self {
            cause: Some(StatusCause {
                reason: "FieldValueInvalid",
                message,
                field: Some("metadata.uid"),
            }),
            ..invalid
        }
    }

    pub(crate) fn bad_request(why: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", why)
    }

    pub(crate) fn unsupported_patch(content_type: &str) -> Self {
        Self::new(
            415,
            "UnsupportedMediaType",
            format!("the body's media type is unknown: {content_type}"),
        )
    }

    pub(crate) fn method_not_allowed() -> Self {
        Self::new(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    pub fn internal(why: impl Into<String>) -> Self {
        Self::new(500, "InternalError", why)
    }

    /// The log no longer reaches back to the version a watch asks for.
    pub fn expired(requested: u64, oldest: u64) -> Self {
        Self::new(
            410,
            "Expired",
            format!("too old resource version: {requested} ({oldest})"),
        )
    }

    /// The list that a continue token belongs to is no longer stored.
    pub(crate) fn expired_continue() -> Self {
        Self::new(
            410,
            "Expired",
            "The provided continue parameter is too old to display a consistent list result.",
        )
    }

    /// The request did not finish within its `timeout`, or the server's own.
    pub fn timeout() -> Self {
        Self::new(
            504,
            "Timeout",
            "Timeout: request did not complete within requested timeout - context deadline exceeded",
        )
    }

    pub(crate) fn to_status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        });
        if let Some(StatusCause {
            reason,
            message,
            field,
        }) = &self.cause
        {
            let mut cause = json!({"reason": reason, "message": message});
            if let Some(field) = field {
                cause["field"] = json!(field);
            }
            status["details"]["causes"] = json!([cause]);
        }
        if let Some(seconds) = self.retry_after_seconds {
            status["details"]["retryAfterSeconds"] = json!(seconds);
        }
        status
    }
}
