//! One GET of a page on the operators' address, for the commands that print what a running service knows.

use super::access::Access;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use std::io::Write;
use std::time::Duration;
use stowage_telemetry::root_cause;

/// Why there is no answer. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum OperatorsClientError {
    #[error("{0}")]
    NotFound(String),
    #[error(
        "the server {text:?} of --server or STOWAGE_SERVER: {problem}; write http://HOST:PORT, or https:// with --ca where it takes tokens"
    )]
    BadServer { text: String, problem: String },
    #[error("--server {text:?}: a token would go there in the clear; write https://HOST:PORT")]
    InTheClear { text: String },
    #[error(
        "{server} does not answer in plain HTTP ({cause}). If it is a Stowage with TLS, write --server {tls}"
    )]
    SpeaksTls {
        server: String,
        tls: String,
        cause: String,
    },
    #[error(
        "no answer from {server}: {cause}. Is `stowage serve` running, and is this its --admin address?"
    )]
    Unreachable { server: String, cause: String },
    #[error("the port-forward to {server} does not hold: {cause}")]
    ForwardFailed { server: String, cause: String },
    #[error("{server} has not answered within {} s", .after.as_secs())]
    TooSlow { server: String, after: Duration },
    #[error("{server} does not let you see it: {text}")]
    NotAllowed { server: String, text: String },
    #[error("{server} answers {status}: {text}")]
    Refused {
        server: String,
        status: StatusCode,
        text: String,
    },
    #[error(
        "{server} does not answer with TLS ({cause}). If it is a Stowage without, write --server {plain}"
    )]
    SpeaksPlain {
        server: String,
        plain: String,
        cause: String,
    },
    #[error(
        "the operators' address of {server} does not answer with TLS ({cause}). If it has none, forward to it \
         (kubectl port-forward), and write --server http://127.0.0.1:PORT"
    )]
    LeaderSpeaksPlain { server: String, cause: String },
    #[error(
        "the {what} of {server} broke off after {bytes} bytes: {cause}. If `stowage serve` failed to read it, its log says why"
    )]
    BrokeOff {
        server: String,
        what: &'static str,
        bytes: u64,
        cause: String,
    },
    #[error(
        "{server} answers something that is no {what} of Stowage. Is this the --admin address of `stowage serve`, and no proxy's \
         page to log in?"
    )]
    SomethingElse { server: String, what: &'static str },
    #[error("the answer cannot be written: {0}")]
    Unwritten(std::io::Error),
    #[error(
        "{server} answers something that is no {what}: {error}; is it a Stowage of this version?"
    )]
    NotUnderstood {
        server: String,
        what: &'static str,
        error: serde_json::Error,
    },
}

/// Maximum answer: every node of a large cluster in detail is some ten megabytes.
const MAX_ANSWER_BYTES: usize = 256 << 20;
/// Timeout of a request: a page of 5,000 nodes takes a fraction of a second, and a port-forward some more.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout between two pieces of a large file: a redacted bundle is read to its end before its first byte comes.
const DOWNLOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// Fetches and parses the page at a path and query; `what` is its name in errors.
pub async fn get<T: DeserializeOwned>(
    access: &Access,
    path: &str,
    what: &'static str,
) -> Result<T, OperatorsClientError> {
    let server = &*access.server_name();
    let request = async {
        let answer = send(access, path, HeaderMap::new()).await?;
        let status = answer.status();
        Ok((status, read_body(access, answer).await?))
    };
    let answer = tokio::time::timeout(REQUEST_TIMEOUT, request).await;
    let (status, body) = answer.unwrap_or_else(|_| {
        Err(OperatorsClientError::TooSlow {
            server: server.into(),
            after: REQUEST_TIMEOUT,
        })
    })?;
    match status {
        StatusCode::OK => {
            serde_json::from_slice(&body).map_err(|error| OperatorsClientError::NotUnderstood {
                server: server.into(),
                what,
                error,
            })
        }
        status => Err(error_for_status(server, status, &body)),
    }
}

/// Writes the page at a path to `out` as it comes, however long it is; `what` is its name in errors, `beginning` its first bytes.
pub async fn download(
    access: &Access,
    path: &str,
    (what, beginning): (&'static str, &[u8]),
    out: &mut (dyn Write + Send),
) -> Result<(), OperatorsClientError> {
    let server = &*access.server_name();
    let too_slow = |_| OperatorsClientError::TooSlow {
        server: server.into(),
        after: DOWNLOAD_TIMEOUT,
    };
    let response = send(access, path, HeaderMap::new());
    let answer = tokio::time::timeout(DOWNLOAD_TIMEOUT, response)
        .await
        .map_err(too_slow)??;
    if answer.status() != StatusCode::OK {
        let status = answer.status();
        return Err(error_for_status(
            server,
            status,
            &read_body(access, answer).await?,
        ));
    }
    let (mut body, mut bytes) = (answer.into_body(), 0);
    while let Some(frame) = tokio::time::timeout(DOWNLOAD_TIMEOUT, body.frame())
        .await
        .map_err(too_slow)?
    {
        let frame = frame.map_err(|error| {
            let (server, cause) = (server.into(), root_cause(&error).to_string());
            OperatorsClientError::BrokeOff {
                server,
                what,
                bytes,
                cause,
            }
        })?;
        if let Some(data) = frame.data_ref() {
            let due = beginning.get(bytes as usize..).unwrap_or_default();
            if due.iter().zip(data).any(|(due, came)| due != came) {
                return Err(OperatorsClientError::SomethingElse {
                    server: server.into(),
                    what,
                });
            }
            out.write_all(data)
                .map_err(OperatorsClientError::Unwritten)?;
            bytes += data.len() as u64;
        }
    }
    Ok(())
}

fn error_for_status(server: &str, status: StatusCode, body: &[u8]) -> OperatorsClientError {
    let (server, text) = (
        server.into(),
        String::from_utf8_lossy(body).trim().to_owned(),
    );
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => OperatorsClientError::NotAllowed {
            server,
            text: error_message(body),
        },
        StatusCode::NOT_FOUND if !body.is_empty() => OperatorsClientError::NotFound(text),
        status => OperatorsClientError::Refused {
            server,
            status,
            text,
        },
    }
}

/// The page's address. No token goes there in the clear.
fn uri(path: &str, access: &Access) -> Result<Uri, OperatorsClientError> {
    let uri = page_uri(&access.url(), path)?;
    if access.authorization.is_some() && uri.scheme_str() == Some("http") {
        return Err(OperatorsClientError::InTheClear { text: access.url() });
    }
    Ok(uri)
}

fn page_uri(server: &str, path: &str) -> Result<Uri, OperatorsClientError> {
    let bad = |problem: String| OperatorsClientError::BadServer {
        text: server.into(),
        problem,
    };
    if !server.starts_with("http://") && !server.starts_with("https://") {
        return Err(bad("it has no scheme".into()));
    }
    format!("{server}{path}")
        .parse()
        .map_err(|error: http::uri::InvalidUri| bad(error.to_string()))
}

/// The message of an error answer; all of it, if Stowage did not write it.
fn error_message(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Refusal {
        error: String,
    }
    let refusal = serde_json::from_slice(body).map(|Refusal { error }| error);
    refusal.unwrap_or_else(|_| String::from_utf8_lossy(body).trim().to_owned())
}

/// Encoded as a value in a query.
pub fn escape_query_value(text: &str) -> String {
    let one = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'/' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(one).collect()
}

/// The answer to a GET with these headers beside the token, as soon as it begins.
pub async fn send(
    access: &Access,
    path: &str,
    headers: HeaderMap,
) -> Result<Response<Incoming>, OperatorsClientError> {
    let server = &*access.server_name();
    let mut request = Request::get(uri(path, access)?)
        .body(Empty::new())
        .expect("a URI that was parsed makes a request");
    *request.headers_mut() = headers;
    if let Some(authorization) = &access.authorization {
        request
            .headers_mut()
            .insert(header::AUTHORIZATION, authorization.clone());
    }
    access.client.request(request).await.map_err(|error| {
        let cause = root_cause(&error).to_string();
        if let Some(cause) = access.forward_problem() {
            return OperatorsClientError::ForwardFailed {
                server: server.into(),
                cause,
            };
        }
        let (url, server) = (access.url(), server.into());
        match url.split_once("://") {
            Some(("https", _)) if access.is_forwarded() && is_not_tls(&error) => {
                OperatorsClientError::LeaderSpeaksPlain { server, cause }
            }
            Some(("https", rest)) if is_not_tls(&error) => OperatorsClientError::SpeaksPlain {
                server,
                plain: format!("http://{rest}"),
                cause,
            },
            Some(("http", rest)) if is_not_http(&error) => OperatorsClientError::SpeaksTls {
                server,
                tls: format!("https://{rest}"),
                cause,
            },
            _ => OperatorsClientError::Unreachable { server, cause },
        }
    })
}

/// Whether something answered, and not in HTTP: a server with TLS sends an alert.
fn is_not_http(error: &(dyn std::error::Error + 'static)) -> bool {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .filter_map(|error| error.downcast_ref::<hyper::Error>())
        .any(hyper::Error::is_parse)
}

/// Whether something answered, and not with TLS: an answer in plain HTTP is none of its messages.
fn is_not_tls(error: &(dyn std::error::Error + 'static)) -> bool {
    let causes = std::iter::successors(Some(error), |error| {
        match error.downcast_ref::<std::io::Error>() {
            // Its source is that of the error inside, and not that itself.
            Some(error) => error
                .get_ref()
                .map(|inner| inner as &(dyn std::error::Error + 'static)),
            None => error.source(),
        }
    });
    let mut of_tls = causes.filter_map(|error| error.downcast_ref::<rustls::Error>());
    of_tls.any(|error| matches!(error, rustls::Error::InvalidMessage(_)))
}

async fn read_body(
    access: &Access,
    answer: Response<Incoming>,
) -> Result<Bytes, OperatorsClientError> {
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES)
        .collect()
        .await;
    let body = body.map_err(|error| OperatorsClientError::Unreachable {
        server: access.server_name(),
        cause: root_cause(error.as_ref()).to_string(),
    });
    Ok(body?.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_a_server_without_a_scheme_is_refused_and_values_are_escaped() {
        let page = page_uri(
            "http://h:1",
            &format!("/v1/models?model={}", escape_query_value("a/b&c?d")),
        )
        .unwrap();
        assert_eq!(page.to_string(), "http://h:1/v1/models?model=a/b%26c%3Fd");
        assert!(matches!(
            page_uri("h:1", "/"),
            Err(OperatorsClientError::BadServer { .. })
        ));
    }
}
