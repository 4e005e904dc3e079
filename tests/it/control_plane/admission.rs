//! The ways in which a container could get GPUs that Stowage did not assign to it, and what Stowage itself may write on a node:
//! each is tried on a real API server under the shipped admission policies.

use super::processes::eventually;
use super::world::{RealControlPlane, manifest};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_scheduling::control_loop::{PodEvent, PodEventReason};
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::policy::{NodeRules, Policy};
use stowage_server::kubernetes;
use stowage_server::kubernetes::events::{self, EventRecorder};
use stowage_server::service::ServerState;

const ONLY_STOWAGE: &str = "only Stowage writes";
const ONLY_VRAM: &str = "Stowage may write only the amount of stowage.dev/vram";

async fn installed() -> Option<RealControlPlane> {
    let world = RealControlPlane::start().await?;
    world.install();
    Some(world)
}

/// Whether the API server would take the pod, and what it says if not. Nothing is created.
async fn try_to_create(client: &Client, pod: &Value) -> Result<(), String> {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    pods.create(&dry_run, &pod)
        .await
        .map(drop)
        .map_err(|error| error.to_string())
}

fn assert_refused(outcome: Result<(), String>, reason: &str) {
    let said = outcome.expect_err(reason);
    assert!(said.contains(reason), "{said}");
}

/// A pod whose one container has these limits.
fn pod(limits: &Value) -> Value {
    json!({
        "metadata": { "name": "tried" },
        "spec": {
            "schedulerName": "stowage",
            "containers": [{ "name": "engine", "image": "engine", "resources": { "limits": limits } }],
        },
    })
}

/// Who acts in a row of `tests/fixtures/admission.yaml`.
struct Accounts {
    tenant: Client,
    kubelet: Client,
    administrator: Client,
}

/// The tenant is a service account with its token; a kubelet's user has the same rights here.
async fn accounts(world: &RealControlPlane) -> Accounts {
    let rights = "{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: tenant}, rules: [\
        {apiGroups: [''], resources: [pods, pods/binding, namespaces], verbs: [create]}, \
        {apiGroups: [''], resources: [pods/ephemeralcontainers, namespaces, namespaces/status], verbs: [patch]}]}";
    assert!(world.apply(rights, &[]).is_success);
    let user = "--user=system:node:a";
    for command in [
        &["create", "namespace", "team-a"][..],
        &["create", "namespace", "monitoring"],
        &["create", "namespace", "gpu-operator"],
        &["create", "namespace", "nvidia-gpu-operator"],
        &[
            "label",
            "namespace",
            "monitoring",
            "gpu-operator",
            "stowage.dev/all-gpus=allowed",
        ],
        &["create", "serviceaccount", "tenant", "--namespace=team-a"],
        &[
            "create",
            "clusterrolebinding",
            "tenant",
            "--clusterrole=tenant",
            "--serviceaccount=team-a:tenant",
            user,
        ],
    ] {
        let ran = world.kubectl(command);
        assert!(ran.is_success, "{}", ran.output);
    }
    let token = world.kubectl(&["create", "token", "tenant", "--namespace=team-a"]);
    assert!(token.is_success, "{}", token.output);
    let admin: Value =
        serde_json::from_str(&std::fs::read_to_string(world.admin()).unwrap()).unwrap();
    let client = async |name: &str, user: Value| {
        let mut config = admin.clone();
        config["users"][0]["user"] = user;
        let file = world.folder().join(name);
        std::fs::write(&file, config.to_string()).unwrap();
        kubernetes::connect(Some(&file), WriteTimes::default())
            .await
            .unwrap()
    };
    let (certificate, key) = world.client_certificate("system:node:a", "system:nodes");
    let certificate = [("kubelet.crt", certificate), ("kubelet.key", key)].map(|(name, text)| {
        let file = world.folder().join(name);
        std::fs::write(&file, text).unwrap();
        file
    });
    Accounts {
        tenant: client("tenant", json!({ "token": token.output.trim() })).await,
        kubelet: client(
            "kubelet",
            json!({ "client-certificate": certificate[0], "client-key": certificate[1] }),
        )
        .await,
        administrator: world.client.clone(),
    }
}

/// Sends the row's objects in turn; what the API server says to the last one.
async fn perform(accounts: &Accounts, row: &Value, name: &str) -> Result<(), String> {
    let client = match row["by"].as_str() {
        None => &accounts.tenant,
        Some("kubelet") => &accounts.kubelet,
        Some("administrator") => &accounts.administrator,
        Some(other) => panic!("{row}: by {other}?"),
    };
    let namespace = row["in"].as_str().unwrap_or("team-a");
    let of_namespace = format!("/api/v1/namespaces/{namespace}");
    let send = async |method: &str, path: &str, body: &Value| {
        let kind = if method == "PATCH" {
            "application/strategic-merge-patch+json"
        } else {
            "application/json"
        };
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", kind);
        let request = request.body(body.to_string().into_bytes()).unwrap();
        client
            .request::<Value>(request)
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    };
    if row["create"].is_object() {
        return send("POST", "/api/v1/namespaces", &row["create"]).await;
    }
    if row["patch"].is_object() {
        let part = row["part"]
            .as_str()
            .map(|part| format!("/{part}"))
            .unwrap_or_default();
        return send("PATCH", &format!("{of_namespace}{part}"), &row["patch"]).await;
    }
    let pods = format!("{of_namespace}/pods");
    let created = send("POST", &pods, &with_name(&row["pod"], name)).await;
    if row["debug"].is_object() {
        created.unwrap_or_else(|said| panic!("{row}: {said}"));
        let mut container = row["debug"].clone();
        (container["name"], container["image"]) = ("debug".into(), "debug".into());
        let patch = json!({ "spec": { "ephemeralContainers": [container] } });
        return send(
            "PATCH",
            &format!("{pods}/{name}/ephemeralcontainers"),
            &patch,
        )
        .await;
    }
    if row["bind"].is_object() {
        created.unwrap_or_else(|said| panic!("{row}: {said}"));
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name, "annotations": row["bind"] },
            "target": { "apiVersion": "v1", "kind": "Node", "name": "a" },
        });
        return send("POST", &format!("{pods}/{name}/binding"), &binding).await;
    }
    created
}

/// A pod with what every pod needs, and what the row says of it.
fn with_name(said: &Value, name: &str) -> Value {
    let mut pod = said.clone();
    (pod["apiVersion"], pod["kind"], pod["metadata"]["name"]) =
        ("v1".into(), "Pod".into(), name.into());
    if pod["spec"]["containers"].is_null() {
        pod["spec"]["containers"] = json!([{}]);
    }
    for (list, prefix) in [("containers", "c"), ("initContainers", "i")] {
        for (place, container) in pod["spec"][list]
            .as_array_mut()
            .into_iter()
            .flatten()
            .enumerate()
        {
            container["name"] = format!("{prefix}{place}").into();
            container["image"] = "image".into();
        }
    }
    pod
}

/// What is claimed of Stowage's nodes, and that no more is refused than that takes.
#[tokio::test(flavor = "multi_thread")]
async fn no_tenant_bypasses_stowage_and_other_workloads_are_admitted() {
    let Some(world) = installed().await else {
        return;
    };
    for class in ["nvidia-cdi", "nvidia-legacy", "gvisor"] {
        world.create_runtime_class(class);
    }
    let accounts = accounts(&world).await;
    let table = std::fs::read_to_string(manifest("../tests/fixtures/admission.yaml")).unwrap();
    let table: Vec<Value> = serde_saphyr::from_str(&table).unwrap();
    let rows = |part: &str| {
        table
            .iter()
            .find_map(|of| of[part].as_array())
            .unwrap()
            .clone()
    };
    let (mut attacks, mut innocents) = (rows("attacks"), rows("innocents"));
    // By the default policy, no node of Stowage's has the first, and any may have the second.
    let under_nvidia = |pattern: &String| {
        let limits = json!({ pattern.replace('*', "x"): 1 });
        let container = json!({ "resources": { "limits": limits } });
        let spec = json!({ "runtimeClassName": "nvidia", "containers": [container] });
        json!({ "row": pattern, "pod": { "spec": spec } })
    };
    let NodeRules {
        gpu_resources,
        harmless_resources,
        ..
    } = NodeRules::default();
    innocents.extend(gpu_resources.iter().map(under_nvidia));
    attacks.extend(harmless_resources.iter().map(under_nvidia).map(|mut row| {
        row["refused"] = "must set NVIDIA_VISIBLE_DEVICES".into();
        row
    }));
    // Each policy, and each label of a namespace, is in force a moment after it was written.
    let mut tries = 0;
    let mut in_force = async |row: &Value| {
        tries += 1;
        perform(&accounts, row, &format!("probe-{tries}"))
            .await
            .is_err()
            == row["refused"].is_string()
    };
    for probe in [
        json!({ "pod": { "spec": { "runtimeClassName": "nvidia" } }, "refused": "" }),
        json!({ "pod": { "metadata": { "annotations": { "stowage.dev/devices": "GPU-1" } } }, "refused": "" }),
        json!({ "pod": { "spec": { "runtimeClassName": "nvidia" } }, "in": "monitoring" }),
        json!({ "pod": { "spec": { "runtimeClassName": "nvidia" } }, "in": "gpu-operator" }),
    ] {
        eventually(&probe.to_string(), async || {
            in_force(&probe).await.then_some(())
        })
        .await;
    }
    let mut wrong = Vec::new();
    for (n, row) in attacks.iter().chain(&innocents).enumerate() {
        let said = perform(&accounts, row, &format!("row-{n}")).await;
        let is_right = match row["refused"].as_str() {
            Some(reason) => said.as_ref().is_err_and(|said| said.contains(reason)),
            None => said.is_ok(),
        };
        if !is_right {
            wrong.push(format!("{}: {said:?}", row["row"]));
        }
    }
    println!(
        "{} attacks, {} innocents; {}",
        attacks.len(),
        innocents.len(),
        world.versions()
    );
    assert!(
        wrong.is_empty(),
        "{} rows:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(
        attacks.iter().all(|row| row["refused"].is_string()),
        "each says why"
    );
    assert!(innocents.iter().all(|row| row["refused"].is_null()));
    assert!(attacks.len() > 50 && innocents.len() > 30);
}

/// What admission cannot see, an agent does: but a pod that an administrator lets see all GPUs is no news.
#[tokio::test(flavor = "multi_thread")]
async fn pods_of_exempt_namespaces_get_no_event_about_gpus_that_stowage_did_not_give_them() {
    let Some(world) = installed().await else {
        return;
    };
    assert!(
        world
            .kubectl(&["create", "namespace", "monitoring"])
            .is_success
    );
    assert!(
        world
            .kubectl(&[
                "label",
                "namespace",
                "monitoring",
                "stowage.dev/all-gpus=allowed"
            ])
            .is_success
    );
    let stowage = kubernetes::connect(Some(&world.service_account()), WriteTimes::default())
        .await
        .unwrap();
    let namespaces: Api<Namespace> = Api::all(stowage.clone());
    eventually("Stowage's rights count", async || {
        namespaces.list_metadata(&Default::default()).await.ok()
    })
    .await;
    let service = ServerState::new(Policy::default());
    let (recorder, receiver) = EventRecorder::new(service.clone());
    tokio::spawn(events::publish(
        stowage,
        service.clone(),
        "here".into(),
        receiver,
    ));
    for namespace in ["kube-system", "monitoring", "default"] {
        let mut sees = pod(&json!({}));
        sees["metadata"]["name"] = json!("sees");
        let pods: Api<Pod> = Api::namespaced(world.client.clone(), namespace);
        let sees = serde_json::from_value(sees).unwrap();
        let uid = pods
            .create(&PostParams::default(), &sees)
            .await
            .unwrap()
            .metadata
            .uid
            .unwrap();
        for (uid, name) in [
            (&*uid, "sees"),
            (&format!("of-{namespace}"), "sees"),
            (&format!("not-{uid}"), "none"),
        ] {
            recorder.record_event(PodEvent {
                key: PodKey::parse(namespace, name).unwrap(),
                uid: PodUid::parse(uid).unwrap(),
                kind: PodEventReason::Ungranted,
                text: "it does".into(),
            });
        }
    }
    let counted = |outcome| {
        service
            .metrics
            .events
            .with_label_values(&["StowageUngranted", outcome])
            .get()
    };
    let outcomes = ["exempt", "published", "failed", "unconfirmed"];
    let all = || outcomes.map(counted).iter().sum::<u64>() == 9;
    eventually("the Events are written", async || all().then_some(())).await;
    assert_eq!(outcomes.map(counted), [2, 1, 0, 6]);
    let said = world
        .kubectl(&["get", "events", "--all-namespaces", "--output=name"])
        .output;
    assert_eq!(
        said.lines().filter(|line| line.contains("sees")).count(),
        1,
        "{said}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_amount_of_vram_without_a_unit_is_not_admitted() {
    let Some(world) = installed().await else {
        return;
    };
    let try_amount = async |amount: &str| {
        let pod = pod(&json!({ "stowage.dev/vram": amount }));
        try_to_create(&world.client, &pod).await
    };
    eventually("the policy is in force", async || {
        try_amount("40").await.err()
    })
    .await;
    for little in ["1", "40", "40k", "255Mi"] {
        assert_refused(try_amount(little).await, "write a unit, such as 40Gi");
    }
    for enough in ["256Mi", "40Gi", "42949672960"] {
        try_amount(enough)
            .await
            .unwrap_or_else(|said| panic!("{enough}: {said}"));
    }
}

/// A kubelet whose writes are refused never shows a pod running, nor ended: it could not be evicted.
#[tokio::test(flavor = "multi_thread")]
async fn an_admitted_pod_can_be_updated_by_its_kubelet_however_many_annotations_it_has() {
    let Some(world) = installed().await else {
        return;
    };
    let in_force = {
        let mut pod = pod(&json!({}));
        pod["metadata"]["annotations"] = json!({ "stowage.dev/devices": "GPU-1" });
        pod
    };
    eventually("the policy is in force", async || {
        let outcome = try_to_create(&world.client, &in_force).await;
        outcome
            .is_err_and(|said| said.contains(ONLY_STOWAGE))
            .then_some(())
    })
    .await;
    let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
    let params = PatchParams::default();
    // Few long keys cost as much as many short ones.
    for (name, keys, width) in [
        ("few", 10, 5),
        ("short", 20_000, 5),
        ("shortest", 35_000, 5),
        ("long", 800, 300),
    ] {
        let key = |n: usize| match width {
            ..10 => format!("{n:0width$x}"),
            _ => format!("{}/{n:060}", "a.".repeat(120).trim_end_matches('.')),
        };
        let annotations: serde_json::Map<String, Value> =
            (0..keys).map(|n| (key(n), json!(""))).collect();
        let mut tried = pod(&json!({}));
        tried["metadata"] = json!({ "name": name, "annotations": annotations });
        if let Err(refused) = pods
            .create(
                &PostParams::default(),
                &serde_json::from_value(tried).unwrap(),
            )
            .await
        {
            assert_ne!(name, "few", "{refused}");
            println!("{name}: not admitted");
            continue;
        }
        let running = json!({ "status": { "phase": "Running" } });
        let written = pods
            .patch_status(name, &params, &Patch::Strategic(running))
            .await;
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
async fn a_too_long_annotation_key_is_accepted_in_a_binding_and_breaks_later_writes() {
    let Some(world) = installed().await else {
        return;
    };
    world
        .add_nodes(&[super::node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")])
        .await;
    let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
    for (container, is_writable) in [("c".repeat(53), true), ("c".repeat(54), false)] {
        let name = format!("of-{}", container.len());
        let mut pod = pod(&json!({}));
        pod["metadata"]["name"] = json!(name);
        pod["spec"]["schedulerName"] = json!("nobody");
        pods.create(
            &PostParams::default(),
            &serde_json::from_value(pod).unwrap(),
        )
        .await
        .unwrap();
        let annotations =
            json!({ format!("nvidia.cdi.k8s.io/container.{container}"): "nvidia.com/gpu=GPU-1" });
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name, "annotations": annotations },
            "target": { "apiVersion": "v1", "kind": "Node", "name": "a" },
        });
        let stowage = kubernetes::connect(Some(&world.service_account()), WriteTimes::default())
            .await
            .unwrap();
        let bound: Api<Pod> = Api::default_namespaced(stowage);
        bound
            .create_subresource::<_, Value>("binding", &name, &PostParams::default(), &binding)
            .await
            .unwrap();
        let running = Patch::Strategic(json!({ "status": { "phase": "Running" } }));
        let written = pods
            .patch_status(&name, &PatchParams::default(), &running)
            .await;
        assert_eq!(written.is_ok(), is_writable, "{name}: {written:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stowage_may_write_only_its_own_resources_in_node_status() {
    let Some(world) = installed().await else {
        return;
    };
    world
        .add_nodes(&[super::node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")])
        .await;
    let stowage = kubernetes::connect(Some(&world.service_account()), WriteTimes::default())
        .await
        .unwrap();
    let write = async |client: &Client, status: Value| {
        let nodes: Api<Node> = Api::all(client.clone());
        let patch = Patch::Strategic(status);
        nodes
            .patch_status("a", &PatchParams::default(), &patch)
            .await
            .map_err(|error| error.to_string())
    };
    let taint = json!({ "status": { "conditions": [{ "type": "Ready", "status": "False" }] } });
    eventually("the policy is in force", async || {
        // A write that changes nothing is allowed, and one before the policy is in force may have changed it.
        let mut again = taint.clone();
        again["status"]["conditions"][0]["message"] = jiff::Timestamp::now().to_string().into();
        write(&stowage, again)
            .await
            .is_err_and(|said| said.contains(ONLY_VRAM))
            .then_some(())
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
        assert!(
            outcome.as_ref().is_err_and(|said| said.contains(ONLY_VRAM)),
            "{status}: {outcome:?}"
        );
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
            (
                &status["capacity"]["stowage.dev/vram"],
                &status["capacity"]["cpu"]
            ),
            (&json!(amount), &json!("128"))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agents_account_may_only_list_pods_and_read_its_node() {
    let Some(world) = installed().await else {
        return;
    };
    let can = |what: &str| {
        let account = "--as=system:serviceaccount:kube-system:stowage-agent";
        let question: Vec<&str> = ["auth", "can-i", account]
            .into_iter()
            .chain(what.split(' '))
            .collect();
        world.kubectl(&question).output.lines().next() == Some("yes")
    };
    eventually("its rights count", async || {
        can("list pods --all-namespaces").then_some(())
    })
    .await;
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
