//! One GET of an address that a user names: of an engine's metrics, or of a Prometheus.

use anyhow::{Context, Result, anyhow};
use bytes::Bytes;
use http::StatusCode;
use http::request::Builder;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::Connect;
use std::time::Duration;

/// Maximum answer: metrics pages of the largest engines have some MiB, and a day of 7,000 GPUs by the minute as much as this.
pub const MAX_ANSWER_BYTES: usize = 256 << 20;

/// The whole answer, within the time to wait. `remedy` is what may help against one that is too slow or too large.
pub async fn get<C: Connect + Clone + Send + Sync + 'static>(
    client: &Client<C, Empty<Bytes>>,
    request: Builder,
    wait: Duration,
    remedy: &str,
) -> Result<(StatusCode, Bytes)> {
    let request = request.body(Empty::new()).context("this is no URL")?;
    let answered = async {
        let answer = client.request(request).await;
        let answer = answer.map_err(|error| match error.is_connect() {
            true => anyhow!("nothing listens there, or it cannot be reached"),
            false => error.into(),
        })?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect();
        let body = body.await;
        let body = body.map_err(|error| anyhow!("its answer broke off: {error}{remedy}"))?;
        Ok((status, body.to_bytes()))
    };
    let late = || {
        anyhow!(
            "it has not answered within {} s{remedy}",
            wait.as_secs_f64()
        )
    };
    let answer = tokio::time::timeout(wait, answered).await;
    answer.map_err(|_| late())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;
    use hyper_util::rt::TokioExecutor;

    #[tokio::test]
    async fn a_server_that_accepts_and_never_answers_is_too_slow() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", silent.local_addr().unwrap());
        let client = Client::builder(TokioExecutor::new()).build_http();
        let wait = Duration::from_millis(10);
        let got = get(&client, Request::get(url), wait, "; ask for less").await;
        let expected = "it has not answered within 0.01 s; ask for less";
        assert_eq!(got.unwrap_err().to_string(), expected);
    }
}
