//! Objects, requests and reports, as the API server, kube-scheduler and the agents write them.

use super::GPU_BYTES;
use serde_json::{Value, json};
use stowage_scheduling::ids::{PodKey, PodUid};

pub fn node(name: &str) -> Value {
    json!({ "kind": "Node", "metadata": { "name": name }, "status": { "allocatable": { "pods": "110" } } })
}

/// What feature discovery says of a node with so many GPUs of 80 GiB.
pub fn gpu_labels(gpus: u32) -> Value {
    json!({
        "nvidia.com/gpu.count": gpus.to_string(),
        "nvidia.com/gpu.memory": (GPU_BYTES >> 20).to_string(),
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    })
}

/// A pod that asks for this much VRAM on one GPU.
pub fn pod(name: &str, vram: &str) -> Value {
    json!({
        "kind": "Pod",
        "metadata": { "name": name, "namespace": "default", "uid": format!("uid-{name}"), "annotations": {} },
        "spec": {
            "schedulerName": "stowage",
            "containers": [{ "name": "engine", "resources": { "limits": { "stowage.dev/vram": vram } } }],
        },
        "status": { "phase": "Pending" },
    })
}

pub fn with_gpu_count(mut pod: Value, gpus: u32) -> Value {
    pod["metadata"]["annotations"]["stowage.dev/gpus"] = json!(gpus.to_string());
    pod
}

pub fn with_exclusive_gpu(mut pod: Value) -> Value {
    pod["metadata"]["annotations"]["stowage.dev/exclusive"] = json!("true");
    pod
}

pub fn with_priority(mut pod: Value, priority: i32) -> Value {
    pod["spec"]["priority"] = json!(priority);
    pod
}

/// The pod as it is once it is bound to these GPUs (by their numbers on the node).
pub fn bound_on(mut pod: Value, node: &str, gpus: &[u32], granted: u64) -> Value {
    let devices: Vec<String> = gpus.iter().map(|gpu| gpu_uuid(node, *gpu)).collect();
    pod["spec"]["nodeName"] = json!(node);
    pod["metadata"]["annotations"]["stowage.dev/devices"] = json!(devices.join(","));
    pod["metadata"]["annotations"]["stowage.dev/vram-granted"] = json!(granted.to_string());
    pod
}

pub fn gpu_uuid(node: &str, gpu: u32) -> String {
    format!("GPU-{node}-{gpu}")
}

pub fn uid_of(pod: &Value) -> PodUid {
    PodUid::parse(pod["metadata"]["uid"].as_str().unwrap()).unwrap()
}

pub fn key_of(pod: &Value) -> PodKey {
    let part = |part: &str| pod["metadata"][part].as_str().unwrap();
    PodKey::parse(part("namespace"), part("name")).unwrap()
}

/// Filter's and prioritize's, by names.
pub fn args(pod: &Value, nodes: &[&str]) -> Value {
    json!({ "Pod": pod, "Nodes": null, "NodeNames": nodes })
}

pub fn bind_args(pod: &Value, node: &str) -> Value {
    let of = |part: &str| pod["metadata"][part].clone();
    json!({ "PodName": of("name"), "PodNamespace": of("namespace"), "PodUID": of("uid"), "Node": node })
}

/// Preempt's, with victims by UID.
pub fn preempt_args(pod: &Value, nodes: &[(&str, &[&Value])]) -> Value {
    let victims = |victims: &[&Value]| -> Vec<Value> {
        victims
            .iter()
            .map(|victim| json!({ "UID": victim["metadata"]["uid"] }))
            .collect()
    };
    let nodes: serde_json::Map<String, Value> = nodes
        .iter()
        .map(|(node, pods)| {
            (
                (*node).to_owned(),
                json!({ "Pods": victims(pods), "NumPDBViolations": 0 }),
            )
        })
        .collect();
    json!({ "Pod": pod, "NodeNameToVictims": null, "NodeNameToMetaVictims": nodes })
}

pub fn report(node: &str, boot: &str, sequence: u64, gpus: u32) -> Value {
    let gpus: Vec<Value> = (0..gpus).map(|gpu| gpu_report(node, gpu)).collect();
    json!({ "node": node, "bootId": boot, "sequence": sequence, "gpus": gpus })
}

pub fn gpu_report(node: &str, gpu: u32) -> Value {
    json!({ "uuid": gpu_uuid(node, gpu), "index": gpu, "model": "NVIDIA-H100-80GB-HBM3", "totalBytes": GPU_BYTES, "usedBytes": 0 })
}
