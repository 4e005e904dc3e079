//! VRAM limits that the driver keeps: what a Binding says on nodes where gpu-fractioning is ready, and that nobody changes it.

use super::fleet::{node, pod};
use super::processes::eventually;
use super::world::RealControlPlane;
use super::{ALWAYS, submit, wait_until_all_bound};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use std::collections::BTreeMap;

const POLICY: &str = "kind: SchedulingPolicy
classes: [{ name: serving, isolation: preferred }]
";

#[tokio::test(flavor = "multi_thread")]
async fn a_binding_has_the_limits_that_its_node_keeps() {
    let nodes = ["limited", "plain"].map(|name| node(name, 2, 81_559, "NVIDIA-H100-80GB-HBM3"));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("policy.yaml"), POLICY).unwrap();
    let serve = [&ALWAYS[..], &["--policy", folder.path().to_str().unwrap()]].concat();
    let Some(mut world) = RealControlPlane::start_all(nodes.to_vec(), &serve).await else {
        return;
    };
    world.begin_scheduling().await;
    let ready = json!({ "status": { "conditions": [
        { "type": "gpu-fractioning.nvidia.com/Ready", "status": "True", "reason": "AllDaemonsReady" },
    ] } });
    let api: Api<Node> = Api::all(world.client.clone());
    let patch = Patch::Strategic(&ready);
    api.patch_status("limited", &PatchParams::default(), &patch)
        .await
        .unwrap();
    eventually("the ledger knows that limits hold there", async || {
        let ledger = world.ledger().await?;
        let nodes = ledger["snapshot"]["nodes"].as_array()?;
        nodes
            .iter()
            .any(|node| node["keeps_vram_limits"] == true)
            .then_some(())
    })
    .await;

    let on = |name: &str| -> Pod {
        let mut pod = pod(name, 20, &json!({}), "");
        let selector = BTreeMap::from([("kubernetes.io/hostname".into(), name.into())]);
        pod.spec.as_mut().unwrap().node_selector = Some(selector);
        pod
    };
    submit(&world.client, &[on("limited"), on("plain")]).await;
    for pod in wait_until_all_bound(&mut world, 2).await {
        let annotations = pod.metadata.annotations.unwrap();
        let devices = &annotations["stowage.dev/devices"];
        let found = |key: &str| annotations.get(key).map(String::as_str);
        let limits = ["gpus.devices", "gpu-memory.request", "gpu-memory.limit"]
            .map(|what| found(&format!("nvidia.com/container.engine.{what}")));
        match pod.metadata.name.as_deref() {
            Some("limited") => {
                let names = format!("runtime.nvidia.com/gpu={devices}");
                let [request, limit] = [Some("20480Mi"); 2];
                assert_eq!(limits, [Some(&*names), request, limit]);
                assert_eq!(found("stowage.dev/gpu-memory-fraction"), Some("0.9200"));
                assert_eq!(found("stowage.dev/vram-limits"), Some("gpu-fractioning"));
                assert_eq!(found("stowage.dev/visible-devices"), None, "one writer");
            }
            _ => {
                assert_eq!(limits, [None; 3]);
                assert!(found("stowage.dev/visible-devices").is_some());
            }
        }
    }
    for change in [
        "nvidia.com/container.engine.gpu-memory.limit=80Gi",
        "nvidia.com/container.engine.gpu-memory.request-",
        "nvidia.com/container.engine.gpus.devices=0",
    ] {
        let ran = world.kubectl(&["annotate", "--overwrite", "pod", "limited", change]);
        assert!(
            !ran.is_success && ran.output.contains("only Stowage writes"),
            "{change}: {}",
            ran.output
        );
    }
}
