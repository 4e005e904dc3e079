//! The part of `stowage serve`'s command line about the agents' address and access to it.

use super::duration;
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use stowage_server::extender::tls::ServerFiles;
use stowage_server::kubernetes::AgentAccount;
use stowage_server::kubernetes::certificates::{
    self, CertificateOptions, CertificateSettings, ObjectName,
};
use stowage_server::serve::{AgentsOptions, AgentsTls, WebhookOptions};

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

    #[command(flatten)]
    kept: KeptCertificateArgs,

    /// Authentication of reports: agents by their service account's token, each for its own node, or none (on loopback only)
    /// [default: token, or none with --cluster]
    #[arg(long, value_enum, value_name = "HOW")]
    agents_auth: Option<Auth>,

    /// The address to which the API server posts new pods to be completed, before Kubernetes 1.36; with the certificate of --agents
    #[arg(long, value_name = "ADDRESS", value_parser = super::address::address, conflicts_with = "cluster")]
    webhook: Option<SocketAddr>,

    /// The runtime class that the webhook names in pods that name none, if the cluster has it
    #[arg(long, value_name = "NAME", requires = "webhook")]
    webhook_runtime_class: Option<String>,

    /// Audience of the agents' tokens
    #[arg(long, value_name = "NAME", default_value = "stowage.dev/reports")]
    agents_audience: String,

    /// The agents' service account, as NAMESPACE/NAME
    #[arg(
        long,
        value_name = "ACCOUNT",
        default_value = "kube-system/stowage-agent"
    )]
    agents_service_account: String,
}

/// The certificate that Stowage keeps in a Secret.
#[derive(Debug, Args)]
struct KeptCertificateArgs {
    /// The Secret that has the certificate for --agents, as NAMESPACE/NAME. Stowage fills and renews it if it is empty, and only
    /// reads it if it has another's tls.crt and tls.key
    #[arg(
        long, value_name = "SECRET", requires = "agents_ca_config_map",
        conflicts_with_all = ["agents_tls_cert", "agents_tls_key", "cluster"],
    )]
    agents_tls_secret: Option<ObjectName>,

    /// The ConfigMap that has the CA for agents under ca.crt, as NAMESPACE/NAME. Written together with that Secret
    #[arg(long, value_name = "CONFIGMAP", requires = "agents_tls_secret")]
    agents_ca_config_map: Option<ObjectName>,

    /// The Service by which agents reach --agents, in the Secret's namespace: the certificate has its DNS names
    #[arg(
        long,
        value_name = "NAME",
        default_value = "stowage-agents",
        requires = "agents_tls_secret"
    )]
    agents_service: String,

    /// The Service by which the API server reaches --webhook, in the Secret's namespace: the certificate has its DNS names
    #[arg(
        long,
        value_name = "NAME",
        default_value = "stowage-webhook",
        requires = "webhook"
    )]
    webhook_service: String,

    /// The MutatingWebhookConfiguration in which Stowage keeps the CA of that certificate
    #[arg(
        long,
        value_name = "NAME",
        default_value = "stowage-pod-defaults",
        requires = "webhook"
    )]
    webhook_configuration: String,

    /// How long that certificate lasts; it is renewed after two thirds
    #[arg(
        long, value_name = "DURATION", default_value = certificates::DEFAULT_LIFETIME, value_parser = lifetime,
        requires = "agents_tls_secret",
    )]
    agents_certificate_lifetime: Duration,

    /// How long its CA lasts; it is replaced after two thirds
    #[arg(
        long, value_name = "DURATION", default_value = certificates::DEFAULT_CA_LIFETIME, value_parser = lifetime,
        requires = "agents_tls_secret",
    )]
    agents_ca_lifetime: Duration,

    /// How long a new CA is published before it signs: the time in which every kubelet has brought it to its agent
    #[arg(
        long, value_name = "DURATION", default_value = certificates::DEFAULT_PUBLICATION_DELAY, value_parser = lifetime,
        requires = "agents_tls_secret",
    )]
    ca_publication_delay: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Auth {
    Token,
    None,
}

impl AgentsArgs {
    pub fn validate(
        self,
        from_dump: bool,
        insecure: bool,
    ) -> Result<(AgentsOptions, Option<WebhookOptions>)> {
        let (listen, loopback) = (self.agents, self.agents.ip().is_loopback());
        let auth = self
            .agents_auth
            .unwrap_or(if from_dump { Auth::None } else { Auth::Token });
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
        let files = self.agents_tls_cert.zip(self.agents_tls_key);
        let tls = match files.map(|(cert, key)| ServerFiles { cert, key }) {
            Some(files) => Some(AgentsTls::Files(files)),
            None => self
                .kept
                .validate(self.webhook.is_some())?
                .map(AgentsTls::Secret),
        };
        if tls.is_none() && !loopback && !insecure {
            bail!(
                "--agents {listen} can be reached from elsewhere, and agents' tokens would go there in the clear: give \
                 --agents-tls-secret and --agents-ca-config-map, or --agents-tls-cert and --agents-tls-key, or listen on 127.0.0.1, or say --insecure"
            );
        }
        if let Some(webhook) = self.webhook.filter(|_| tls.is_none()) {
            bail!(
                "--webhook {webhook} needs a certificate, because the API server posts over TLS only: give --agents-tls-secret and \
                 --agents-ca-config-map, or --agents-tls-cert and --agents-tls-key"
            );
        }
        let runtime_class = self.webhook_runtime_class;
        let webhook = self.webhook.map(|listen| WebhookOptions {
            listen,
            runtime_class,
        });
        let account = match auth {
            Auth::None => None,
            Auth::Token => Some(account(
                &self.agents_audience,
                &self.agents_service_account,
            )?),
        };
        let agents = AgentsOptions {
            listen,
            tls,
            account,
        };
        Ok((agents, webhook))
    }
}

impl KeptCertificateArgs {
    fn validate(self, has_webhook: bool) -> Result<Option<CertificateOptions>> {
        let (Some(secret), Some(config_map)) = (self.agents_tls_secret, self.agents_ca_config_map)
        else {
            return Ok(None);
        };
        let (lifetime, ca_lifetime) = (self.agents_certificate_lifetime, self.agents_ca_lifetime);
        let delay = self.ca_publication_delay;
        if ca_lifetime < lifetime {
            bail!(
                "--agents-ca-lifetime {ca_lifetime:?} is shorter than --agents-certificate-lifetime {lifetime:?}, and no \
                 certificate outlasts its CA: write a longer one"
            );
        }
        // Of the last third, one half is for whatever delays the next CA.
        if ca_lifetime < delay * 6 {
            bail!(
                "--agents-ca-lifetime {ca_lifetime:?} is shorter than six times --ca-publication-delay {delay:?}: a CA could \
                 expire before the next one may sign; write a longer lifetime or a shorter delay"
            );
        }
        let mut names = certificates::service_names(&self.agents_service, &secret.namespace);
        if has_webhook {
            names.push(format!("{}.{}.svc", self.webhook_service, secret.namespace));
        }
        let settings = CertificateSettings {
            dns_names: names,
            lifetime,
            ca_lifetime,
            publication_delay: delay,
        };
        let look_every = certificates::CERTIFICATE_READ_INTERVAL;
        Ok(Some(CertificateOptions {
            secret,
            config_map,
            settings,
            read_interval: look_every,
            webhook_configuration: has_webhook.then_some(self.webhook_configuration),
        }))
    }
}

fn lifetime(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        short if short < Duration::from_secs(1) => Err("write at least 1s".into()),
        duration => Ok(duration),
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
