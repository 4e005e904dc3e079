//! The way of a figure through the whole system: an engine's page, the agent's rounds over HTTP, its report, the ledger, and
//! another placement.
//!
//! Only the hardware and the pod list are made up. What a page says reaches the extender through the agent or not at all.

use crate::served::{Served, ServedCluster, bound_on, eventually, gpu_report, pod};
use axum::Router;
use axum::response::{IntoResponse, Response};
use futures::future::{BoxFuture, ready};
use http::Uri;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stowage_agent::engines::EngineWatcher;
use stowage_agent::engines::limits::EngineLimits;
use stowage_agent::models::{ModelScan, ModelSource};
use stowage_agent::nvml::{GpuSample, GpuSource};
use stowage_agent::ownership::OwnerSource;
use stowage_agent::pods::{PodOnNode, PodSource};
use stowage_agent::publish::Publisher;
use stowage_agent::round::{NodeSampler, ReportSources, Round};
use stowage_report::{EngineReport, EngineState, GpuReport, MissingPart};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::vocabulary::node_reading::EngineLoad;
use tokio::runtime::Runtime;

/// What an engine does when its page is asked for.
#[derive(Debug, Clone, Copy)]
enum EngineMood {
    Serves {
        kv: f64,
        waiting: u64,
    },
    /// It takes the request, and nothing comes.
    Hangs,
}

/// An engine in a process of its own, as far as one test can have that: a runtime, which takes its sockets along.
struct EngineProcess {
    port: u16,
    mood: Arc<Mutex<EngineMood>>,
    runtime: Runtime,
}

impl EngineProcess {
    fn start(mood: EngineMood) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let mood = Arc::new(Mutex::new(mood));
        let shown = mood.clone();
        let router = Router::new().fallback(async move |uri: Uri| {
            let mood = *shown.lock();
            answer(&uri, mood).await
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        runtime.spawn(async {
            axum::serve(tokio::net::TcpListener::from_std(listener).unwrap(), router)
                .await
                .unwrap()
        });
        Self {
            port,
            mood,
            runtime,
        }
    }

    fn is(&self, mood: EngineMood) {
        *self.mood.lock() = mood;
    }

    fn dies(self) {
        self.runtime.shutdown_timeout(Duration::from_secs(60));
    }
}

async fn answer(uri: &Uri, mood: EngineMood) -> Response {
    match (uri.path(), mood) {
        (_, EngineMood::Hangs) => std::future::pending().await,
        ("/metrics", EngineMood::Serves { kv, waiting }) => format!(
            "vllm:kv_cache_usage_perc{{engine=\"0\"}} {kv}\nvllm:num_requests_waiting{{engine=\"0\"}} {waiting}\n"
        )
        .into_response(),
        _ => ().into_response(),
    }
}

/// A node's GPUs as a driver shows them that reports no processes, and its pods as they are bound.
struct ScriptedSources {
    gpus: Vec<GpuReport>,
    pods: Vec<PodOnNode>,
}

impl GpuSource for ScriptedSources {
    fn sample(&mut self) -> Result<GpuSample, String> {
        Ok(GpuSample {
            gpus: self.gpus.clone(),
            sensors: Default::default(),
            missing: Vec::new(),
            taken_at: Instant::now(),
        })
    }
}

impl PodSource for ScriptedSources {
    fn pods(&mut self) -> Result<Vec<PodOnNode>, String> {
        Ok(self.pods.clone())
    }
}

impl OwnerSource for ScriptedSources {
    fn owners<'a>(
        &'a mut self,
        _: &'a mut [GpuReport],
        _: &'a [PodOnNode],
    ) -> BoxFuture<'a, Vec<MissingPart>> {
        Box::pin(ready(Vec::new()))
    }
}

impl ModelSource for ScriptedSources {
    fn models(&mut self) -> ModelScan {
        ModelScan::default()
    }
}

/// The agent of a node, driven round by round.
struct SteppedAgent {
    rounds: NodeSampler,
    publisher: Publisher,
    runtime: Runtime,
}

impl SteppedAgent {
    fn of(node: &str, gpus: u32, pods: &[Value], served: &Served) -> Self {
        let given = || ScriptedSources {
            gpus: (0..gpus)
                .map(|gpu| serde_json::from_value(gpu_report(node, gpu)).unwrap())
                .collect(),
            pods: pods
                .iter()
                .map(|pod| {
                    PodOnNode::from_pod(&serde_json::from_value(pod.clone()).unwrap()).unwrap()
                })
                .collect(),
        };
        let sources = ReportSources {
            gpus: Box::new(given()),
            owners: Box::new(given()),
            pods: Box::new(given()),
            models: Box::new(given()),
            engines: EngineWatcher::new(limits()),
        };
        let extender = format!("http://{}", served.agents).parse().unwrap();
        Self {
            rounds: NodeSampler::new(NodeName::parse(node).unwrap(), "agent".into(), sources)
                .unwrap(),
            publisher: Publisher::new(vec![extender], None, None).unwrap(),
            runtime: Runtime::new().unwrap(),
        }
    }

    /// One round, reported; what it says of the engine.
    fn round(&mut self) -> Option<EngineReport> {
        self.runtime.block_on(async {
            let Round { report, as_of, .. } = self.rounds.run_round().await;
            let engine = report.engines.first().cloned();
            self.publisher.publish(report, as_of).await;
            engine
        })
    }
}

/// The shipped limits, except what would delay a test: no pause after a failed attempt, and figures are reported briefly only.
fn limits() -> EngineLimits {
    EngineLimits {
        round_timeout: Duration::from_millis(50),
        max_age: Duration::from_millis(500),
        max_engine_backoff: Duration::ZERO,
        ..EngineLimits::default()
    }
}

const CALM_ENGINE: EngineMood = EngineMood::Serves {
    kv: 0.3,
    waiting: 0,
};
const FULL_ENGINE: EngineMood = EngineMood::Serves {
    kv: 0.97,
    waiting: 40,
};

/// The pod that the engine runs in: half of GPU 0 of node-a.
fn pod_of_engine(engine: &EngineProcess) -> Value {
    let mut tenant = bound_on(pod("tenant", "40Gi"), "node-a", &[0], 40 << 30);
    tenant["metadata"]["annotations"]["stowage.dev/metrics-port"] = json!(engine.port.to_string());
    tenant["status"] = json!({ "phase": "Running", "podIP": "127.0.0.1" });
    tenant
}

/// Polls the engine until the ledger has this load of its GPU.
fn report_until(
    what: &str,
    agent: &mut SteppedAgent,
    served: &Served,
    holds: impl Fn(EngineLoad) -> bool,
) {
    let node = NodeName::parse("node-a").unwrap();
    eventually(what, || {
        agent.round();
        holds(served.service.cluster().ledger().node(&node).unwrap().gpus[0].engine_load)
    });
}

fn is_full(pressure: EngineLoad) -> bool {
    pressure.kv_cache.is_some_and(|kv| kv.get() == 97) && pressure.queue == Some(40)
}

fn is_calm(pressure: EngineLoad) -> bool {
    pressure.kv_cache.is_some_and(|kv| kv.get() == 30) && pressure.queue == Some(0)
}

/// Binds a pod where the verbs send it, and takes it away again. Answers its GPU.
fn placed_gpu(served: &Served, newcomer: &Value, nodes: &[&str]) -> String {
    let passed = served.filter_passed(newcomer, nodes);
    let passed: Vec<&str> = passed.iter().map(String::as_str).collect();
    let scores = served.prioritize(newcomer, &passed);
    let (best, _) = scores.into_iter().max_by_key(|(_, score)| *score).unwrap();
    assert_eq!(served.bind(newcomer, &best), "");
    let device = served
        .control_plane
        .orders
        .lock()
        .last()
        .unwrap()
        .0
        .placement
        .devices[0]
        .to_string();
    served.delete(newcomer);
    device
}

#[test]
fn an_engines_metric_decides_the_gpu_of_a_pod() {
    let engine = EngineProcess::start(CALM_ENGINE);
    let tenant = pod_of_engine(&engine);
    let newcomers = ["one", "two", "three"].map(|name| pod(name, "20Gi"));
    let served = ServedCluster::with_gpus(&[("node-a", 2)])
        .with([std::slice::from_ref(&tenant), &newcomers[..]].concat())
        .serve();
    let mut agent = SteppedAgent::of("node-a", 2, &[tenant], &served);
    let place = |newcomer: &Value| placed_gpu(&served, newcomer, &["node-a"]);

    report_until(
        "the engine is known to be calm",
        &mut agent,
        &served,
        is_calm,
    );
    assert_eq!(place(&newcomers[0]), "GPU-node-a-0", "the tightest fit");
    engine.is(FULL_ENGINE);
    report_until(
        "its KV cache is known to be full",
        &mut agent,
        &served,
        is_full,
    );
    assert_eq!(place(&newcomers[1]), "GPU-node-a-1");
    engine.is(CALM_ENGINE);
    report_until(
        "its KV cache is known to have room",
        &mut agent,
        &served,
        is_calm,
    );
    assert_eq!(place(&newcomers[2]), "GPU-node-a-0");
}

#[test]
fn an_engines_metric_decides_the_node_of_a_pod() {
    let engine = EngineProcess::start(FULL_ENGINE);
    let tenant = pod_of_engine(&engine);
    let newcomers = ["one", "two"].map(|name| pod(name, "20Gi"));
    let nodes = ["node-a", "node-b"];
    let served = ServedCluster::with_gpus(&[("node-a", 1), ("node-b", 1)])
        .with([std::slice::from_ref(&tenant), &newcomers[..]].concat())
        .serve();
    let mut agent = SteppedAgent::of("node-a", 1, &[tenant], &served);

    report_until(
        "its KV cache is known to be full",
        &mut agent,
        &served,
        is_full,
    );
    assert_eq!(
        served.filter_passed(&newcomers[0], &nodes[..1]),
        [""; 0],
        "it waits rather than to join"
    );
    assert_eq!(placed_gpu(&served, &newcomers[0], &nodes), "GPU-node-b-0");
    engine.is(CALM_ENGINE);
    report_until(
        "its KV cache is known to have room",
        &mut agent,
        &served,
        is_calm,
    );
    assert_eq!(placed_gpu(&served, &newcomers[1], &nodes), "GPU-node-a-0");
}

/// Full at first, so that later assertions cannot be met by the initial state.
fn agent_with_full_engine() -> (EngineProcess, Served, SteppedAgent, Value) {
    let engine = EngineProcess::start(FULL_ENGINE);
    let (tenant, newcomer) = (pod_of_engine(&engine), pod("newcomer", "20Gi"));
    let served = ServedCluster::with_gpus(&[("node-a", 1)])
        .with([tenant.clone(), newcomer.clone()])
        .serve();
    let mut agent = SteppedAgent::of("node-a", 1, &[tenant], &served);
    report_until(
        "its KV cache is known to be full",
        &mut agent,
        &served,
        is_full,
    );
    assert_eq!(served.filter_passed(&newcomer, &["node-a"]), [""; 0]);
    (engine, served, agent, newcomer)
}

#[test]
fn a_hanging_engine_has_unknown_load_and_excludes_no_pod() {
    let (engine, served, mut agent, newcomer) = agent_with_full_engine();
    engine.is(EngineMood::Hangs);
    report_until("nothing is known", &mut agent, &served, |pressure| {
        (pressure.kv_cache, pressure.queue) == (None, None)
    });
    let told = agent.round().unwrap();
    assert_eq!(
        (told.kv_cache_usage, told.waiting),
        (None, None),
        "unknown is not zero"
    );
    assert_eq!(served.filter_passed(&newcomer, &["node-a"]), ["node-a"]);
}

#[test]
fn a_dead_engine_has_unknown_load_and_excludes_no_pod() {
    let (engine, served, mut agent, newcomer) = agent_with_full_engine();
    engine.dies();
    report_until("nothing is known", &mut agent, &served, |pressure| {
        (pressure.kv_cache, pressure.queue) == (None, None)
    });
    assert_eq!(agent.round().unwrap().state, EngineState::Unreachable);
    assert_eq!(served.filter_passed(&newcomer, &["node-a"]), ["node-a"]);
}
