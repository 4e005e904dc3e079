//! `stowage preflight` on dumps: whom the shipped policies would refuse, whose each node would be, and what is missing or not shown.

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use tempfile::TempDir;

const HEADER: &str = "apiVersion: stowage.dev/v1alpha1\nkind: SchedulingPolicy\n";

struct Answer {
    code: i32,
    out: String,
    err: String,
}

fn preflight(dumps: &[Value], more: &[&str]) -> Answer {
    let texts: Vec<String> = dumps.iter().map(|items| list(items).to_string()).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    of_texts(&texts, more)
}

fn list(items: &Value) -> Value {
    json!({ "apiVersion": "v1", "items": items, "kind": "List" })
}

fn of_texts(dumps: &[&str], more: &[&str]) -> Answer {
    let folder = TempDir::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    command.arg("preflight").args(more);
    for (number, text) in dumps.iter().enumerate() {
        let path: PathBuf = folder.path().join(number.to_string());
        std::fs::write(&path, text).unwrap();
        command.arg("--cluster").arg(path);
    }
    let ran = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Answer {
        code: ran.status.code().unwrap(),
        out: text(ran.stdout),
        err: text(ran.stderr),
    }
}

fn read(answer: &Answer) -> Value {
    serde_json::from_str(&answer.out).unwrap_or_else(|_| panic!("{}{}", answer.out, answer.err))
}

/// The names with that verdict.
fn named(answer: &Value, of: &str, verdict: &str) -> Vec<String> {
    let groups = answer[of].as_array().unwrap().iter();
    let groups = groups.filter(|one| one["verdict"] == verdict);
    let names = groups.flat_map(|one| one["names"].as_array().unwrap());
    names
        .map(|name| name.as_str().unwrap().to_owned())
        .collect()
}

fn commands(answer: &Value, of: &str) -> String {
    let gaps = answer[of].as_array().unwrap().iter();
    let commands: Vec<&str> = gaps.map(|one| one["command"].as_str().unwrap()).collect();
    commands.join("\n")
}

fn namespace(name: &str, labels: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": labels } })
}

fn runtime_class(name: &str) -> Value {
    json!({ "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": { "name": name }, "handler": name })
}

/// As an API server has it: amounts are texts, and names and a scheduler are there.
fn pod(namespace: &str, name: &str, mut pod: Value) -> Value {
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    pod["metadata"]["namespace"] = namespace.into();
    pod["metadata"]["name"] = name.into();
    let spec = pod
        .as_object_mut()
        .unwrap()
        .entry("spec")
        .or_insert(json!({}));
    let spec = spec.as_object_mut().unwrap();
    spec.entry("schedulerName")
        .or_insert("default-scheduler".into());
    spec.entry("containers").or_insert(json!([{}]));
    for list in ["containers", "initContainers"] {
        for container in spec
            .get_mut(list)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            container["name"] = "c".into();
            let limits = container
                .pointer_mut("/resources/limits")
                .and_then(Value::as_object_mut);
            for amount in limits.into_iter().flat_map(|limits| limits.values_mut()) {
                *amount = amount
                    .as_str()
                    .map_or(amount.to_string(), str::to_owned)
                    .into();
            }
        }
    }
    pod
}

fn owned(mut pod: Value, kind: &str, name: &str) -> Value {
    pod["metadata"]["ownerReferences"] = json!([{ "apiVersion": "apps/v1", "kind": kind, "name": name, "uid": name, "controller": true }]);
    pod
}

fn exporter(name: &str) -> Value {
    let env = json!([{ "name": "NVIDIA_VISIBLE_DEVICES", "value": "all" }]);
    let spec =
        json!({ "runtimeClassName": "nvidia", "nodeName": "a", "containers": [{ "env": env }] });
    let status =
        json!({ "phase": "Running", "conditions": [{ "type": "PodScheduled", "status": "True" }] });
    owned(
        pod(
            "monitoring",
            name,
            json!({ "spec": spec, "status": status }),
        ),
        "DaemonSet",
        "dcgm-exporter",
    )
}

/// The table that a real API server is asked: whatever is refused there is listed, and nothing else.
#[test]
fn exactly_the_pods_that_an_api_server_refuses_are_listed() {
    let table = std::fs::read_to_string("tests/fixtures/admission.yaml").unwrap();
    let table: Vec<BTreeMap<String, Vec<Value>>> = serde_saphyr::from_str(&table).unwrap();
    let rows = table.into_iter().flat_map(BTreeMap::into_values).flatten();
    let rows = rows
        .filter(|row| row["pod"].is_object() && row["debug"].is_null() && row["bind"].is_null());
    let exempt = json!({ "stowage.dev/all-gpus": "allowed" });
    let mut items: Vec<Value> = ["gpu-operator", "monitoring"]
        .map(|name| namespace(name, exempt.clone()))
        .into();
    items.extend(
        ["team-a", "nvidia-gpu-operator", "kube-system"].map(|name| namespace(name, json!({}))),
    );
    let mut refused = BTreeMap::new();
    for (number, row) in rows.enumerate() {
        let (name, namespace) = (
            format!("row-{number}"),
            row["in"].as_str().unwrap_or("team-a"),
        );
        let mut pod = pod(namespace, &name, row["pod"].clone());
        // What is completed here is not, in the test on an API server.
        pod["metadata"]["labels"]["stowage.dev/pod-defaults"] = "false".into();
        items.push(match row["by"] == "kubelet" {
            true => owned(pod, "Node", "a"),
            false => pod,
        });
        let reason = row["refused"].as_str();
        refused.extend(reason.map(|reason| (format!("Pod {namespace}/{name}"), reason.to_owned())));
    }
    let without_namespaces: Vec<Value> = items[5..].to_vec();
    let answer = preflight(&[items.into()], &["-o", "json"]);
    let (code, answer) = (answer.code, read(&answer));
    let listed: BTreeSet<String> = named(&answer, "workloads", "refused").into_iter().collect();
    assert_eq!(listed, refused.keys().cloned().collect());
    for one in answer["workloads"].as_array().unwrap() {
        let reason = &refused[one["names"][0].as_str().unwrap()];
        assert!(one["why"].to_string().contains(reason), "{reason}: {one}");
    }
    assert_eq!(
        (code, answer["workloads"].as_array().unwrap().len()),
        (1, refused.len())
    );
    // What labels of namespaces may exempt is not known without them, and what they do not is.
    let answer = read(&preflight(&[without_namespaces.into()], &["-o", "json"]));
    let certain = named(&answer, "workloads", "refused");
    let is_refused = |one: &String| refused.contains_key(one);
    assert!(
        certain.iter().all(is_refused) && !certain.is_empty(),
        "{certain:?}"
    );
    let unknown = named(&answer, "workloads", "unknown");
    assert!(unknown.iter().any(|one| !refused.contains_key(one)));
    assert!(refused.len() > 60);
}

#[test]
fn an_exporter_is_refused_until_its_namespace_has_the_label_that_is_named() {
    let of = |labels: Option<Value>| {
        let mut items = vec![exporter("dcgm-exporter-a"), exporter("dcgm-exporter-b")];
        items.extend(labels.map(|labels| namespace("monitoring", labels)));
        preflight(&[items.into()], &["-o", "json"])
    };
    let without = of(Some(json!({})));
    let answer = read(&without);
    assert_eq!(
        (without.code, answer["workloads"][0]["count"].as_u64()),
        (1, Some(2))
    );
    assert_eq!(
        named(&answer, "workloads", "refused"),
        ["DaemonSet monitoring/dcgm-exporter"]
    );
    let why = answer["workloads"][0]["why"].to_string();
    assert!(
        why.contains("stowage-visible-devices: NVIDIA_VISIBLE_DEVICES must come from"),
        "{why}"
    );
    let label = "kubectl label namespace monitoring stowage.dev/all-gpus=allowed";
    assert!(commands(&answer, "missing").contains(label));
    let with = of(Some(json!({ "stowage.dev/all-gpus": "allowed" })));
    assert_eq!((with.code, &read(&with)["workloads"]), (0, &json!([])));
    // A dump without namespaces does not say.
    let unknown = of(None);
    let answer = read(&unknown);
    assert_eq!(named(&answer, "workloads", "unknown").len(), 1);
    assert_eq!(unknown.code, 0);
    assert!(commands(&answer, "unknown").contains("kubectl get namespaces -o json"));
    // In shadow mode the API server warns.
    let policy = TempDir::new().unwrap();
    let file = policy.path().join("policy.yaml");
    std::fs::write(&file, format!("{HEADER}mode: shadow\n")).unwrap();
    let items = json!([exporter("a"), namespace("monitoring", json!({}))]);
    let shadow = preflight(
        &[items],
        &["-o", "json", "--policy", file.to_str().unwrap()],
    );
    assert_eq!(
        (
            shadow.code,
            named(&read(&shadow), "workloads", "warned").len()
        ),
        (0, 1),
        "{}",
        shadow.err
    );
}

#[test]
fn a_pod_that_asks_for_vram_is_completed_before_it_is_judged() {
    let vram = json!({ "limits": { "stowage.dev/vram": "40Gi" } });
    let asks = pod(
        "team-a",
        "asks",
        json!({ "spec": { "containers": [{ "resources": vram.clone() }] } }),
    );
    let mut opted_out = asks.clone();
    opted_out["metadata"]["namespace"] = "team-b".into();
    let out = namespace("team-b", json!({ "stowage.dev/pod-defaults": "false" }));
    let placed = pod(
        "team-a",
        "placed",
        json!({
            "metadata": { "annotations": { "stowage.dev/devices": "GPU-1", "stowage.dev/visible-devices": "x" } },
            "spec": { "schedulerName": "stowage", "nodeName": "a", "runtimeClassName": "nvidia", "containers": [{
                "resources": vram, "env": [
                    { "name": "GPU_MEMORY_FRACTION", "value": "0.5" },
                    { "name": "NVIDIA_VISIBLE_DEVICES", "value": "void" },
                ],
            }] },
            "status": { "conditions": [{ "type": "PodScheduled", "status": "True" }] },
        }),
    );
    let items = json!([
        namespace("team-a", json!({})),
        out,
        runtime_class("nvidia"),
        asks,
        opted_out,
        placed
    ]);
    let answer = read(&preflight(&[items], &["-o", "json"]));
    assert_eq!(
        named(&answer, "workloads", "completed"),
        ["Pod team-a/asks"]
    );
    let added = answer["workloads"].to_string();
    assert!(
        added.contains("/spec/schedulerName") && added.contains("/spec/runtimeClassName"),
        "{added}"
    );
    assert_eq!(named(&answer, "workloads", "refused"), ["Pod team-b/asks"]);
    // Its namespace's label would not help.
    let refused = answer["workloads"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["verdict"] == "refused");
    let remedies = refused.unwrap()["remedies"].as_array().unwrap();
    assert_eq!(remedies.len(), 1);
    assert_eq!(remedies[0]["command"], "kubectl -n team-b edit Pod asks");
}

fn node(name: &str, labels: Value, resources: Value) -> Value {
    let info = json!({
        "kubeletVersion": "v1.34.2", "containerRuntimeVersion": "containerd://2.1.0", "architecture": "amd64", "bootID": "",
        "kernelVersion": "", "kubeProxyVersion": "", "machineID": "", "operatingSystem": "linux", "osImage": "", "systemUUID": "",
    });
    let status =
        json!({ "allocatable": resources.clone(), "capacity": resources, "nodeInfo": info });
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "uid": name, "labels": labels }, "status": status })
}

#[test]
fn each_node_is_stowages_anothers_or_unclear_with_the_reason() {
    let gpus = |more: Value| {
        let mut labels = crate::served::gpu_labels(2);
        labels
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        labels
    };
    let present = json!({ "nvidia.com/gpu.present": "true" });
    let slice = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": "s" },
        "spec": { "driver": "gpu.nvidia.com", "nodeName": "dra", "pool": { "name": "dra", "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "gpu-0", "attributes": {}, "capacity": {} }] },
    });
    let items = json!([
        node("ours", gpus(json!({})), json!({ "cpu": "9" })),
        node(
            "plugin",
            gpus(present.clone()),
            json!({ "nvidia.com/gpu": "2" })
        ),
        node("dra", gpus(present.clone()), json!({})),
        node(
            "volcano",
            json!({}),
            json!({ "volcano.sh/vgpu-number": "2" })
        ),
        node(
            "renamed",
            gpus(present.clone()),
            json!({ "example.com/gpu": "2" })
        ),
        node(
            "changing",
            gpus(json!({ "nvidia.com/mig.config.state": "pending" })),
            json!({})
        ),
        node("bare", present, json!({})),
        node("cpu", json!({}), json!({ "cpu": "9" })),
    ]);
    let operator = json!({
        "apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": { "name": "cluster-policy" },
        "spec": { "driver": { "enabled": false } },
    });
    let plugin = json!({ "spec": { "containers": [{ "name": "p", "image": "nvcr.io/nvidia/k8s-device-plugin:v0.20.0" }] } });
    let others = json!([slice, operator, runtime_class("nvidia-cdi"), {
        "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": { "name": "plugin", "namespace": "gpu-operator" }, "spec": { "template": plugin },
    }]);
    let answer = read(&preflight(&[items, others], &["-o", "json"]));
    assert_eq!(named(&answer, "nodes", "stowage"), ["ours"]);
    let mut other = named(&answer, "nodes", "other");
    other.sort();
    assert_eq!(other, ["dra", "plugin", "volcano"]);
    let mut unclear = named(&answer, "nodes", "unclear");
    unclear.sort();
    assert_eq!(unclear, ["bare", "changing", "renamed"]);
    assert_eq!(named(&answer, "nodes", "noGpus"), ["cpu"]);
    let why = answer["nodes"].to_string();
    for reason in [
        "hands out nvidia.com/gpu",
        "DRA driver",
        "volcano.sh/vgpu-number",
        "example.com/gpu",
        "mig.config.state=pending",
    ] {
        assert!(why.contains(reason), "{reason}: {why}");
    }
    let found = answer["found"].to_string();
    for fact in [
        "kubelet v1.34.2, containerd://2.1.0: 8 nodes",
        "driver.enabled false, toolkit.enabled true",
        "k8s-device-plugin:v0.20.0",
    ] {
        assert!(found.contains(fact), "{fact}: {found}");
    }
    let missing = commands(&answer, "missing");
    for command in [
        r#""metadata":{"name":"nvidia"}"#,
        "kubectl label nodes ours nvidia.com/gpu.present=true",
        "kubectl taint nodes ours nvidia.com/gpu=present:NoSchedule",
        "kubectl apply -k manifests/overlays/webhook",
    ] {
        assert!(missing.contains(command), "{command}: {missing}");
    }
    let unknown = commands(&answer, "unknown");
    assert!(
        unknown.contains("kubectl get pods -A") && unknown.contains("stowage agent --once"),
        "{unknown}"
    );
    assert!(
        !unknown.contains("clusterpolicies") && !unknown.contains("resourceslices"),
        "{unknown}"
    );
}

#[test]
fn a_dump_that_is_cut_off_is_no_answer() {
    let whole = list(&json!([exporter("a"), namespace("monitoring", json!({}))]));
    let json = whole.to_string();
    let yaml = serde_saphyr::to_string(&whole).unwrap();
    for (text, said) in [
        (&json[..json.len() / 2], "EOF while parsing"),
        (yaml.split("\nkind: List").next().unwrap(), "cut off"),
    ] {
        let answer = of_texts(&[text], &[]);
        assert!(
            answer.code == 2 && answer.err.contains(said) && answer.out.is_empty(),
            "{}{}",
            answer.err,
            answer.out
        );
    }
    for text in [json, yaml] {
        assert_eq!(of_texts(&[&text], &[]).code, 1, "{text}");
    }
}
