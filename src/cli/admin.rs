//! The part of `stowage serve`'s command line about the operators' address and access to it.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use stowage_server::extender::tls::ServerFiles;
use stowage_server::serve::{AdminOptions, AdminTls};
use stowage_telemetry::devices::GpuSeries;

#[derive(Debug, Args)]
pub struct AdminArgs {
    /// The operators' address: /metrics, /healthz, /readyz, the page for browsers at /, and what `stowage explain`, `models`,
    /// `top` and `bundle` read
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9445", value_parser = super::address::address)]
    admin: SocketAddr,

    /// Certificate for --admin, PEM [default: with --agents-tls-secret, and other than on loopback, that one]
    #[arg(long, value_name = "FILE", requires = "admin_tls_key")]
    admin_tls_cert: Option<PathBuf>,

    /// Private key for --admin, PEM
    #[arg(long, value_name = "FILE", requires = "admin_tls_cert")]
    admin_tls_key: Option<PathBuf>,

    /// Authentication of the operators' address: a bearer token that the API server knows and allows to see the page
    /// (TokenReview and SubjectAccessReview), or none (on loopback only). /healthz and /readyz are always open [default: none
    /// on loopback, else token]
    #[arg(long, value_enum, value_name = "HOW")]
    admin_auth: Option<AdminAuth>,

    /// Whether /metrics has up to six series for each GPU; each node's agent has others of its own
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    gpu_metrics: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AdminAuth {
    Token,
    None,
}

impl AdminArgs {
    /// `agents_certificate`: whether the agents' address has a certificate that this one may serve as well.
    pub fn validate(
        self,
        from_dump: bool,
        insecure: bool,
        agents_certificate: bool,
    ) -> Result<AdminOptions> {
        let (listen, loopback) = (self.admin, self.admin.ip().is_loopback());
        let auth = self.admin_auth.unwrap_or(if loopback {
            AdminAuth::None
        } else {
            AdminAuth::Token
        });
        if auth == AdminAuth::Token && from_dump {
            bail!(
                "--admin {listen} with tokens asks an API server who may look, and --cluster has none: listen on 127.0.0.1, \
                 with --admin-auth none"
            );
        }
        if auth == AdminAuth::None && !loopback {
            bail!(
                "--admin {listen} can be reached from elsewhere, and without tokens any client there sees every pod: leave \
                 out --admin-auth none, or listen on 127.0.0.1"
            );
        }
        let files = self.admin_tls_cert.zip(self.admin_tls_key);
        let files = files.map(|(cert, key)| AdminTls::Files(ServerFiles { cert, key }));
        let tls = files.or_else(|| (agents_certificate && !loopback).then_some(AdminTls::Agents));
        if auth == AdminAuth::Token && tls.is_none() && !insecure {
            bail!(
                "--admin {listen} takes tokens, and they would go there in the clear: give --admin-tls-cert and \
                 --admin-tls-key, or --agents-tls-secret, or listen on 127.0.0.1 with --admin-auth none, or say --insecure"
            );
        }
        let gpu_series = if self.gpu_metrics {
            GpuSeries::Exported
        } else {
            GpuSeries::LeftOut
        };
        Ok(AdminOptions {
            listen,
            tls,
            requires_tokens: auth == AdminAuth::Token,
            gpu_series,
        })
    }
}
