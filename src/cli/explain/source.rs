//! Sources of an explanation: the operators' address of a running service, or a dump that is loaded here.

use super::access::Access;
use crate::ids::PodKey;
use crate::kubernetes::dump::{Dump, DumpControlPlane, DumpError};
use crate::kubernetes::index::ClusterIndex;
use crate::kubernetes::objects;
use crate::scheduling::explaining::{Explanation, ShownNodes, explain};
use crate::scheduling::policy::Policy;
use crate::scheduling::vocabulary::demand::RequestError;
use crate::service::Service;
use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::Pod;
use std::path::Path;
use std::time::Duration;

/// Why there is no explanation. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    #[error("{0}")]
    UnknownPod(String),
    #[error(
        "--server {text:?}: {problem}; write http://HOST:PORT, or https:// with --ca where it takes tokens"
    )]
    BadServer { text: String, problem: String },
    #[error(
        "no answer from {server}: {cause}. Is `stowage serve` running, and is this its --admin address? From outside the \
         cluster: kubectl -n kube-system port-forward deploy/stowage 9445"
    )]
    Unreachable { server: String, cause: String },
    #[error("{server} has not answered within {} s", .after.as_secs())]
    TooSlow { server: String, after: Duration },
    #[error("{server} does not let you see it: {text}")]
    NotAllowed { server: String, text: String },
    #[error("{server} answers {status}: {text}")]
    Refused { server: String, status: StatusCode, text: String },
    #[error("{server} answers something that is no explanation: {error}; is it a Stowage of this version?")]
    NotUnderstood { server: String, error: serde_json::Error },
    #[error(transparent)]
    Dump(#[from] DumpError),
}

/// Every node of a large cluster in detail is some ten megabytes.
const LARGEST_ANSWER: usize = 256 << 20;
/// An explanation of 5,000 nodes takes a fraction of a second; a port-forward some more.
const PATIENCE: Duration = Duration::from_secs(30);

pub async fn from_server(
    server: &str,
    access: &Access,
    pod: &PodKey,
    options: &ShownNodes,
) -> Result<Explanation, Unanswered> {
    let uri = uri(server, pod, options)?;
    if access.authorization.is_some() && uri.scheme_str() == Some("http") {
        let problem = "a token would go there in the clear".into();
        return Err(Unanswered::BadServer { text: server.into(), problem });
    }
    let answer = tokio::time::timeout(PATIENCE, get(server, access, uri)).await;
    let (status, body) =
        answer.unwrap_or_else(|_| Err(Unanswered::TooSlow { server: server.into(), after: PATIENCE }))?;
    let text = || String::from_utf8_lossy(&body).trim().to_owned();
    match status {
        StatusCode::OK => serde_json::from_slice(&body)
            .map_err(|error| Unanswered::NotUnderstood { server: server.into(), error }),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            Err(Unanswered::NotAllowed { server: server.into(), text: error_of(&body) })
        }
        StatusCode::NOT_FOUND if !body.is_empty() => Err(Unanswered::UnknownPod(text())),
        status => Err(Unanswered::Refused { server: server.into(), status, text: text() }),
    }
}

fn uri(server: &str, pod: &PodKey, options: &ShownNodes) -> Result<Uri, Unanswered> {
    let bad = |problem: String| Unanswered::BadServer { text: server.into(), problem };
    let which = match options {
        ShownNodes::Best(_) => String::new(),
        ShownNodes::All => "&all=true".into(),
        ShownNodes::Node(node) => format!("&node={}", escaped(node.as_str())),
    };
    let base = server.trim_end_matches('/');
    if !base.starts_with("http://") && !base.starts_with("https://") {
        return Err(bad("it has no scheme".into()));
    }
    let query = escaped(&pod.to_string());
    format!("{base}/v1/explain?pod={query}{which}")
        .parse()
        .map_err(|error: http::uri::InvalidUri| bad(error.to_string()))
}

/// The message of an error answer; all of it, if Stowage did not write it.
fn error_of(body: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct DumpRefusal {
        error: String,
    }
    let refusal = serde_json::from_slice(body).map(|DumpRefusal { error }| error);
    refusal.unwrap_or_else(|_| String::from_utf8_lossy(body).trim().to_owned())
}

/// Encoded as a value in a query.
fn escaped(text: &str) -> String {
    let one = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'/' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(one).collect()
}

async fn get(server: &str, access: &Access, uri: Uri) -> Result<(StatusCode, Bytes), Unanswered> {
    let unreachable = |cause: String| Unanswered::Unreachable { server: server.into(), cause };
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build(access.connector());
    let mut request = Request::get(uri).body(Empty::new()).expect("a URI that was parsed makes a request");
    if let Some(authorization) = &access.authorization {
        request.headers_mut().insert(header::AUTHORIZATION, authorization.clone());
    }
    let answer = client.request(request).await.map_err(|error| unreachable(deepest(&error)))?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), LARGEST_ANSWER).collect().await;
    let body = body.map_err(|error| unreachable(deepest(error.as_ref())))?;
    Ok((status, body.to_bytes()))
}

/// The innermost cause: `Connection refused` rather than `client error`.
fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

pub fn from_dump(
    path: &Path,
    policy: Policy,
    key: &PodKey,
    options: &ShownNodes,
) -> Result<Explanation, Unanswered> {
    let dump = Dump::read(path)?;
    let service = Service::new(policy);
    DumpControlPlane::load(&dump, &service, &mut ClusterIndex::default())?;
    let mut cluster = service.cluster();
    let explained = cluster.uid_of(key).and_then(|uid| explain(&mut *cluster, &uid, options));
    match explained {
        Some(explanation) => Ok(explanation),
        None => Err(Unanswered::UnknownPod(why_unknown(dump.pod(key)?.as_ref(), key, cluster.policy()))),
    }
}

/// Why the ledger has no such pod.
fn why_unknown(pod: Option<&Pod>, key: &PodKey, policy: &Policy) -> String {
    let Some(pod) = pod else {
        return format!("the dump has no pod {key}; write NAMESPACE/NAME, and dump with -A");
    };
    if objects::is_finished(pod) {
        return format!("{key} has ended: it has no GPU and requests none");
    }
    match objects::demand(pod, policy) {
        Err(RequestError::NoVram) => format!(
            "{key} is none of Stowage's: no container of it asks for stowage.dev/vram, nor a device plugin for a GPU; add it to the container's \
             resources.limits, such as stowage.dev/vram: 40Gi"
        ),
        Err(error) => format!("{key} cannot be understood, and so fits nowhere: {error}"),
        Ok(_) => {
            format!("{key} has no UID that can be read; dump it with `kubectl get nodes,pods -A -o yaml`")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::NodeName;

    #[test]
    fn the_query_to_a_server_is_escaped() {
        let (pod, node) = (PodKey::parse("a&b", "c?d").unwrap(), "n#1");
        let options = ShownNodes::Node(NodeName::parse(node).unwrap());
        let uri = uri("http://h:1/", &pod, &options).unwrap();
        assert_eq!(uri.to_string(), "http://h:1/v1/explain?pod=a%26b/c%3Fd&node=n%231");
        assert!(matches!(super::uri("h:1", &pod, &options), Err(Unanswered::BadServer { .. })));
    }
}
