//! Certificates and keys as they are stored: whether they can be read, belong together and verify each other.
//!
//! Pure. Nothing is made here, and no key is ever shown.

use jiff::Timestamp;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use yasna::ASN1Result;
use yasna::tags::TAG_UTCTIME;

/// A private key, PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct PrivateKey(pub String);

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey")
    }
}

/// The certificate of a CA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaCertificate {
    pub pem: String,
    pub der: CertificateDer<'static>,
    pub not_after: Timestamp,
}

/// A CA's certificate, and its key if it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ca {
    pub certificate: CaCertificate,
    /// `None` if there is none that belongs to the certificate: then it signs nothing any more.
    pub key: Option<PrivateKey>,
}

/// What an address serves: a certificate, with those between it and its CA behind it, and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServingCertificate {
    /// PEM.
    pub chain: String,
    pub key: PrivateKey,
    pub not_after: Timestamp,
}

impl CaCertificate {
    /// All certificates of a bundle that can be read, each once, and what is wrong with the others.
    pub fn bundle(text: &[u8]) -> (Vec<Self>, Option<String>) {
        let mut found: Vec<Self> = Vec::new();
        let mut problem = None;
        for der in CertificateDer::pem_slice_iter(text) {
            match der.map_err(|error| error.to_string()).and_then(Self::read) {
                Ok(certificate) if found.iter().any(|earlier| earlier.der == certificate.der) => {}
                Ok(certificate) => found.push(certificate),
                Err(error) => problem = Some(error),
            }
        }
        (found, problem)
    }

    fn read(der: CertificateDer<'static>) -> Result<Self, String> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(der.clone()).map_err(|error| error.to_string())?;
        let not_after = not_after(&der)?;
        let text = pem("CERTIFICATE", &der);
        Ok(Self {
            pem: text,
            der,
            not_after,
        })
    }
}

impl Ca {
    pub fn read(certificate: &[u8], key: &[u8]) -> Result<Self, String> {
        let (mut found, problem) = CaCertificate::bundle(certificate);
        let certificate = match found.len() {
            1 => found.remove(0),
            0 => return Err(problem.unwrap_or_else(|| "it holds no certificate".into())),
            _ => return Err("it holds several certificates".into()),
        };
        let key = private_key(key)
            .ok()
            .filter(|key| key_matches(&certificate.der, key) && subject_matches(&certificate, key));
        Ok(Self { certificate, key })
    }

    pub(crate) fn can_sign(&self) -> bool {
        self.key.is_some()
    }
}

/// A certificate that Stowage makes has a subject that is made from its key (`issue`); what another CA's key
/// signs would name the wrong issuer.
fn subject_matches(certificate: &CaCertificate, key: &PrivateKey) -> bool {
    let subject = super::issue::subject_of(key).unwrap_or_default();
    !subject.is_empty()
        && certificate
            .der
            .windows(subject.len())
            .any(|part| part == subject.as_bytes())
}

impl ServingCertificate {
    pub fn read(chain: &[u8], key: &[u8]) -> Result<Self, String> {
        let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
            .collect::<Result<_, _>>()
            .map_err(|error| format!("tls.crt cannot be read: {error}"))?;
        let first = certificates.first().ok_or("tls.crt holds no certificate")?;
        let not_after =
            not_after(first).map_err(|error| format!("tls.crt cannot be read: {error}"))?;
        let key = private_key(key).map_err(|error| format!("tls.key cannot be read: {error}"))?;
        if !key_matches(first, &key) {
            return Err("tls.key does not belong to tls.crt".into());
        }
        let chain = String::from_utf8_lossy(chain).into_owned();
        Ok(Self {
            chain,
            key,
            not_after,
        })
    }

    /// Whether a client that trusts these CAs accepts it for every name until it expires.
    pub fn is_trusted_by(&self, cas: &[&CaCertificate], names: &[String]) -> bool {
        let certificates: Vec<_> = CertificateDer::pem_slice_iter(self.chain.as_bytes())
            .filter_map(Result::ok)
            .collect();
        let Some((first, others)) = certificates.split_first() else {
            return false;
        };
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(cas.iter().map(|ca| ca.der.clone()));
        let provider = Arc::new(ring::default_provider());
        let Ok(verifier) =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()
        else {
            return false;
        };
        // Whether it has expired is another question.
        let last = u64::try_from(self.not_after.as_second() - 1).unwrap_or_default();
        let at = UnixTime::since_unix_epoch(Duration::from_secs(last));
        names.iter().all(|name| {
            let Ok(name) = ServerName::try_from(name.as_str()) else {
                return false;
            };
            verifier
                .verify_server_cert(first, others, &name, &[], at)
                .is_ok()
        })
    }
}

fn private_key(pem: &[u8]) -> Result<PrivateKey, String> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| error.to_string())?;
    String::from_utf8(pem.to_vec())
        .map(PrivateKey)
        .map_err(|error| error.to_string())
}

fn key_matches(certificate: &CertificateDer<'static>, key: &PrivateKey) -> bool {
    let Ok(key) = PrivateKeyDer::from_pem_slice(key.0.as_bytes()) else {
        return false;
    };
    CertifiedKey::from_der(vec![certificate.clone()], key, &ring::default_provider()).is_ok()
}

/// The end of a certificate's validity. webpki checks it and does not tell it.
fn not_after(certificate: &[u8]) -> Result<Timestamp, String> {
    let seconds = yasna::parse_der(certificate, |reader| {
        reader.read_sequence(|reader| {
            let end = reader.next().read_sequence(|reader| {
                // The version is left out where it is the first.
                if reader.next().lookahead_tag()?.tag_class == yasna::TagClass::ContextSpecific {
                    reader.next().read_der()?;
                }
                // Serial number, algorithm, issuer.
                for _ in 0..3 {
                    reader.next().read_der()?;
                }
                let end = reader.next().read_sequence(|reader| {
                    seconds(reader.next())?;
                    seconds(reader.next())
                })?;
                while reader.read_optional(|reader| reader.read_der())?.is_some() {}
                Ok(end)
            })?;
            reader.next().read_der()?;
            reader.next().read_der()?;
            Ok(end)
        })
    });
    let seconds = seconds.map_err(|_| "its validity cannot be read")?;
    Timestamp::from_second(seconds).map_err(|error| error.to_string())
}

fn seconds(reader: yasna::BERReader<'_, '_>) -> ASN1Result<i64> {
    if reader.lookahead_tag()? == TAG_UTCTIME {
        return Ok(reader.read_utctime()?.datetime().unix_timestamp());
    }
    Ok(reader.read_generalized_time()?.datetime().unix_timestamp())
}

fn pem(label: &str, der: &[u8]) -> String {
    let encoded =
        serde_json::to_value(k8s_openapi::ByteString(der.to_vec())).expect("bytes are plain data");
    let encoded = encoded.as_str().unwrap_or_default().as_bytes();
    let lines = encoded
        .chunks(64)
        .map(|line| format!("{}\n", String::from_utf8_lossy(line)));
    format!(
        "-----BEGIN {label}-----\n{}-----END {label}-----\n",
        lines.collect::<String>()
    )
}
