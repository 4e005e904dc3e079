//! The servers of a real control plane, how a client reaches them, and who signs users' certificates.

use super::processes::TestProcess;
use crate::needs;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const BINARIES: [&str; 4] = ["etcd", "kube-apiserver", "kube-scheduler", "kubectl"];
const DEFAULT_FOLDER: &str = "/usr/local/kubebuilder/bin";

/// Where the binaries are, if this machine has them.
pub fn folder() -> PathBuf {
    let folder = std::env::var_os("KUBEBUILDER_ASSETS").unwrap_or_else(|| DEFAULT_FOLDER.into());
    PathBuf::from(folder)
}

/// The folder of the binaries; `None`, with a line that says so, where they are not.
pub fn binaries() -> Option<PathBuf> {
    let folder = folder();
    let missing: Vec<&str> = BINARIES
        .into_iter()
        .filter(|name| !folder.join(name).exists())
        .collect();
    if missing.is_empty() {
        return Some(folder);
    }
    needs::report_skipped(format_args!(
        "no real control plane: {} has no {}; KUBEBUILDER_ASSETS names another folder",
        folder.display(),
        missing.join(", ")
    ));
    None
}

pub const ADMIN_TOKEN: &str = "admin-of-this-test";

pub fn etcd(binaries: &Path, folder: &Path, client_port: u16, peer_port: u16) -> TestProcess {
    let (client, peer) = (
        format!("http://127.0.0.1:{client_port}"),
        format!("http://127.0.0.1:{peer_port}"),
    );
    let mut command = Command::new(binaries.join("etcd"));
    command
        .arg("--name=default")
        .arg(format!("--data-dir={}", folder.join("etcd").display()));
    command
        .arg(format!("--listen-client-urls={client}"))
        .arg(format!("--advertise-client-urls={client}"));
    command
        .arg(format!("--listen-peer-urls={peer}"))
        .arg(format!("--initial-advertise-peer-urls={peer}"));
    command.arg(format!("--initial-cluster=default={peer}"));
    // What is written here is not needed tomorrow.
    command.args(["--unsafe-no-fsync", "--log-level=warn"]);
    TestProcess::start("etcd", &mut command, folder)
}

pub fn apiserver(binaries: &Path, folder: &Path, etcd_port: u16, secure_port: u16) -> TestProcess {
    let key = KeyPair::generate().unwrap();
    let write = |name: &str, text: &str| {
        let file = folder.join(name);
        std::fs::write(&file, text).unwrap();
        file.display().to_string()
    };
    let private = write("service-accounts.key", &key.serialize_pem());
    let public = write("service-accounts.pub", &key.public_key_pem());
    let tokens = write(
        "tokens.csv",
        &format!("{ADMIN_TOKEN},admin,admin,\"system:masters\"\n"),
    );
    let mut command = Command::new(binaries.join("kube-apiserver"));
    command.args([
        format!("--etcd-servers=http://127.0.0.1:{etcd_port}"),
        format!("--secure-port={secure_port}"),
        format!("--cert-dir={}", folder.join("certs").display()),
        format!("--service-account-issuer=https://127.0.0.1:{secure_port}"),
        format!("--service-account-key-file={public}"),
        format!("--service-account-signing-key-file={private}"),
        format!("--token-auth-file={tokens}"),
    ]);
    command.args([
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--authorization-mode=RBAC",
        // No controllers run here: none creates the default service accounts or removes the taint of new nodes.
        "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        "--endpoint-reconciler-type=none",
        "--allow-privileged=true",
        "--profiling=false",
    ]);
    let ca = ClientCa::make();
    command
        .arg("--client-ca-file")
        .arg(write("clients.crt", &ca.certificate()));
    write("clients.key", &ca.key.serialize_pem());
    TestProcess::start("kube-apiserver", &mut command, folder)
}

pub fn kubeconfig(folder: &Path, name: &str, server: &str, token: &str) -> PathBuf {
    let certificate = folder.join("certs/apiserver.crt");
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "c", "cluster": { "server": server, "certificate-authority": certificate } }],
        "users": [{ "name": "u", "user": { "token": token } }],
        "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        "current-context": "c",
    });
    let file = folder.join(name);
    std::fs::write(&file, config.to_string()).unwrap();
    file
}

/// Signs the certificates of users.
pub struct ClientCa {
    pub key: KeyPair,
}

impl ClientCa {
    pub fn make() -> Self {
        Self {
            key: KeyPair::generate().unwrap(),
        }
    }

    fn params() -> CertificateParams {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params
            .distinguished_name
            .push(DnType::CommonName, "clients");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
    }

    fn certificate(&self) -> String {
        Self::params().self_signed(&self.key).unwrap().pem()
    }

    pub fn issue(self, user: &str, group: &str) -> (String, String) {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, user);
        params
            .distinguished_name
            .push(DnType::OrganizationName, group);
        params
            .extended_key_usages
            .push(ExtendedKeyUsagePurpose::ClientAuth);
        let key = KeyPair::generate().unwrap();
        let certificate = params
            .signed_by(&key, &Issuer::new(Self::params(), self.key))
            .unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}
