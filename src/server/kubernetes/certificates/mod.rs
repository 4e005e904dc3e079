//! The certificate of the agents' address, made and renewed by Stowage itself, and the CA that agents verify it by.
//!
//! ```text
//!            Secret                                     ConfigMap                  agents
//!  ca.crt, ca.key      the signing CA         ──┐
//!  next-ca.*           the CA after it        ──┼──►  ca.crt, all of these  ──►  a mounted file (the kubelet takes its time)
//!  previous-ca.crt     CAs before it, no key  ──┘
//!  tls.crt, tls.key    what every replica serves, signed by the signing CA
//! ```
//!
//! [`stored`] reads the two objects, [`plan`] decides what is due, [`change`] makes the objects that say so, and `run` reads and
//! writes them. A new CA signs nothing before its publication is old enough for every agent to have it. How old it is, is
//! counted in the Secret by a clock that cannot jump, so that a restart or another leader counts on.
//!
//! Every write names the version of the object that it was decided on: what another replica has written meanwhile is read first.
//! So the process may end between any two writes, and an answer may be lost.
//!
//! A Secret that has data and not the annotation [`MANAGED`] is the user's: it is served, and never written.

mod change;
mod issue;
mod keys;
mod plan;
#[cfg(test)]
mod proptests;
mod run;
mod stored;
#[cfg(test)]
mod tests;

pub use keys::ServingCertificate;
pub use run::run;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The annotation of a Secret that Stowage writes, with the value `managed`.
pub(crate) const MANAGED: &str = "stowage.dev/certificates";
/// Annotation: how long the next CA has been published, at least.
const PUBLISHED_FOR: &str = "stowage.dev/next-ca-published-for";
/// Annotation: until when a certificate of a previous CA may be in use.
const PREVIOUS_UNTIL: &str = "stowage.dev/previous-ca-until";

/// `NAMESPACE/NAME` of a Secret or a ConfigMap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectName {
    pub namespace: String,
    pub name: String,
}

impl FromStr for ObjectName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/').filter(|(namespace, name)| {
            !namespace.is_empty() && !name.is_empty() && !name.contains('/')
        });
        let (namespace, name) =
            parts.ok_or("write NAMESPACE/NAME, such as kube-system/stowage-agents-tls")?;
        Ok(Self {
            namespace: namespace.into(),
            name: name.into(),
        })
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[derive(Debug, Clone)]
pub struct CertificateOptions {
    pub secret: ObjectName,
    pub config_map: ObjectName,
    pub settings: CertificateSettings,
    /// How often the two objects are read.
    pub read_interval: Duration,
    /// The MutatingWebhookConfiguration that gets the CAs.
    pub webhook_configuration: Option<String>,
}

/// What certificates are for, and how long they last.
#[derive(Debug, Clone)]
pub struct CertificateSettings {
    /// The DNS names of the serving certificate, at least one.
    pub dns_names: Vec<String>,
    /// Each certificate is renewed after two thirds of its lifetime.
    pub lifetime: Duration,
    pub ca_lifetime: Duration,
    /// How long a CA is published before a certificate of it is served.
    pub publication_delay: Duration,
}

/// How often the Secret and the ConfigMap are read; a new certificate takes effect within this time, as one in files does.
pub const CERTIFICATE_READ_INTERVAL: Duration = Duration::from_secs(5);
pub const DEFAULT_LIFETIME: &str = "90d";
pub const DEFAULT_CA_LIFETIME: &str = "365d";
/// Two sync periods of a kubelet, each with the time that its cache may lag behind, and a minute for what else takes time.
pub const DEFAULT_PUBLICATION_DELAY: &str = "5m";

/// The names by which a Service is reached, and the loopback's.
pub fn service_names(service: &str, namespace: &str) -> Vec<String> {
    vec![
        format!("{service}.{namespace}.svc"),
        format!("{service}.{namespace}.svc.cluster.local"),
        service.to_owned(),
        "localhost".to_owned(),
    ]
}
