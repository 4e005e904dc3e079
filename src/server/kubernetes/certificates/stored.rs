//! The Secret and the ConfigMap as they are stored, and back.
//!
//! Pure: objects in, facts out. What cannot be used is named, and counts as missing.

use super::keys::{Ca, CaCertificate, ServingCertificate};
use super::{MANAGED, PREVIOUS_UNTIL, PUBLISHED_FOR};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use std::collections::BTreeMap;
use std::time::Duration;
use stowage_policy_file::format::{format_duration, parse_duration};
use stowage_scheduling::units::Millis;

/// The key of the ConfigMap, and of the signing CA in the Secret.
const CA: &str = "ca.crt";

/// Contents of the Secret, by who manages it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SecretContents {
    /// It has no data: Stowage fills it.
    Empty,
    /// Stowage's own.
    Managed(Box<ManagedSecret>),
    /// The user's: served, and never written.
    Foreign(Result<ServingCertificate, String>),
}

/// Contents of a Secret that Stowage manages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ManagedSecret {
    pub signing: Option<Ca>,
    pub next: Option<Ca>,
    /// How long the next CA has been published, at least; `None` until it was found there.
    pub published_for: Option<Duration>,
    pub previous: Vec<CaCertificate>,
    /// Until when a certificate of these may be in use; `None` as long as they last.
    pub previous_until: Option<Timestamp>,
    pub serving: Result<ServingCertificate, String>,
    /// Problems with its other entries, for the log.
    pub problems: Vec<String>,
}

impl SecretContents {
    pub fn read(secret: &Secret) -> Self {
        let data = secret.data.clone().unwrap_or_default();
        let data_of = |key: &str| data.get(key).map_or(&[][..], |value| &value.0[..]);
        let is_managed = annotation(secret, MANAGED) == Some("managed");
        if data.values().all(|value| value.0.is_empty()) {
            return Self::Empty;
        }
        let serving = ServingCertificate::read(data_of("tls.crt"), data_of("tls.key"));
        if !is_managed {
            return Self::Foreign(serving);
        }
        let mut problems = Vec::new();
        let mut ca = |name: &str| {
            let (certificate, key) = (format!("{name}.crt"), format!("{name}.key"));
            if data_of(&certificate).is_empty() && data_of(&key).is_empty() {
                return None;
            }
            let read = Ca::read(data_of(&certificate), data_of(&key));
            match &read {
                Err(error) => problems.push(format!("{certificate} cannot be used: {error}")),
                Ok(ca) if !ca.can_sign() => {
                    problems.push(format!("{key} is not the key of {certificate}"))
                }
                Ok(_) => {}
            }
            read.ok()
        };
        let (signing, next) = (ca("ca"), ca("next-ca"));
        if signing.is_none() && next.is_none() && problems.is_empty() {
            problems.push("ca.crt is missing".into());
        }
        let (previous, problem) = CaCertificate::bundle(data_of("previous-ca.crt"));
        problems.extend(problem.map(|error| format!("previous-ca.crt cannot be used: {error}")));
        let published =
            annotation(secret, PUBLISHED_FOR).and_then(|text| parse_duration(text).ok());
        Self::Managed(Box::new(ManagedSecret {
            signing,
            next,
            published_for: published.map(|time| Duration::from_millis(time.0)),
            previous,
            previous_until: annotation(secret, PREVIOUS_UNTIL).and_then(|text| text.parse().ok()),
            serving,
            problems,
        }))
    }
}

impl ManagedSecret {
    /// What agents are to trust: each once, the signing CA first.
    pub fn bundle(&self) -> Vec<&CaCertificate> {
        let mut bundle: Vec<&CaCertificate> = Vec::new();
        let cas = [&self.signing, &self.next]
            .into_iter()
            .flatten()
            .map(|ca| &ca.certificate);
        for certificate in cas.chain(&self.previous) {
            if bundle.iter().all(|trusted| trusted.der != certificate.der) {
                bundle.push(certificate);
            }
        }
        bundle
    }

    /// The Secret with this in it. What else it has stays.
    pub fn write(&self, mut secret: Secret) -> Secret {
        let data = secret.data.get_or_insert_default();
        let mut set = |key: &str, text: Option<&str>| match text {
            Some(text) => drop(data.insert(key.into(), ByteString(text.as_bytes().to_vec()))),
            None => drop(data.remove(key)),
        };
        for (name, ca) in [("ca", &self.signing), ("next-ca", &self.next)] {
            set(
                &format!("{name}.crt"),
                ca.as_ref().map(|ca| &*ca.certificate.pem),
            );
            let key = ca.as_ref().and_then(|ca| ca.key.as_ref());
            set(&format!("{name}.key"), key.map(|key| &*key.0));
        }
        let previous: String = self.previous.iter().map(|ca| &*ca.pem).collect();
        set(
            "previous-ca.crt",
            Some(&*previous).filter(|text| !text.is_empty()),
        );
        // A Secret of type kubernetes.io/tls has these two, be they empty.
        let serving = self.serving.as_ref().ok();
        set(
            "tls.crt",
            Some(serving.map_or("", |serving| &serving.chain)),
        );
        set(
            "tls.key",
            Some(serving.map_or("", |serving| &serving.key.0)),
        );

        let annotations = secret.metadata.annotations.get_or_insert_default();
        let mut annotate = |key: &str, text: Option<String>| match text {
            Some(text) => drop(annotations.insert(key.into(), text)),
            None => drop(annotations.remove(key)),
        };
        annotate(MANAGED, Some("managed".into()));
        annotate(
            PUBLISHED_FOR,
            self.published_for
                .map(|time| format_duration(Millis(time.as_millis() as u64))),
        );
        annotate(
            PREVIOUS_UNTIL,
            self.previous_until.map(|until| until.to_string()),
        );
        secret
    }
}

fn annotation<'a>(secret: &'a Secret, key: &str) -> Option<&'a str> {
    secret
        .metadata
        .annotations
        .as_ref()?
        .get(key)
        .map(String::as_str)
}

/// The certificates that a ConfigMap publishes.
pub(crate) fn read_bundle(config_map: &ConfigMap) -> Vec<CaCertificate> {
    let text = config_map.data.as_ref().and_then(|data| data.get(CA));
    text.map(|text| CaCertificate::bundle(text.as_bytes()).0)
        .unwrap_or_default()
}

/// The ConfigMap with this bundle in it. What else it has stays.
pub(crate) fn write_bundle(mut config_map: ConfigMap, bundle: &[&CaCertificate]) -> ConfigMap {
    let data: &mut BTreeMap<String, String> = config_map.data.get_or_insert_default();
    data.insert(CA.into(), bundle.iter().map(|ca| &*ca.pem).collect());
    config_map
}
