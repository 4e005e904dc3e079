//! TLS: clients of the scheduler's address need a certificate of the operators' own CA; on the agents' address only the server
//! has a certificate, and agents send a token.

use parking_lot::RwLock;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{WantsServerCert, WebPkiClientVerifier};
use rustls::{ConfigBuilder, RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Certificates of an address and what it requires of clients; replaceable while the address is served.
#[derive(Debug, Clone)]
pub struct Tls(Arc<RwLock<Arc<ServerConfig>>>);

impl Tls {
    fn new(config: ServerConfig) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(config))))
    }

    /// A certificate that no client trusts, until there is another: the kubelet's probes verify none, and every other client is
    /// refused by its own side before it sends a word.
    pub fn self_signed() -> Result<Self, TlsError> {
        let made =
            rcgen::generate_simple_self_signed(["stowage-has-no-certificate-yet".to_owned()]);
        let made =
            made.map_err(|error| TlsError::Unusable(rustls::Error::General(error.to_string())))?;
        from_pem(&made.cert.pem(), &made.signing_key.serialize_pem())
    }

    /// The configuration for a handshake that begins now.
    pub fn current(&self) -> Arc<ServerConfig> {
        self.0.read().clone()
    }

    /// Uses another configuration for every handshake from now on. Existing connections continue; earlier sessions are not resumed.
    pub fn replace(&self, other: &Self) {
        *self.0.write() = other.current();
    }
}

#[derive(Debug, Clone)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
    /// Which clients are admitted.
    pub client_ca: PathBuf,
}

/// A server's certificate and key.
#[derive(Debug, Clone)]
pub struct ServerFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {what} from {}: {error}", .path.display())]
    Read {
        what: &'static str,
        path: PathBuf,
        error: rustls::pki_types::pem::Error,
    },
    #[error("{} should hold {what} and holds no certificate", .path.display())]
    Empty { what: &'static str, path: PathBuf },
    #[error("the certificate and key do not work: {0}")]
    Unusable(#[from] rustls::Error),
    #[error("the client CA in {} does not work: {error}", .path.display())]
    ClientCa { path: PathBuf, error: String },
}

/// Mutual TLS from three PEM files.
pub fn load_mutual(files: &TlsFiles) -> Result<Tls, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in certificates("the client CA", &files.client_ca)? {
        roots
            .add(certificate)
            .map_err(|error| client_ca_error(&files.client_ca, &error))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|error| client_ca_error(&files.client_ca, &error))?;
    let identity = ServerFiles {
        cert: files.cert.clone(),
        key: files.key.clone(),
    };
    let builder =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    with_server_files(builder.with_client_cert_verifier(verifier), &identity)
}

/// TLS with only a server certificate, from two PEM files.
pub fn load_server(files: &ServerFiles) -> Result<Tls, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let builder =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    with_server_files(builder.with_no_client_auth(), files)
}

/// TLS with only a server certificate, from two texts.
pub fn from_pem(certificate: &str, key: &str) -> Result<Tls, TlsError> {
    let unreadable = |error: rustls::pki_types::pem::Error| {
        TlsError::Unusable(rustls::Error::General(error.to_string()))
    };
    let certificates: Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(certificate.as_bytes()).collect();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(unreadable)?;
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth();
    with_certificates(builder, certificates.map_err(unreadable)?, key)
}

fn with_server_files(
    builder: ConfigBuilder<ServerConfig, WantsServerCert>,
    files: &ServerFiles,
) -> Result<Tls, TlsError> {
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| TlsError::Read {
        what: "the private key",
        path: files.key.clone(),
        error,
    })?;
    with_certificates(builder, certificates("the certificate", &files.cert)?, key)
}

fn with_certificates(
    builder: ConfigBuilder<ServerConfig, WantsServerCert>,
    certificates: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Tls, TlsError> {
    let mut config = builder.with_single_cert(certificates, key)?;
    // kube-scheduler's client speaks HTTP/1.1 to extenders, and so do agents.
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Tls::new(config))
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = |error| TlsError::Read {
        what,
        path: path.into(),
        error,
    };
    let certificates: Vec<_> = CertificateDer::pem_file_iter(path)
        .map_err(read)?
        .collect::<Result<_, _>>()
        .map_err(read)?;
    if certificates.is_empty() {
        Err(TlsError::Empty {
            what,
            path: path.into(),
        })
    } else {
        Ok(certificates)
    }
}

fn client_ca_error(path: &Path, error: &dyn std::fmt::Display) -> TlsError {
    TlsError::ClientCa {
        path: path.into(),
        error: error.to_string(),
    }
}
