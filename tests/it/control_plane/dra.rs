//! Nodes of a DRA driver under the real API server and scheduler: pods that ask for VRAM stay off them, and pods with claims are
//! ranked there.

use super::ALWAYS;
use super::fleet::node;
use super::processes::{eventually, throughout};
use super::world::{RealControlPlane, SCHEDULER_CONFIG, amount};
use crate::dra::slice;
use crate::served::pod;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::time::Duration;

const DRIVER: &str = "gpu.nvidia.com";
const DRA_NODES: [&str; 3] = ["dra-a", "dra-b", "dra-c"];

/// What a driver and a cluster's owner set up: a slice for each node, and the class by which claims ask.
fn driver_objects() -> Vec<String> {
    let class = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": DRIVER },
        "spec": { "selectors": [{ "cel": { "expression": format!("device.driver == '{DRIVER}'") } }] },
    });
    let slices =
        DRA_NODES.map(|name| slice(DRIVER, name, &[&node(name, 1, 81_559, "H100").uuid(0)]));
    // A network card's driver takes nothing.
    let network = slice("networking.example.com", "own", &["nic-0"]);
    slices
        .iter()
        .chain([&class, &network])
        .map(Value::to_string)
        .collect()
}

fn claim(name: &str) -> String {
    let request = json!({ "name": "gpu", "exactly": { "deviceClassName": DRIVER } });
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "devices": { "requests": [request] } },
    })
    .to_string()
}

fn with_claim(name: &str) -> Value {
    let mut claims = pod(name, "1Gi");
    claims["spec"]["resourceClaims"] = json!([{ "name": "gpu", "resourceClaimName": name }]);
    claims["spec"]["containers"][0]["resources"] = json!({ "claims": [{ "name": "gpu" }] });
    claims
}

async fn create(world: &RealControlPlane, mut pod: Value) {
    pod["metadata"].as_object_mut().unwrap().remove("uid");
    pod["spec"]["containers"][0]["image"] = json!("engine");
    let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
    pods.create(
        &PostParams::default(),
        &serde_json::from_value(pod).unwrap(),
    )
    .await
    .unwrap();
}

/// The node of each pod whose name begins so, by name; empty for one without.
async fn nodes_of(world: &RealControlPlane, prefix: &str) -> Vec<String> {
    let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
    let mut pods = pods.list(&Default::default()).await.unwrap().items;
    pods.retain(|pod| pod.metadata.name.as_deref().unwrap().starts_with(prefix));
    pods.sort_by_key(|pod| pod.metadata.name.clone());
    pods.into_iter()
        .map(|pod| pod.spec.unwrap().node_name.unwrap_or_default())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn vram_pods_avoid_dra_nodes_and_pods_with_claims_are_ranked_there() {
    let names = ["own"].into_iter().chain(DRA_NODES);
    let nodes = names.map(|name| node(name, 1, 81_559, "H100")).collect();
    let Some(mut world) =
        RealControlPlane::start_all_with_objects(nodes, &driver_objects(), &ALWAYS).await
    else {
        return;
    };
    let api: Api<Node> = Api::all(world.client.clone());
    eventually("the node without a driver offers VRAM", async || {
        world.check();
        (amount(&api.get("own").await.ok()?, "allocatable") > 0).then_some(())
    })
    .await;
    // Left over from days on which it was Stowage's: the scheduler's own check lets pods pass.
    let left_over = json!({ "stowage.dev/vram": "72Gi" });
    let left_over =
        Patch::Merge(json!({ "status": { "capacity": left_over, "allocatable": left_over } }));
    for name in DRA_NODES {
        api.patch_status(name, &PatchParams::default(), &left_over)
            .await
            .unwrap();
    }
    world.start_scheduler_with_change(SCHEDULER_CONFIG, |config| {
        let url = config["extenders"][0]["urlPrefix"].clone();
        // As docs/inside/kube-scheduler.md has it.
        config["extenders"].as_array_mut().unwrap().push(json!({
            "urlPrefix": url, "prioritizeVerb": "prioritize-claims", "weight": 15,
            "nodeCacheCapable": true, "ignorable": true, "httpTimeout": "5s",
        }));
    });
    for number in 0..5 {
        create(&world, pod(&format!("vram-{number}"), "40Gi")).await;
    }
    eventually(
        "one engine has the one GPU of Stowage, and others are refused by the extender",
        async || {
            world.check();
            let bound = nodes_of(&world, "vram")
                .await
                .iter()
                .filter(|node| !node.is_empty())
                .count();
            let refused = world
                .count("stowage_nodes_rejected_total", "code=\"dra-node\"")
                .await;
            (bound == 1 && refused > 0).then_some(())
        },
    )
    .await;
    // One after the other: equal nodes are ranked by name, and kube-scheduler alone would toss a coin.
    for (number, expected) in DRA_NODES.into_iter().enumerate() {
        let name = format!("claim-{number}");
        assert!(world.apply(&claim(&name), &[]).is_success);
        create(&world, with_claim(&name)).await;
        eventually("the pod with the claim is bound", async || {
            world.check();
            let node = nodes_of(&world, &name)
                .await
                .pop()
                .filter(|node| !node.is_empty())?;
            assert_eq!(node, expected, "{name}");
            Some(())
        })
        .await;
    }
    let ranked = world
        .count(
            "stowage_answers_total",
            "code=\"claims\",outcome=\"ranked\"",
        )
        .await;
    assert!(
        ranked >= 2,
        "with one node left the scheduler does not ask: {ranked}"
    );
    throughout(Duration::from_secs(3), async || {
        let on_dra = nodes_of(&world, "vram")
            .await
            .iter()
            .filter(|node| node.starts_with("dra"))
            .count();
        assert_eq!(on_dra, 0);
    })
    .await;
    let ledger = world.ledger().await.unwrap();
    let kinds = ledger["snapshot"]["nodes"].as_array().unwrap().iter();
    let kinds: Vec<_> = kinds
        .map(|node| {
            (
                node["name"].as_str().unwrap(),
                node["kind"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        kinds,
        [
            ("dra-a", "dra"),
            ("dra-b", "dra"),
            ("dra-c", "dra"),
            ("own", "stowage")
        ]
    );
    println!(
        "0 of 5 engines on {} nodes of a DRA driver, 3 pods with claims ranked; {}",
        DRA_NODES.len(),
        world.versions()
    );
}
