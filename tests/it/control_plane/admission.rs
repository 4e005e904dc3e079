//! The ways in which a container could get GPUs that Stowage did not assign to it, and what Stowage itself may write on a node:
//! each is tried on a real API server under the shipped admission policies.

use super::processes::eventually;
use super::world::{RealControlPlane, manifest, yaml};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use stowage::kubernetes;
use stowage::kubernetes::port::WriteTimes;

const NOT_BY_HAND: &str = "NVIDIA_VISIBLE_DEVICES";
const ONLY_STOWAGE: &str = "only Stowage writes";
const ONLY_VRAM: &str = "Stowage may write only the amount of stowage.dev/vram";

async fn installed() -> Option<RealControlPlane> {
    let world = RealControlPlane::start().await?;
    world.install();
    Some(world)
}

/// Whether the API server would take the pod, and what it says if not. Nothing is created.
async fn try_to_create(client: &Client, namespace: &str, pod: &Value) -> Result<(), String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    pods.create(&dry_run, &pod).await.map(drop).map_err(|error| error.to_string())
}

fn refused(outcome: Result<(), String>, reason: &str) {
    let said = outcome.expect_err(reason);
    assert!(said.contains(reason), "{said}");
}

/// A pod under a runtime class, with the given environment in its one container.
fn pod(runtime: Option<&str>, env: &Value, limits: &Value) -> Value {
    json!({
        "metadata": { "name": "tried" },
        "spec": {
            "schedulerName": "stowage",
            "runtimeClassName": runtime,
            "containers": [{
                "name": "engine", "image": "engine", "env": env, "resources": { "limits": limits },
            }],
        },
    })
}

fn literal(value: &str) -> Value {
    json!([{ "name": "NVIDIA_VISIBLE_DEVICES", "value": value }])
}

fn from_field(path: &str) -> Value {
    json!([{ "name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": { "fieldRef": { "fieldPath": path } } }])
}

const GIVEN: &str = "metadata.annotations['stowage.dev/visible-devices']";

#[tokio::test(flavor = "multi_thread")]
async fn s6_a_container_may_not_name_gpus_itself() {
    let Some(world) = installed().await else { return };
    let client = &world.client;
    let nvidia = Some("nvidia");
    let vram = json!({ "stowage.dev/vram": "40Gi" });
    let all = pod(nvidia, &literal("all"), &json!({}));
    eventually("the policy is in force", async || {
        try_to_create(client, "default", &all)
            .await
            .is_err_and(|said| said.contains(NOT_BY_HAND))
            .then_some(())
    })
    .await;
    let both = |one: Value, other: Value| {
        Value::Array([one, other].iter().flat_map(|list| list.as_array().unwrap().clone()).collect())
    };
    let of_config = json!([{ "name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": { "configMapKeyRef": { "name": "c", "key": "k" } } }]);
    for (env, why) in [
        (literal("0"), "by its index"),
        (literal("GPU-1"), "by its UUID"),
        (literal("$(OTHER)"), "through another variable"),
        (from_field("metadata.annotations['mine']"), "from an annotation that anyone writes"),
        (of_config, "from a ConfigMap"),
        (both(from_field(GIVEN), literal("all")), "twice, and the last counts"),
        (json!([]), "not at all: then the image's own counts"),
    ] {
        println!("{why}");
        refused(try_to_create(client, "default", &pod(nvidia, &env, &vram)).await, NOT_BY_HAND);
        refused(try_to_create(client, "default", &pod(nvidia, &env, &json!({}))).await, NOT_BY_HAND);
    }
    refused(try_to_create(client, "default", &pod(None, &literal("all"), &vram)).await, NOT_BY_HAND);
    let mut beside = pod(nvidia, &from_field(GIVEN), &vram);
    beside["spec"]["initContainers"] = json!([{ "name": "i", "image": "i", "env": literal("all") }]);
    refused(try_to_create(client, "default", &beside).await, NOT_BY_HAND);
    let mut mounted = pod(nvidia, &from_field(GIVEN), &vram);
    mounted["spec"]["volumes"] = json!([{ "name": "null", "hostPath": { "path": "/dev/null" } }]);
    for path in ["/var/run/nvidia-container-devices/all", "/var/run//./nvidia-container-devices/all"] {
        mounted["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "null", "mountPath": path }]);
        refused(try_to_create(client, "default", &mounted).await, NOT_BY_HAND);
    }

    let accepted = async |namespace: &str, pod: &Value| {
        try_to_create(client, namespace, pod).await.unwrap_or_else(|said| panic!("{pod}: {said}"));
    };
    let example = yaml(&std::fs::read_to_string(manifest("examples/pod-in-full.yaml")).unwrap());
    accepted("default", &example).await;
    accepted("default", &pod(nvidia, &from_field(GIVEN), &vram)).await;
    accepted("default", &pod(nvidia, &literal("void"), &json!({}))).await;
    accepted("default", &pod(None, &json!([]), &vram)).await;
    accepted("default", &pod(None, &literal("all"), &json!({}))).await;
    accepted("default", &pod(nvidia, &json!([]), &json!({ "nvidia.com/gpu": "1" }))).await;
    refused(
        try_to_create(client, "default", &pod(nvidia, &literal("all"), &json!({ "nvidia.com/gpu": "1" })))
            .await,
        NOT_BY_HAND,
    );
    // No device plugin is asked for an amount of zero: the image's own variable counts.
    for none in ["0", "0k"] {
        let limits = json!({ "nvidia.com/gpu": none });
        refused(try_to_create(client, "default", &pod(nvidia, &json!([]), &limits)).await, NOT_BY_HAND);
    }
    // The agent's own namespace, and one that an administrator has named.
    accepted("kube-system", &all).await;
    assert!(world.kubectl(&["create", "namespace", "gpu-tools"]).ok);
    refused(try_to_create(client, "gpu-tools", &all).await, NOT_BY_HAND);
    assert!(world.kubectl(&["label", "namespace", "gpu-tools", "stowage.dev/all-gpus=allowed"]).ok);
    eventually("the label counts", async || try_to_create(client, "gpu-tools", &all).await.ok()).await;
    a_debug_container_names_none_either(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_amount_of_vram_without_a_unit_is_not_admitted() {
    let Some(world) = installed().await else { return };
    let try_amount = async |amount: &str| {
        let pod = pod(None, &json!([]), &json!({ "stowage.dev/vram": amount }));
        try_to_create(&world.client, "default", &pod).await
    };
    eventually("the policy is in force", async || try_amount("40").await.err()).await;
    for little in ["1", "40", "40k", "255Mi"] {
        refused(try_amount(little).await, "write a unit, such as 40Gi");
    }
    for enough in ["256Mi", "40Gi", "42949672960"] {
        try_amount(enough).await.unwrap_or_else(|said| panic!("{enough}: {said}"));
    }
}

async fn a_debug_container_names_none_either(world: &RealControlPlane) {
    let running = pod(Some("nvidia"), &from_field(GIVEN), &json!({ "stowage.dev/vram": "40Gi" }));
    let running: Pod = serde_json::from_value(running).unwrap();
    let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
    pods.create(&PostParams::default(), &running).await.unwrap();
    let debug = async |env: Value| {
        let container = json!({ "name": "debug", "image": "debug", "env": env });
        let patch = Patch::Strategic(json!({ "spec": { "ephemeralContainers": [container] } }));
        let params = PatchParams { dry_run: true, ..PatchParams::default() };
        let patched = pods.patch_ephemeral_containers("tried", &params, &patch).await;
        patched.map(drop).map_err(|error| error.to_string())
    };
    refused(debug(literal("all")).await, NOT_BY_HAND);
    refused(debug(json!([])).await, NOT_BY_HAND);
    debug(literal("void")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn s6_no_annotation_puts_devices_into_a_container() {
    let Some(world) = installed().await else { return };
    let annotated = |key: &str| {
        let mut pod = pod(None, &json!([]), &json!({}));
        pod["metadata"]["annotations"] = json!({ key: "nvidia.com/gpu=all" });
        pod
    };
    eventually("the policy is in force", async || {
        let outcome = try_to_create(&world.client, "default", &annotated("stowage.dev/devices")).await;
        outcome.is_err_and(|said| said.contains(ONLY_STOWAGE)).then_some(())
    })
    .await;
    for key in [
        "nvidia.cdi.k8s.io/container.engine",
        "nvidia.cdi.k8s.io/pod",
        "cdi.k8s.io/gpu",
        "cdi.k8s.io/vendor_device-1",
        "other.cdi.k8s.io/container.engine",
        "cdi-devices.nri.io/container.engine",
        "cdi-devices.noderesource.dev/pod",
        "cdi.nri.io/pod",
        "devices.nri.io/container.engine",
        "devices.nri.io",
        "devices.noderesource.dev/container.engine",
        "devices.gke.io/container.engine",
    ] {
        let outcome = try_to_create(&world.client, "default", &annotated(key)).await;
        assert!(outcome.as_ref().is_err_and(|said| said.contains(ONLY_STOWAGE)), "{key}: {outcome:?}");
    }
    // Pods that see all GPUs get them so where NVIDIA's NRI plugin is in place of its runtime.
    let mut of_operator = annotated("nvidia.cdi.k8s.io/container.engine");
    of_operator["metadata"]["name"] = json!("operator");
    try_to_create(&world.client, "kube-system", &of_operator).await.unwrap();
    // Similar keys of other projects.
    for key in ["cdi.kubevirt.io/storage.import", "example.com/cdi.k8s.io", "netdevices.nri.io/pod"] {
        try_to_create(&world.client, "default", &annotated(key)).await.unwrap();
    }
}

/// A kubelet whose writes are refused never shows a pod running, nor ended: it could not be evicted.
#[tokio::test(flavor = "multi_thread")]
async fn s6_a_pod_that_is_admitted_can_be_written_by_its_kubelet_however_many_annotations_it_has() {
    let Some(world) = installed().await else { return };
    let in_force = {
        let mut pod = pod(None, &json!([]), &json!({}));
        pod["metadata"]["annotations"] = json!({ "stowage.dev/devices": "GPU-1" });
        pod
    };
    eventually("the policy is in force", async || {
        let outcome = try_to_create(&world.client, "default", &in_force).await;
        outcome.is_err_and(|said| said.contains(ONLY_STOWAGE)).then_some(())
    })
    .await;
    let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
    let params = PatchParams::default();
    // Few long keys cost as much as many short ones.
    for (name, keys, width) in
        [("few", 10, 5), ("short", 20_000, 5), ("shortest", 35_000, 5), ("long", 800, 300)]
    {
        let key = |n: usize| match width {
            ..10 => format!("{n:0width$x}"),
            _ => format!("{}/{n:060}", "a.".repeat(120).trim_end_matches('.')),
        };
        let annotations: serde_json::Map<String, Value> = (0..keys).map(|n| (key(n), json!(""))).collect();
        let mut tried = pod(None, &json!([]), &json!({}));
        tried["metadata"] = json!({ "name": name, "annotations": annotations });
        if let Err(refused) =
            pods.create(&PostParams::default(), &serde_json::from_value(tried).unwrap()).await
        {
            assert_ne!(name, "few", "{refused}");
            println!("{name}: not admitted");
            continue;
        }
        let running = json!({ "status": { "phase": "Running" } });
        let written = pods.patch_status(name, &params, &Patch::Strategic(running)).await;
        assert!(written.is_ok(), "{name}: {}", written.unwrap_err());
        if keys > 1000 {
            continue; // To compare so many takes longer than this client waits.
        }
        // A controller keeps a note of its own there.
        let noted = json!({ "metadata": { "annotations": { key(1): "noted" } } });
        let written = pods.patch(name, &params, &Patch::Merge(noted)).await;
        assert!(written.is_ok(), "{name}: {}", written.unwrap_err());
    }
}

/// Why a container with a long name has no annotation for the NRI plugin.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_too_long_comes_in_with_a_binding_and_no_write_after_it() {
    let Some(world) = installed().await else { return };
    world.add_nodes(&[super::node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")]).await;
    let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
    for (container, is_writable) in [("c".repeat(53), true), ("c".repeat(54), false)] {
        let name = format!("of-{}", container.len());
        let mut pod = pod(None, &json!([]), &json!({}));
        pod["metadata"]["name"] = json!(name);
        pod["spec"]["schedulerName"] = json!("nobody");
        pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
        let annotations =
            json!({ format!("nvidia.cdi.k8s.io/container.{container}"): "nvidia.com/gpu=GPU-1" });
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name, "annotations": annotations },
            "target": { "apiVersion": "v1", "kind": "Node", "name": "a" },
        });
        let stowage =
            kubernetes::connect(Some(&world.service_account()), WriteTimes::default()).await.unwrap();
        let bound: Api<Pod> = Api::default_namespaced(stowage);
        bound
            .create_subresource::<_, Value>("binding", &name, &PostParams::default(), &binding)
            .await
            .unwrap();
        let running = Patch::Strategic(json!({ "status": { "phase": "Running" } }));
        let written = pods.patch_status(&name, &PatchParams::default(), &running).await;
        assert_eq!(written.is_ok(), is_writable, "{name}: {written:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s6_stowage_may_write_its_own_resources_of_a_nodes_status_only() {
    let Some(world) = installed().await else { return };
    world.add_nodes(&[super::node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")]).await;
    let stowage = kubernetes::connect(Some(&world.service_account()), WriteTimes::default()).await.unwrap();
    let write = async |client: &Client, status: Value| {
        let nodes: Api<Node> = Api::all(client.clone());
        let patch = Patch::Strategic(status);
        nodes.patch_status("a", &PatchParams::default(), &patch).await.map_err(|error| error.to_string())
    };
    let taint = json!({ "status": { "conditions": [{ "type": "Ready", "status": "False" }] } });
    eventually("the policy is in force", async || {
        // A write that changes nothing is allowed, and one before the policy is in force may have changed it.
        let mut again = taint.clone();
        again["status"]["conditions"][0]["message"] = jiff::Timestamp::now().to_string().into();
        write(&stowage, again).await.is_err_and(|said| said.contains(ONLY_VRAM)).then_some(())
    })
    .await;
    for status in [
        json!({ "status": { "capacity": { "cpu": "1" } } }),
        json!({ "status": { "allocatable": { "memory": "1Gi" } } }),
        json!({ "status": { "capacity": { "nvidia.com/gpu": "8" } } }),
        json!({ "status": { "allocatable": { "pods": null } } }),
        json!({ "status": { "addresses": [{ "type": "InternalIP", "address": "10.9.9.9" }] } }),
        json!({ "status": { "phase": "Terminated" } }),
        json!({ "status": { "images": [{ "names": ["model"], "sizeBytes": 1 }] } }),
        json!({ "status": { "daemonEndpoints": { "kubeletEndpoint": { "Port": 1 } } } }),
        json!({ "status": { "nodeInfo": { "kernelVersion": "9" } } }),
        json!({ "metadata": { "labels": { "nvidia.com/gpu.count": "16" } } }),
        json!({ "metadata": { "annotations": { "a": "b" } } }),
        json!({ "metadata": { "finalizers": ["example.com/a"] } }),
    ] {
        let outcome = write(&stowage, status.clone()).await;
        assert!(outcome.as_ref().is_err_and(|said| said.contains(ONLY_VRAM)), "{status}: {outcome:?}");
    }
    // Others write as they always did.
    write(&world.client, taint).await.unwrap();
    for amount in ["140Gi", "70Gi"] {
        let status = json!({ "status": {
            "capacity": { "stowage.dev/vram": amount }, "allocatable": { "stowage.dev/vram": amount },
        } });
        let node = write(&stowage, status).await.unwrap();
        let status = serde_json::to_value(node.status).unwrap();
        assert_eq!(
            (&status["capacity"]["stowage.dev/vram"], &status["capacity"]["cpu"]),
            (&json!(amount), &json!("128"))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s6_the_agents_account_may_list_pods_and_read_its_node_only() {
    let Some(world) = installed().await else { return };
    let can = |what: &str| {
        let account = "--as=system:serviceaccount:kube-system:stowage-agent";
        let question: Vec<&str> = ["auth", "can-i", account].into_iter().chain(what.split(' ')).collect();
        world.kubectl(&question).said.lines().next() == Some("yes")
    };
    eventually("its rights count", async || can("list pods --all-namespaces").then_some(())).await;
    assert!(can("watch pods --all-namespaces") && can("get nodes/a"));
    for no in [
        "get pods",
        "get pods --subresource=log",
        "create pods --subresource=exec",
        "get pods --subresource=proxy",
        "delete pods",
        "patch pods",
        "patch pods --subresource=status",
        "list nodes",
        "patch nodes --subresource=status",
        "get nodes --subresource=proxy",
        "get nodes --subresource=pods",
        "get secrets -n kube-system",
        "list configmaps -n kube-system",
        "create serviceaccounts --subresource=token -n kube-system",
        "create events",
    ] {
        assert!(!can(no), "it may {no}");
    }
}
