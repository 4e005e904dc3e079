//! Injected faults of the stand-in API server: writes that are applied late, twice or without an answer, lists in pages, watches
//! that lag, die or end, and clients that are cut off.

use super::{TEST_TIMEOUT, binding, pod, send, server};
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use serde_json::{Value, json};
use std::time::Duration;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::api_server::faults::{DelayStage, InjectedFault, Operation};

const BINDING: &str = "/api/v1/namespaces/default/pods/a/binding";
const STATUS: &str = "/api/v1/namespaces/default/pods/a/status";

fn is_bound(api: &ApiServer) -> bool {
    api.get("pods/default/a").unwrap()["spec"]["nodeName"] == "n"
}

/// A Binding of `a` that is on its way.
fn bind_later(
    client: &kube::Client,
    query: &'static str,
) -> tokio::task::JoinHandle<Result<Value, (u16, String)>> {
    let client = client.clone();
    tokio::spawn(async move {
        send(
            &client,
            "POST",
            &format!("{BINDING}{query}"),
            binding("", "n"),
        )
        .await
    })
}

#[tokio::test]
async fn a_delayed_write_is_applied_after_its_client_has_gone() {
    for stage in [DelayStage::Network, DelayStage::Queue, DelayStage::Commit] {
        let (api, client) = server().await;
        api.create("pods", pod("a")).unwrap();
        api.faults().fail_next(
            Operation::Binding,
            1,
            InjectedFault::CommitsWhenReleased(stage),
        );
        let sent = bind_later(&client, "");
        api.held_requests()
            .until_held("test", Operation::Binding, "a")
            .await;
        sent.abort();
        assert!(sent.await.unwrap_err().is_cancelled());
        assert!(!is_bound(&api), "{stage:?}: nothing is written so far");
        assert_eq!(api.held_requests().release("test", Operation::Binding), 1);
        api.until(|api| is_bound(api).then_some(())).await;
    }
}

#[tokio::test]
async fn a_write_is_committed_after_its_timeout_only_if_its_commit_had_begun() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    let faults = api.faults();
    faults.fail_next(
        Operation::Binding,
        1,
        InjectedFault::CommitsWhenReleased(DelayStage::Queue),
    );
    assert_eq!(
        bind_later(&client, "?timeout=20ms")
            .await
            .unwrap()
            .unwrap_err()
            .0,
        504
    );
    assert_eq!(
        api.held_requests().release("test", Operation::Binding),
        0,
        "it is given up"
    );
    assert!(!is_bound(&api));

    faults.fail_next(
        Operation::Binding,
        1,
        InjectedFault::CommitsLate(DelayStage::Queue, TEST_TIMEOUT),
    );
    assert_eq!(
        bind_later(&client, "?timeout=20ms")
            .await
            .unwrap()
            .unwrap_err()
            .0,
        504
    );
    assert!(!is_bound(&api));

    // What a proxy buffers has not arrived: the server's time has not begun.
    faults.fail_next(
        Operation::Binding,
        1,
        InjectedFault::CommitsWhenReleased(DelayStage::Network),
    );
    let buffered = bind_later(&client, "?timeout=20ms");
    api.held_requests()
        .until_held("test", Operation::Binding, "a")
        .await;
    faults.fail_next(
        Operation::Binding,
        1,
        InjectedFault::CommitsWhenReleased(DelayStage::Commit),
    );
    assert_eq!(
        bind_later(&client, "?timeout=20ms")
            .await
            .unwrap()
            .unwrap_err()
            .0,
        504
    );
    assert!(!buffered.is_finished() && !is_bound(&api));
    assert_eq!(api.held_requests().release("test", Operation::Binding), 2);
    api.until(|api| is_bound(api).then_some(())).await;
    let buffered = buffered.await.unwrap().map_err(|(code, _)| code);
    assert!(
        matches!(buffered, Ok(_) | Err(409)),
        "one of the two was the first: {buffered:?}"
    );

    assert_eq!(
        bind_later(&client, "?timeout=soon")
            .await
            .unwrap()
            .unwrap_err()
            .0,
        400
    );
}

#[tokio::test]
async fn a_response_can_be_lost_after_its_write_is_committed() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    api.faults()
        .fail_next(Operation::Binding, 1, InjectedFault::LosesAnswer);
    let request = http::Request::post(BINDING).header("Content-Type", "application/json");
    let request = request
        .body(binding("", "n").to_string().into_bytes())
        .unwrap();
    let lost = client.request::<Value>(request).await.unwrap_err();
    assert!(!matches!(lost, kube::Error::Api(_)), "{lost}");
    assert!(is_bound(&api));
}

#[tokio::test]
async fn a_write_can_be_duplicated_after_another_write() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    let reason = |api: &ApiServer| {
        api.get("pods/default/a").unwrap()["status"]["conditions"][0]["reason"].clone()
    };
    let write = async |reason: &str| {
        let condition =
            json!({ "type": "stowage.dev/Reserved", "status": "True", "reason": reason });
        let patch = json!([{ "op": "add", "path": "/status/conditions", "value": [condition] }]);
        send(&client, "PATCH", STATUS, patch).await.unwrap()
    };
    api.faults().fail_next(
        Operation::PodStatus,
        1,
        InjectedFault::ArrivesAgainWhenReleased,
    );
    write("First").await;
    assert_eq!(reason(&api), "First");
    write("Second").await;
    assert_eq!(reason(&api), "Second");
    api.held_requests()
        .until_held("test", Operation::PodStatus, "a")
        .await;
    assert_eq!(api.held_requests().release("test", Operation::PodStatus), 1);
    api.until(|api| (reason(api) == "First").then_some(()))
        .await;

    api.faults().fail_next(
        Operation::PodStatus,
        1,
        InjectedFault::ArrivesTwice(Duration::ZERO),
    );
    let revision = *api.subscribe().borrow();
    write("Third").await;
    assert_eq!(
        *api.subscribe().borrow(),
        revision + 1,
        "a repetition that changes nothing is no write"
    );
}

#[tokio::test]
async fn a_fault_for_one_client_does_not_affect_another() {
    let (api, one) = server().await;
    let other = api.client("other").unwrap();
    api.create("pods", pod("a")).unwrap();
    api.faults()
        .fail_next_from("other", Operation::Binding, 1, InjectedFault::Forbids);
    api.faults()
        .fail_next(Operation::Binding, 1, InjectedFault::Throttles(7));
    let Err(kube::Error::Api(throttled)) = bind_once(&one).await else {
        panic!("it is throttled")
    };
    assert_eq!(
        (
            throttled.code,
            throttled.details.as_ref().unwrap().retry_after_seconds
        ),
        (429, 7)
    );
    assert_eq!(
        send(&other, "POST", BINDING, binding("", "n"))
            .await
            .unwrap_err()
            .0,
        403
    );
    assert_eq!(api.faults().pending_count(), 0);
    send(&one, "POST", BINDING, binding("", "n")).await.unwrap();
}

async fn bind_once(client: &kube::Client) -> kube::Result<Value> {
    let request = http::Request::post(BINDING)
        .body(binding("", "n").to_string().into_bytes())
        .unwrap();
    client.request::<Value>(request).await
}

#[tokio::test]
async fn all_pages_of_a_list_show_the_resource_version_of_the_first() {
    let (api, client) = server().await;
    ["a", "b", "c", "d", "e"]
        .iter()
        .for_each(|name| drop(api.create("pods", pod(name)).unwrap()));
    let pods: Api<Pod> = Api::all(client);
    let page = ListParams::default().limit(2);
    let first = pods.list(&page).await.unwrap();
    let token = first.metadata.continue_.clone().unwrap();
    assert_eq!(
        (first.items.len(), first.metadata.remaining_item_count),
        (2, Some(3))
    );
    api.create("pods", pod("late")).unwrap();
    api.delete_now("pods/default/e").unwrap();
    api.bind("pods/default/d", &json!({ "target": { "name": "n" } }))
        .unwrap();

    let second = pods
        .list(&page.clone().continue_token(&token))
        .await
        .unwrap();
    let third = second.metadata.continue_.clone().unwrap();
    let third = pods
        .list(&page.clone().continue_token(&third))
        .await
        .unwrap();
    let rest: Vec<&Pod> = second.items.iter().chain(&third.items).collect();
    let names: Vec<&str> = rest
        .iter()
        .map(|pod| pod.metadata.name.as_deref().unwrap())
        .collect();
    assert_eq!(names, ["c", "d", "e"]);
    assert!(
        rest[1].spec.as_ref().unwrap().node_name.is_none(),
        "as it was then"
    );
    assert_eq!(
        third.metadata.resource_version,
        first.metadata.resource_version
    );
    assert_eq!(third.metadata.continue_, None);

    api.compact();
    let Err(kube::Error::Api(gone)) = pods.list(&page.clone().continue_token(&token)).await else {
        panic!("the token has expired")
    };
    assert_eq!((gone.code, gone.reason.as_str()), (410, "Expired"));
    let Err(kube::Error::Api(bad)) = pods.list(&page.continue_token("x")).await else {
        panic!("no token")
    };
    assert_eq!(bad.code, 400);
}

#[tokio::test]
async fn a_list_that_is_answered_late_shows_the_cluster_as_of_its_arrival() {
    let (api, client) = server().await;
    api.faults()
        .fail_next(Operation::ListPods, 1, InjectedFault::AnswersWhenReleased);
    let listing =
        tokio::spawn(async move { Api::<Pod>::all(client).list(&ListParams::default()).await });
    api.held_requests()
        .until_held("test", Operation::ListPods, "")
        .await;
    api.create("pods", pod("a")).unwrap();
    api.held_requests().release_all();
    assert!(listing.await.unwrap().unwrap().items.is_empty());
}

type PodEvents = futures::stream::BoxStream<'static, kube::Result<WatchEvent<Pod>>>;

async fn watch(client: &kube::Client) -> PodEvents {
    Api::<Pod>::all(client.clone())
        .watch(&WatchParams::default(), "0")
        .await
        .unwrap()
        .boxed()
}

async fn next(events: &mut PodEvents) -> Option<String> {
    match tokio::time::timeout(TEST_TIMEOUT, events.next())
        .await
        .unwrap()?
        .unwrap()
    {
        WatchEvent::Added(pod) => pod.metadata.name,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn watches_are_held_back_and_resumed_for_one_client() {
    let (api, client) = server().await;
    let (mut ours, mut others) = (
        watch(&client).await,
        watch(&api.client("other").unwrap()).await,
    );
    api.connections().pause_watches("test", "pods");
    api.create("pods", pod("a")).unwrap();
    assert_eq!(next(&mut others).await.as_deref(), Some("a"));
    assert!(ours.next().now_or_never().is_none());
    api.connections().resume_watches("test", "pods");
    assert_eq!(next(&mut ours).await.as_deref(), Some("a"));
}

#[tokio::test]
async fn a_watch_can_stall_or_end_and_the_next_one_delivers_all_changes() {
    let (api, client) = server().await;
    let (mut silent, connections) = (watch(&client).await, api.connections());
    connections.silence_watches("test", "pods");
    let mut ends = watch(&client).await;
    api.create("pods", pod("a")).unwrap();
    assert_eq!(next(&mut ends).await.as_deref(), Some("a"));
    assert!(silent.next().now_or_never().is_none());
    connections.end_watches("test", "pods");
    assert_eq!(next(&mut ends).await, None);
    assert!(
        silent.next().now_or_never().is_none(),
        "what is dead does not end"
    );
    assert_eq!(next(&mut watch(&client).await).await.as_deref(), Some("a"));
}

#[tokio::test]
async fn a_watch_and_a_list_can_be_made_to_fail_with_410() {
    let (api, client) = server().await;
    for operation in [Operation::WatchPods, Operation::ListPods] {
        api.faults().fail_next(operation, 1, InjectedFault::Expired);
    }
    let query = |text: &str| format!("/api/v1/pods{text}");
    assert_eq!(
        send(&client, "GET", &query("?watch=1"), json!({}))
            .await
            .unwrap_err()
            .0,
        410
    );
    assert_eq!(
        send(&client, "GET", &query(""), json!({}))
            .await
            .unwrap_err()
            .0,
        410
    );
    send(&client, "GET", &query(""), json!({})).await.unwrap();
}

#[tokio::test]
async fn a_request_abandoned_during_a_partition_never_arrives_but_waiting_ones_do() {
    let (api, client) = server().await;
    api.create("pods", pod("a")).unwrap();
    let mut events = watch(&client).await;
    assert_eq!(next(&mut events).await.as_deref(), Some("a"));
    api.connections().cut_off("test");
    let (given_up, patient) = (bind_later(&client, ""), {
        let client = client.clone();
        tokio::spawn(async move { send(&client, "GET", "/api/v1/pods", json!({})).await })
    });
    let other = api.client("other").unwrap();
    assert_eq!(
        send(&other, "GET", "/api/v1/pods", json!({}))
            .await
            .unwrap()["items"][0]["metadata"]["name"],
        "a"
    );
    api.create("pods", pod("b")).unwrap();
    assert!(events.next().now_or_never().is_none() && !patient.is_finished());
    given_up.abort();
    assert!(given_up.await.unwrap_err().is_cancelled());
    api.connections().reconnect("test");
    assert_eq!(next(&mut events).await.as_deref(), Some("b"));
    assert_eq!(
        patient.await.unwrap().unwrap()["items"][1]["metadata"]["name"],
        "b"
    );
    assert_eq!(api.calls().count_by("test", "create", "pods/binding"), 0);
}
