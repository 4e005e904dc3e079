//! Nodes whose GPUs a DRA driver publishes as ResourceSlices: no pod of Stowage is placed there, and other drivers' slices do not
//! matter.

use crate::served::{ServedCluster, pod};
use serde_json::{Value, json};

/// A slice of a driver on one node, with a device for each of these UUIDs.
pub fn slice(driver: &str, node: &str, uuids: &[&str]) -> Value {
    let device = |(number, uuid): (usize, &&str)| {
        json!({ "name": format!("gpu-{number}"), "attributes": { "uuid": { "string": uuid } } })
    };
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
fn a_gpu_that_a_dra_driver_publishes_is_not_promised() {
    let mut cluster = ServedCluster::of(&[("dra", 1), ("network", 1), ("own", 1)]);
    cluster.nodes.push(slice("gpu.nvidia.com", "dra", &["GPU-dra-0"]));
    cluster.nodes.push(slice("networking.example.com", "network", &["nic-0"]));
    let served = cluster.serve();
    let engine = pod("engine", "70Gi");
    let mut passed = served.passed(&engine, &["dra", "network", "own"]);
    passed.sort_unstable();
    assert_eq!(passed, ["network", "own"]);
    let refused = served.filter(&engine, &["dra"]).json()["FailedAndUnresolvableNodes"].take();
    assert_eq!(refused["dra"], "a DRA driver allocates the node's GPUs");
}
