//! The credentials of `stowage explain` and `stowage models` for a service that requires a token, and the certificates that they
//! trust.

use crate::agent::publish::trust::{Trust, authorization};
use anyhow::{Context, Result};
use clap::Args;
use http::HeaderValue;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct AccessArgs {
    /// A token for the API server to present to --server, such as `kubectl create token` prints
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// CA certificates to trust for --server, PEM
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// The name that --server's certificate is for, if it is reached under another, as through a port-forward
    #[arg(long, value_name = "NAME")]
    tls_server_name: Option<String>,
}

/// The same, with the files read.
pub struct Access {
    pub authorization: Option<HeaderValue>,
    tls: ClientConfig,
    name: Option<ServerName<'static>>,
}

impl AccessArgs {
    pub fn read(&self) -> Result<Access> {
        let authorization =
            self.token_file.as_deref().map(authorization).transpose().context("--token-file")?;
        let trust = Trust::new(self.ca.clone()).context("--ca")?;
        let name = self.tls_server_name.clone().map(ServerName::try_from).transpose();
        let name = name.context("--tls-server-name")?;
        Ok(Access { authorization, tls: ClientConfig::clone(&trust.config), name })
    }
}

impl Access {
    pub fn connector(&self) -> HttpsConnector<HttpConnector> {
        let builder = HttpsConnectorBuilder::new().with_tls_config(self.tls.clone()).https_or_http();
        match &self.name {
            Some(name) => builder
                .with_server_name_resolver(FixedServerNameResolver::new(name.clone()))
                .enable_http1()
                .build(),
            None => builder.enable_http1().build(),
        }
    }
}
