//! The defaults for pods (`manifests/components/pod-defaults`) on a real API server: what it makes of pods that say little, that
//! nothing a user wrote is changed, and that a pod of two lines ends on a GPU with its environment.

use super::fleet::node;
use super::processes::{eventually, free_ports};
use super::world::{RealControlPlane, manifest};
use super::{ALWAYS, annotation, wait_until_all_bound};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const DEVICES: &str = "metadata.annotations['stowage.dev/visible-devices']";
const FRACTION: &str = "metadata.annotations['stowage.dev/gpu-memory-fraction']";

/// With the folder that the README installs, and the defaults in force.
async fn installed(runtime_class: bool) -> Option<RealControlPlane> {
    let world = RealControlPlane::start().await?;
    world.install_of("");
    if runtime_class {
        world.create_runtime_class("nvidia");
    }
    eventually("the defaults are in force", async || {
        let made = made_of(&world, "default", asking()).await.ok()?;
        let has_class = made["spec"]["runtimeClassName"] == "nvidia";
        (made["spec"]["schedulerName"] == "stowage" && has_class == runtime_class).then_some(())
    })
    .await;
    let mut others = asking();
    others["spec"]["schedulerName"] = json!("volcano");
    eventually("the admission rules are in force", async || {
        made_of(&world, "default", others.clone())
            .await
            .is_err()
            .then_some(())
    })
    .await;
    Some(world)
}

/// What the API server would store; nothing is stored.
async fn made_of(world: &RealControlPlane, namespace: &str, pod: Value) -> Result<Value, String> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), namespace);
    let pod: Pod = serde_json::from_value(pod).unwrap();
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let made = pods
        .create(&dry_run, &pod)
        .await
        .map_err(|error| error.to_string())?;
    Ok(serde_json::to_value(made).unwrap())
}

/// The least that a pod can say.
fn asking() -> Value {
    json!({
        "metadata": { "name": "asks" },
        "spec": { "containers": [{
            "name": "engine", "image": "engine", "resources": { "limits": { "stowage.dev/vram": "40Gi" } },
        }] },
    })
}

fn from_field(name: &str, path: &str) -> Value {
    json!({ "name": name, "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": path } } })
}

/// As a controller makes a pod of the template at that place in an example.
fn pod_of(example: &str, template: &str) -> Value {
    let text = std::fs::read_to_string(manifest("examples").join(example)).unwrap();
    let object: Value = serde_saphyr::from_multiple::<Value>(&text)
        .unwrap()
        .swap_remove(0);
    let mut pod = object
        .pointer(template)
        .unwrap_or_else(|| panic!("{example}: no {template}"))
        .clone();
    pod["metadata"]["name"] = "made".into();
    json!({ "metadata": pod["metadata"], "spec": pod["spec"] })
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_every_kind_of_workload_are_completed_as_committed() {
    if let Some(world) = installed(true).await {
        are_completed_as_committed(&world).await;
    }
}

async fn are_completed_as_committed(world: &RealControlPlane) {
    for (name, example, template) in [
        ("pod", "pod.yaml", ""),
        ("deployment", "deployment.yaml", "/spec/template"),
        (
            "leader",
            "leaderworkerset.yaml",
            "/spec/leaderWorkerTemplate/leaderTemplate",
        ),
        (
            "worker",
            "leaderworkerset.yaml",
            "/spec/leaderWorkerTemplate/workerTemplate",
        ),
        (
            "jobset",
            "jobset.yaml",
            "/spec/replicatedJobs/0/template/spec/template",
        ),
    ] {
        let pod = pod_of(example, template);
        let made = made_of(world, "default", pod)
            .await
            .unwrap_or_else(|said| panic!("{name}: {said}"));
        let kept = json!({
            "labels": made["metadata"]["labels"],
            "annotations": made["metadata"]["annotations"],
            "spec": made["spec"],
        });
        is_committed(
            name,
            &format!("{}\n", serde_json::to_string_pretty(&kept).unwrap()),
        );
    }
    // The example that says all of it itself is left as it is, and is what the short one becomes.
    let full = pod_of("pod-in-full.yaml", "");
    let made = made_of(world, "default", full.clone()).await.unwrap();
    let short = made_of(world, "default", pod_of("pod.yaml", ""))
        .await
        .unwrap();
    for field in [
        "/spec/schedulerName",
        "/spec/runtimeClassName",
        "/metadata/labels",
    ] {
        assert_eq!(made.pointer(field), full.pointer(field), "{field}");
        assert_eq!(made.pointer(field), short.pointer(field), "{field}");
    }
    let names = |pod: &Value| {
        let env = pod["spec"]["containers"][0]["env"]
            .as_array()
            .unwrap()
            .iter();
        let mut names: Vec<String> = env.map(ToString::to_string).collect();
        names.sort();
        names
    };
    assert_eq!(names(&made), names(&short));
}

/// Before Kubernetes 1.36 there are no such policies, and here none is installed.
#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_of_stowage_completes_pods_as_the_policies_do() {
    let Some(mut world) = RealControlPlane::start().await else {
        return;
    };
    world.install();
    let [port] = free_ports();
    let component = manifest("components/pod-defaults-webhook/webhook.yaml");
    let service =
        "service: { name: stowage-webhook, namespace: kube-system, path: /admission/pods }";
    let url = format!("url: \"https://localhost:{port}/admission/pods\"");
    let text = std::fs::read_to_string(component).unwrap();
    assert_eq!(text.matches(service).count(), 2);
    let applied = world.apply(&text.replace(service, &url), &[]);
    assert!(applied.is_success, "{}", applied.output);
    let address = format!("--webhook=127.0.0.1:{port}");
    let serve = [
        &ALWAYS[..],
        &[
            "--agents-tls-secret=kube-system/stowage-agents-tls",
            "--agents-ca-config-map=kube-system/stowage-agents-ca",
            "--ca-publication-delay=1s",
            &address,
            "--webhook-runtime-class=nvidia",
        ],
    ]
    .concat();
    world.stowage = Some(world.serve("stowage", world.ports, &serve));
    eventually("the webhook completes pods", async || {
        world.check();
        let made = made_of(&world, "default", asking()).await.ok()?;
        (made["spec"]["runtimeClassName"] == "nvidia").then_some(())
    })
    .await;
    are_completed_as_committed(&world).await;
    what_a_user_wrote_stays(&world).await;
    labels_opt_out_and_other_containers_get_no_gpu(&world).await;

    // With none that answers, pods are admitted; one that would go past Stowage is told what to write.
    world.stowage.take().expect("it runs").kill();
    let mut other = asking();
    other["spec"]["containers"][0]["resources"] = json!({});
    assert!(made_of(&world, "default", other).await.is_ok());
    let told = made_of(&world, "default", asking()).await.unwrap_err();
    assert!(told.contains("needs spec.schedulerName stowage"), "{told}");
    let full = pod_of("pod-in-full.yaml", "");
    let made = made_of(&world, "default", full.clone()).await.unwrap();
    assert_eq!(made["spec"]["schedulerName"], full["spec"]["schedulerName"]);
}

fn is_committed(name: &str, actual: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/pod-defaults");
    let file = folder.join(format!("{name}.json"));
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&file, actual).unwrap();
    }
    let expected = std::fs::read_to_string(&file)
        .unwrap_or_else(|error| panic!("{}: {error}; STOWAGE_BLESS=1 writes it", file.display()));
    assert_eq!(
        actual, expected,
        "{name}: not what is committed; STOWAGE_BLESS=1 writes it again"
    );
}

/// As `kubectl debug` adds it: its image's own variable would give it every GPU.
#[tokio::test(flavor = "multi_thread")]
async fn a_debugging_container_that_says_nothing_of_gpus_sees_none() {
    let Some(world) = installed(true).await else {
        return;
    };
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), "default");
    let pod: Pod = serde_json::from_value(asking()).unwrap();
    pods.create(&PostParams::default(), &pod).await.unwrap();
    let debug = async |container: Value| -> Result<BTreeMap<String, Value>, String> {
        let patch = Patch::Strategic(json!({ "spec": { "ephemeralContainers": [container] } }));
        let patched = pods
            .patch_ephemeral_containers("asks", &PatchParams::default(), &patch)
            .await;
        let patched = serde_json::to_value(patched.map_err(|error| error.to_string())?).unwrap();
        let added = patched["spec"]["ephemeralContainers"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        Ok(added
            .into_iter()
            .map(|one| (one["name"].as_str().unwrap().to_owned(), one["env"].clone()))
            .collect())
    };
    let void = json!({ "name": "NVIDIA_VISIBLE_DEVICES", "value": "void" });
    let own = json!({ "name": "LEVEL", "value": "3" });
    let added = debug(json!({ "name": "one", "image": "i" })).await.unwrap();
    assert_eq!(added["one"], json!([void]));
    let added = debug(json!({ "name": "two", "image": "i", "env": [own] }))
        .await
        .unwrap();
    assert_eq!(
        (&added["one"], &added["two"]),
        (&json!([void]), &json!([void, own]))
    );
    let all = json!([{ "name": "NVIDIA_VISIBLE_DEVICES", "value": "all" }]);
    let refused = debug(json!({ "name": "three", "image": "i", "env": all }))
        .await
        .unwrap_err();
    assert!(refused.contains("must come from the field"), "{refused}");
}

/// Of the component `start-turns`: behind what needs no GPU, before what needs one.
#[tokio::test(flavor = "multi_thread")]
async fn an_init_container_asks_for_the_turn_of_a_pod() {
    let Some(world) = RealControlPlane::start().await else {
        return;
    };
    world.install_of("");
    let applied = world.kubectl(&[
        "apply",
        "-f",
        manifest("components/start-turns/start-turns.yaml")
            .to_str()
            .unwrap(),
    ]);
    assert!(applied.is_success, "{}", applied.output);
    world.create_runtime_class("nvidia");
    let turns = async |pod: Value| -> Option<Value> {
        let made = made_of(&world, "default", pod).await.ok()?;
        let containers = made["spec"]["initContainers"].as_array()?.clone();
        containers
            .iter()
            .any(|one| one["name"] == "stowage-turn")
            .then_some(Value::from(containers))
    };
    let made = eventually("the component is in force", async || turns(asking()).await).await;
    assert_eq!(made[0]["args"], json!(["wait-turn"]));
    assert!(
        made[0]["image"].as_str().unwrap().contains("/stowage:"),
        "the agents' image"
    );
    let names = |containers: &Value| -> Vec<String> {
        containers
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let mut fetching = asking();
    fetching["spec"]["initContainers"] = json!([{ "name": "fetch", "image": "i" }]);
    assert_eq!(
        names(&turns(fetching.clone()).await.unwrap()),
        ["fetch", "stowage-turn"]
    );
    fetching["spec"]["initContainers"][0]["resources"] =
        json!({ "limits": { "stowage.dev/vram": "40Gi" } });
    assert_eq!(
        names(&turns(fetching).await.unwrap()),
        ["stowage-turn", "fetch"]
    );
    let mut without = asking();
    without["metadata"]["labels"] = json!({ "stowage.dev/pod-defaults": "false" });
    without["spec"]["schedulerName"] = json!("stowage");
    assert_eq!(turns(without).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_user_wrote_is_never_changed() {
    if let Some(world) = installed(true).await {
        what_a_user_wrote_stays(&world).await;
    }
}

async fn what_a_user_wrote_stays(world: &RealControlPlane) {
    let made = async |pod: Value| made_of(world, "default", pod).await.unwrap();
    let mut said = asking();
    said["metadata"]["labels"] = json!({ "llm-d.ai/engine-type": "own", "app": "a" });
    said["spec"]["runtimeClassName"] = json!("nvidia-cdi");
    said["spec"]["containers"][0]["image"] = json!("vllm/vllm-openai");
    let own = json!([
        { "name": "FIRST", "value": "1" },
        { "name": "NVIDIA_VISIBLE_DEVICES", "value": "void" },
        { "name": "GPU_MEMORY_FRACTION", "value": "0.5" },
    ]);
    said["spec"]["containers"][0]["env"] = own.clone();
    world.create_runtime_class("nvidia-cdi");
    let kept = eventually("the other runtime class is known", async || {
        made_of(world, "default", said.clone()).await.ok()
    });
    let kept = kept.await;
    assert_eq!(kept["metadata"]["labels"], said["metadata"]["labels"]);
    assert_eq!(kept["spec"]["runtimeClassName"], "nvidia-cdi");
    assert_eq!(kept["spec"]["containers"][0]["env"], own);

    // An engine's image alone makes no server of a batch job.
    let mut batch = asking();
    batch["spec"]["containers"][0]["image"] = json!("vllm/vllm-openai");
    assert_eq!(made(batch.clone()).await["metadata"]["labels"], Value::Null);
    batch["spec"]["containers"][0]["ports"] = json!([{ "containerPort": 9000 }]);
    assert_eq!(
        made(batch).await["metadata"]["labels"],
        json!({ "llm-d.ai/engine-type": "vllm" })
    );

    // Each by itself: one that is there does not keep the others away.
    let mut one = asking();
    one["spec"]["containers"][0]["env"] =
        json!([{ "name": "GPU_MEMORY_FRACTION", "value": "0.5" }]);
    let one = made(one).await;
    let env = json!([from_field("NVIDIA_VISIBLE_DEVICES", DEVICES), { "name": "GPU_MEMORY_FRACTION", "value": "0.5" }]);
    assert_eq!(one["spec"]["containers"][0]["env"], env);

    // The default scheduler is what the API server writes where a user wrote none; any other name was written.
    let mut other = asking();
    other["spec"]["schedulerName"] = json!("default-scheduler");
    assert_eq!(
        made(other.clone()).await["spec"]["schedulerName"],
        "stowage"
    );
    other["spec"]["schedulerName"] = json!("volcano");
    let said = made_of(world, "default", other).await.unwrap_err();
    assert!(said.contains("needs spec.schedulerName stowage"), "{said}");

    // Pods that ask for none are not touched, whatever else they ask for.
    let mut none = asking();
    none["spec"]["containers"][0]["resources"] = json!({ "limits": { "nvidia.com/gpu": "1" } });
    let none = made(none).await;
    assert_eq!(
        (
            &none["spec"]["schedulerName"],
            &none["spec"]["runtimeClassName"]
        ),
        (&json!("default-scheduler"), &Value::Null)
    );
    assert_eq!(none["spec"]["containers"][0]["env"], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_label_opts_out_and_containers_that_need_no_gpu_get_none() {
    if let Some(world) = installed(true).await {
        labels_opt_out_and_other_containers_get_no_gpu(&world).await;
    }
}

async fn labels_opt_out_and_other_containers_get_no_gpu(world: &RealControlPlane) {
    let mut out = asking();
    out["metadata"]["labels"] = json!({ "stowage.dev/pod-defaults": "false" });
    let said = made_of(world, "default", out.clone()).await.unwrap_err();
    assert!(
        said.contains("needs spec.schedulerName stowage"),
        "nothing was added: {said}"
    );
    out["spec"]["schedulerName"] = json!("stowage");
    let made = made_of(world, "default", out).await.unwrap();
    assert_eq!(made["spec"]["runtimeClassName"], Value::Null);
    assert_eq!(made["spec"]["containers"][0]["env"], Value::Null);
    assert!(
        world
            .kubectl(&["create", "namespace", "by-hand"])
            .is_success
    );
    assert!(
        world
            .kubectl(&[
                "label",
                "namespace",
                "by-hand",
                "stowage.dev/pod-defaults=false"
            ])
            .is_success
    );
    eventually("the namespace's label counts", async || {
        made_of(world, "by-hand", asking())
            .await
            .is_err()
            .then_some(())
    })
    .await;

    let mut several = asking();
    several["spec"]["initContainers"] = json!([
        { "name": "fetch", "image": "vllm/vllm-openai" },
        { "name": "proxy", "image": "proxy", "restartPolicy": "Always", "env": [{ "name": "A", "value": "b" }] },
    ]);
    let containers = several["spec"]["containers"].as_array_mut().unwrap();
    containers.push(json!({ "name": "logs", "image": "logs" }));
    let made = made_of(world, "default", several).await.unwrap();
    let void = json!({ "name": "NVIDIA_VISIBLE_DEVICES", "value": "void" });
    let spec = &made["spec"];
    let given = json!([
        from_field("GPU_MEMORY_FRACTION", FRACTION),
        from_field("NVIDIA_VISIBLE_DEVICES", DEVICES)
    ]);
    assert_eq!(spec["containers"][0]["env"], given);
    assert_eq!(spec["containers"][1]["env"], json!([void]));
    assert_eq!(spec["initContainers"][0]["env"], json!([void]));
    assert_eq!(
        spec["initContainers"][1]["env"],
        json!([void, { "name": "A", "value": "b" }])
    );
    assert_eq!(
        made["metadata"]["labels"],
        Value::Null,
        "the image that asks for VRAM names no engine"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn where_several_containers_ask_each_takes_its_own_fraction_and_zero_is_no_request() {
    let Some(world) = installed(true).await else {
        return;
    };
    let ask = |name: &str, amounts: Value| json!({ "name": name, "image": name, "resources": { "limits": amounts } });
    let mut several = asking();
    several["spec"]["containers"] = json!([
        ask("llm", json!({ "stowage.dev/vram": "32Gi" })),
        ask(
            "embed",
            json!({ "stowage.dev/vram": "10Gi", "nvidia.com/gpu": "0" })
        ),
        ask("proxy", json!({ "stowage.dev/vram": "0" })),
    ]);
    several["spec"]["initContainers"] = json!([ask("warm", json!({ "stowage.dev/vram": "1Gi" }))]);
    let made = made_of(&world, "default", several).await.unwrap();
    let own = |name: &str| {
        format!("metadata.annotations['{name}.container.stowage.dev/gpu-memory-fraction']")
    };
    let given = |name: &str| {
        json!([
            from_field("GPU_MEMORY_FRACTION", &own(name)),
            from_field("NVIDIA_VISIBLE_DEVICES", DEVICES)
        ])
    };
    let spec = &made["spec"];
    assert_eq!(spec["containers"][0]["env"], given("llm"));
    assert_eq!(spec["containers"][1]["env"], given("embed"));
    assert_eq!(
        spec["containers"][2]["env"],
        json!([{ "name": "NVIDIA_VISIBLE_DEVICES", "value": "void" }])
    );
    assert_eq!(spec["initContainers"][0]["env"], given("warm"));
    let mut forged = asking();
    forged["metadata"]["annotations"] =
        json!({ "engine.container.stowage.dev/gpu-memory-fraction": "0.9" });
    let said = made_of(&world, "default", forged).await.unwrap_err();
    assert!(said.contains("only Stowage writes them"), "{said}");
    let mut none = asking();
    none["spec"]["containers"][0]["resources"] = json!({ "limits": { "stowage.dev/vram": "0" } });
    assert_eq!(
        made_of(&world, "default", none).await.unwrap()["spec"]["schedulerName"],
        "default-scheduler"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_without_the_runtime_class_admits_the_pod() {
    let Some(world) = installed(false).await else {
        return;
    };
    let made = made_of(&world, "default", asking()).await.unwrap();
    assert_eq!(made["spec"]["runtimeClassName"], Value::Null);
    assert_eq!(made["spec"]["schedulerName"], "stowage");
    assert_eq!(
        made["spec"]["containers"][0]["env"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_pod_of_two_lines_is_bound_with_its_environment() {
    let nodes = vec![node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")];
    let Some(mut world) = RealControlPlane::start_all(nodes, &ALWAYS).await else {
        return;
    };
    world.install_of("");
    world.begin_scheduling().await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "first" },
        "spec": { "containers": [{
            "name": "engine",
            "image": "vllm/vllm-openai:v0.20.0",
            "args": ["--model=m", "--gpu-memory-utilization=$(GPU_MEMORY_FRACTION)"],
            "resources": { "limits": { "stowage.dev/vram": "40Gi" } },
        }] },
    });
    eventually(
        "the defaults are in force and the pod is accepted",
        async || world.apply(&pod.to_string(), &[]).is_success.then_some(()),
    )
    .await;
    let bound = wait_until_all_bound(&mut world, 1).await;
    let spec = bound[0].spec.as_ref().unwrap();
    assert_eq!(spec.runtime_class_name.as_deref(), Some("nvidia"));
    // What the kubelet gives the container: each variable from the annotation that it names.
    let value = |name: &str| {
        let variable = spec.containers[0]
            .env
            .iter()
            .flatten()
            .find(|variable| variable.name == name)
            .unwrap();
        let path = &variable
            .value_from
            .as_ref()
            .unwrap()
            .field_ref
            .as_ref()
            .unwrap()
            .field_path;
        let key = path
            .strip_prefix("metadata.annotations['")
            .unwrap()
            .strip_suffix("']")
            .unwrap();
        annotation(&bound[0], key)
            .unwrap_or_else(|| panic!("{name}: no {key}"))
            .to_owned()
    };
    let fraction: f64 = value("GPU_MEMORY_FRACTION").parse().unwrap();
    let share = 40.0 * 1024.0 / 81_559.0;
    assert!(
        (share - 0.01..=share).contains(&fraction),
        "{fraction} of {share}"
    );
    let devices = annotation(&bound[0], "stowage.dev/devices").unwrap();
    assert_eq!(
        value("NVIDIA_VISIBLE_DEVICES"),
        format!("runtime.nvidia.com/gpu={devices}")
    );
    println!(
        "--gpu-memory-utilization={fraction} on {devices}; {}",
        world.versions()
    );
}
