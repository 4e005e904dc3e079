//! The stand-in scheduler at work: wire format, waking, nomination and preemption.

use crate::recorded;
use crate::stand_in_extender::{
    RecordedRequest, ScriptedAnswer, ScriptedExtender, accept_all, filter_answer, requested_nodes,
};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::kubelet;
use stowage_lab::demo::kubelet::Kubelet;
use stowage_lab::demo::scheduler::StandInScheduler;
use stowage_lab::demo::scheduler::config::SchedulerConfig;
use stowage_lab::demo::scheduler::observations::Verb;

struct SchedulerCluster {
    api: Arc<ApiServer>,
    extender: ScriptedExtender,
}

impl SchedulerCluster {
    /// Nodes `n0`, `n1`, … of 80Gi.
    async fn new(
        nodes: usize,
        script: impl Fn(&ApiServer, &RecordedRequest) -> ScriptedAnswer + Send + Sync + 'static,
    ) -> Self {
        let api = Arc::new(ApiServer::start().await.unwrap());
        for number in 0..nodes {
            let capacity =
                json!({"cpu": "64", "memory": "512Gi", "pods": "110", "stowage.dev/vram": "80Gi"});
            let node = json!({"metadata": {"name": format!("n{number}")}, "status": {"capacity": capacity}});
            api.create("nodes", node).unwrap();
        }
        let scripted = api.clone();
        let extender = ScriptedExtender::start(move |request| script(&scripted, request)).await;
        Self { api, extender }
    }

    fn config(&self) -> SchedulerConfig {
        let mut config = SchedulerConfig::as_shipped(&self.extender.url_prefix());
        config.initial_back_off = Duration::from_millis(5);
        // No test here is about time-outs, and a busy machine must not cause one.
        config.extender.timeout = Duration::from_secs(30);
        config
    }

    fn schedule(&self) -> StandInScheduler {
        StandInScheduler::start(self.api.client("scheduler").unwrap(), self.config())
    }

    fn create(&self, name: &str, vram: &str, priority: i64) {
        let container = json!({"name": "c", "resources": {"limits": {"stowage.dev/vram": vram}}});
        let spec =
            json!({"schedulerName": "stowage", "priority": priority, "containers": [container]});
        self.api
            .create("pods", json!({"metadata": {"name": name}, "spec": spec}))
            .unwrap();
    }

    fn node_of(&self, pod: &str) -> Option<String> {
        Some(
            self.api.get(&format!("pods/default/{pod}"))?["spec"]["nodeName"]
                .as_str()?
                .to_owned(),
        )
    }

    async fn wait_until_bound(&self, pod: &str) -> String {
        with_timeout(self.api.until(|_| self.node_of(pod))).await
    }

    /// Until the scheduler has seen all that was written and has nothing to do.
    async fn wait_until_idle(&self, scheduler: &StandInScheduler) {
        let newest = |kind: &str| {
            let version = |object: &Arc<Value>| {
                object["metadata"]["resourceVersion"]
                    .as_str()?
                    .parse::<u64>()
                    .ok()
            };
            self.api
                .list(kind)
                .iter()
                .filter_map(version)
                .max()
                .unwrap_or_default()
        };
        let settled = scheduler.observations().until(|seen| {
            let progress = seen.progress();
            let news = progress.pods_version >= newest("pods")
                && progress.nodes_version >= newest("nodes");
            (progress.is_idle && news).then_some(())
        });
        with_timeout(settled).await;
    }
}

async fn with_timeout<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("in time")
}

fn refuse_all(api: &ApiServer, request: &RecordedRequest) -> ScriptedAnswer {
    if request.verb != "filter" {
        return accept_all(api, request);
    }
    let reasons: Value = requested_nodes(request)
        .into_iter()
        .map(|name| (name, json!("no single GPU has room")))
        .collect();
    ScriptedAnswer::ok(json!({"NodeNames": [], "FailedAndUnresolvableNodes": reasons}))
}

#[tokio::test]
async fn the_stand_ins_requests_equal_the_recorded_ones() {
    let recorded = recorded::json("filter-cached.json");
    let cluster = SchedulerCluster::new(2, accept_all).await;
    let mut pod = recorded["request"]["Pod"].clone();
    pod["spec"]["schedulerName"] = json!("stowage");
    let mut config = cluster.config();
    config.extender.managed_resource = "example.com/vram".into();
    config.extender.ignored_by_scheduler = true;
    for node in ["n0", "n1"] {
        let room = json!({"status": {"allocatable": {"nvidia.com/gpu": "4"}}});
        cluster
            .api
            .patch_status(&format!("nodes/{node}"), &room)
            .unwrap();
    }
    cluster.api.create("pods", pod.clone()).unwrap();
    let _scheduler = StandInScheduler::start(cluster.api.client("scheduler").unwrap(), config);
    cluster.wait_until_bound("llm-0").await;

    let mut request = cluster.extender.requests("filter").remove(0);
    for field in ["uid", "resourceVersion", "creationTimestamp"] {
        assert!(request.body["Pod"]["metadata"][field].is_string());
        request.body["Pod"]["metadata"][field] = pod["metadata"][field].clone();
    }
    assert_eq!(request.body["Pod"], pod);
    assert_eq!(keys(&request.body), keys(&recorded["request"]));
    assert_eq!(request.body["Nodes"], Value::Null);
    for (name, value) in [
        ("User-Agent", "Go-http-client/1.1"),
        ("Content-Type", "application/json"),
    ] {
        assert!(
            request.headers.contains(&(name.into(), value.into())),
            "{:?}",
            request.headers
        );
    }
    let bind = &cluster.extender.requests("bind")[0].body;
    assert_eq!(keys(bind), ["Node", "PodName", "PodNamespace", "PodUID"]);
}

fn keys(object: &Value) -> Vec<&str> {
    object
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[tokio::test]
async fn a_refused_pod_is_requeued_by_a_pod_update_and_not_by_a_node_heartbeat() {
    let cluster = SchedulerCluster::new(2, refuse_all).await;
    let scheduler = cluster.schedule();
    cluster.create("a", "1Gi", 0);
    let filters = || scheduler.observations().count(Verb::Filter);
    with_timeout(
        scheduler
            .observations()
            .until(|seen| (seen.count(Verb::Filter) == 2).then_some(())),
    )
    .await;
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(filters(), 2, "its own condition woke it once");

    let heartbeat = json!({"status": {"conditions": [{"type": "Ready", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}});
    cluster.api.patch_status("nodes/n0", &heartbeat).unwrap();
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(filters(), 2);

    cluster
        .api
        .patch(
            "pods/default/a",
            &json!({"metadata": {"annotations": {"touch": "1"}}}),
        )
        .unwrap();
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(filters(), 3);
    cluster
        .api
        .patch("nodes/n0", &json!({"metadata": {"labels": {"touch": "1"}}}))
        .unwrap();
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(filters(), 4);
}

#[tokio::test]
async fn a_nominated_pod_asks_about_its_node_alone_and_skips_scores() {
    let cluster = SchedulerCluster::new(4, accept_all).await;
    cluster.create("a", "1Gi", 0);
    cluster
        .api
        .patch_status(
            "pods/default/a",
            &json!({"status": {"nominatedNodeName": "n2"}}),
        )
        .unwrap();
    let scheduler = cluster.schedule();
    assert_eq!(cluster.wait_until_bound("a").await, "n2");
    assert_eq!(
        requested_nodes(&cluster.extender.requests("filter")[0]),
        ["n2"]
    );
    assert_eq!(scheduler.observations().count(Verb::Prioritize), 0);
    assert!(cluster.api.get("pods/default/a").unwrap()["status"]["nominatedNodeName"].is_null());
}

#[tokio::test]
async fn a_gated_pod_waits_for_its_gate_and_another_schedulers_pod_is_never_scheduled() {
    let cluster = SchedulerCluster::new(1, accept_all).await;
    let container = json!({"name": "c", "resources": {"limits": {"stowage.dev/vram": "1Gi"}}});
    let pod = |name: &str, scheduler: &str, gates: Value| {
        let spec = json!({"schedulerName": scheduler, "schedulingGates": gates, "containers": [container]});
        json!({"metadata": {"name": name}, "spec": spec})
    };
    cluster
        .api
        .create("pods", pod("gated", "stowage", json!([{"name": "g"}])))
        .unwrap();
    cluster
        .api
        .create("pods", pod("strange", "default-scheduler", json!([])))
        .unwrap();
    let scheduler = cluster.schedule();
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(scheduler.observations().calls(), []);
    cluster
        .api
        .patch(
            "pods/default/gated",
            &json!({"spec": {"schedulingGates": null}}),
        )
        .unwrap();
    cluster.wait_until_bound("gated").await;
    assert_eq!(cluster.node_of("strange"), None);
}

#[tokio::test]
async fn the_top_score_wins_every_time() {
    let cluster = SchedulerCluster::new(5, |api, request| match request.verb.as_str() {
        "prioritize" => {
            ScriptedAnswer::ok(json!([{"Host": "n1", "Score": 3}, {"Host": "n3", "Score": 4}]))
        }
        _ => accept_all(api, request),
    });
    let cluster = cluster.await;
    let _scheduler = cluster.schedule();
    for name in ["a", "b", "c"] {
        cluster.create(name, "1Gi", 0);
        assert_eq!(cluster.wait_until_bound(name).await, "n3");
    }
}

#[tokio::test]
async fn insufficient_allocatable_vram_causes_a_preemption_and_a_nomination() {
    let cluster = SchedulerCluster::new(2, |api, request| match request.verb.as_str() {
        // The one node of the two on which the placement is to succeed.
        "preempt" => {
            let victims = &request.body["NodeNameToMetaVictims"]["n1"];
            ScriptedAnswer::ok(json!({"NodeNameToMetaVictims": {"n1": victims}}))
        }
        _ => accept_all(api, request),
    });
    let cluster = cluster.await;
    let fast = kubelet::KubeletConfig {
        grace_second: Duration::from_millis(1),
        ..kubelet::KubeletConfig::default()
    };
    let _kubelet = Kubelet::start(cluster.api.client("kubelet").unwrap(), fast);
    let scheduler = cluster.schedule();
    for name in ["low0", "low1"] {
        cluster.create(name, "60Gi", 0);
        cluster.wait_until_bound(name).await;
    }
    cluster.create("high", "40Gi", 100);
    assert_eq!(cluster.wait_until_bound("high").await, "n1");

    let preempts = cluster.extender.requests("preempt");
    assert_eq!(
        preempts.len(),
        1,
        "while its victims terminated it was not eligible again"
    );
    assert_eq!(
        keys(&preempts[0].body["NodeNameToMetaVictims"]),
        ["n0", "n1"]
    );
    assert_eq!(preempts[0].body["NodeNameToVictims"], Value::Null);
    let last = cluster.extender.requests("filter").pop().unwrap();
    assert_eq!(requested_nodes(&last), ["n1"]);
    assert_eq!(last.body["Pod"]["status"]["nominatedNodeName"], "n1");
    assert_eq!(
        scheduler.observations().outcome("default/high").preemptions,
        1
    );
    assert_eq!(
        cluster.api.list("pods").len(),
        2,
        "one victim left, one pod stayed"
    );
}

#[tokio::test]
async fn an_empty_preempt_answer_evicts_no_pod() {
    let cluster = SchedulerCluster::new(1, |api, request| match request.verb.as_str() {
        "preempt" => ScriptedAnswer::ok(json!({"NodeNameToMetaVictims": {}})),
        _ => accept_all(api, request),
    });
    let cluster = cluster.await;
    let scheduler = cluster.schedule();
    cluster.create("low", "60Gi", 0);
    cluster.wait_until_bound("low").await;
    cluster.create("high", "40Gi", 100);
    with_timeout(
        scheduler
            .observations()
            .until(|seen| seen.outcome("default/high").message),
    )
    .await;
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(
        scheduler
            .observations()
            .outcome("default/high")
            .message
            .as_deref(),
        Some(
            "0/1 nodes are available: 1 Insufficient stowage.dev/vram. \
             no new claims to deallocate, preemption: no candidate node for preemption"
        )
    );
    assert!(
        cluster.api.get("pods/default/low").unwrap()["metadata"]["deletionTimestamp"].is_null()
    );
    assert_eq!(
        scheduler.observations().count(Verb::Preempt),
        1,
        "the resource check's refusal is not woken by a touch"
    );
}

#[tokio::test]
async fn the_node_sum_counts_pods_whose_bind_is_still_on_its_way() {
    let cluster = SchedulerCluster::new(1, accept_all).await;
    let scheduler = cluster.schedule();
    for name in ["a", "b", "c"] {
        cluster.create(name, "40Gi", 0);
    }
    let refused = |name: &str| {
        let outcome = scheduler.observations().outcome(&format!("default/{name}"));
        outcome.reason == Some("Unschedulable")
    };
    let all = ["a", "b", "c"];
    with_timeout(scheduler.observations().until(|seen| {
        let done =
            |name: &&str| seen.outcome(&format!("default/{name}")).node.is_some() || refused(name);
        all.iter().all(done).then_some(())
    }))
    .await;
    assert_eq!(
        all.iter()
            .filter(|name| cluster.node_of(name).is_some())
            .count(),
        2
    );
}

#[tokio::test]
async fn a_shortlist_of_one_is_bound_without_scores() {
    let cluster = SchedulerCluster::new(3, |api, request| match request.verb.as_str() {
        "filter" => ScriptedAnswer::ok(filter_answer(request, |name| name == "n1")),
        _ => accept_all(api, request),
    });
    let cluster = cluster.await;
    let scheduler = cluster.schedule();
    cluster.create("a", "1Gi", 0);
    assert_eq!(cluster.wait_until_bound("a").await, "n1");
    assert_eq!(scheduler.observations().count(Verb::Prioritize), 0);
    assert_eq!(
        cluster
            .api
            .calls()
            .count_by("scheduler", "create", "pods/binding"),
        0,
        "the extender binds"
    );
}

/// Why Stowage refuses through `FailedAndUnresolvableNodes`; see "Refusals" in docs/inside/kube-scheduler.md.
#[tokio::test]
async fn a_resolvable_refusal_repeats_where_a_pod_could_be_evicted() {
    let cluster = SchedulerCluster::new(6, |api, request| {
        let refused = request.verb == "filter" && request.body["Pod"]["metadata"]["name"] == "high";
        if !refused {
            return accept_all(api, request);
        }
        let reasons: Value = requested_nodes(request)
            .into_iter()
            .map(|name| (name, json!("no room")))
            .collect();
        ScriptedAnswer::ok(json!({"NodeNames": [], "FailedNodes": reasons}))
    });
    let cluster = cluster.await;
    let scheduler = cluster.schedule();
    for number in 0..6 {
        let name = format!("low{number}");
        cluster.create(&name, "50Gi", 0);
        cluster.wait_until_bound(&name).await;
    }
    cluster.create("high", "10Gi", 100);
    let seen = scheduler.observations();
    with_timeout(seen.until(|seen| (seen.calls_for("default/high").len() > 20).then_some(())))
        .await;
    let message = seen.outcome("default/high").message.unwrap();
    assert!(
        message.contains("expected at least one victim pod on node"),
        "{message}"
    );
    assert_eq!(seen.count(Verb::Preempt), 0);
}
