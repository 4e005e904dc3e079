//! Reading a request: limits on its size and time, and the errors of malformed requests.
//!
//! A malformed request is answered with its status and a text that names the place; it changes nothing.

use super::server::limits::ConnectionLimits;
use crate::service::assert_cluster_unlocked;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use stowage_scheduling::coded::coded;

/// Limits of one request.
#[derive(Debug, Clone, Copy)]
pub struct RequestLimits {
    /// 5,000 full nodes with their managed fields are about 10 MB; 64 MiB is enough for 30,000.
    pub body: usize,
    /// Advice in the error for a body that is larger.
    pub too_large_advice: &'static str,
    /// How long a client may take to send its body. kube-scheduler runs beside Stowage; an agent is one hop away.
    pub body_time: Duration,
    pub connections: ConnectionLimits,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            body: 64 << 20,
            too_large_advice: "raise --body-limit if your cluster needs it",
            body_time: Duration::from_secs(10),
            connections: ConnectionLimits::default(),
        }
    }
}

coded! {
    /// A request that gets an error status as its answer, and that status.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum BadRequest: StatusCode {
        "too-large" TooLarge { limit: usize, way_out: &'static str },
            "the body is larger than {limit} bytes; {way_out}"
            => StatusCode::PAYLOAD_TOO_LARGE;
        "too-slow" TooSlow { within: Duration },
            "the body did not arrive within {} s", within.as_secs_f32()
            => StatusCode::REQUEST_TIMEOUT;
        "broken-off" BrokenOff(error: String), "the body broke off: {error}" => StatusCode::BAD_REQUEST;
        "malformed" Malformed(error: String), "the body is not the JSON this verb takes: {error}" => StatusCode::BAD_REQUEST;
        "unprocessable" [*code] Unprocessable { code: &'static str, message: String }, "{message}" => StatusCode::UNPROCESSABLE_ENTITY;
        "unauthorized" [*code] Unauthorized { code: &'static str, message: String }, "{message}" => StatusCode::UNAUTHORIZED;
        "forbidden" [*code] Forbidden { code: &'static str, message: String }, "{message}" => StatusCode::FORBIDDEN;
        "unavailable" Unavailable(reason: &'static str), "not answering: {reason}" => StatusCode::SERVICE_UNAVAILABLE;
        /// A limit is reached; the request may succeed later.
        "crowded" [*code] Crowded { code: &'static str, message: String }, "{message}" => StatusCode::SERVICE_UNAVAILABLE;
        /// The API server did not answer the access review.
        "undecided" [*code] Undecided { code: &'static str, message: String }, "{message}" => StatusCode::SERVICE_UNAVAILABLE;
    }
}

impl BadRequest {
    pub(crate) fn unprocessable(code: &'static str, message: impl ToString) -> Self {
        Self::Unprocessable {
            code,
            message: message.to_string(),
        }
    }

    pub fn status(&self) -> StatusCode {
        self.entry()
    }
}

impl IntoResponse for BadRequest {
    fn into_response(self) -> Response {
        #[derive(Serialize)]
        #[serde(rename_all = "PascalCase")]
        struct Shape {
            error: String,
        }
        let mut answer = json(
            self.status(),
            &Shape {
                error: self.to_string(),
            },
        );
        let headers = answer.headers_mut();
        match &self {
            Self::Unauthorized { .. } => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                // An unauthenticated client keeps no connection.
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Self::Crowded { .. } => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        answer
    }
}

/// The whole body, within the limits.
pub async fn read_body(
    headers: &HeaderMap,
    body: Body,
    limits: RequestLimits,
) -> Result<Bytes, BadRequest> {
    let too_large = check_announced_length(headers, limits)?;
    match tokio::time::timeout(limits.body_time, to_bytes(body, limits.body)).await {
        Ok(Ok(body)) => Ok(body),
        Ok(Err(error)) if is_length_limit(&error) => Err(too_large),
        Ok(Err(error)) => Err(BadRequest::BrokenOff(error.to_string())),
        Err(_) => Err(BadRequest::TooSlow {
            within: limits.body_time,
        }),
    }
}

/// Rejects a body whose announced length is too large before any of it is read; otherwise returns the error for one that is
/// larger than announced.
pub(crate) fn check_announced_length(
    headers: &HeaderMap,
    limits: RequestLimits,
) -> Result<BadRequest, BadRequest> {
    let too_large = BadRequest::TooLarge {
        limit: limits.body,
        way_out: limits.too_large_advice,
    };
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    match announced {
        Some(length) if length > limits.body as u64 => Err(too_large),
        _ => Ok(too_large),
    }
}

pub fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, BadRequest> {
    serde_json::from_slice(body)
        .map_err(|error| BadRequest::Malformed(with_path::<T>(body, &error)))
}

/// The error with the place in the document, such as `engines[0].engine`. Only a request that is refused pays for finding it.
pub(crate) fn with_path<'a, T: Deserialize<'a>>(
    body: &'a [u8],
    error: &serde_json::Error,
) -> String {
    let found =
        serde_path_to_error::deserialize::<_, T>(&mut serde_json::Deserializer::from_slice(body))
            .err();
    match found
        .map(|found| found.path().to_string())
        .filter(|path| path != ".")
    {
        Some(path) => format!("{path}: {error}"),
        None => error.to_string(),
    }
}

/// A JSON answer with its length in the head: a chunked one would cost kube-scheduler a new connection.
pub fn json(status: StatusCode, answer: &impl Serialize) -> Response {
    assert_cluster_unlocked();
    json_from_bytes(
        status,
        serde_json::to_vec(answer).expect("answers are plain data"),
    )
}

/// A JSON answer of bytes that are serialized already, with its length in the head.
pub(crate) fn json_from_bytes(status: StatusCode, body: Vec<u8>) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn is_length_limit(error: &axum::Error) -> bool {
    std::error::Error::source(error)
        .is_some_and(|source| source.is::<http_body_util::LengthLimitError>())
}
