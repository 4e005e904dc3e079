//! S7: certificates and the client CA are reloaded from their files, on every address.

use crate::client::Client;
use crate::process::{RunningServe, eventually, json_dump};
use crate::served::{args, pod};
use crate::tls::{Ca, Identity, TlsFixture, connect};
use std::path::PathBuf;

struct Paths {
    cert: PathBuf,
    key: PathBuf,
    client_ca: PathBuf,
}

/// Writes what a renewed Secret brings.
fn write(files: &TlsFixture, server: &Identity, client_ca: &str) -> Paths {
    Paths {
        cert: files.write("tls.crt", &server.cert),
        key: files.write("tls.key", &server.key),
        client_ca: files.write("ca.crt", client_ca),
    }
}

/// Whether a client that trusts `ca` and shows a certificate of `client` gets an answer.
fn is_answered(running: &RunningServe, ca: &Ca, client: &Ca) -> bool {
    let body = args(&pod("llm", "40Gi"), &["node-a"]).to_string();
    let identity = client.issue_for("127.0.0.1");
    let mut asking = connect(running.scheduler, &ca.pem, Some(&identity));
    asking
        .try_post("/scheduler/filter", body.as_bytes())
        .is_ok_and(|answer| answer.status == 200)
}

#[test]
fn the_server_certificate_and_client_ca_are_reloaded_and_invalid_ones_rejected() {
    let ([old, new], files, folder) = (
        ["old", "new"].map(Ca::new),
        TlsFixture::new(),
        tempfile::tempdir().unwrap(),
    );
    let paths = write(&files, &old.issue_for("127.0.0.1"), &old.pem);
    let path = |path: &PathBuf| path.to_str().unwrap().to_owned();
    let (cert, key, ca) = (path(&paths.cert), path(&paths.key), path(&paths.client_ca));
    let flags = ["--tls-cert", &cert, "--tls-key", &key, "--client-ca", &ca];
    let running = RunningServe::serve_with(&json_dump(&folder), &flags);
    assert!(is_answered(&running, &old, &old));

    write(&files, &new.issue_for("127.0.0.1"), &new.pem);
    eventually("the new certificate is shown", || {
        is_answered(&running, &new, &new)
    });
    assert!(
        !is_answered(&running, &new, &old),
        "the old CA's clients are let in no more"
    );

    files.write(
        "tls.crt",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    );
    let told = running.wait_for_line("the previous certificate stays in use");
    assert!(
        told.contains("ERROR") && told.contains("--tls-cert"),
        "{told}"
    );
    assert!(
        is_answered(&running, &new, &new),
        "the last good one goes on"
    );
    for line in [
        "stowage_tls_reload_failed{address=\"scheduler\"} 1",
        "stowage_tls_reloads_total{address=\"scheduler\",outcome=\"applied\"} 1",
        "stowage_tls_reloads_total{address=\"scheduler\",outcome=\"rejected\"} 1",
    ] {
        // It is counted after it is said.
        eventually(line, || {
            let metrics = Client::connect(running.operators).get_page("/metrics");
            metrics.text().lines().any(|found| found == line)
        });
    }
}
