//! When and how often a request is performed, and what its client is answered: at once and truthfully, unless a fault was
//! ordered.
//!
//! A late write lands whether or not its client still waits: it runs in a task of its own. `routes` and the modules behind it
//! perform requests.

use super::error::ApiError;
use super::faults::{DelayStage, InjectedFault, Operation};
use super::routes::{ApiRequest, error_response};
use axum::body::{Body, Bytes};
use axum::response::Response;
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Time limit of a write that names no `timeout`, as in kube-apiserver (`requestTimeoutUpperBound`).
const DEFAULT_WRITE_TIMEOUT: Duration = Duration::from_secs(34);

/// Performs a request, and answers it.
pub async fn deliver(
    request: Arc<ApiRequest>,
    fault: Option<(Operation, InjectedFault)>,
) -> Response {
    let Some((operation, fault)) = fault else {
        return request.perform();
    };
    match fault {
        InjectedFault::AnswersLate(delay) => {
            let answer = request.perform();
            request.until_stop(tokio::time::sleep(delay)).await;
            answer
        }
        InjectedFault::AnswersWhenReleased => {
            let answer = request.perform();
            request
                .until_stop(request.wait_for_release(operation))
                .await;
            answer
        }
        InjectedFault::LosesAnswer => break_before_body(request.perform()),
        InjectedFault::CommitsLate(stage, delay) => {
            perform_late(request, stage, Box::pin(tokio::time::sleep(delay))).await
        }
        InjectedFault::CommitsWhenReleased(stage) => {
            let held = request.clone();
            let released = async move { held.wait_for_release(operation).await };
            perform_late(request, stage, Box::pin(released)).await
        }
        InjectedFault::ArrivesTwice(delay) => {
            perform_twice(request, Box::pin(tokio::time::sleep(delay)))
        }
        InjectedFault::ArrivesAgainWhenReleased => {
            let held = request.clone();
            perform_twice(
                request,
                Box::pin(async move { held.wait_for_release(operation).await }),
            )
        }
        InjectedFault::Hangs => {
            request.shared.stop.cancelled().await;
            error_response(&ApiError::internal("the server stops"))
        }
        _ => error_response(&injected_error(fault, &request)),
    }
}

/// The error that answers a request which is not performed.
fn injected_error(fault: InjectedFault, request: &ApiRequest) -> ApiError {
    const WHY: &str = "a fault was ordered";
    match fault {
        InjectedFault::Conflicts => ApiError::conflict(&request.resource(), request.name(), WHY),
        InjectedFault::Forbids => ApiError::new(403, "Forbidden", WHY),
        InjectedFault::TooManyRequests => ApiError::too_many_requests(WHY, None),
        InjectedFault::Throttles(seconds) => ApiError::too_many_requests(WHY, Some(seconds)),
        InjectedFault::Expired => ApiError::new(410, "Expired", "too old resource version"),
        _ => ApiError::internal(WHY),
    }
}

/// Performs the request when `commit_time` has passed; the client waits no longer than the server's timeout.
async fn perform_late(
    request: Arc<ApiRequest>,
    stage: DelayStage,
    commit_time: BoxFuture<'static, ()>,
) -> Response {
    let timeout = request.timeout.unwrap_or(DEFAULT_WRITE_TIMEOUT);
    let (sender, receiver) = oneshot::channel();
    let commit = async move {
        let is_performed = match stage {
            DelayStage::Queue => tokio::time::timeout(timeout, commit_time).await.is_ok(),
            DelayStage::Network | DelayStage::Commit => {
                commit_time.await;
                true
            }
        };
        // The client may have disconnected.
        let _ = sender.send(if is_performed {
            request.perform()
        } else {
            error_response(&ApiError::timeout())
        });
    };
    tokio::spawn(commit);
    let answer = async {
        receiver
            .await
            .unwrap_or_else(|_| error_response(&ApiError::internal("the server stops")))
    };
    match stage {
        DelayStage::Commit => tokio::time::timeout(timeout, answer)
            .await
            .unwrap_or_else(|_| error_response(&ApiError::timeout())),
        DelayStage::Network | DelayStage::Queue => answer.await,
    }
}

/// Performs the request now, and again when `again` has passed.
fn perform_twice(request: Arc<ApiRequest>, again: BoxFuture<'static, ()>) -> Response {
    let answer = request.perform();
    tokio::spawn(async move {
        again.await;
        request.perform();
    });
    answer
}

/// The head of an answer, and a connection that breaks before its body.
fn break_before_body(answer: Response) -> Response {
    let breaks = futures::stream::iter([Err::<Bytes, _>(std::io::Error::from(
        std::io::ErrorKind::ConnectionReset,
    ))]);
    answer.map(|_| Body::from_stream(breaks))
}
