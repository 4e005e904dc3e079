//! The shipped manifests before a real API server and scheduler: what they accept, and what the admission policies refuse.

use super::processes::{eventually, run};
use super::world::{RealControlPlane, manifest, yaml};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn the_manifests_are_accepted_and_the_admission_policy_reserves_the_gpu_annotations_for_stowage()
 {
    let Some(world) = RealControlPlane::start().await else {
        return;
    };
    println!("{}", world.versions());
    world.install();
    scheduler_reads_the_shipped_configuration(&world);
    policies_are_without_type_errors(&world).await;
    forgeries_are_refused(&world).await;
}

/// It is no object of the API server's: the scheduler itself reads it, strictly, and writes out what it understood.
fn scheduler_reads_the_shipped_configuration(world: &RealControlPlane) {
    let understood = world.folder().join("understood.yaml");
    let mut command = world.command("kube-scheduler");
    command
        .arg("--config")
        .arg(world.scheduler_config())
        .arg("--write-config-to")
        .arg(&understood);
    let ran = run(&mut command);
    assert!(ran.is_success, "{}", ran.output);
    let understood = yaml(&std::fs::read_to_string(understood).unwrap());
    assert_eq!(understood["profiles"][0]["percentageOfNodesToScore"], 100);
    let extender = &understood["extenders"][0];
    assert_eq!(
        (&extender["nodeCacheCapable"], &extender["ignorable"]),
        (&json!(true), &Value::Null)
    );
    assert_eq!(
        extender["managedResources"],
        json!([{ "name": "stowage.dev/vram" }])
    );
}

async fn policies_are_without_type_errors(world: &RealControlPlane) {
    let policies = world.kubectl(&["get", "validatingadmissionpolicies", "-o", "json"]);
    let policies = yaml(&policies.output);
    let policies = policies["items"].as_array().unwrap();
    assert_eq!(policies.len(), 6);
    assert!(
        policies
            .iter()
            .all(|policy| policy["status"]["typeChecking"].is_null()),
        "{policies:?}"
    );
}

async fn forgeries_are_refused(world: &RealControlPlane) {
    let example = std::fs::read_to_string(manifest("examples/pod-in-full.yaml")).unwrap();
    let plain = example.replace("stowage.dev/vram: 40Gi", "example.com/other: 1");
    let forged =
        |key: &str| example.replace("stowage.dev/kv-cache: 20Gi", &format!("{key}: forged"));
    let devices = "only Stowage writes";
    let other_scheduler = example.replace("schedulerName: stowage", "schedulerName: other");
    eventually("the admission policies are in force", async || {
        [
            (&forged("stowage.dev/devices"), devices),
            (&other_scheduler, "needs spec.schedulerName"),
        ]
        .into_iter()
        .all(|(text, reason)| {
            world
                .apply(text, &["--dry-run=server"])
                .output
                .contains(reason)
        })
        .then_some(())
    })
    .await;
    let refused = |text: &str, reason: &str| {
        assert_ne!(text, example);
        let applied = world.apply(text, &["--dry-run=server"]);
        assert!(
            !applied.is_success && applied.output.contains(reason),
            "{}",
            applied.output
        );
    };
    for key in [
        "devices",
        "vram-granted",
        "exclusive-granted",
        "gpu-memory-fraction",
        "visible-devices",
    ] {
        refused(&forged(&format!("stowage.dev/{key}")), devices);
    }
    refused(&forged("nvidia.cdi.k8s.io/container.engine"), devices);
    let on_a_node = |pod: &str| {
        pod.replace(
            "schedulerName: stowage",
            "schedulerName: stowage\n  nodeName: a",
        )
    };
    refused(&on_a_node(&example), "must not set spec.nodeName");
    refused(&other_scheduler, "needs spec.schedulerName");
    let others = plain.replace("schedulerName: stowage", "nodeName: a");
    let applied = world.apply(&others, &["--dry-run=server"]);
    assert!(
        applied.is_success,
        "a pod that asks for no VRAM is nobody's business: {}",
        applied.output
    );

    assert!(world.apply(&example, &[]).is_success);
    let annotate = |pair: &str| world.kubectl(&["annotate", "pod", "llama-3-1-8b", pair]);
    assert!(annotate("example.com/note=fine").is_success);
    assert!(
        annotate("stowage.dev/devices=GPU-1")
            .output
            .contains(devices)
    );
    let status =
        json!({ "metadata": { "annotations": { "stowage.dev/devices": "GPU-1" } } }).to_string();
    let patch = [
        "patch",
        "pod",
        "llama-3-1-8b",
        "--subresource=status",
        "--type=merge",
        "-p",
        &status,
    ];
    assert!(world.kubectl(&patch).output.contains(devices));
    let binding = bind_with_devices(&world.client)
        .await
        .unwrap_err()
        .to_string();
    assert!(binding.contains(devices), "{binding}");
}

/// What a user with the right to bind would try.
async fn bind_with_devices(client: &Client) -> kube::Result<Value> {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let annotations = json!({ "stowage.dev/devices": "GPU-1" });
    let binding = json!({
        "metadata": { "name": "llama-3-1-8b", "annotations": annotations },
        "target": { "kind": "Node", "name": "a" },
    });
    pods.create_subresource("binding", "llama-3-1-8b", &PostParams::default(), &binding)
        .await
}
