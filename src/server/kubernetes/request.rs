//! Requests to the API server that end in time, answered or not.

use std::future::Future;
use std::time::Duration;

/// Why a request has no usable answer. One that writes may have been carried out all the same.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiRequestError {
    #[error("the API server did not answer within {0:?}")]
    TimedOut(Duration),
    #[error(transparent)]
    Failed(Box<kube::Error>),
}

pub async fn within<T>(
    limit: Duration,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, ApiRequestError> {
    match tokio::time::timeout(limit, request).await {
        Ok(answer) => answer.map_err(|error| ApiRequestError::Failed(Box::new(error))),
        Err(_) => Err(ApiRequestError::TimedOut(limit)),
    }
}
