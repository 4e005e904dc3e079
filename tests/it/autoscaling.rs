//! Replicas per model: the answer follows the load that agents report of their engines, up at once and down after the window. The
//! clock is driven by the test, but for one that goes the whole way: from an engine's page by its agent to the metric.

use crate::client::{Client, TEST_TIMEOUT};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use stowage_lab::demo::engines::{FakeEngine, FakeEngineLoad};
use stowage_lab::demo::machine::DemoMachine;
use stowage_lab::demo::setup::Setup;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Millis;
use stowage_server::extender::reports::{Sender, reports};
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::{Extender, autoscaling, operators};
use stowage_server::kubernetes::dump::{Dump, DumpControlPlane};
use stowage_server::kubernetes::index::ClusterIndex;
use stowage_server::service::{ServerState, TimeSource};
use tower::ServiceExt;

/// Seconds since the test began.
static CLOCK_SECONDS: AtomicU64 = AtomicU64::new(0);
const MODEL: &str = "org/model";

struct AutoscalingSetup {
    extender: Extender,
    sequence: u64,
}

impl AutoscalingSetup {
    fn new() -> Self {
        let monotonic = || Duration::from_secs(CLOCK_SECONDS.load(Ordering::SeqCst));
        let service = ServerState::with_time_source(
            TimeSource {
                monotonic,
                wall: jiff::Timestamp::now,
            },
            Policy::default(),
        );
        let limits = json!({ "limits": { "stowage.dev/vram": "20Gi" } });
        let pod = |n: u32| {
            json!({
                "kind": "Pod", "metadata": { "name": format!("pod-{n}"), "namespace": "default", "uid": format!("pod-{n}") },
                "spec": { "nodeName": "node-a", "containers": [{ "name": "engine", "resources": limits }] },
            })
        };
        let node = json!({ "kind": "Node", "metadata": { "name": "node-a" } });
        let items: Vec<Value> = std::iter::once(node).chain((0..4).map(pod)).collect();
        let dump = json!({ "items": items }).to_string();
        let dump = Dump::from_text(dump, Path::new("test"));
        let control_plane =
            DumpControlPlane::load(&dump, &service, &mut ClusterIndex::default()).unwrap();
        Self {
            extender: Extender::new(service, Arc::new(control_plane), RequestLimits::default()),
            sequence: 0,
        }
    }

    /// Fifteen seconds pass, four engines report this load, and the models are evaluated.
    fn advance_with_load(&mut self, kv_cache: f64, waiting: u64) {
        CLOCK_SECONDS.fetch_add(15, Ordering::SeqCst);
        self.sequence += 1;
        let engine = |n: u32| {
            json!({
                "pod": format!("pod-{n}"), "engine": "vllm", "gpus": [], "state": "serving", "model": MODEL,
                "kvCacheUsage": kv_cache, "waiting": waiting, "running": 8,
            })
        };
        let report = json!({
            "node": "node-a", "bootId": "boot", "sequence": self.sequence, "gpus": [],
            "engines": (0..4).map(engine).collect::<Vec<_>>(),
        });
        let now = self.extender.state.now();
        let taken = reports(
            &self.extender,
            &Sender::Anyone,
            now,
            report.to_string().as_bytes(),
        )
        .unwrap();
        assert_eq!(taken.accepted, 1);
        autoscaling::evaluate(&self.extender);
    }

    async fn get_page(&self, query: &str) -> (u16, String) {
        let request = axum::http::Request::get(format!("{}{query}", autoscaling::PATH));
        let request = request.body(axum::body::Body::empty()).unwrap();
        let answer = operators::router(self.extender.clone())
            .oneshot(request)
            .await
            .unwrap();
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), 1 << 20)
            .await
            .unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn desired_replicas(&self) -> (u64, String) {
        let (status, text) = self.get_page(&format!("?model={MODEL}")).await;
        assert_eq!(status, 200, "{text}");
        let page: Value = serde_json::from_str(&text).unwrap();
        let desired = page["desiredReplicas"].as_u64().unwrap();
        let metric = format!("\nstowage_model_desired_replicas{{model=\"{MODEL}\"}} {desired}\n");
        let metrics = self.extender.state.metrics.render();
        assert!(metrics.contains(&metric), "{metrics}");
        (desired, page["reason"].as_str().unwrap().to_owned())
    }
}

#[tokio::test]
async fn desired_replicas_follow_engine_load_and_fall_after_the_stabilization_window() {
    let mut driven = AutoscalingSetup::new();
    let (status, text) = driven.get_page(&format!("?model={MODEL}")).await;
    assert_eq!(status, 503, "{text}");
    driven.advance_with_load(0.7, 0);
    assert_eq!(driven.desired_replicas().await, (4, "tolerance".to_owned()));
    driven.advance_with_load(1.0, 8);
    assert_eq!(
        driven.desired_replicas().await,
        (7, "waiting".to_owned()),
        "32 waiting requests at 5 a replica"
    );
    let mut falls_after = 0;
    while driven.desired_replicas().await.0 == 7 {
        driven.advance_with_load(0.1, 0);
        falls_after += 15;
        assert!(falls_after <= 600, "it never falls");
    }
    assert!(falls_after > 300, "it fell after {falls_after} s");
    let (status, text) = driven.get_page("?model=other").await;
    assert!(
        status == 404 && text.contains("autoscaling.models"),
        "{status}: {text}"
    );
    let (status, text) = driven.get_page("").await;
    assert!(
        status == 400 && text.contains("?model=MODEL"),
        "{status}: {text}"
    );
}

/// The metric as Prometheus would scrape it; `None` while the page does not name the model.
fn scraped(setup: &Setup) -> Option<u32> {
    let answer = Client::connect(setup.stowage.addresses.operators).get_page("/metrics");
    let series = format!("stowage_model_desired_replicas{{model=\"{MODEL}\"}} ");
    answer
        .text()
        .lines()
        .find_map(|line| line.strip_prefix(&series)?.parse().ok())
}

async fn wait_until_scraped(setup: &Setup, desired: u32) {
    let mut latest = None;
    let looking = async {
        while latest != Some(desired) {
            tokio::time::sleep(Duration::from_millis(50)).await;
            latest = scraped(setup);
        }
    };
    let came = tokio::time::timeout(TEST_TIMEOUT, looking).await;
    assert!(
        came.is_ok(),
        "it never came to {desired} replicas: {latest:?}"
    );
}

fn engine_pod(name: &str, port: u16) -> Value {
    let limits = json!({ "limits": { "stowage.dev/vram": "20Gi" } });
    json!({
        "metadata": {
            "name": name, "namespace": "default",
            "annotations": { "stowage.dev/model": MODEL, "stowage.dev/metrics-port": port.to_string() },
        },
        "spec": {
            "schedulerName": "stowage",
            "containers": [{ "name": "engine", "image": "engine", "resources": limits }],
        },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metric_follows_what_the_engines_say_on_their_own_pages() {
    const MACHINE: DemoMachine = DemoMachine {
        node: "node-a",
        model: "H100",
        gpu_count: 2,
        gib_per_gpu: 80,
        models: &[],
    };
    let mut policy = Policy::default();
    // What an engine's page last said counts, however late a busy machine makes the next report.
    policy.telemetry.fresh = Millis::seconds(24 * 3600);
    policy.telemetry.stale = Millis::seconds(48 * 3600);
    policy.autoscaling.scale_down.window = Millis::seconds(1);
    // However long a step takes, there is no trend.
    policy.autoscaling.look_ahead = Millis(0);
    let setup = Setup::with_policy(policy, &[MACHINE]).await.unwrap();
    assert_eq!(scraped(&setup), None, "no engine, no load");

    let calm = FakeEngineLoad {
        kv_percent: 40,
        waiting: 0,
        running: 4,
    };
    let engine = FakeEngine::start(setup.api.clone(), "one", MODEL, calm)
        .await
        .unwrap();
    setup
        .api
        .create("pods", engine_pod("one", engine.port()))
        .unwrap();
    wait_until_scraped(&setup, 1).await;
    // By the queue: 19 waiting requests at 5 a replica.
    engine.set_load(FakeEngineLoad {
        kv_percent: 95,
        waiting: 19,
        running: 32,
    });
    wait_until_scraped(&setup, 4).await;
    // By the KV caches of two engines: 1.9 at 0.7 a replica.
    let full = FakeEngineLoad {
        kv_percent: 95,
        waiting: 0,
        running: 32,
    };
    let other = FakeEngine::start(setup.api.clone(), "two", MODEL, full)
        .await
        .unwrap();
    setup
        .api
        .create("pods", engine_pod("two", other.port()))
        .unwrap();
    engine.set_load(full);
    wait_until_scraped(&setup, 3).await;
    engine.set_load(calm);
    other.set_load(calm);
    wait_until_scraped(&setup, 2).await;
    setup.stop().await.unwrap();
}

fn example(name: &str) -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("manifests/examples")
        .join(name);
    serde_saphyr::from_multiple(&std::fs::read_to_string(file).unwrap()).unwrap()
}

fn named<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects
        .iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}

/// The model of a workload's engine, as its pods say it.
fn model_of(target: &Value) -> String {
    let name = target["name"].as_str().unwrap();
    let annotations = match target["kind"].as_str() {
        Some("LeaderWorkerSet") => {
            let set = named(&example("leaderworkerset.yaml"), "LeaderWorkerSet", name).clone();
            set["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["annotations"].clone()
        }
        _ => {
            let deployment = named(&example("deployment.yaml"), "Deployment", name).clone();
            deployment["spec"]["template"]["metadata"]["annotations"].clone()
        }
    };
    annotations["stowage.dev/model"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[test]
fn each_example_of_an_hpa_reads_the_rule_of_the_model_that_it_scales() {
    let objects = example("autoscaling-hpa.yaml");
    let rules = named(&objects, "ConfigMap", "adapter-config")["data"]["config.yaml"]
        .as_str()
        .unwrap();
    let rules: Value = serde_saphyr::from_str(rules).unwrap();
    let rules = rules["externalRules"].as_array().unwrap();
    let hpas: Vec<&Value> = objects
        .iter()
        .filter(|one| one["kind"] == "HorizontalPodAutoscaler")
        .collect();
    assert_eq!((hpas.len(), rules.len()), (2, 2));
    for hpa in hpas {
        let model = model_of(&hpa["spec"]["scaleTargetRef"]);
        let external = &hpa["spec"]["metrics"][0]["external"];
        assert_eq!(
            external["target"],
            json!({ "type": "AverageValue", "averageValue": "1" })
        );
        let rule = rules
            .iter()
            .find(|rule| rule["name"]["as"] == external["metric"]["name"])
            .unwrap();
        let series = format!("stowage_model_desired_replicas{{model=\"{model}\"}}");
        assert_eq!(rule["seriesQuery"], *series);
        assert_eq!(rule["metricsQuery"], format!("max({series})"));
        assert_eq!(rule["resources"]["namespaced"], false);
    }
}

#[test]
fn the_keda_example_reads_the_existing_metrics_page_and_its_account_may_read_no_other() {
    let objects = example("autoscaling-keda.yaml");
    let scaled = named(&objects, "ScaledObject", "llama-3-1-8b");
    let model = model_of(
        &json!({ "kind": "Deployment", "name": scaled["spec"]["scaleTargetRef"]["name"] }),
    );
    let trigger = &scaled["spec"]["triggers"][0];
    let metadata = &trigger["metadata"];
    let url = format!(
        "https://stowage-agents.kube-system.svc:9445{}?model={model}",
        autoscaling::PATH
    );
    assert_eq!(metadata["url"], *url);
    assert_eq!(
        (&metadata["valueLocation"], &metadata["targetValue"]),
        (&"desiredReplicas".into(), &"1".into())
    );
    assert_eq!(
        (&metadata["unsafeSsl"], &metadata["authMode"]),
        (&"false".into(), &"bearer".into())
    );
    let authentication = trigger["authenticationRef"]["name"].as_str().unwrap();
    let from =
        &named(&objects, "TriggerAuthentication", authentication)["spec"]["secretTargetRef"][0];
    let secret = named(&objects, "Secret", from["name"].as_str().unwrap());
    let account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
        .as_str()
        .unwrap();
    named(&objects, "ServiceAccount", account);
    let rules = &named(&objects, "ClusterRole", "stowage-autoscaling")["rules"];
    assert_eq!(
        *rules,
        json!([{ "nonResourceURLs": [autoscaling::PATH], "verbs": ["get"] }])
    );
}
