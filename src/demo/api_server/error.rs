//! What goes wrong, as the `Status` object Kubernetes answers.
//!
//! Texts follow the real API server's, because clients show them to people (never compare them).

use super::resource::Resource;
use serde_json::{Value, json};

/// A refusal: HTTP code, machine-readable reason, text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
}

impl ApiError {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
    }

    pub fn not_found(resource: &Resource, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} \"{name}\" not found", resource.qualified()))
    }

    pub fn no_such_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource")
    }

    pub fn already_exists(resource: &Resource, name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("{} \"{name}\" already exists", resource.qualified()))
    }

    pub fn conflict(what: &str, name: &str, why: impl std::fmt::Display) -> Self {
        Self::new(409, "Conflict", format!("Operation cannot be fulfilled on {what} \"{name}\": {why}"))
    }

    pub fn invalid(resource: &Resource, name: &str, why: impl std::fmt::Display) -> Self {
        Self::new(422, "Invalid", format!("{} \"{name}\" is invalid: {why}", resource.kind))
    }

    pub fn bad_request(why: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", why)
    }

    pub fn unsupported_patch(content_type: &str) -> Self {
        Self::new(415, "UnsupportedMediaType", format!("the body's media type is unknown: {content_type}"))
    }

    pub fn method_not_allowed() -> Self {
        Self::new(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
    }

    pub fn internal(why: impl Into<String>) -> Self {
        Self::new(500, "InternalError", why)
    }

    /// The log no longer reaches back to the version a watch asks for.
    pub fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    pub fn to_status(&self) -> Value {
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        })
    }
}
