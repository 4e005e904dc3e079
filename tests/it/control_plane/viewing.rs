//! `stowage explain` with nothing but a kubeconfig, before a real API server: its token, its exec plugin or its client
//! certificate, and the CA that Stowage publishes.

use super::ALWAYS;
use super::fleet::node;
use super::processes::{CommandOutput, eventually, run};
use super::world::RealControlPlane;
use crate::tls::{Ca, TlsFixture};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;

#[tokio::test(flavor = "multi_thread")]
async fn explain_needs_only_a_kubeconfig() {
    let (ca, files) = (Ca::new("stowage-agents-ca"), TlsFixture::new());
    let identity = ca.issue_for("stowage-agents.kube-system.svc");
    let path = |name: &str, text: &str| files.write(name, text).display().to_string();
    let (cert, key) = (
        path("tls.crt", &identity.cert),
        path("tls.key", &identity.key),
    );
    let tls = [
        "--admin-auth",
        "token",
        "--admin-tls-cert",
        &cert,
        "--admin-tls-key",
        &key,
    ];
    let serve = [&ALWAYS[..], &tls].concat();
    let nodes = vec![node("a", 1, 81_559, "NVIDIA-H100-80GB-HBM3")];
    let Some(world) = RealControlPlane::start_all(nodes, &serve).await else {
        return;
    };
    // The manifests have the ConfigMap, empty: here nobody else fills it.
    let ca_map = json!({ "data": { "ca.crt": ca.pem } }).to_string();
    let published = [
        "patch",
        "configmap",
        "stowage-agents-ca",
        "-n",
        "kube-system",
        "--type=merge",
        "-p",
        &ca_map,
    ];
    let published = world.kubectl(&published);
    assert!(published.is_success, "{}", published.output);
    let asking = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"llm","namespace":"default"},"spec":{
        "schedulerName":"stowage","containers":[{"name":"c","image":"i","resources":{"limits":{"stowage.dev/vram":"10Gi"}}}]}}"#;
    assert!(world.apply(asking, &[]).is_success);
    let server = format!("https://127.0.0.1:{}", world.ports.admin);
    let explain = |kubeconfig: &PathBuf| -> CommandOutput {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        run(command
            .args(["explain", "llm", "--server", &server])
            .arg("--kubeconfig")
            .arg(kubeconfig))
    };
    let explained = eventually("the token of a kubeconfig is enough", async || {
        Some(explain(&world.admin())).filter(|ran| ran.output.contains("default/llm"))
    });
    println!("{}", explained.await.output);

    let of_token: Value =
        serde_json::from_str(&std::fs::read_to_string(world.admin()).unwrap()).unwrap();
    let with_user = |name: &str, user: &Value| {
        let mut config = of_token.clone();
        config["users"][0]["user"] = user.clone();
        files.write(name, &config.to_string())
    };
    let credential = json!({
        "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
        "status": { "token": of_token["users"][0]["user"]["token"] },
    });
    let plugin = json!({ "exec": {
        "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never",
        "command": "sh", "args": ["-c", format!("echo '{credential}'")],
    } });
    let ran = explain(&with_user("exec", &plugin));
    assert!(
        ran.output.contains("default/llm"),
        "an exec plugin: {}",
        ran.output
    );

    let administrator = world.client_certificate("jane", "system:masters");
    let (cert, key) = (
        path("jane.crt", &administrator.0),
        path("jane.key", &administrator.1),
    );
    let of_certificate = with_user(
        "certificate",
        &json!({ "client-certificate": cert, "client-key": key }),
    );
    let ran = explain(&of_certificate);
    assert!(
        ran.output.contains("default/llm"),
        "a client certificate: {}",
        ran.output
    );
    let deleted = world.kubectl(&[
        "delete",
        "serviceaccount",
        "-n",
        "kube-system",
        "stowage-viewer",
    ]);
    assert!(deleted.is_success, "{}", deleted.output);
    let ran = explain(&of_certificate);
    assert!(
        !ran.is_success && ran.output.contains("--token-file"),
        "the way out is named: {}",
        ran.output
    );
    let deleted = world.kubectl(&[
        "delete",
        "configmap",
        "-n",
        "kube-system",
        "stowage-agents-ca",
    ]);
    assert!(deleted.is_success, "{}", deleted.output);
    let ran = explain(&world.admin());
    assert!(
        !ran.is_success && ran.output.contains("--ca FILE"),
        "nobody is believed without a CA: {}",
        ran.output
    );
}
