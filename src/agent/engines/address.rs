//! Candidate addresses of an engine's pages on a pod: from the pod's annotations and labels, then from engines' defaults.
//!
//! A pure function of the pod. `probe` finds out whether a server answers there.

use crate::agent::pods::PodOnNode;
use crate::engine_metrics::Engine;
use http::uri::PathAndQuery;

/// Stowage's own, which take precedence over everything else on the pod.
pub const METRICS_PORT: &str = "stowage.dev/metrics-port";
pub const METRICS_PATH: &str = "stowage.dev/metrics-path";
/// The annotations that many monitoring systems use.
const PROMETHEUS_PORT: &str = "prometheus.io/port";
const PROMETHEUS_PATH: &str = "prometheus.io/path";
const ENGINE_TYPE: &str = "llm-d.ai/engine-type";

const METRICS: PathAndQuery = PathAndQuery::from_static("/metrics");
const HEALTH: PathAndQuery = PathAndQuery::from_static("/health");

/// A page of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsAddress {
    pub port: u16,
    pub path: PathAndQuery,
}

/// What to probe on a pod: the engine, and the addresses of its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineQuery {
    /// The engine its label names.
    pub engine: Option<Engine>,
    pub claim: EngineEvidence,
    /// In the order of the attempts; no address twice.
    pub addresses: Vec<MetricsAddress>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineEvidence {
    /// The pod declares that it is an engine, by Stowage's annotations or by its engine-type label.
    Declared,
    /// It has a GPU, and may be an engine or anything else.
    Guessed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressOwner {
    Pod,
    /// Pods in the host's network share one address: a server on a port that this pod does not declare may be another pod's.
    Shared,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadAnnotation {
    #[error("its annotation {METRICS_PORT} is {0:?}; write a port from 1 to 65535")]
    Port(String),
    #[error("its annotation {METRICS_PATH} is {0:?}; write a path such as /metrics")]
    Path(String),
}

pub fn sought(pod: &PodOnNode, owner: AddressOwner) -> Result<EngineQuery, BadAnnotation> {
    let annotation = |key| pod.annotations.get(key).map(|text| text.trim());
    let engine = pod.labels.get(ENGINE_TYPE).and_then(|text| Engine::from_label(text));
    let own_port = annotation(METRICS_PORT)
        .map(|text| port(text).ok_or_else(|| BadAnnotation::Port(text.into())))
        .transpose()?;
    let own_path = annotation(METRICS_PATH)
        .map(|text| path(text).ok_or_else(|| BadAnnotation::Path(text.into())))
        .transpose()?;
    let is_declared = own_port.is_some() || own_path.is_some() || pod.labels.contains_key(ENGINE_TYPE);
    let claim = if is_declared { EngineEvidence::Declared } else { EngineEvidence::Guessed };
    // The path for a port of which only the number is known.
    let usual_path = match (&own_path, engine) {
        (Some(path), _) => path.clone(),
        (None, Some(engine)) => well_known(engine)[0].path.clone(),
        (None, None) => METRICS,
    };
    let mut addresses = Vec::new();
    let mut add = |port, path: &PathAndQuery| {
        let address = MetricsAddress { port, path: own_path.as_ref().unwrap_or(path).clone() };
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    };
    if let Some(port) = own_port {
        add(port, &usual_path);
        return Ok(EngineQuery { engine, claim, addresses });
    }
    if let Some(port) = annotation(PROMETHEUS_PORT).and_then(port) {
        add(port, &annotation(PROMETHEUS_PATH).and_then(path).unwrap_or_else(|| usual_path.clone()));
    }
    let guesses: Vec<MetricsAddress> = match (owner, engine) {
        (AddressOwner::Shared, _) => Vec::new(),
        (AddressOwner::Pod, Some(engine)) => well_known(engine),
        (AddressOwner::Pod, None) => Engine::ALL.into_iter().flat_map(well_known).collect(),
    };
    // A named engine's default port is a better guess than one of several that the pod declares.
    let (before, after) = if engine.is_some() { (&guesses[..], &[][..]) } else { (&[][..], &guesses[..]) };
    before.iter().for_each(|guess| add(guess.port, &guess.path));
    pod.ports.iter().for_each(|&port| add(port, &usual_path));
    after.iter().for_each(|guess| add(guess.port, &guess.path));
    Ok(EngineQuery { engine, claim, addresses })
}

fn port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|&port| port != 0)
}

fn path(text: &str) -> Option<PathAndQuery> {
    text.starts_with('/').then(|| text.parse().ok()).flatten()
}

/// An engine's default metrics addresses; at least one.
fn well_known(engine: Engine) -> Vec<MetricsAddress> {
    let (ports, path): (&[u16], &'static str) = match engine {
        Engine::Vllm => (&[8000], "/metrics"),
        Engine::Sglang => (&[30000], "/metrics"),
        Engine::TrtllmServe => (&[8000], "/prometheus/metrics"),
        // Its metrics have a port of their own.
        Engine::Triton => (&[8002], "/metrics"),
        Engine::Lmdeploy => (&[23333], "/metrics"),
        // As its image starts it, and as many charts do, because port 80 needs a privilege.
        Engine::Tgi => (&[80, 8080], "/metrics"),
        Engine::LlamaCpp => (&[8080], "/metrics"),
        // A worker has none unless DYN_SYSTEM_PORT sets one: 9090 is what its operator sets, 8081 what its guides use.
        Engine::Dynamo => (&[9090, 8081], "/metrics"),
    };
    ports.iter().map(|&port| MetricsAddress { port, path: PathAndQuery::from_static(path) }).collect()
}

/// The health endpoint of an engine whose metrics are at `metrics`, if it has one.
pub fn health(engine: Option<Engine>, metrics: &MetricsAddress) -> Option<MetricsAddress> {
    match engine {
        Some(Engine::Dynamo | Engine::Lmdeploy) => None,
        Some(Engine::Triton) => {
            Some(MetricsAddress { port: 8000, path: PathAndQuery::from_static("/v2/health/ready") })
        }
        _ => Some(MetricsAddress { port: metrics.port, path: HEALTH }),
    }
}

/// The endpoint where llama.cpp reports the size of its KV cache.
pub fn properties(metrics: &MetricsAddress) -> MetricsAddress {
    MetricsAddress { port: metrics.port, path: PathAndQuery::from_static("/props") }
}
