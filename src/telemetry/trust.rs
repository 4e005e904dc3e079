//! The agent's credentials: its token, and the CA of the extenders, both read from files that change.
//!
//! The kubelet renews the token every hour, and the CA when its ConfigMap changes. Only paths are ever logged.

use http::HeaderValue;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    #[error("cannot read {what} from {}: {error}", .path.display())]
    Read {
        what: &'static str,
        path: PathBuf,
        error: String,
    },
    #[error("{} should hold a token and holds none", .path.display())]
    NoToken { path: PathBuf },
    #[error("{} should hold the extenders' CA and holds no certificate", .path.display())]
    NoCertificate { path: PathBuf },
    #[error("the CA in {} does not work: {error}", .path.display())]
    Unusable { path: PathBuf, error: String },
}

/// The present `Authorization` header. The file is small and in memory, so it is read each time.
pub fn authorization(token_file: &Path) -> Result<HeaderValue, TrustError> {
    let text = read("the token", token_file)?;
    let no_token = || TrustError::NoToken {
        path: token_file.into(),
    };
    let token = std::str::from_utf8(&text).map_err(|_| no_token())?;
    bearer(token).ok_or_else(no_token)
}

/// The `Authorization` header with a token; `None` if the text is none.
pub fn bearer(token: &str) -> Option<HeaderValue> {
    let token = Some(token.trim()).filter(|token| !token.is_empty())?;
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// The CA's file, its last content, and the resulting TLS configuration.
pub struct Trust {
    path: Option<PathBuf>,
    text: Vec<u8>,
    pub config: Arc<ClientConfig>,
}

impl Trust {
    /// Trusts certificates that the CA has signed; without a CA, none.
    pub fn new(path: Option<PathBuf>) -> Result<Self, TrustError> {
        let (text, roots) = match &path {
            None => (Vec::new(), RootCertStore::empty()),
            Some(path) => {
                let text = read("the extenders' CA", path)?;
                let roots = roots(path, &text)?;
                (text, roots)
            }
        };
        Ok(Self {
            path,
            text,
            config: config(roots),
        })
    }

    /// Trust for an agent, which may start before its CA is published: while the file is missing or empty nothing is trusted, and
    /// the error that is waited out is returned as well.
    pub fn new_or_awaiting(
        path: Option<PathBuf>,
    ) -> Result<(Self, Option<TrustError>), TrustError> {
        match Self::new(path.clone()) {
            Ok(trust) => Ok((trust, None)),
            Err(error @ (TrustError::Read { .. } | TrustError::NoCertificate { .. })) => {
                let config = config(RootCertStore::empty());
                Ok((
                    Self {
                        path,
                        text: Vec::new(),
                        config,
                    },
                    Some(error),
                ))
            }
            Err(error) => Err(error),
        }
    }

    /// Trusts certificates that the CA in this text has signed; `origin` is for errors.
    pub fn from_pem(text: &[u8], origin: &str) -> Result<Self, TrustError> {
        Ok(Self {
            path: None,
            text: Vec::new(),
            config: config(roots(Path::new(origin), text)?),
        })
    }

    /// Reads the file again; `true` if it has changed and connections must be made again. A file that cannot be used changes
    /// nothing.
    pub fn reload(&mut self) -> Result<bool, TrustError> {
        let Some(path) = &self.path else {
            return Ok(false);
        };
        let text = read("the extenders' CA", path)?;
        if text == self.text {
            return Ok(false);
        }
        self.config = config(roots(path, &text)?);
        self.text = text;
        Ok(true)
    }
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, TrustError> {
    std::fs::read(path).map_err(|error| TrustError::Read {
        what,
        path: path.into(),
        error: error.to_string(),
    })
}

fn roots(path: &Path, text: &[u8]) -> Result<RootCertStore, TrustError> {
    let unusable = |error: &dyn std::fmt::Display| TrustError::Unusable {
        path: path.into(),
        error: error.to_string(),
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(text) {
        let certificate = certificate.map_err(|error| unusable(&error))?;
        roots.add(certificate).map_err(|error| unusable(&error))?;
    }
    if roots.is_empty() {
        Err(TrustError::NoCertificate { path: path.into() })
    } else {
        Ok(roots)
    }
}

fn config(roots: RootCertStore) -> Arc<ClientConfig> {
    let config =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider knows the protocol's versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
    Arc::new(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_anew_each_time_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let missing = authorization(&file).unwrap_err().to_string();
        assert!(
            missing.contains("cannot read the token from") && missing.contains("token"),
            "{missing}"
        );
        for token in ["first", "second\n"] {
            std::fs::write(&file, token).unwrap();
            let value = authorization(&file).unwrap();
            assert_eq!(value.to_str().unwrap(), format!("Bearer {}", token.trim()));
            assert_eq!(format!("{value:?}"), "Sensitive");
        }
        for none in ["", " \n", "two\nlines"] {
            std::fs::write(&file, none).unwrap();
            let error = authorization(&file).unwrap_err();
            assert_eq!(
                error,
                TrustError::NoToken { path: file.clone() },
                "{none:?}"
            );
        }
    }

    #[test]
    fn a_ca_that_is_not_published_yet_is_waited_for_and_one_that_is_broken_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.crt");
        let (mut trust, waits_for) = Trust::new_or_awaiting(Some(file.clone())).unwrap();
        assert!(matches!(waits_for, Some(TrustError::Read { .. })));
        assert!(
            matches!(trust.reload(), Err(TrustError::Read { .. })),
            "still"
        );
        std::fs::write(&file, "").unwrap();
        assert!(matches!(
            Trust::new_or_awaiting(Some(file.clone())),
            Ok((_, Some(TrustError::NoCertificate { .. })))
        ));
        let ca = || {
            rcgen::generate_simple_self_signed(["ca".to_owned()])
                .unwrap()
                .cert
                .pem()
        };
        std::fs::write(&file, ca() + &ca()).unwrap();
        assert_eq!(trust.reload(), Ok(true), "a bundle of two");
        assert!(matches!(
            Trust::new_or_awaiting(Some(file.clone())),
            Ok((_, None))
        ));
        std::fs::write(
            &file,
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        )
        .unwrap();
        assert!(matches!(
            Trust::new_or_awaiting(Some(file)),
            Err(TrustError::Unusable { .. })
        ));
    }

    #[test]
    fn a_ca_that_changes_is_taken_and_one_that_breaks_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.crt");
        let ca = || {
            rcgen::generate_simple_self_signed(["ca".to_owned()])
                .unwrap()
                .cert
                .pem()
        };
        std::fs::write(&file, "").unwrap();
        assert!(matches!(
            Trust::new(Some(file.clone())),
            Err(TrustError::NoCertificate { .. })
        ));
        std::fs::write(&file, ca()).unwrap();
        let mut trust = Trust::new(Some(file.clone())).unwrap();
        assert_eq!(trust.reload(), Ok(false));
        let before = trust.config.clone();
        std::fs::write(
            &file,
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        )
        .unwrap();
        assert!(matches!(trust.reload(), Err(TrustError::Unusable { .. })));
        assert!(Arc::ptr_eq(&before, &trust.config));
        std::fs::write(&file, ca()).unwrap();
        assert_eq!(trust.reload(), Ok(true));
        assert!(!Arc::ptr_eq(&before, &trust.config));
    }
}
