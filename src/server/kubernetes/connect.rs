//! The client of the API server, configured for a scheduler: it repeats no request by itself but pages of lists, and every write
//! limits how long the API server may work on it.
//!
//! No request is sent here.

use super::page_retry::ListPageRetry;
use http::uri::{Parts, PathAndQuery};
use http::{Method, Request, Uri};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ConfigExt};
use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use std::error::Error;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_kubernetes_objects::pruning::{Pruning, ResponseMode};
use stowage_telemetry::root_cause;
use tower::util::MapRequestLayer;
use tower::{BoxError, ServiceBuilder};

/// A server that takes longer to accept a connection is unreachable; a Binding waits no longer either.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("--kubeconfig {path}: {reason}")]
    Kubeconfig { path: String, reason: String },
    #[error(
        "there is no kubeconfig here, nor a pod's service account; name the cluster with --kubeconfig FILE"
    )]
    NoConfig,
    #[error(
        "the kubeconfig in KUBECONFIG or ~/.kube/config: {reason}; repair it, or name another with --kubeconfig FILE"
    )]
    DefaultKubeconfig { reason: String },
    #[error("the API server's client could not be set up: {0}")]
    Client(#[from] Box<kube::Error>),
}

/// A request that was not answered, in the words of the innermost cause: `Connection refused` rather than `client error`.
#[derive(Debug, thiserror::Error)]
#[error("no answer from {server}: {}", root_cause(cause))]
struct NoAnswer {
    server: String,
    cause: legacy::Error,
}

/// A connection on which nothing arrives for this long is dead. A watch ends by itself within a minute, and so receives
/// something within this time.
const READ_TIMEOUT: Duration = Duration::from_secs(75);

/// A client for a kubeconfig's current context, or from the environment: `KUBECONFIG`, `~/.kube/config`, or the pod's service
/// account.
pub async fn connect(kubeconfig: Option<&Path>, times: WriteTimes) -> Result<Client, ConnectError> {
    Ok(client(config(kubeconfig, None).await?, times, ResponseMode::Pruned).map_err(Box::new)?)
}

/// Where the API server is, and the credentials for it; by the kubeconfig's current context, if none is named.
pub async fn config(
    kubeconfig: Option<&Path>,
    context: Option<&str>,
) -> Result<Config, ConnectError> {
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    match (kubeconfig, context) {
        (Some(path), _) => from_file(path, &options).await,
        (None, Some(_)) => {
            let kubeconfig = Kubeconfig::read().map_err(|error| default_error(&error))?;
            let config = Config::from_custom_kubeconfig(kubeconfig, &options).await;
            config.map_err(|error| default_error(&error))
        }
        (None, None) => Config::infer()
            .await
            .map_err(|error| inference_error(&error)),
    }
}

/// The client does not throttle, and repeats nothing by itself but pages of lists (`page_retry`): every caller handles its
/// failures, and a write that is repeated automatically may arrive after the Lease has passed on. What the kernel still sends when
/// a request is given up, and what the API server has begun, ends by [`WriteTimes`].
pub fn client(
    mut config: Config,
    times: WriteTimes,
    answers: ResponseMode,
) -> kube::Result<Client> {
    config.default_retry = false;
    if config.proxy_url.is_some() {
        // This build has no proxy support, and the library's own error says so.
        return Client::try_from(config);
    }
    let server = config.cluster_url.to_string();
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_tcp_user_timeout(Some(times.transport));
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(tcp)?);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_read_timeout(Some(READ_TIMEOUT));
    let https: legacy::Client<_, Body> =
        legacy::Client::builder(TokioExecutor::new()).build(connector);
    let service = ServiceBuilder::new()
        .layer(tower::layer::layer_fn(move |client| {
            Pruning(client, answers)
        }))
        .layer(MapRequestLayer::new(move |request| {
            with_server_timeout(request, times.server)
        }))
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(move |cause| {
            BoxError::from(NoAnswer {
                server: server.trim_end_matches('/').to_owned(),
                cause,
            })
        })
        .retry(ListPageRetry::default())
        .service(https);
    Ok(Client::new(service, config.default_namespace))
}

/// Limits how long the API server works on a write that sets no limit itself. Reads keep their own.
pub fn with_server_timeout(mut request: Request<Body>, limit: Duration) -> Request<Body> {
    let is_timeout = |parameter: &str| {
        parameter
            .split_once('=')
            .is_some_and(|(name, _)| name == "timeout")
    };
    let is_limited = request
        .uri()
        .query()
        .is_some_and(|query| query.split('&').any(is_timeout));
    if !is_limited && !matches!(*request.method(), Method::GET | Method::HEAD) {
        *request.uri_mut() = with_timeout(request.uri(), limit);
    }
    request
}

fn with_timeout(uri: &Uri, limit: Duration) -> Uri {
    let (path, query) = (uri.path(), uri.query().unwrap_or_default());
    let separator = if query.is_empty() { "" } else { "&" };
    let limited = format!("{path}?{query}{separator}timeout={}ms", limit.as_millis());
    let limited =
        PathAndQuery::try_from(limited).expect("a query is still one with a parameter more");
    let mut parts: Parts = uri.clone().into_parts();
    parts.path_and_query = Some(limited);
    Uri::from_parts(parts).expect("a URI with another query is one")
}

async fn from_file(path: &Path, options: &KubeConfigOptions) -> Result<Config, ConnectError> {
    let failed = |error: KubeconfigError| {
        let path = path.display().to_string();
        match error {
            // The path is named before this error.
            KubeconfigError::ReadConfig(error, _) => ConnectError::Kubeconfig {
                path,
                reason: error.to_string(),
            },
            KubeconfigError::CurrentContextNotSet => ConnectError::Kubeconfig {
                reason: format!(
                    "it has no current-context: is it a kubeconfig? kubectl --kubeconfig {path} config get-contexts lists its contexts"
                ),
                path,
            },
            error => ConnectError::Kubeconfig {
                path,
                reason: error.to_string(),
            },
        }
    };
    let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
    Config::from_custom_kubeconfig(kubeconfig, options)
        .await
        .map_err(failed)
}

/// The error outside a pod, where the kubeconfig matters: whether there is none, or what is wrong with it.
fn inference_error(error: &InferConfigError) -> ConnectError {
    let source = error.source();
    let source = source.and_then(|source| source.downcast_ref::<KubeconfigError>());
    source.map_or(ConnectError::NoConfig, default_error)
}

/// What is wrong with the kubeconfig in its usual places, or that there is none.
fn default_error(error: &KubeconfigError) -> ConnectError {
    match error {
        KubeconfigError::FindPath => ConnectError::NoConfig,
        KubeconfigError::ReadConfig(error, _) if error.kind() == ErrorKind::NotFound => {
            ConnectError::NoConfig
        }
        // After its first line, the parser draws the place.
        error => ConnectError::DefaultKubeconfig {
            reason: error.to_string().lines().next().unwrap_or_default().into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kubeconfig_with_tls_makes_a_client_and_one_that_is_missing_is_named() {
        let (folder, times) = (tempfile::tempdir().unwrap(), WriteTimes::default());
        let path = folder.path().join("config");
        let missing = connect(Some(&path), times).await.err().unwrap();
        let names_it = format!("--kubeconfig {}: ", path.display());
        assert!(missing.to_string().starts_with(&names_it), "{missing}");
        std::fs::write(&path, KUBECONFIG).unwrap();
        assert_eq!(
            connect(Some(&path), times)
                .await
                .unwrap()
                .default_namespace(),
            "team-a"
        );
    }

    #[tokio::test]
    async fn a_request_without_an_answer_names_the_server_and_the_cause() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        for server in ["http://127.0.0.1:1", "https://127.0.0.1:1"] {
            std::fs::write(&path, KUBECONFIG.replace("https://127.0.0.1:6443", server)).unwrap();
            let client = connect(Some(&path), WriteTimes::default()).await.unwrap();
            let error = client.apiserver_version().await.unwrap_err().to_string();
            let says = format!("no answer from {server}: Connection refused");
            assert!(error.contains(&says), "{error}");
        }
    }

    #[test]
    fn writes_carry_a_server_timeout_and_reads_do_not() {
        let sent = |method: Method, uri: &str| {
            let request = Request::builder()
                .method(method)
                .uri(uri)
                .body(Body::empty())
                .unwrap();
            with_server_timeout(request, Duration::from_secs(5))
                .uri()
                .to_string()
        };
        let binding = "/api/v1/namespaces/a/pods/b/binding";
        assert_eq!(
            sent(Method::POST, binding),
            format!("{binding}?timeout=5000ms")
        );
        assert_eq!(
            sent(
                Method::PATCH,
                "http://x/api/v1/nodes/n/status?fieldManager=stowage"
            ),
            "http://x/api/v1/nodes/n/status?fieldManager=stowage&timeout=5000ms"
        );
        assert_eq!(
            sent(Method::GET, "/api/v1/pods?watch=true"),
            "/api/v1/pods?watch=true"
        );
        assert_eq!(sent(Method::PUT, "/a?timeout=1s"), "/a?timeout=1s");
    }

    const KUBECONFIG: &str = "
apiVersion: v1
kind: Config
current-context: here
contexts: [{ name: here, context: { cluster: one, user: me, namespace: team-a } }]
clusters: [{ name: one, cluster: { server: 'https://127.0.0.1:6443' } }]
users: [{ name: me, user: { token: none } }]
";
}
