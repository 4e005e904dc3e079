//! `stowage explain` beside kube-scheduler's own word: what its Event says of the filters, and what `explain` says of each node,
//! live and on a dump.

use super::fleet::{node, pod};
use super::processes::{CommandOutput, eventually, run};
use super::world::RealControlPlane;
use super::{ALWAYS, objects, submit, wait_until_all_bound};
use k8s_openapi::api::core::v1::{Event, Node};
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::Command;

/// Each node but the last is kept from the pod by one filter of kube-scheduler: its reason's code, and the Event's words.
const REFUSALS: [(&str, &str, &str); 4] = [
    ("tainted", "tainted", "untolerated taint"),
    ("cordoned", "tainted", "unschedulable"),
    (
        "unlabeled",
        "not-selected",
        "didn't match Pod's node affinity/selector",
    ),
    ("small", "insufficient-allocatable", "Insufficient cpu"),
];

#[tokio::test(flavor = "multi_thread")]
async fn explain_says_of_each_node_what_kube_scheduler_says() {
    let names = ["tainted", "cordoned", "unlabeled", "small", "free"];
    let nodes = names.map(|name| node(name, 2, 81_559, "NVIDIA-H100-80GB-HBM3"));
    let Some(mut world) = RealControlPlane::start_all(nodes.to_vec(), &ALWAYS).await else {
        return;
    };
    world.begin_scheduling().await;

    // A device that a Binding recorded: two of these fill both GPUs of the one node that takes them.
    let neighbour = |name: &str| {
        let mut pod = pod(name, 60, &json!({}), "");
        pod.spec.as_mut().unwrap().node_selector = Some(BTreeMap::from([(
            "kubernetes.io/hostname".into(),
            "free".into(),
        )]));
        pod
    };
    submit(&world.client, &[neighbour("one"), neighbour("two")]).await;
    let bound = wait_until_all_bound(&mut world, 2).await;
    change_nodes(&world).await;

    let wanted = waiting("llm", json!({}));
    apply(&world, &wanted);
    let without_volume = waiting(
        "with-volume",
        json!({ "volumes": [
        { "name": "weights", "persistentVolumeClaim": { "claimName": "weights" } },
    ] }),
    );
    apply(&world, &without_volume);
    let other_claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "another" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
    });
    apply(&world, &other_claim);

    let event = scheduler_event(&world, "llm").await;
    println!("kube-scheduler of llm: {event}");
    for (node, _, words) in REFUSALS {
        assert!(event.contains(words), "{node}: {event}");
    }
    let of_volume = scheduler_event(&world, "with-volume").await;
    println!("kube-scheduler of with-volume: {of_volume}");
    assert!(
        of_volume.contains("persistentvolumeclaim \"weights\" not found"),
        "{of_volume}"
    );

    let dump = world.kubectl(&["get", "nodes,pods,pvc", "-A", "-o", "yaml"]);
    let file = world.folder().join("dump.yaml");
    std::fs::write(&file, &dump.output).unwrap();
    let file = file.to_str().unwrap();
    let server = format!("http://127.0.0.1:{}", world.ports.admin);
    for source in [["--server", &server], ["--cluster", file]] {
        let explained = explain_json("llm", &source);
        for (node, code, _) in REFUSALS {
            let verdict = &of_node(&explained, node)["kubeScheduler"];
            assert_eq!(verdict["code"], code, "{node} by {source:?}: {verdict}");
        }
        let free = of_node(&explained, "free");
        assert_eq!(free["kubeScheduler"], Value::Null, "{source:?}: {free}");
        assert_eq!(
            free["misfit"]["code"], "insufficient-vram",
            "{source:?}: {free}"
        );
        assert_eq!(explained["counts"]["fit"], 0, "{source:?}");
        let text = explain(&["with-volume", source[0], source[1]]).output;
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            text.contains("the persistent volume claim weights of the pod does not exist"),
            "{source:?}: {text}"
        );
    }
    // The dump has each neighbour on the GPU that its Binding recorded.
    let explained = explain_json("llm", &["--cluster", file]);
    let free = of_node(&explained, "free");
    for neighbour in bound {
        let name = neighbour.metadata.name.unwrap();
        let annotations = neighbour.metadata.annotations.unwrap();
        let recorded = &annotations[objects::binding_annotations::DEVICES];
        let gpus = free["gpus"].as_array().unwrap();
        let gpu = gpus
            .iter()
            .find(|gpu| recorded.contains(gpu["uuid"].as_str().unwrap()));
        let on_it = &gpu.unwrap_or_else(|| panic!("{recorded} is none of {gpus:?}"))["occupants"];
        assert!(on_it.to_string().contains(&name), "{name}: {on_it}");
    }
    println!("{}", explain(&["llm", "--cluster", file]).output);
}

/// The refusals of [`REFUSALS`], once the pods are bound.
async fn change_nodes(world: &RealControlPlane) {
    let api: Api<Node> = Api::all(world.client.clone());
    let pool = json!({ "metadata": { "labels": { "pool": "llm" } } });
    let taint =
        json!({ "spec": { "taints": [{ "key": "team", "value": "b", "effect": "NoSchedule" }] } });
    for (node, change) in [
        ("tainted", &pool),
        ("cordoned", &pool),
        ("small", &pool),
        ("free", &pool),
        ("tainted", &taint),
        ("cordoned", &json!({ "spec": { "unschedulable": true } })),
    ] {
        let patch = Patch::Merge(change);
        api.patch(node, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
    let fewer = json!({ "status": { "capacity": { "cpu": "4" }, "allocatable": { "cpu": "4" } } });
    let patch = Patch::Merge(&fewer);
    api.patch_status("small", &PatchParams::default(), &patch)
        .await
        .unwrap();
}

fn apply(world: &RealControlPlane, object: &Value) {
    let applied = world.apply(&object.to_string(), &[]);
    assert!(applied.is_success, "{}", applied.output);
}

fn waiting(name: &str, spec: Value) -> Value {
    let resources = json!({ "limits": { "stowage.dev/vram": "40Gi" }, "requests": { "cpu": "8" } });
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": {
            "schedulerName": "stowage", "nodeSelector": { "pool": "llm" },
            "containers": [{ "name": "engine", "image": "engine", "resources": resources }],
        },
    });
    let into = pod["spec"].as_object_mut().unwrap();
    into.extend(spec.as_object().unwrap().clone());
    pod
}

async fn scheduler_event(world: &RealControlPlane, pod: &str) -> String {
    let api: Api<Event> = Api::namespaced(world.client.clone(), "default");
    let fields = format!("involvedObject.name={pod},reason=FailedScheduling");
    let list = ListParams::default().fields(&fields);
    eventually("kube-scheduler says why the pod waits", async || {
        let events = api.list(&list).await.ok()?;
        events.items.into_iter().find_map(|event| event.message)
    })
    .await
}

fn explain(arguments: &[&str]) -> CommandOutput {
    run(Command::new(env!("CARGO_BIN_EXE_stowage"))
        .arg("explain")
        .args(arguments))
}

fn explain_json(pod: &str, source: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    command.args(["explain", pod, "-o", "json"]).args(source);
    let output = command.output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn of_node<'e>(explained: &'e Value, name: &str) -> &'e Value {
    let nodes = explained["nodes"].as_array().unwrap();
    let found = nodes.iter().find(|node| node["name"] == name);
    found.unwrap_or_else(|| panic!("{name} is not among {nodes:?}"))
}
