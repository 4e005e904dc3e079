//! The part of `stowage serve`'s command line about the agents' address and access to it.

use crate::extender::tls::ServerFiles;
use crate::kubernetes::AgentAccount;
use crate::serve::AgentsOptions;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct AgentsArgs {
    /// The address to which the node agents post their reports
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9446", value_parser = super::address::address)]
    agents: SocketAddr,

    /// Certificate for --agents, PEM
    #[arg(long, value_name = "FILE", requires = "agents_tls_key")]
    agents_tls_cert: Option<PathBuf>,

    /// Private key for --agents, PEM
    #[arg(long, value_name = "FILE", requires = "agents_tls_cert")]
    agents_tls_key: Option<PathBuf>,

    /// Authentication of reports: agents by their service account's token, each for its own node, or none (on loopback only)
    /// [default: token, or none with --cluster]
    #[arg(long, value_enum, value_name = "HOW")]
    agents_auth: Option<Auth>,

    /// Audience of the agents' tokens
    #[arg(long, value_name = "NAME", default_value = "stowage.dev/reports")]
    agents_audience: String,

    /// The agents' service account, as NAMESPACE/NAME
    #[arg(long, value_name = "ACCOUNT", default_value = "kube-system/stowage-agent")]
    agents_service_account: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Auth {
    Token,
    None,
}

impl AgentsArgs {
    pub fn validate(self, from_dump: bool, insecure: bool) -> Result<AgentsOptions> {
        let (listen, loopback) = (self.agents, self.agents.ip().is_loopback());
        let auth = self.agents_auth.unwrap_or(if from_dump { Auth::None } else { Auth::Token });
        if auth == Auth::Token && from_dump {
            bail!(
                "--agents-auth token needs an API server to review tokens, and --cluster has none: leave one of them out"
            );
        }
        if auth == Auth::None && !loopback {
            bail!(
                "--agents {listen} can be reached from elsewhere, and without tokens any client there can report anything of \
                 any node: leave out --agents-auth none, or listen on 127.0.0.1"
            );
        }
        let tls = self.agents_tls_cert.zip(self.agents_tls_key).map(|(cert, key)| ServerFiles { cert, key });
        if tls.is_none() && !loopback && !insecure {
            bail!(
                "--agents {listen} can be reached from elsewhere, and agents' tokens would go there in the clear: give \
                 --agents-tls-cert and --agents-tls-key, or listen on 127.0.0.1, or say --insecure"
            );
        }
        let account = match auth {
            Auth::None => None,
            Auth::Token => Some(account(&self.agents_audience, &self.agents_service_account)?),
        };
        Ok(AgentsOptions { listen, tls, account })
    }
}

fn account(audience: &str, account: &str) -> Result<AgentAccount> {
    let is_name = |name: &str| !name.is_empty() && !name.contains(['/', ':']);
    let (namespace, name) = account
        .split_once('/')
        .filter(|(namespace, name)| is_name(namespace) && is_name(name))
        .with_context(|| {
            format!("--agents-service-account is {account:?}; write NAMESPACE/NAME, such as kube-system/stowage-agent")
        })?;
    if audience.is_empty() {
        bail!("--agents-audience is empty: any token of the account would be let in");
    }
    Ok(AgentAccount::new(audience, namespace, name))
}
