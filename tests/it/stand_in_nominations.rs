//! The stand-in scheduler's nominations: their effect, and the paths on which they are lost.

use crate::stand_in_extender::{
    RecordedRequest, ScriptedAnswer, ScriptedExtender, accept_all, requested_nodes,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::scheduler::StandInScheduler;
use stowage_lab::demo::scheduler::config::SchedulerConfig;
use stowage_lab::demo::scheduler::observations::Verb;

/// How the extender deviates from agreeing to everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExtenderMood {
    Agrees,
    RefusesEverywhere,
    FailsToFilter,
    FailsToBind,
}

/// Nodes `n0`, `n1`, … of 80Gi.
struct NominationCluster {
    api: Arc<ApiServer>,
    extender: ScriptedExtender,
    mood: Arc<Mutex<ExtenderMood>>,
}

impl NominationCluster {
    async fn new(nodes: usize) -> Self {
        let api = Arc::new(ApiServer::start().await.unwrap());
        for number in 0..nodes {
            let capacity =
                json!({"cpu": "64", "memory": "512Gi", "pods": "110", "stowage.dev/vram": "80Gi"});
            let node = json!({"metadata": {"name": format!("n{number}")}, "status": {"capacity": capacity}});
            api.create("nodes", node).unwrap();
        }
        let mood = Arc::new(Mutex::new(ExtenderMood::Agrees));
        let (scripted, now) = (api.clone(), mood.clone());
        let extender =
            ScriptedExtender::start(move |request| answer(&scripted, *now.lock(), request)).await;
        Self {
            api,
            extender,
            mood,
        }
    }

    fn schedule(&self) -> StandInScheduler {
        let mut config = SchedulerConfig::as_shipped(&self.extender.url_prefix());
        config.initial_back_off = Duration::from_millis(5);
        // No test here is about time-outs, and a busy machine must not cause one.
        config.extender.timeout = Duration::from_secs(30);
        StandInScheduler::start(self.api.client("scheduler").unwrap(), config)
    }

    fn create(&self, name: &str, vram: &str, spec: Value) {
        let container = json!({"name": "c", "resources": {"limits": {"stowage.dev/vram": vram}}});
        let mut pod = json!({"metadata": {"name": name}, "spec": {"schedulerName": "stowage", "containers": [container]}});
        pod["spec"]
            .as_object_mut()
            .unwrap()
            .extend(spec.as_object().unwrap().clone());
        self.api.create("pods", pod).unwrap();
    }

    fn gated(&self, name: &str, vram: &str) {
        self.create(
            name,
            vram,
            json!({"schedulingGates": [{"name": "stowage.dev/plan"}]}),
        );
    }

    fn remove_gate(&self, name: &str) {
        let gates = json!([{"$patch": "delete", "name": "stowage.dev/plan"}]);
        let patch = json!({"spec": {"schedulingGates": gates}});
        self.api
            .patch(&format!("pods/default/{name}"), &patch)
            .unwrap();
    }

    fn nominate(&self, name: &str, node: Option<&str>) {
        let patch = json!({"status": {"nominatedNodeName": node}});
        self.api
            .patch_status(&format!("pods/default/{name}"), &patch)
            .unwrap();
    }

    fn nominated(&self, name: &str) -> Option<String> {
        let pod = self.api.get(&format!("pods/default/{name}"))?;
        Some(pod["status"]["nominatedNodeName"].as_str()?.to_owned())
    }

    fn node_of(&self, name: &str) -> Option<String> {
        Some(
            self.api.get(&format!("pods/default/{name}"))?["spec"]["nodeName"]
                .as_str()?
                .to_owned(),
        )
    }

    async fn wait_until_bound(&self, name: &str) -> String {
        with_timeout(self.api.until(|_| self.node_of(name))).await
    }

    /// The nodes of each filter call about a pod.
    fn filtered(&self, name: &str) -> Vec<Vec<String>> {
        let requests = self.extender.requests("filter").into_iter();
        let of_pod = requests.filter(|request| request.body["Pod"]["metadata"]["name"] == name);
        of_pod.map(|request| requested_nodes(&request)).collect()
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

fn answer(api: &ApiServer, mood: ExtenderMood, request: &RecordedRequest) -> ScriptedAnswer {
    match (mood, request.verb.as_str()) {
        (ExtenderMood::RefusesEverywhere, "filter") => {
            let reasons: Value = requested_nodes(request)
                .into_iter()
                .map(|name| (name, json!("no room")))
                .collect();
            ScriptedAnswer::ok(json!({"NodeNames": [], "FailedAndUnresolvableNodes": reasons}))
        }
        (ExtenderMood::FailsToFilter, "filter") | (ExtenderMood::FailsToBind, "bind") => {
            ScriptedAnswer::ok(json!({"Error": "not now"}))
        }
        _ => accept_all(api, request),
    }
}

async fn with_timeout<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("in time")
}

#[tokio::test]
async fn a_planned_pod_costs_one_filter_call_for_one_node_and_no_prioritize() {
    let cluster = NominationCluster::new(4).await;
    let scheduler = cluster.schedule();
    cluster.gated("planned", "1Gi");
    cluster.wait_until_idle(&scheduler).await;
    cluster.nominate("planned", Some("n2"));
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(
        scheduler.observations().calls(),
        [],
        "gated, it is nobody's business"
    );
    cluster.remove_gate("planned");
    assert_eq!(cluster.wait_until_bound("planned").await, "n2");
    assert_eq!(cluster.filtered("planned"), [["n2"]]);
    let calls = scheduler.observations().calls_for("default/planned");
    let calls: Vec<(Verb, usize)> = calls.iter().map(|call| (call.verb, call.nodes)).collect();
    assert_eq!(calls, [(Verb::Filter, 1), (Verb::Bind, 1)]);
    assert_eq!(cluster.nominated("planned"), None, "the Binding ends it");
}

#[tokio::test]
async fn a_nomination_is_lost_when_filter_or_bind_fails_and_when_the_extender_refuses() {
    for mood in [
        ExtenderMood::FailsToFilter,
        ExtenderMood::FailsToBind,
        ExtenderMood::RefusesEverywhere,
    ] {
        let cluster = NominationCluster::new(2).await;
        *cluster.mood.lock() = mood;
        cluster.create("p", "1Gi", json!({}));
        cluster.nominate("p", Some("n1"));
        let _scheduler = cluster.schedule();
        with_timeout(
            cluster
                .api
                .until(|_| cluster.nominated("p").is_none().then_some(())),
        )
        .await;
        assert_eq!(cluster.node_of("p"), None, "{mood:?}");
        assert_eq!(cluster.filtered("p")[0], ["n1"], "{mood:?}");
        *cluster.mood.lock() = ExtenderMood::Agrees;
        cluster
            .api
            .patch(
                "pods/default/p",
                &json!({"metadata": {"annotations": {"touch": "1"}}}),
            )
            .unwrap();
        cluster.wait_until_bound("p").await;
    }
}

#[tokio::test]
async fn a_pod_that_may_not_preempt_keeps_its_nomination_when_refused() {
    let cluster = NominationCluster::new(2).await;
    *cluster.mood.lock() = ExtenderMood::RefusesEverywhere;
    cluster.create("p", "1Gi", json!({"preemptionPolicy": "Never"}));
    cluster.nominate("p", Some("n1"));
    let scheduler = cluster.schedule();
    with_timeout(
        scheduler
            .observations()
            .until(|seen| seen.outcome("default/p").message),
    )
    .await;
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(cluster.nominated("p").as_deref(), Some("n1"));
}

#[tokio::test]
async fn a_nomination_keeps_resources_from_lower_and_equal_priority_only() {
    let cluster = NominationCluster::new(1).await;
    cluster.gated("planned", "60Gi");
    let scheduler = cluster.schedule();
    cluster.wait_until_idle(&scheduler).await;
    cluster.nominate("planned", Some("n0"));
    for (name, priority) in [("lower", -1), ("equal", 0)] {
        cluster.create(name, "40Gi", json!({"priority": priority}));
    }
    cluster.wait_until_idle(&scheduler).await;
    for name in ["lower", "equal"] {
        assert_eq!(
            scheduler
                .observations()
                .outcome(&format!("default/{name}"))
                .reason,
            Some("Unschedulable")
        );
    }
    cluster.create("higher", "40Gi", json!({"priority": 1}));
    assert_eq!(cluster.wait_until_bound("higher").await, "n0");
}

#[tokio::test]
async fn clearing_a_nomination_requeues_the_pods_it_blocked() {
    let cluster = NominationCluster::new(1).await;
    cluster.gated("planned", "60Gi");
    let scheduler = cluster.schedule();
    cluster.wait_until_idle(&scheduler).await;
    cluster.nominate("planned", Some("n0"));
    cluster.create("equal", "40Gi", json!({}));
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(cluster.node_of("equal"), None);
    cluster.nominate("planned", None);
    assert_eq!(cluster.wait_until_bound("equal").await, "n0");
}

#[tokio::test]
async fn a_restarted_scheduler_forgets_a_gated_pods_nomination_until_the_pod_changes() {
    let cluster = NominationCluster::new(1).await;
    cluster.gated("planned", "60Gi");
    cluster.nominate("planned", Some("n0"));
    let scheduler = cluster.schedule();
    cluster.create("first", "10Gi", json!({}));
    assert_eq!(
        cluster.wait_until_bound("first").await,
        "n0",
        "it would fit beside the planned one, too"
    );
    cluster.create("second", "40Gi", json!({}));
    assert_eq!(
        cluster.wait_until_bound("second").await,
        "n0",
        "nobody knows of the planned one"
    );
    cluster.api.delete_now("pods/default/second").unwrap();
    cluster
        .api
        .patch(
            "pods/default/planned",
            &json!({"metadata": {"annotations": {"a": "b"}}}),
        )
        .unwrap();
    cluster.wait_until_idle(&scheduler).await;
    cluster.create("third", "40Gi", json!({}));
    cluster.wait_until_idle(&scheduler).await;
    assert_eq!(cluster.node_of("third"), None);
    cluster.remove_gate("planned");
    assert_eq!(cluster.wait_until_bound("planned").await, "n0");
}
