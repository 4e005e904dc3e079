//! Nodes whose GPUs a DRA driver publishes as ResourceSlices: no pod of Stowage is placed there, and other drivers' slices do not
//! matter.

use crate::served::{ServedCluster, args, pod};
use serde_json::{Value, json};

/// A slice of a driver on one node, with a device for each of these UUIDs.
pub fn slice(driver: &str, node: &str, uuids: &[&str]) -> Value {
    let device = |(number, uuid): (usize, &&str)| json!({ "name": format!("gpu-{number}"), "attributes": { "uuid": { "string": uuid } } });
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
        "metadata": { "name": format!("{node}-{driver}") },
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": { "name": node, "generation": 1, "resourceSliceCount": 1 },
            "devices": uuids.iter().enumerate().map(device).collect::<Vec<_>>(),
        },
    })
}

#[test]
fn a_gpu_in_a_resource_slice_is_not_allocated() {
    let mut cluster = ServedCluster::with_gpus(&[("dra", 1), ("network", 1), ("own", 1)]);
    cluster
        .nodes
        .push(slice("gpu.nvidia.com", "dra", &["GPU-dra-0"]));
    cluster
        .nodes
        .push(slice("networking.example.com", "network", &["nic-0"]));
    let served = cluster.serve();
    let engine = pod("engine", "70Gi");
    let mut passed = served.filter_passed(&engine, &["dra", "network", "own"]);
    passed.sort_unstable();
    assert_eq!(passed, ["network", "own"]);
    let refused = served.filter(&engine, &["dra"]).json()["FailedAndUnresolvableNodes"].take();
    assert_eq!(refused["dra"], "a DRA driver allocates the node's GPUs");
}

/// A pod whose device kube-scheduler allocates by a claim.
pub fn claims_pod(name: &str) -> Value {
    let mut claims = pod(name, "1Gi");
    claims["spec"]["resourceClaims"] =
        json!([{ "name": "gpu", "resourceClaimTemplateName": "one-gpu" }]);
    claims["spec"]["containers"][0]["resources"] = json!({ "claims": [{ "name": "gpu" }] });
    claims
}

#[test]
fn a_pod_with_a_resource_claim_passes_every_node_and_is_not_in_the_ledger() {
    let mut cluster = ServedCluster::with_gpus(&[("dra-a", 1), ("dra-b", 1), ("own", 1)]);
    cluster
        .nodes
        .push(slice("gpu.nvidia.com", "dra-a", &["GPU-dra-a-0"]));
    cluster
        .nodes
        .push(slice("gpu.nvidia.com", "dra-b", &["GPU-dra-b-0"]));
    let served = cluster.serve();
    let (claims, nodes) = (claims_pod("claims"), ["dra-a", "dra-b", "own", "unknown"]);
    let before = served.ledger();
    assert_eq!(
        served.filter_passed(&claims, &nodes),
        nodes,
        "fit is the scheduler's"
    );
    for verb in ["prioritize", "prioritize-claims"] {
        let answer = served.post(&format!("/scheduler/{verb}"), args(&claims, &nodes));
        let scores: Vec<i64> = answer
            .json()
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["Score"].as_i64().unwrap())
            .collect();
        assert_eq!(
            scores.iter().filter(|score| **score == 10).count(),
            1,
            "{verb}: {scores:?}"
        );
        assert_eq!(
            scores[3], 0,
            "{verb}: of a node that is not known nothing is known"
        );
    }
    assert!(served.pod_state(&claims).is_none());
    assert_eq!(served.ledger(), before);
    // An extender entry without managedResources sends every pod.
    let engine = pod("engine", "40Gi");
    let answer = served
        .post("/scheduler/prioritize-claims", args(&engine, &nodes))
        .json();
    assert!(
        answer
            .as_array()
            .unwrap()
            .iter()
            .all(|one| one["Score"] == 0),
        "{answer}"
    );
    let mut plain = claims_pod("plain");
    plain["spec"]
        .as_object_mut()
        .unwrap()
        .remove("resourceClaims");
    assert_eq!(
        served
            .post("/scheduler/prioritize-claims", args(&plain, &nodes))
            .status,
        200
    );
}

#[test]
fn an_extended_resource_of_a_device_class_passes_nodes_with_resource_slices() {
    let mut cluster = ServedCluster::with_gpus(&[("dra", 1), ("own", 1)]);
    cluster
        .nodes
        .push(slice("gpu.nvidia.com", "dra", &["GPU-dra-0"]));
    let served = cluster.serve();
    let asks = crate::device_plugin::pod_requesting("by-resource", "nvidia.com/gpu", 1);
    assert_eq!(served.filter_passed(&asks, &["dra", "own"]), ["dra"]);
}
