//! `stowage serve --agents-tls-secret`: from an empty Secret, with another's, and with what cannot be used.

use super::{CONFIG_MAP, SECRET, create_empty, published};
use crate::client::{Client, HttpAnswer};
use crate::process::{RunningServe, eventually, expect_failure};
use crate::tls::{Ca, Identity, connect_to};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use std::io::Write;
use std::net::SocketAddr;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::api_server::faults::{InjectedFault, Operation};
use tempfile::NamedTempFile;
use tokio::runtime::Runtime;

const FLAGS: [&str; 8] = [
    "--agents-tls-secret",
    "kube-system/stowage-agents-tls",
    "--agents-ca-config-map",
    "kube-system/stowage-agents-ca",
    "--agents-auth",
    "none",
    "--admin-auth",
    "token",
];
const NAME: &str = "stowage-agents.kube-system.svc";

struct CertificateCluster {
    api: ApiServer,
    kubeconfig: NamedTempFile,
    _runtime: Runtime,
}

impl CertificateCluster {
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let api = runtime.block_on(ApiServer::start()).unwrap();
        let mut kubeconfig = NamedTempFile::new().unwrap();
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c", "cluster": { "server": api.uri().to_string() } }],
            "users": [{ "name": "u", "user": {} }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        });
        kubeconfig.write_all(config.to_string().as_bytes()).unwrap();
        Self {
            api,
            kubeconfig,
            _runtime: runtime,
        }
    }

    fn serve(&self, admin: &str) -> RunningServe {
        RunningServe::serve_from_api_server(
            self.kubeconfig.path(),
            &[&["--admin", admin], &FLAGS[..]].concat(),
        )
    }

    /// As `kubectl create secret tls` would, over what is there.
    fn put(&self, cert: &str, key: &str) {
        let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
        let data = json!({ "data": { "tls.crt": bytes(cert), "tls.key": bytes(key) } });
        self.api.patch(SECRET, &data).unwrap();
    }
}

/// A page of an address that serves a certificate of one of these CAs, unless the client refuses it.
fn page(address: SocketAddr, cas: &str, path: &str) -> Option<HttpAnswer> {
    let address = SocketAddr::from(([127, 0, 0, 1], address.port()));
    connect_to(NAME, address, cas, None).try_get(path).ok()
}

/// Whether an agent that trusts them gets through.
fn is_trusted(address: SocketAddr, cas: &str) -> bool {
    page(address, cas, "/").is_some()
}

#[test]
fn an_empty_secret_is_filled_and_both_addresses_serve_its_certificate() {
    let cluster = CertificateCluster::start();
    create_empty(&cluster.api);
    // A concurrent write is read first, and an answer that is lost was a write all the same.
    cluster
        .api
        .faults()
        .fail_next(Operation::Secret, 1, InjectedFault::Conflicts);
    cluster
        .api
        .faults()
        .fail_next(Operation::ConfigMap, 1, InjectedFault::LosesAnswer);
    let running = cluster.serve("0.0.0.0:0");
    eventually("its CA is published", || {
        !published(&cluster.api).is_empty()
    });
    let cas = published(&cluster.api);
    eventually("agents get through", || is_trusted(running.agents, &cas));
    assert!(!is_trusted(running.agents, &Ca::new("another").pem));
    eventually("it is ready", || {
        page(running.operators, &cas, "/readyz").is_some_and(|answer| answer.status == 200)
    });
    running.wait_for_line(
        "another replica has written the Secret kube-system/stowage-agents-tls meanwhile",
    );
    running.wait_for_line("made a CA and a certificate");
    // Nothing is served in the clear.
    assert!(
        Client::connect(SocketAddr::from(([127, 0, 0, 1], running.operators.port())))
            .try_get("/healthz")
            .is_err()
    );
    let secret = cluster.api.get(SECRET).unwrap();
    assert_eq!(
        secret["metadata"]["annotations"]["stowage.dev/certificates"],
        "managed"
    );
    let keys: Vec<&String> = secret["data"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["ca.crt", "ca.key", "tls.crt", "tls.key"]);

    // A second replica serves the same, and so does one that starts again.
    let second = cluster.serve("0.0.0.0:0");
    eventually("the second one serves it as well", || {
        is_trusted(second.agents, &cas)
    });
    assert_eq!(cluster.api.get(SECRET).unwrap(), secret);
}

#[test]
fn the_lifetimes_and_the_service_are_those_of_the_flags_and_metrics_show_when_each_certificate_ends()
 {
    let cluster = CertificateCluster::start();
    create_empty(&cluster.api);
    let flags = [
        "--admin",
        "127.0.0.1:0",
        "--agents-service",
        "gpu-agents",
        "--agents-certificate-lifetime",
        "48h",
        "--agents-ca-lifetime",
        "240h",
    ];
    let before = jiff::Timestamp::now();
    let running = RunningServe::serve_from_api_server(
        cluster.kubeconfig.path(),
        &[&flags, &FLAGS[..6]].concat(),
    );
    eventually("agents reach the Service's name", || {
        let address = SocketAddr::from(([127, 0, 0, 1], running.agents.port()));
        let cas = published(&cluster.api);
        connect_to("gpu-agents.kube-system.svc", address, &cas, None)
            .try_get("/")
            .is_ok()
    });
    let after = jiff::Timestamp::now();
    let ends = |certificate: &str| {
        let metrics = Client::connect(running.operators).get_page("/metrics");
        let start = format!(
            "stowage_certificate_expiry_timestamp_seconds{{certificate=\"{certificate}\"}} "
        );
        metrics
            .text()
            .lines()
            .find_map(|line| line.strip_prefix(&*start)?.parse::<i64>().ok())
    };
    for (certificate, hours) in [("serving", 48), ("ca", 240)] {
        eventually("it is shown", || ends(certificate).is_some());
        let made = ends(certificate).unwrap() - hours * 3600;
        assert!(
            (before.as_second()..=after.as_second()).contains(&made),
            "{certificate}: {made}"
        );
    }
}

#[test]
fn a_certificate_of_the_users_own_is_served_and_reloaded_and_what_cannot_be_used_is_named() {
    let cluster = CertificateCluster::start();
    create_empty(&cluster.api);
    let [old, new] = ["old", "new"].map(Ca::new);
    let issue = |ca: &Ca| ca.issue_for(NAME);
    let Identity { cert, key } = issue(&old);
    cluster.put(&cert, &key);
    let running = RunningServe::serve_from_api_server(
        cluster.kubeconfig.path(),
        &[&["--admin", "127.0.0.1:0"], &FLAGS[..6]].concat(),
    );
    eventually("it is served", || is_trusted(running.agents, &old.pem));
    // Agents find its CA in the ConfigMap, where nobody has put it.
    let told = running.wait_for_line("has no CA of this certificate");
    assert!(
        told.contains("ERROR") && told.contains("kube-system/stowage-agents-ca"),
        "{told}"
    );
    let both = format!("{}{}", old.pem, new.pem);
    cluster
        .api
        .patch(CONFIG_MAP, &json!({ "data": { "ca.crt": both } }))
        .unwrap();
    running.wait_for_line("the certificate's Secret is good again");
    let Identity { cert, key } = issue(&new);
    cluster.put(&cert, &key);
    eventually("the new certificate is served", || {
        is_trusted(running.agents, &new.pem)
    });

    let metric = |line: &str| {
        let metrics = Client::connect(running.operators).get_page("/metrics");
        metrics.text().lines().any(|found| found == line)
    };
    cluster.put(&cert, &key[..key.len() / 2]);
    let told = running.wait_for_line("tls.key cannot be read");
    assert!(
        told.contains("ERROR") && told.contains("A certificate that is in use stays"),
        "{told}"
    );
    assert!(told.contains("kube-system/stowage-agents-tls"), "{told}");
    assert!(metric("stowage_tls_reload_failed{address=\"agents\"} 1"));
    cluster.put(&issue(&old).cert, &key);
    running.wait_for_line("tls.key does not belong to tls.crt");
    cluster.api.delete(SECRET).unwrap();
    let told = running.wait_for_line("there is no Secret kube-system/stowage-agents-tls");
    assert!(told.contains("kubectl apply"), "{told}");
    assert!(is_trusted(running.agents, &new.pem), "it goes on");
    assert_eq!(
        published(&cluster.api),
        both,
        "the ConfigMap is the user's too"
    );
    assert_eq!(cluster.api.calls().count("update", "secrets"), 0);
    for line in [
        "stowage_tls_reloads_total{address=\"agents\",outcome=\"applied\"} 2",
        "stowage_tls_reloads_total{address=\"agents\",outcome=\"rejected\"} 4",
    ] {
        assert!(metric(line), "no {line}");
    }
    assert!(metric("stowage_tls_reload_failed{address=\"operators\"} 0"));

    // The manifests again: it is empty, and filled.
    api_applies_the_secret(&cluster);
    eventually("the failure is over", || {
        metric("stowage_tls_reload_failed{address=\"agents\"} 0")
    });
    eventually("a CA is published beside them", || {
        published(&cluster.api).len() > both.len()
    });
}

fn api_applies_the_secret(cluster: &CertificateCluster) {
    let secret =
        json!({ "metadata": { "name": "stowage-agents-tls", "namespace": "kube-system" } });
    cluster.api.create("secrets", secret).unwrap();
}

#[test]
fn a_replica_without_a_certificate_is_not_ready_and_serves_everything_else() {
    let cluster = CertificateCluster::start();
    let running = RunningServe::serve_from_api_server(
        cluster.kubeconfig.path(),
        &[&["--admin", "127.0.0.1:0"], &FLAGS[..6]].concat(),
    );
    let readyz = || Client::connect(running.operators).get("/readyz");
    eventually("it says what it waits for", || {
        readyz()
            .text()
            .contains("there is no Secret kube-system/stowage-agents-tls")
    });
    assert_eq!(readyz().status, 503);
    assert_eq!(
        Client::connect(running.operators).get("/healthz").status,
        200,
        "a restart would not help"
    );
    let filtered = Client::connect(running.scheduler).post("/scheduler/filter", "{}");
    assert_ne!(filtered.status, 200, "{}", filtered.text());
    assert!(
        Client::connect(running.agents).try_get("/").is_err(),
        "agents' tokens never go in the clear"
    );
    create_empty(&cluster.api);
    eventually("it is ready", || readyz().status == 200);

    // Without the ConfigMap nothing is made that agents could not verify.
    cluster.api.delete(CONFIG_MAP).unwrap();
    running.wait_for_line("there is no ConfigMap kube-system/stowage-agents-ca");
    let served: Value = Value::clone(&cluster.api.get(SECRET).unwrap());
    assert!(served["data"]["tls.crt"].is_string());
}

#[test]
fn flags_that_do_not_go_together_are_refused() {
    for arguments in [
        &["--agents-tls-secret", "a/b"][..],
        &["--agents-ca-config-map", "a/b"],
        &["--agents-tls-secret", "b", "--agents-ca-config-map", "a/b"],
        &[
            &FLAGS[..4],
            &["--agents-tls-cert", "x", "--agents-tls-key", "y"],
        ]
        .concat(),
        &[&FLAGS[..4], &["--cluster", "x"]].concat(),
        &[&FLAGS[..4], &["--ca-publication-delay", "0s"]].concat(),
    ] {
        assert_eq!(
            expect_failure(&[&["serve"], arguments].concat()).0,
            2,
            "{arguments:?}"
        );
    }
    for (flags, says) in [
        (
            ["--agents-ca-lifetime", "30d"],
            "no certificate outlasts its CA",
        ),
        (
            ["--ca-publication-delay", "90d"],
            "six times --ca-publication-delay",
        ),
    ] {
        let (code, error) = expect_failure(&[&["serve"], &FLAGS[..4], &flags[..]].concat());
        assert!(
            code == 1 && error.contains(says) && error.contains(flags[0]),
            "{error}"
        );
    }
}
