//! The way to a running service for the commands that ask one, their credentials for it and the certificates that they trust.
//! What is not given comes from the kubeconfig, for a server with TLS only.

use super::cluster_credentials::{ClusterCredentials, SERVER_NAME};
use super::leader_forward::LeaderForward;
use super::standard_input::is_standard_input;
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::HeaderValue;
use http_body_util::Empty;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::path::PathBuf;
use stowage_agent::publish::Destination;
use stowage_telemetry::trust::{Trust, authorization, bearer};

#[derive(Debug, Args)]
pub struct AccessArgs {
    /// The operators' address of a running `stowage serve` (--admin there) [default: STOWAGE_SERVER, then the leader's, through
    /// the API server]
    #[arg(long, value_name = "URL")]
    server: Option<String>,

    /// A token to present to --server, such as `kubectl create token` prints; `-` is standard input [default: the kubeconfig's
    /// token or exec plugin; with a client certificate a token for the account kube-system/stowage-viewer]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// CA certificates to trust for --server, PEM [default: the ConfigMap kube-system/stowage-agents-ca]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// The name that --server's certificate is for, if it is reached under another, as through a port-forward [default there:
    /// stowage-agents.kube-system.svc]
    #[arg(long, value_name = "NAME")]
    tls_server_name: Option<String>,

    /// Kubeconfig for what is not given [default: KUBECONFIG, ~/.kube/config, then the pod's service account]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// [`AccessArgs`] with the kubeconfig's context. `estimate` goes without: its `--context` is a model's.
#[derive(Debug, Args)]
pub struct ContextAccessArgs {
    #[command(flatten)]
    access: AccessArgs,

    /// Context of the kubeconfig [default: its current one]
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
}

impl ContextAccessArgs {
    /// What is needed to ask the server.
    pub async fn read(&self) -> Result<Access> {
        self.access.read_for(self.context.as_deref(), None).await
    }

    /// The same way with new credentials.
    pub async fn renew(&self, access: &Access) -> Result<Access> {
        let route = Some(access.route.clone());
        self.access.read_for(self.context.as_deref(), route).await
    }
}

/// Where the server is.
#[derive(Clone)]
enum Route {
    Address(String),
    Leader(LeaderForward),
}

/// The way to one server, with credentials and TLS settings, their files read.
pub struct Access {
    route: Route,
    pub authorization: Option<HeaderValue>,
    pub client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
}

impl AccessArgs {
    /// What is needed to ask the server. Nothing is looked for in the cluster for a server without TLS: no token is sent there.
    pub async fn read(&self) -> Result<Access> {
        self.read_for(None, None).await
    }

    /// The server that a flag or the environment names.
    fn named_server(&self) -> Option<String> {
        let environment = || std::env::var("STOWAGE_SERVER").ok();
        let named = self.server.clone().or_else(environment);
        let named = named.map(|server| server.trim_end_matches('/').to_owned());
        named.filter(|server| !server.is_empty())
    }

    async fn read_for(&self, context: Option<&str>, discovered: Option<Route>) -> Result<Access> {
        let named = self.named_server();
        let is_tls = named
            .as_ref()
            .is_none_or(|server| server.starts_with("https://"));
        let lacks_any = named.is_none() || self.token_file.is_none() || self.ca.is_none();
        let cluster = match is_tls && lacks_any {
            true => ClusterCredentials::find(self.kubeconfig.as_deref(), context).await?,
            false => None,
        };
        let route = match (discovered, named, &cluster) {
            (Some(route), ..) => route,
            (None, Some(server), _) => Route::Address(server),
            (None, None, Some(cluster)) => {
                Route::Leader(LeaderForward::open(cluster.patient_client()?).await?)
            }
            (None, None, None) => bail!(
                "there is no kubeconfig here to find the leader with: name the cluster with --kubeconfig FILE, or a running \
                 `stowage serve` with --server http://HOST:PORT"
            ),
        };
        let trust = match (&self.ca, &cluster) {
            (None, Some(cluster)) => cluster.trust().await?,
            (ca, _) => Trust::new(ca.clone()).context("--ca")?,
        };
        let authorization = match (&self.token_file, &cluster) {
            (Some(file), _) if is_standard_input(file) => {
                let token = std::io::read_to_string(std::io::stdin()).context("--token-file -")?;
                Some(
                    bearer(&token).context(
                        "--token-file -: standard input should hold a token and holds none",
                    )?,
                )
            }
            (Some(file), _) => Some(authorization(file).context("--token-file")?),
            (None, Some(cluster)) => Some(cluster.authorization().await?),
            (None, None) => None,
        };
        let name = self
            .tls_server_name
            .as_deref()
            .or((is_tls && is_loopback(&route.url())).then_some(SERVER_NAME));
        let name = name
            .map(str::to_owned)
            .map(ServerName::try_from)
            .transpose();
        let name = name.context("--tls-server-name")?;
        let mut client = Client::builder(TokioExecutor::new());
        // A connection that is kept stays with a pod that leads no longer.
        if matches!(route, Route::Leader(_)) {
            client.pool_max_idle_per_host(0);
        }
        Ok(Access {
            route,
            authorization,
            client: client.build(connector(&trust.config, name)),
        })
    }
}

/// Whether the server is on this machine, and so behind a port-forward: no certificate of Stowage's own is for such an address.
fn is_loopback(server: &str) -> bool {
    let server = server.trim_end_matches('/').parse::<Destination>();
    server.is_ok_and(|server| server.is_loopback())
}

impl Route {
    fn url(&self) -> String {
        match self {
            Self::Address(server) => server.clone(),
            Self::Leader(forward) => format!("https://{}", forward.address),
        }
    }
}

impl Access {
    /// The server's address, without a slash at its end.
    pub fn url(&self) -> String {
        self.route.url()
    }

    /// What the server is called in messages.
    pub fn server_name(&self) -> String {
        match &self.route {
            Route::Address(server) => server.clone(),
            Route::Leader(forward) => forward.pod_name(),
        }
    }

    /// Whether the server is the leader, through the API server.
    pub fn is_forwarded(&self) -> bool {
        matches!(self.route, Route::Leader(_))
    }

    /// Why the way to the server does not hold, if it is a port-forward and that is known.
    pub fn forward_problem(&self) -> Option<String> {
        match &self.route {
            Route::Address(_) => None,
            Route::Leader(forward) => forward.problem(),
        }
    }
}

pub fn connector(
    tls: &ClientConfig,
    server_name: Option<ServerName<'static>>,
) -> HttpsConnector<HttpConnector> {
    let builder = HttpsConnectorBuilder::new()
        .with_tls_config(tls.clone())
        .https_or_http();
    match server_name {
        Some(name) => builder
            .with_server_name_resolver(FixedServerNameResolver::new(name))
            .enable_http1()
            .build(),
        None => builder.enable_http1().build(),
    }
}

#[cfg(test)]
mod tests {
    use super::is_loopback;

    #[test]
    fn a_port_forward_is_known_by_its_address() {
        for own in [
            "https://127.0.0.1:9445",
            "https://localhost:9445/",
            "https://[::1]:9445",
        ] {
            assert!(is_loopback(own), "{own}");
        }
        for other in [
            "https://stowage.example:9445",
            "https://10.0.0.1:9445",
            "nonsense:::",
        ] {
            assert!(!is_loopback(other), "{other}");
        }
    }
}
