//! Mutual TLS on the scheduler's address: only a client with a certificate of the operators' CA gets an answer.

use crate::client::{Client, TEST_TIMEOUT};
use crate::served::{ServedCluster, args, endpoints, pod};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use stowage_server::extender::server;
use stowage_server::extender::tls::{TlsFiles, load_mutual};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

pub struct Ca {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// PEM of a certificate and of its key.
pub struct Identity {
    pub cert: String,
    pub key: String,
}

impl Ca {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    fn issue(&self) -> Identity {
        self.issue_for("127.0.0.1")
    }

    /// For a server of that name or address.
    pub fn issue_for(&self, name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap().pem();
        Identity {
            cert,
            key: key.serialize_pem(),
        }
    }
}

pub struct TlsFixture {
    folder: TempDir,
}

impl TlsFixture {
    pub fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn of(&self, identity: &Identity, client_ca: &str) -> TlsFiles {
        TlsFiles {
            cert: self.write("tls.crt", &identity.cert),
            key: self.write("tls.key", &identity.key),
            client_ca: self.write("ca.crt", client_ca),
        }
    }
}

pub fn connect(
    address: SocketAddr,
    ca: &str,
    identity: Option<&Identity>,
) -> Client<StreamOwned<ClientConnection, TcpStream>> {
    connect_to(&address.ip().to_string(), address, ca, identity)
}

/// Expects a certificate for that name of one of these CAs.
pub fn connect_to(
    name: &str,
    address: SocketAddr,
    cas: &str,
    identity: Option<&Identity>,
) -> Client<StreamOwned<ClientConnection, TcpStream>> {
    let mut roots = RootCertStore::empty();
    for ca in CertificateDer::pem_slice_iter(cas.as_bytes()) {
        roots.add(ca.unwrap()).unwrap();
    }
    let config =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
    let config = match identity {
        Some(identity) => {
            let cert = CertificateDer::from_pem_slice(identity.cert.as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
            config.with_client_auth_cert(vec![cert], key).unwrap()
        }
        None => config.with_no_client_auth(),
    };
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    Client::over(StreamOwned::new(connection, stream))
}

#[test]
fn only_a_client_certificate_of_the_configured_ca_is_accepted() {
    let [ours, theirs, impostor] = ["ours", "theirs", "ours"].map(Ca::new);
    let files = TlsFixture::new();
    let tls = load_mutual(&files.of(&ours.issue(), &ours.pem)).unwrap();
    let served = ServedCluster::with_gpus(&[("node-a", 1)]).serve();
    let (mut endpoints, [address, ..]) = endpoints();
    endpoints.scheduler.tls = Some(tls);
    let stop = CancellationToken::new();
    let serving = served.spawn(server::serve(
        served.extender.clone(),
        endpoints,
        stop.clone(),
    ));

    let llm = pod("llm", "40Gi");
    let body = args(&llm, &["node-a"]).to_string();
    let ask = |identity: Option<&Identity>| {
        connect(address, &ours.pem, identity).try_post("/scheduler/filter", body.as_bytes())
    };
    let ledger = served.ledger();
    let refused = ask(None).unwrap_err();
    assert!(
        refused.to_string().contains("CertificateRequired"),
        "{refused}"
    );
    let refused = ask(Some(&theirs.issue())).unwrap_err();
    assert!(refused.to_string().contains("UnknownCA"), "{refused}");
    let refused = ask(Some(&impostor.issue())).unwrap_err();
    assert!(
        refused.to_string().contains("DecryptError"),
        "the same name, another key: {refused}"
    );
    // Nor does a client that leaves TLS out.
    assert!(
        Client::connect(address)
            .try_post("/scheduler/filter", body.as_bytes())
            .is_err()
    );
    assert_eq!(served.ledger(), ledger, "nobody was heard");
    assert_eq!(served.pod_state(&llm), None);

    let mut scheduler = connect(address, &ours.pem, Some(&ours.issue()));
    for _ in 0..2 {
        let answer = scheduler.post("/scheduler/filter", &body);
        assert_eq!(
            (answer.status, &answer.json()["NodeNames"][0]),
            (200, &serde_json::json!("node-a"))
        );
    }
    assert!(
        connect(address, &theirs.pem, Some(&ours.issue()))
            .try_post("/scheduler/filter", body.as_bytes())
            .is_err()
    );
    drop(scheduler);
    stop.cancel();
    served.run(serving).unwrap().unwrap();
}

#[test]
fn unusable_tls_files_are_named_with_the_error() {
    let (ca, other, files) = (Ca::new("ca"), Ca::new("other"), TlsFixture::new());
    let server = ca.issue();
    let good = files.of(&server, &ca.pem);
    assert!(load_mutual(&good).is_ok());
    let missing = files.folder.path().join("missing.pem");
    let empty = files.write("empty.pem", "");
    let garbage = files.write(
        "garbage.pem",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    );
    let other_key = files.write("other.key", &other.issue().key);
    let cases = [
        (
            TlsFiles {
                cert: missing.clone(),
                ..good.clone()
            },
            vec![
                "cannot read the certificate from",
                "missing.pem",
                "No such file",
            ],
        ),
        (
            TlsFiles {
                key: missing.clone(),
                ..good.clone()
            },
            vec!["cannot read the private key from", "missing.pem"],
        ),
        (
            TlsFiles {
                client_ca: missing,
                ..good.clone()
            },
            vec!["cannot read the client CA from", "missing.pem"],
        ),
        (
            TlsFiles {
                cert: empty.clone(),
                ..good.clone()
            },
            vec!["empty.pem should hold the certificate and holds no certificate"],
        ),
        (
            TlsFiles {
                key: empty.clone(),
                ..good.clone()
            },
            vec![
                "cannot read the private key from",
                "empty.pem",
                "no items found",
            ],
        ),
        (
            TlsFiles {
                client_ca: empty,
                ..good.clone()
            },
            vec!["empty.pem should hold the client CA and holds no certificate"],
        ),
        (
            TlsFiles {
                client_ca: garbage,
                ..good.clone()
            },
            vec!["the client CA in", "garbage.pem", "does not work"],
        ),
        (
            TlsFiles {
                key: other_key,
                ..good.clone()
            },
            vec!["the certificate and key do not work"],
        ),
        (
            TlsFiles {
                key: good.cert.clone(),
                ..good.clone()
            },
            vec!["cannot read the private key from", "tls.crt"],
        ),
    ];
    for (files, parts) in cases {
        let error = load_mutual(&files)
            .expect_err("it does not load")
            .to_string();
        for part in parts {
            assert!(error.contains(part), "{error:?} does not say {part:?}");
        }
    }
}
