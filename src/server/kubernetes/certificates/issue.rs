//! Makes keys and certificates: ECDSA on P-256, which every client of TLS 1.2 and 1.3 knows.
//!
//! The only source of randomness here is the key generator.

use super::keys::{Ca, CaCertificate, PrivateKey, ServingCertificate};
use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, date_time_ymd,
};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub(crate) enum IssueError {
    #[error("no certificate could be made: {0}")]
    Make(#[from] rcgen::Error),
    #[error("the certificate that was made cannot be read: {0}")]
    Read(String),
    #[error("the CA has no key")]
    NoKey,
}

/// Makes a CA that is valid for `lifetime` from now.
pub(crate) fn new_ca(now: Timestamp, lifetime: Duration) -> Result<Ca, IssueError> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let mut params = ca_params(&key);
    set_validity(&mut params, validity_end(now, lifetime));
    let certificate = params.self_signed(&key)?.pem();
    Ca::read(certificate.as_bytes(), key.serialize_pem().as_bytes()).map_err(IssueError::Read)
}

/// Makes a serving certificate that is valid for `lifetime` from now, but no longer than its CA.
pub(crate) fn new_serving_certificate(
    ca: &Ca,
    names: &[String],
    now: Timestamp,
    lifetime: Duration,
) -> Result<ServingCertificate, IssueError> {
    let ca_key = KeyPair::from_pem(&ca.key.as_ref().ok_or(IssueError::NoKey)?.0)?;
    let issuer = Issuer::new(ca_params(&ca_key), ca_key);
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = common_name("stowage-agents");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    set_validity(
        &mut params,
        serving_validity_end(&ca.certificate, now, lifetime),
    );
    let certificate = params.signed_by(&key, &issuer)?.pem();
    ServingCertificate::read(certificate.as_bytes(), key.serialize_pem().as_bytes())
        .map_err(IssueError::Read)
}

/// When a serving certificate that is made now ends.
pub(crate) fn serving_validity_end(
    ca: &CaCertificate,
    now: Timestamp,
    lifetime: Duration,
) -> Timestamp {
    validity_end(now, lifetime).min(ca.not_after)
}

fn ca_params(key: &KeyPair) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name(&subject(key));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// The common name of a CA, derived from its key and so unique: a CA can sign without its certificate being read.
fn subject(key: &KeyPair) -> String {
    let digest = Sha256::digest(key.subject_public_key_info());
    digest[..8]
        .iter()
        .fold("stowage-agents-ca-".to_owned(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// The common name of the CA with this key.
pub(crate) fn subject_of(key: &PrivateKey) -> Option<String> {
    KeyPair::from_pem(&key.0).ok().map(|key| subject(&key))
}

fn common_name(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

/// Sets the validity, from 1970 on: a certificate's beginning protects nothing, and the clock of the replica that makes it may be
/// ahead of an agent's.
fn set_validity(params: &mut CertificateParams, end: Timestamp) {
    let seconds = u64::try_from(end.as_second()).unwrap_or_default();
    params.not_before = date_time_ymd(1970, 1, 1);
    params.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
}

/// End of a validity of `lifetime` from now, in whole seconds as in a certificate.
fn validity_end(now: Timestamp, lifetime: Duration) -> Timestamp {
    let lifetime = SignedDuration::try_from(lifetime).unwrap_or(SignedDuration::MAX);
    // The latest year that a certificate can name is 9999, as a Timestamp's.
    let end = now.saturating_add(lifetime).unwrap_or(Timestamp::MAX);
    Timestamp::from_second(end.as_second()).unwrap_or(end)
}
