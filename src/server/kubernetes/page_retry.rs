//! Repeats requests for pages of lists, all but the first. The watcher starts a list that fails with its first page again: of
//! hundreds of pages, an API server that throttles one in a hundred would hardly ever let a list end.
//!
//! Nothing else is repeated: a repeated write may land after the Lease has passed on, and a failed read of a Lease has to be noticed
//! at once.

use http::{Method, Request, Response, StatusCode, header};
use kube::client::Body;
use std::time::Duration;
use tokio::time::Sleep;
use tower::retry::Policy;

/// Retries of one request: with the doubling pause these are about four seconds.
const MAX_RETRIES: u32 = 4;
/// Pause before the first retry, unless `Retry-After` asks for a longer one; doubles with each retry.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause before a retry, whatever `Retry-After` asks for.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub(crate) struct ListPageRetry {
    remaining_retries: u32,
}

impl Default for ListPageRetry {
    fn default() -> Self {
        Self {
            remaining_retries: MAX_RETRIES,
        }
    }
}

impl<B, E> Policy<Request<Body>, Response<B>, E> for ListPageRetry {
    type Future = Sleep;

    fn retry(
        &mut self,
        request: &mut Request<Body>,
        answer: &mut Result<Response<B>, E>,
    ) -> Option<Sleep> {
        let requested_pause = match answer {
            Ok(answer) if is_transient(answer.status()) => retry_after(answer),
            Ok(_) => return None,
            Err(_) => None,
        };
        if !is_later_page(request) || self.remaining_retries == 0 {
            return None;
        }
        let pause = FIRST_RETRY_PAUSE * 2_u32.pow(MAX_RETRIES - self.remaining_retries);
        self.remaining_retries -= 1;
        Some(tokio::time::sleep(
            requested_pause
                .unwrap_or_default()
                .clamp(pause, MAX_RETRY_PAUSE),
        ))
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        let mut copy = is_later_page(request).then(|| Request::new(Body::empty()))?;
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = request.uri().clone();
        *copy.headers_mut() = request.headers().clone();
        Some(copy)
    }
}

/// Whether the request is for a page of a list after the first. A first page is not retried: its failure loses no other page, and a
/// command reports it at once.
fn is_later_page(request: &Request<Body>) -> bool {
    let mut parameters = request.uri().query().unwrap_or_default().split('&');
    request.method() == Method::GET && parameters.any(|one| one.starts_with("continue="))
}

/// Whether a retry may succeed. While etcd changes its leader, the API server answers 500.
fn is_transient(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 500 | 502 | 503 | 504)
}

fn retry_after<B>(answer: &Response<B>) -> Option<Duration> {
    let seconds = answer.headers().get(header::RETRY_AFTER)?.to_str().ok()?;
    Some(Duration::from_secs(seconds.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;
    use tokio::time::Instant;
    use tower::{Service, ServiceBuilder, service_fn};

    /// What the server answers, one after the other; `None` is a connection that broke. Answers the last answer's status, how often
    /// the server was asked, and for how long it all took.
    async fn asked(
        method: Method,
        uri: &str,
        answers: &[Option<(u16, &str)>],
    ) -> (Option<u16>, usize, Duration) {
        let left = Rc::new(RefCell::new(
            answers.iter().rev().copied().collect::<Vec<_>>(),
        ));
        let count = left.clone();
        let server = service_fn(move |_: Request<Body>| {
            let answer = left.borrow_mut().pop().expect("it is not asked any more");
            async move {
                let Some((status, after)) = answer else {
                    return Err("the connection broke");
                };
                let answer = Response::builder()
                    .status(status)
                    .header(header::RETRY_AFTER, after);
                Ok(answer.body(()).unwrap())
            }
        });
        let mut client = ServiceBuilder::new()
            .retry(ListPageRetry::default())
            .service(server);
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .body(Body::empty())
            .unwrap();
        let begun = Instant::now();
        let answer = client
            .call(request)
            .await
            .ok()
            .map(|answer| answer.status().as_u16());
        (
            answer,
            answers.len() - count.borrow().len(),
            begun.elapsed(),
        )
    }

    const PAGE: &str = "http://x/api/v1/pods?&limit=250&continue=abc";

    #[tokio::test(start_paused = true)]
    async fn a_page_is_asked_for_again_until_it_comes() {
        let (status, times, took) = asked(
            Method::GET,
            PAGE,
            &[None, Some((429, "2")), Some((500, "")), Some((200, ""))],
        )
        .await;
        assert_eq!((status, times), (Some(200), 4));
        assert_eq!(
            took.as_millis() / 10 * 10,
            250 + 2000 + 1000,
            "and the server says when"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn retries_of_a_page_are_limited() {
        let (status, times, took) = asked(Method::GET, PAGE, &[Some((503, "3600")); 9]).await;
        assert_eq!((status, times), (Some(503), 5));
        assert!(took <= Duration::from_secs(21), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn permanent_errors_and_requests_that_are_no_later_page_are_not_retried() {
        for (method, uri, status) in [
            (Method::GET, PAGE, 410),
            (Method::GET, PAGE, 403),
            (Method::GET, "http://x/api/v1/pods?&limit=250", 503),
            (
                Method::GET,
                "http://x/api/v1/pods?&watch=true&timeoutSeconds=60",
                503,
            ),
            (
                Method::GET,
                "http://x/apis/coordination.k8s.io/v1/namespaces/a/leases/b",
                503,
            ),
            (
                Method::POST,
                "http://x/api/v1/namespaces/a/pods/b/binding?continue=1",
                429,
            ),
        ] {
            let answers = [Some((status, "1")), Some((200, ""))];
            assert_eq!(asked(method, uri, &answers).await.1, 1, "{uri}");
        }
    }
}
