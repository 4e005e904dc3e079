//! The certificate in its Secret on a real API server, with the rights of its Role and no other.

use super::processes::eventually;
use super::world::{RealControlPlane, manifest, yaml};
use crate::tls::connect_to;
use serde_json::Value;
use std::net::SocketAddr;

const OBJECTS: &str = "
apiVersion: v1
kind: Secret
metadata: {name: stowage-agents-tls, namespace: kube-system}
type: Opaque
---
apiVersion: v1
kind: ConfigMap
metadata: {name: stowage-agents-ca, namespace: kube-system}
";

const SERVE: [&str; 10] = [
    "--lead-with",
    "always",
    "--write-deadline",
    "1s",
    "--agents-tls-secret",
    "kube-system/stowage-agents-tls",
    "--agents-ca-config-map",
    "kube-system/stowage-agents-ca",
    "--ca-publication-delay",
    "1s",
];

fn get(world: &RealControlPlane, object: &str) -> Option<Value> {
    let ran = world.kubectl(&["get", "--namespace", "kube-system", "-o", "json", object]);
    ran.is_success.then(|| yaml(&ran.output))
}

/// Whether the agents' address serves a certificate of a published CA.
fn is_trusted(world: &RealControlPlane) -> Option<()> {
    let config_map = get(world, "configmap/stowage-agents-ca")?;
    let address = SocketAddr::from(([127, 0, 0, 1], world.ports.agents));
    let mut agent = connect_to(
        "stowage-agents.kube-system.svc",
        address,
        config_map["data"]["ca.crt"].as_str()?,
        None,
    );
    agent.try_get("/").ok().map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_secret_is_filled_with_the_rights_of_a_role_for_it_alone() {
    let Some(mut world) = RealControlPlane::start().await else {
        return;
    };
    world.install();
    for kind in [
        "secret/stowage-agents-tls",
        "configmap/stowage-agents-ca",
        "role/stowage-certificates",
    ] {
        world.kubectl(&[
            "delete",
            "--namespace",
            "kube-system",
            "--ignore-not-found",
            kind,
        ]);
    }
    let applied = world.apply(OBJECTS, &[]);
    assert!(applied.is_success, "{}", applied.output);
    world.stowage = Some(world.serve("stowage", world.ports, &SERVE));
    eventually("it says that it may not read the Secret", async || {
        world.check();
        let (status, text) = world.get("/readyz").await?;
        (status == 503 && text.contains("no certificate") && text.contains("forbidden"))
            .then_some(())
    })
    .await;

    let shipped = std::fs::read_to_string(manifest("base/certificates.yaml")).unwrap();
    let applied = world.apply(&shipped, &[]);
    assert!(applied.is_success, "{}", applied.output);
    eventually("agents get through", async || is_trusted(&world)).await;
    eventually("it is ready", async || {
        (world.get("/readyz").await?.0 == 200).then_some(())
    })
    .await;
    let before = get(&world, "secret/stowage-agents-tls");
    let again = world.apply(&shipped, &[]);
    assert!(
        again.is_success && !again.output.contains("configured"),
        "{}",
        again.output
    );
    assert_eq!(
        get(&world, "secret/stowage-agents-tls"),
        before,
        "applied again, the Secret keeps its content"
    );
    let may = |verb: &str, what: &str| {
        let account = "--as=system:serviceaccount:kube-system:stowage";
        world
            .kubectl(&[
                "auth",
                "can-i",
                verb,
                what,
                "--namespace",
                "kube-system",
                account,
            ])
            .is_success
    };
    assert!(may("update", "secrets/stowage-agents-tls"));
    for (verb, what) in [
        ("create", "secrets"),
        ("list", "secrets"),
        ("get", "secrets/other"),
        ("delete", "secrets/stowage-agents-tls"),
        ("update", "configmaps/other"),
    ] {
        assert!(!may(verb, what), "{verb} {what}");
    }

    // Somebody deletes it; then applies one of the other type, which the API server wants to have both keys.
    assert!(
        world
            .kubectl(&[
                "delete",
                "--namespace",
                "kube-system",
                "secret/stowage-agents-tls"
            ])
            .is_success
    );
    eventually("it names the Secret", async || {
        let log = world.stowage.as_ref()?.log();
        log.contains("there is no Secret kube-system/stowage-agents-tls")
            .then_some(())
    })
    .await;
    is_trusted(&world).expect("what it serves stays");
    let typed = OBJECTS.replace(
        "type: Opaque",
        "type: kubernetes.io/tls\ndata: {tls.crt: '', tls.key: ''}",
    );
    let applied = world.apply(&typed, &[]);
    assert!(applied.is_success, "{}", applied.output);
    eventually("the next CA signs", async || {
        let secret = get(&world, "secret/stowage-agents-tls")?;
        secret["data"]["tls.crt"]
            .as_str()
            .is_some_and(|text| !text.is_empty())
            .then_some(())
    })
    .await;
    eventually("agents get through", async || is_trusted(&world)).await;
    assert!(
        !world
            .stowage
            .as_ref()
            .unwrap()
            .log()
            .contains("PRIVATE KEY"),
        "no key is ever logged"
    );
    world.check();
}
