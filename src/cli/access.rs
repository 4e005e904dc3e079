//! The credentials of `stowage explain` and `stowage models` for a service that requires a token, and the certificates that they
//! trust. What is not given comes from the kubeconfig, for a server with TLS only.

use super::cluster_credentials::{ClusterCredentials, SERVER_NAME};
use super::standard_input::is_standard_input;
use anyhow::{Context, Result};
use clap::Args;
use http::HeaderValue;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::path::PathBuf;
use stowage_agent::publish::Destination;
use stowage_telemetry::trust::{Trust, authorization, bearer};

#[derive(Debug, Args)]
pub struct AccessArgs {
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

/// Credentials and TLS settings for one server, with their files read.
pub struct Access {
    pub authorization: Option<HeaderValue>,
    tls: ClientConfig,
    server_name: Option<ServerName<'static>>,
}

impl AccessArgs {
    /// What is needed to ask this server. Nothing is looked for in the cluster for a server without TLS: no token is sent there.
    pub async fn read(&self, server: &str) -> Result<Access> {
        let is_tls = server.starts_with("https://");
        let lacks_any = self.token_file.is_none() || self.ca.is_none();
        let cluster = match is_tls && lacks_any {
            true => ClusterCredentials::find(self.kubeconfig.as_deref()).await?,
            false => None,
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
            .or((is_tls && is_loopback(server)).then_some(SERVER_NAME));
        let name = name
            .map(str::to_owned)
            .map(ServerName::try_from)
            .transpose();
        let name = name.context("--tls-server-name")?;
        Ok(Access {
            authorization,
            tls: ClientConfig::clone(&trust.config),
            server_name: name,
        })
    }
}

/// Whether the server is on this machine, and so behind a port-forward: no certificate of Stowage's own is for such an address.
fn is_loopback(server: &str) -> bool {
    let server = server.trim_end_matches('/').parse::<Destination>();
    server.is_ok_and(|server| server.is_loopback())
}

impl Access {
    pub fn connector(&self) -> HttpsConnector<HttpConnector> {
        let builder = HttpsConnectorBuilder::new()
            .with_tls_config(self.tls.clone())
            .https_or_http();
        match &self.server_name {
            Some(name) => builder
                .with_server_name_resolver(FixedServerNameResolver::new(name.clone()))
                .enable_http1()
                .build(),
            None => builder.enable_http1().build(),
        }
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
