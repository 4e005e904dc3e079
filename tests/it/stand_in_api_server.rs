//! The stand-in API server, used by kube's own client and watcher, and by hand where kube hides the answer.

mod faults;

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::{self, Event};
use serde_json::{Value, json};
use std::time::Duration;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::api_server::faults::{InjectedFault, Operation};

/// Longer than anything here takes on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

async fn server() -> (ApiServer, kube::Client) {
    let api = ApiServer::start().await.unwrap();
    let client = api.client("test").unwrap();
    (api, client)
}

fn pod(name: &str) -> Value {
    let container =
        json!({"name": "c", "image": "i", "resources": {"limits": {"stowage.dev/vram": "1Gi"}}});
    json!({"metadata": {"name": name}, "spec": {"containers": [container]}})
}

fn binding(uid: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Binding",
        "metadata": {"name": "a", "uid": uid, "annotations": {"k": "v"}, "labels": {"l": "w"}},
        "target": {"kind": "Node", "name": node},
    })
}

/// A raw request, for what kube's typed calls do not show.
async fn send(
    client: &kube::Client,
    method: &str,
    path: &str,
    body: Value,
) -> Result<Value, (u16, String)> {
    let content_type = if method == "PATCH" {
        "application/json-patch+json"
    } else {
        "application/json"
    };
    let request = http::Request::builder()
        .method(method)
        .uri(path)
        .header("Content-Type", content_type);
    match client
        .request(request.body(body.to_string().into_bytes()).unwrap())
        .await
    {
        Ok(answer) => Ok(answer),
        Err(kube::Error::Api(status)) => Err((status.code, status.message.clone())),
        Err(other) => panic!("{other}"),
    }
}

#[tokio::test]
async fn kube_creates_reads_patches_and_deletes() {
    let (api, client) = server().await;
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let created = pods
        .create(
            &PostParams::default(),
            &serde_json::from_value(pod("a")).unwrap(),
        )
        .await
        .unwrap();
    let requests = created.spec.unwrap().containers[0]
        .resources
        .clone()
        .unwrap()
        .requests
        .unwrap();
    assert_eq!(requests["stowage.dev/vram"].0, "1Gi");
    let twice = pods
        .create(
            &PostParams::default(),
            &serde_json::from_value(pod("a")).unwrap(),
        )
        .await;
    assert!(matches!(twice, Err(kube::Error::Api(status)) if status.is_already_exists()));

    let patch = json!({"metadata": {"annotations": {"x": "y"}}, "status": {"phase": "Running"}});
    let patched = pods
        .patch("a", &PatchParams::default(), &Patch::Merge(patch))
        .await
        .unwrap();
    assert_eq!(patched.metadata.annotations.unwrap()["x"], "y");
    assert_eq!(
        patched.status.unwrap().phase.as_deref(),
        Some("Pending"),
        "the status is its subresource's alone"
    );

    let list = pods.list(&ListParams::default()).await.unwrap();
    assert_eq!(
        (list.items.len(), list.metadata.resource_version.as_deref()),
        (1, Some("2"))
    );
    pods.delete("a", &DeleteParams::default()).await.unwrap();
    assert!(pods.get_opt("a").await.unwrap().is_none());
    assert_eq!(api.calls().count_by("test", "create", "pods"), 2);
    assert_eq!(api.calls().reads_by("test"), 2);
}

#[tokio::test]
async fn status_conditions_merge_by_type_and_a_repeated_write_changes_nothing() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    let pods: Api<Pod> = Api::default_namespaced(client);
    let condition =
        |kind: &str| json!({"status": {"conditions": [{"type": kind, "status": "True"}]}});
    for kind in ["stowage.dev/Reserved", "Ready", "Ready"] {
        pods.patch_status(
            "a",
            &PatchParams::default(),
            &Patch::Strategic(condition(kind)),
        )
        .await
        .unwrap();
    }
    let stored = api.get("pods/default/a").unwrap();
    assert_eq!(stored["status"]["conditions"].as_array().unwrap().len(), 2);
    assert_eq!(stored["metadata"]["resourceVersion"], "3");
}

#[tokio::test]
async fn a_binding_writes_node_annotations_labels_and_condition_at_once_and_only_once() {
    let (api, client) = server().await;
    let created = api.create("pods", pod("a")).unwrap();
    let uid = created["metadata"]["uid"].as_str().unwrap();
    let path = "/api/v1/namespaces/default/pods/a/binding";
    let (code, text) = send(&client, "POST", path, binding("other", "n"))
        .await
        .unwrap_err();
    assert_eq!(
        (code, text.contains("Precondition failed: UID")),
        (409, true)
    );
    send(&client, "POST", path, binding(uid, "n"))
        .await
        .unwrap();
    let stored = api.get("pods/default/a").unwrap();
    assert_eq!(stored["spec"]["nodeName"], "n");
    assert_eq!(
        (
            &stored["metadata"]["annotations"]["k"],
            &stored["metadata"]["labels"]["l"]
        ),
        (&json!("v"), &json!("w"))
    );
    assert_eq!(stored["status"]["conditions"][0]["type"], "PodScheduled");
    assert_eq!(stored["metadata"]["resourceVersion"], "2", "one write");
    let (code, text) = send(&client, "POST", path, binding(uid, "n"))
        .await
        .unwrap_err();
    assert_eq!(code, 409);
    assert!(
        text.ends_with("pod a is already assigned to node \"n\""),
        "{text}"
    );
    api.delete_now("pods/default/a").unwrap();
    assert_eq!(
        send(&client, "POST", path, binding(uid, "n"))
            .await
            .unwrap_err()
            .0,
        404
    );
}

#[tokio::test]
async fn a_scheduling_gate_can_be_removed_but_not_added() {
    let (api, client) = server().await;
    let mut gated = pod("a");
    gated["spec"]["schedulingGates"] = json!([{"name": "stowage.dev/plan"}]);
    let created = api.create("pods", gated).unwrap();
    let path = "/api/v1/namespaces/default/pods/a";
    let early = send(
        &client,
        "POST",
        &format!("{path}/binding"),
        binding("", "n"),
    )
    .await;
    assert_eq!(early.unwrap_err().0, 409);
    let uid = &created["metadata"]["uid"];
    let lift = json!([
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "remove", "path": "/spec/schedulingGates/0"},
    ]);
    let lifted = send(&client, "PATCH", path, lift).await.unwrap();
    assert_eq!(lifted["spec"]["schedulingGates"], json!([]));
    let add = json!([{"op": "add", "path": "/spec/schedulingGates/-", "value": {"name": "late"}}]);
    assert_eq!(send(&client, "PATCH", path, add).await.unwrap_err().0, 422);
}

#[tokio::test]
async fn a_gated_pod_has_the_gated_condition_and_no_node_and_a_merge_patch_removes_one_of_its_gates()
 {
    let (api, client) = server().await;
    let mut gated = pod("a");
    gated["spec"]["schedulingGates"] = json!([{"name": "quota"}, {"name": "stowage.dev/plan"}]);
    let mut placed = gated.clone();
    placed["spec"]["nodeName"] = json!("n");
    assert_eq!(api.create("pods", placed).unwrap_err().code, 422);
    let created = api.create("pods", gated).unwrap();
    let condition = &created["status"]["conditions"][0];
    assert_eq!(
        (&condition["type"], &condition["reason"]),
        (&json!("PodScheduled"), &json!("SchedulingGated"))
    );
    api.patch_status(
        "pods/default/a",
        &json!({"status": {"nominatedNodeName": "n"}}),
    )
    .unwrap();
    assert_eq!(
        api.get("pods/default/a").unwrap()["status"]["nominatedNodeName"],
        "n",
        "a gated pod may have one"
    );

    let pods: Api<Pod> = Api::default_namespaced(client);
    let lift = |uid: &Value| {
        let gates = json!([{"$patch": "delete", "name": "stowage.dev/plan"}]);
        Patch::Strategic(json!({"metadata": {"uid": uid}, "spec": {"schedulingGates": gates}}))
    };
    let foreign_pod = pods
        .patch("a", &PatchParams::default(), &lift(&json!("other")))
        .await;
    let Err(kube::Error::Api(foreign_pod)) = foreign_pod else {
        panic!("{foreign_pod:?}")
    };
    assert_eq!(
        (
            foreign_pod.code,
            foreign_pod.details.unwrap().causes[0].field.as_str()
        ),
        (422, "metadata.uid")
    );
    let lifted = pods
        .patch(
            "a",
            &PatchParams::default(),
            &lift(&created["metadata"]["uid"]),
        )
        .await
        .unwrap();
    let left: Vec<String> = lifted
        .spec
        .unwrap()
        .scheduling_gates
        .unwrap()
        .into_iter()
        .map(|gate| gate.name)
        .collect();
    assert_eq!(left, ["quota"]);
}

#[tokio::test]
async fn an_eviction_marks_a_bound_pod_and_waits_for_its_kubelet() {
    let (api, client) = server().await;
    let created = api.create("pods", pod("a")).unwrap();
    api.bind("pods/default/a", &binding("", "n")).unwrap();
    let path = "/api/v1/namespaces/default/pods/a/eviction";
    let eviction = |uid: &Value| json!({"deleteOptions": {"preconditions": {"uid": uid}}});
    assert_eq!(
        send(&client, "POST", path, eviction(&json!("other")))
            .await
            .unwrap_err()
            .0,
        409
    );
    send(&client, "POST", path, eviction(&created["metadata"]["uid"]))
        .await
        .unwrap();
    let stored = api.get("pods/default/a").unwrap();
    assert!(stored["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(stored["metadata"]["deletionGracePeriodSeconds"], 30);
    assert_eq!(
        stored["status"]["conditions"][1]["reason"],
        "EvictionByEvictionAPI"
    );
    for (asked, given) in [
        (json!(40), 30),
        (Value::Null, 30),
        (json!(20), 20),
        (json!(25), 20),
    ] {
        let shorter = json!({"deleteOptions": {"gracePeriodSeconds": asked}});
        send(&client, "POST", path, shorter).await.unwrap();
        assert_eq!(
            api.get("pods/default/a").unwrap()["metadata"]["deletionGracePeriodSeconds"],
            given
        );
    }
}

#[tokio::test]
async fn a_pod_with_a_finalizer_stays_until_it_is_removed_even_if_deletion_is_forced() {
    let (api, _) = server().await;
    let mut kept = pod("a");
    kept["metadata"]["finalizers"] = json!(["example.com/keep"]);
    api.create("pods", kept).unwrap();
    api.bind("pods/default/a", &binding("", "n")).unwrap();
    api.delete("pods/default/a").unwrap();
    assert_eq!(
        api.get("pods/default/a").unwrap()["metadata"]["deletionGracePeriodSeconds"],
        30
    );
    api.delete_now("pods/default/a").unwrap();
    assert_eq!(
        api.get("pods/default/a").unwrap()["metadata"]["deletionGracePeriodSeconds"],
        0
    );
    api.patch_status("pods/default/a", &json!({"status": {"phase": "Failed"}}))
        .unwrap();
    assert!(
        api.get("pods/default/a").is_some(),
        "another change does not let it go"
    );
    api.patch("pods/default/a", &json!({"metadata": {"finalizers": null}}))
        .unwrap();
    assert!(api.get("pods/default/a").is_none());
}

/// A pod that runs, of an app.
fn running(api: &ApiServer, name: &str, app: &str) {
    let mut labelled = pod(name);
    labelled["metadata"]["labels"] = json!({"app": app});
    api.create("pods", labelled).unwrap();
    let mut binding = binding("", "n");
    binding["metadata"]["name"] = json!(name);
    api.bind(&format!("pods/default/{name}"), &binding).unwrap();
    let status = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    api.patch_status(&format!("pods/default/{name}"), &json!({"status": status}))
        .unwrap();
}

fn budget(name: &str, allowed: u64) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "served"}}},
        "status": {"disruptionsAllowed": allowed, "desiredHealthy": 1, "currentHealthy": 1 + allowed},
    })
}

#[tokio::test]
async fn a_disruption_budget_admits_as_many_evictions_as_it_allows() {
    let (api, client) = server().await;
    api.create("poddisruptionbudgets", budget("pdb", 1))
        .unwrap();
    for name in ["a", "b"] {
        running(&api, name, "served");
    }
    running(&api, "c", "other");
    api.create("pods", {
        let mut waiting = pod("waiting");
        waiting["metadata"]["labels"] = json!({"app": "served"});
        waiting
    })
    .unwrap();
    let evict = async |name: &str| {
        let path = format!("/api/v1/namespaces/default/pods/{name}/eviction");
        let request = http::Request::post(&path).header("Content-Type", "application/json");
        client
            .request::<Value>(request.body(b"{}".to_vec()).unwrap())
            .await
    };
    evict("a").await.unwrap();
    let status = &api.get("poddisruptionbudgets/default/pdb").unwrap()["status"];
    assert_eq!(
        (
            &status["disruptionsAllowed"],
            status["disruptedPods"]["a"].is_string()
        ),
        (&json!(0), true)
    );
    let Err(kube::Error::Api(refused)) = evict("b").await else {
        panic!("the budget is spent")
    };
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (429, "TooManyRequests")
    );
    let cause = &refused.details.as_ref().unwrap().causes[0];
    assert_eq!(cause.reason, "DisruptionBudget");
    assert!(
        cause
            .message
            .contains("needs 1 healthy pods and has 2 currently"),
        "{}",
        cause.message
    );
    assert!(api.get("pods/default/b").unwrap()["metadata"]["deletionTimestamp"].is_null());

    evict("a")
        .await
        .expect("who leaves already costs no budget");
    evict("c").await.expect("another app");
    evict("waiting")
        .await
        .expect("who does not run is nobody's loss");
    assert!(api.get("pods/default/waiting").is_none());
    api.patch_status(
        "poddisruptionbudgets/default/pdb",
        &json!({"status": {"disruptionsAllowed": 1}}),
    )
    .unwrap();
    evict("b").await.expect("the budget has one again");

    running(&api, "d", "served");
    let sick = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    api.patch_status("pods/default/d", &sick).unwrap();
    evict("d")
        .await
        .expect("it is not ready, and enough others are");
}

#[tokio::test]
async fn a_pod_of_two_budgets_cannot_be_evicted_and_a_budget_with_stale_status_answers_retry_after()
{
    let (api, client) = server().await;
    running(&api, "a", "served");
    let mut uncounted = budget("pdb", 5);
    uncounted["metadata"]["generation"] = json!(2);
    uncounted["status"]["observedGeneration"] = json!(1);
    api.create("poddisruptionbudgets", uncounted).unwrap();
    let path = "/api/v1/namespaces/default/pods/a/eviction";
    let request = http::Request::post(path).body(b"{}".to_vec()).unwrap();
    let Err(kube::Error::Api(refused)) = client.request::<Value>(request).await else {
        panic!("not counted")
    };
    assert_eq!(
        (
            refused.code,
            refused.details.as_ref().unwrap().retry_after_seconds
        ),
        (429, 10)
    );
    api.create("poddisruptionbudgets", budget("second", 5))
        .unwrap();
    assert_eq!(
        send(&client, "POST", path, json!({})).await.unwrap_err().0,
        500
    );
}

#[tokio::test]
async fn a_watch_sees_what_enters_and_leaves_its_selector_and_survives_a_compaction() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    let pods: Api<Pod> = Api::all(client);
    let config = watcher::Config::default().fields("spec.nodeName=");
    let mut events = watcher::watcher(pods, config).boxed();
    let mut next = async || loop {
        let event = tokio::time::timeout(TEST_TIMEOUT, events.next())
            .await
            .unwrap()
            .unwrap();
        match event {
            Ok(Event::InitApply(pod)) => return format!("listed {}", pod.metadata.name.unwrap()),
            Ok(Event::Apply(pod)) => return format!("applied {}", pod.metadata.name.unwrap()),
            Ok(Event::Delete(pod)) => return format!("deleted {}", pod.metadata.name.unwrap()),
            Ok(Event::InitDone) => return "synced".to_owned(),
            Ok(Event::Init) | Err(_) => {}
        }
    };
    assert_eq!(next().await, "listed a");
    assert_eq!(next().await, "synced");
    api.create("pods", pod("b")).unwrap();
    assert_eq!(next().await, "applied b");
    api.bind("pods/default/a", &binding("", "n")).unwrap();
    assert_eq!(next().await, "deleted a", "it left the selector");
    api.create("pods", pod("c")).unwrap();
    api.compact();
    let mut rest = vec![next().await];
    while rest
        .last()
        .is_some_and(|event| event != "synced" && event != "applied c")
    {
        rest.push(next().await);
    }
    assert!(rest.iter().any(|event| event.ends_with(" c")), "{rest:?}");
}

#[tokio::test]
async fn a_watch_from_a_forgotten_version_gets_410() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    api.create("pods", pod("b")).unwrap();
    api.compact();
    let request = http::Request::get("/api/v1/pods?watch=true&resourceVersion=1")
        .body(Vec::new())
        .unwrap();
    let text = client.request_text(request).await.unwrap();
    let event: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&event["type"], &event["object"]["code"]),
        (&json!("ERROR"), &json!(410))
    );
}

#[tokio::test]
async fn a_streamed_list_ends_with_its_bookmark() {
    let (api, client) = server().await;
    api.create("nodes", json!({"metadata": {"name": "n"}}))
        .unwrap();
    let config = watcher::Config::default().streaming_lists();
    let mut events = watcher::watcher(Api::<Node>::all(client), config).boxed();
    let mut seen = Vec::new();
    while !matches!(seen.last(), Some(Event::InitDone)) {
        let event = tokio::time::timeout(TEST_TIMEOUT, events.next())
            .await
            .unwrap()
            .unwrap();
        seen.push(event.unwrap());
    }
    assert_eq!(seen.len(), 3, "{seen:?}");
}

#[tokio::test]
async fn injected_faults_occur_in_order_and_then_stop() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    let path = "/api/v1/namespaces/default/pods/a/binding";
    api.faults()
        .fail_next(Operation::Binding, 1, InjectedFault::Fails);
    api.faults()
        .fail_next(Operation::Binding, 1, InjectedFault::Conflicts);
    api.faults()
        .fail_next(Operation::Binding, 1, InjectedFault::Hangs);
    api.faults().fail_next(
        Operation::Binding,
        1,
        InjectedFault::AnswersLate(Duration::from_secs(60)),
    );
    assert_eq!(
        send(&client, "POST", path, binding("", "n"))
            .await
            .unwrap_err()
            .0,
        500
    );
    assert_eq!(
        send(&client, "POST", path, binding("", "n"))
            .await
            .unwrap_err()
            .0,
        409
    );
    let asked = api.calls().count("create", "pods/binding");
    let hung = tokio::spawn({
        let client = client.clone();
        async move { send(&client, "POST", path, binding("", "n")).await }
    });
    while api.calls().count("create", "pods/binding") == asked {
        tokio::task::yield_now().await;
    }
    hung.abort();
    assert!(hung.await.unwrap_err().is_cancelled(), "it was answered");
    assert!(
        api.get("pods/default/a").unwrap()["spec"]["nodeName"].is_null(),
        "nothing was written so far"
    );
    let late = tokio::spawn({
        let client = client.clone();
        async move { send(&client, "POST", path, binding("", "n")).await }
    });
    api.until(|api| {
        api.get("pods/default/a")
            .filter(|pod| pod["spec"]["nodeName"] == "n")
    })
    .await;
    assert!(!late.is_finished(), "written, but not answered");
    let text = send(&client, "POST", path, binding("", "n"))
        .await
        .unwrap_err()
        .1;
    assert!(text.contains("already assigned"), "{text}");
}

#[tokio::test]
async fn malformed_input_is_refused_and_the_server_keeps_running() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    let pods = "/api/v1/namespaces/default/pods";
    for (method, path, body, code) in [
        ("POST", pods.to_owned(), json!([]), 400),
        ("POST", pods.to_owned(), json!({"metadata": 3}), 400),
        (
            "POST",
            format!("{pods}/a/binding"),
            json!({"target": "n"}),
            400,
        ),
        (
            "POST",
            format!("{pods}/gone/eviction"),
            json!({"deleteOptions": 1}),
            404,
        ),
        ("PATCH", format!("{pods}/a"), json!({}), 400),
        (
            "PATCH",
            format!("{pods}/a"),
            json!([{"op": "replace", "path": "", "value": 1}]),
            400,
        ),
        ("PATCH", format!("{pods}/a/scale"), json!([]), 404),
        ("GET", "/api/v1/unknown".to_owned(), json!({}), 404),
        ("DELETE", pods.to_owned(), json!({}), 405),
    ] {
        let answer = send(&client, method, &path, body).await;
        assert_eq!(answer.unwrap_err().0, code, "{method} {path}");
    }
    assert!(api.get("pods/default/a").is_some());
}

#[tokio::test]
async fn dropping_the_server_ends_its_watches_and_hanging_requests() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    api.faults()
        .fail_next(Operation::Binding, 1, InjectedFault::Hangs);
    let request = http::Request::get("/api/v1/pods?watch=true&resourceVersion=1")
        .body(Vec::new())
        .unwrap();
    let watching = tokio::spawn({
        let client = client.clone();
        async move { client.request_text(request).await }
    });
    let hanging = tokio::spawn(async move {
        send(
            &client,
            "POST",
            "/api/v1/namespaces/default/pods/a/binding",
            binding("", "n"),
        )
        .await
    });
    let arrived =
        || api.calls().count("watch", "pods") + api.calls().count("create", "pods/binding") == 2;
    while !arrived() {
        tokio::task::yield_now().await;
    }
    drop(api);
    assert!(
        tokio::time::timeout(TEST_TIMEOUT, watching)
            .await
            .unwrap()
            .unwrap()
            .is_ok()
    );
    assert_eq!(
        tokio::time::timeout(TEST_TIMEOUT, hanging)
            .await
            .unwrap()
            .unwrap()
            .unwrap_err()
            .0,
        500
    );
}
