//! Changes without an API event: a refused pod is retried when an engine's queue has become empty. The whole system but the
//! hardware: scheduler, API server, kubelet, agents, engines' pages, all over loopback HTTP.

use serde_json::{Value, json};
use std::time::Duration;
use stowage::lab::demo::engines::{FakeEngine, StubEngineLoad};
use stowage::lab::demo::machine::DemoMachine;
use stowage::lab::demo::scheduler::observations::Verb;
use stowage::lab::demo::setup::Setup;
use stowage::scheduling::policy::Policy;
use stowage::units::Millis;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

const ONE_GPU: DemoMachine = DemoMachine { node: "node-a", model: "H100", gpus: 1, gib: 80, models: &[] };

const CALM: StubEngineLoad = StubEngineLoad { kv_percent: 20, waiting: 0, running: 2 };
const BUSY: StubEngineLoad = StubEngineLoad { kv_percent: 97, waiting: 50, running: 8 };

fn pod(name: &str, port: Option<u16>) -> Value {
    let port = port.map(|port| json!({ "stowage.dev/metrics-port": port.to_string() }));
    json!({
        "metadata": { "name": name, "namespace": "default", "annotations": port.unwrap_or(json!({})) },
        "spec": {
            "schedulerName": "stowage",
            "containers": [{ "name": "engine", "image": "engine", "resources": { "limits": { "stowage.dev/vram": "20Gi" } } }],
        },
    })
}

fn named<'a>(pods: &'a [std::sync::Arc<Value>], name: &str) -> &'a Value {
    pods.iter().find(|pod| pod["metadata"]["name"] == name).unwrap()
}

async fn until(setup: &Setup, what: &str, is_so: impl Fn(&Setup) -> bool) {
    let looked = async {
        while !is_so(setup) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, looked).await.is_ok(), "{what}");
}

fn is_bound(setup: &Setup, name: &str) -> bool {
    named(&setup.api.list("pods"), name)["spec"]["nodeName"] == "node-a"
}

fn kv_percent(setup: &Setup) -> Option<u8> {
    let snapshot = setup.stowage.service.cluster().snapshot();
    snapshot.node("node-a")?.gpus[0].engine_load.kv_cache.map(|percent| percent.get())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_refused_for_a_busy_engine_is_woken_only_when_the_engine_is_idle_enough() {
    // What the engine's page last said stays true, however late a busy machine makes the next report.
    let mut policy = Policy::default();
    policy.telemetry.fresh = Millis::seconds(24 * 3600);
    policy.telemetry.stale = Millis::seconds(48 * 3600);
    let setup = Setup::by(policy, &[ONE_GPU]).await.unwrap();
    let engine = FakeEngine::start(setup.api.clone(), "engine", "m", CALM).await.unwrap();
    setup.api.create("pods", pod("engine", Some(engine.port()))).unwrap();
    until(&setup, "the engine serves", |setup| kv_percent(setup) == Some(20)).await;

    engine.set(BUSY);
    until(&setup, "its cache is seen to fill up", |setup| kv_percent(setup) == Some(97)).await;
    setup.api.create("pods", pod("late", None)).unwrap();
    let refused = |setup: &Setup| {
        let conditions = named(&setup.api.list("pods"), "late")["status"]["conditions"].clone();
        conditions.as_array().is_some_and(|all| all.iter().any(|one| one["reason"] == "Unschedulable"))
    };
    until(&setup, "the pod is refused", refused).await;
    // Some reports later nothing has changed: no pod was woken, and the scheduler is idle.
    let asked = setup.scheduler.observations().count(Verb::Filter);
    let reports =
        |setup: &Setup| setup.stowage.service.metrics.reports.with_label_values(&["accepted"]).get();
    let before = reports(&setup);
    until(&setup, "reports come in", |setup| reports(setup) >= before + 4).await;
    let told = || setup.stowage.service.metrics.writes.with_label_values(&["nomination", "written"]).get();
    assert_eq!(told(), 0);
    assert!(setup.scheduler.observations().count(Verb::Filter) <= asked + 1, "a refused pod is left alone");

    engine.set(CALM);
    until(&setup, "the pod is woken and bound", |setup| is_bound(setup, "late")).await;
    until(&setup, "it is told where its room is", |_| told() >= 1).await;
    assert_eq!(told(), 1, "once");
    setup.stop().await.unwrap();
}
