//! What runs in a cluster before Stowage comes stays as it is: `stowage preflight` of the API server's own dump says so, and after
//! `kubectl apply -k manifests/` the API server makes the same pods of the same templates.

use super::processes::eventually;
use super::world::{RealControlPlane, yaml};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};
use std::process::Command;

/// A pod that a service mesh has completed, an exporter that sees all GPUs, and a job that asks the device plugin for one.
const TEMPLATES: [(&str, &str, &str); 3] = [
    (
        "default",
        "in-a-mesh",
        "
runtimeClassName: nvidia
initContainers:
  - {name: istio-init, image: istio/proxyv2, args: [istio-iptables], securityContext: {capabilities: {add: [NET_ADMIN, NET_RAW]}}}
  - name: istio-proxy
    image: istio/proxyv2
    restartPolicy: Always
    args: [proxy, sidecar]
    env: [{name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
    startupProbe: {httpGet: {path: /healthz/ready, port: 15021}}
    resources: {requests: {cpu: 100m, memory: 128Mi}}
containers:
  - {name: server, image: server, resources: {limits: {nvidia.com/gpu: 1}}}
",
    ),
    (
        "gpu-operator",
        "dcgm-exporter",
        "
runtimeClassName: nvidia
nodeSelector: {nvidia.com/gpu.deploy.dcgm-exporter: 'true'}
tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
initContainers:
  - {name: toolkit-validation, image: validator, command: [sh, -c, 'true'], securityContext: {privileged: true}}
containers:
  - name: dcgm-exporter
    image: nvcr.io/nvidia/k8s/dcgm-exporter
    env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]
    securityContext: {capabilities: {add: [SYS_ADMIN]}}
",
    ),
    (
        "default",
        "job",
        "
restartPolicy: Never
containers:
  - {name: train, image: train, resources: {limits: {nvidia.com/gpu: 1}}}
",
    ),
];

/// The pods as a controller makes them of their templates.
fn pods(suffix: &str) -> Vec<(&'static str, Value)> {
    let pod = |(namespace, name, spec): (&'static str, &str, &str)| {
        let mut spec = yaml(spec);
        spec["automountServiceAccountToken"] = json!(false);
        let pod = json!({ "metadata": { "name": format!("{name}-{suffix}") }, "spec": spec });
        (namespace, pod)
    };
    TEMPLATES.map(pod).to_vec()
}

async fn create(world: &RealControlPlane, suffix: &str) -> Result<Vec<Value>, String> {
    let mut made = Vec::new();
    for (namespace, pod) in pods(suffix) {
        let api: Api<Pod> = Api::namespaced(world.client.clone(), namespace);
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let pod = api.create(&PostParams::default(), &pod).await;
        let pod = serde_json::to_value(pod.map_err(|error| error.to_string())?).unwrap();
        made.push(json!([
            pod["metadata"]["labels"],
            pod["metadata"]["annotations"],
            pod["spec"]
        ]));
    }
    Ok(made)
}

/// What preflight says of the cluster as it is.
fn preflight(world: &RealControlPlane) -> (Option<i32>, Value) {
    let kinds = "nodes,pods,namespaces,daemonsets,runtimeclasses,resourceslices";
    let dump = world.kubectl(&["get", kinds, "-A", "-o", "json"]);
    assert!(dump.is_success, "{}", dump.output);
    let file = world.folder().join("cluster.json");
    std::fs::write(&file, &dump.output).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    let command = command.args(["preflight", "-o", "json", "--cluster"]);
    let ran = command.arg(&file).output().unwrap();
    let answer = serde_json::from_slice(&ran.stdout);
    (ran.status.code(), answer.expect("an answer"))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_before_stowage_stays_as_it_is() {
    let Some(world) = RealControlPlane::start().await else {
        return;
    };
    world.create_runtime_class("nvidia");
    let namespace = world.kubectl(&["create", "namespace", "gpu-operator"]);
    assert!(namespace.is_success, "{}", namespace.output);
    let before = eventually("the runtime class is known", async || {
        create(&world, "before").await.ok()
    });
    let before = before.await;

    let (code, answer) = preflight(&world);
    let workloads = answer["workloads"].as_array().unwrap();
    let names: Vec<&Value> = workloads.iter().map(|one| &one["names"][0]).collect();
    assert_eq!((code, names.len()), (Some(1), 1), "{names:?}");
    let remedies = workloads[0]["remedies"].as_array().unwrap();
    let label = "kubectl label namespace gpu-operator stowage.dev/all-gpus=allowed";
    assert!(
        remedies.iter().any(|one| one["command"] == label),
        "{answer}"
    );
    let arguments: Vec<&str> = label.split(' ').skip(1).collect();
    assert!(world.kubectl(&arguments).is_success);
    let (code, answer) = preflight(&world);
    assert_eq!((code, &answer["workloads"]), (Some(0), &json!([])));

    world.install_of("");
    // Where no label exempts it, the exporter is refused, and a pod that asks for VRAM is completed: the policies are in force.
    let (_, exporter) = pods("refused").swap_remove(1);
    let limits = json!({ "limits": { "stowage.dev/vram": "8Gi" } });
    let asking = json!({
        "metadata": { "name": "asks" },
        "spec": { "containers": [{ "name": "engine", "image": "engine", "resources": limits }] },
    });
    let elsewhere: Api<Pod> = Api::default_namespaced(world.client.clone());
    let tried = async |pod: &Value| {
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
        elsewhere.create(&dry_run, &pod).await
    };
    eventually("the policies are in force", async || {
        let refused = tried(&exporter).await.err()?.to_string();
        let completed = tried(&asking).await.ok()?.spec?;
        let is_completed =
            completed.scheduler_name? == "stowage" && completed.runtime_class_name.is_some();
        (refused.contains("NVIDIA_VISIBLE_DEVICES") && is_completed).then_some(())
    })
    .await;
    assert_eq!(create(&world, "after").await.unwrap(), before);
}
