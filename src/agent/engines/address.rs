//! Candidate addresses of a pod's engines: from the pod's annotations and labels, then from engines' defaults.
//!
//! A pure function of the pod. `probe` finds out whether a server answers there.

use crate::pods::PodOnNode;
use http::uri::PathAndQuery;
use stowage_scheduling::engines::{DECLARATIONS, Engine};

/// Stowage's own annotations, which take precedence over everything else on the pod.
pub const METRICS_PORT: &str = "stowage.dev/metrics-port";
pub(crate) const METRICS_PATH: &str = "stowage.dev/metrics-path";
/// The annotations that many monitoring systems use, and those that KServe writes on the pods of its runtimes.
const PROMETHEUS: [&str; 2] = ["prometheus.io/", "prometheus.kserve.io/"];
const ENGINE_TYPE: &str = "llm-d.ai/engine-type";

/// Ports of one pod at which an engine may be, at most: the eight of a node's GPUs and some more. Others are not probed, and the
/// pod contract says so.
pub(crate) const MAX_ENGINE_PORTS: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    Http,
    Https,
}

/// The address of an HTTP endpoint on a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsAddress {
    /// The scheme to try first.
    pub scheme: Scheme,
    pub port: u16,
    pub path: PathAndQuery,
}

/// What to probe on a pod: the engine, and the addresses of its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineQuery {
    /// The engine its label names.
    pub engine: Option<Engine>,
    pub evidence: EngineEvidence,
    /// In the order of the attempts; no address twice.
    pub addresses: Vec<MetricsAddress>,
    /// The ports that the pod declares. Each may be that of an engine of its own.
    pub ports: Vec<u16>,
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
pub enum AnnotationError {
    #[error(
        "its annotation {METRICS_PORT} is {0:?}; write a port from 1 to 65535, or up to {MAX_ENGINE_PORTS} of them with commas"
    )]
    Port(String),
    #[error("its annotation {METRICS_PATH} is {0:?}; write a path such as /metrics")]
    Path(String),
}

pub fn engine_query(pod: &PodOnNode, owner: AddressOwner) -> Result<EngineQuery, AnnotationError> {
    let annotation = |key: &str| pod.annotations.get(key).map(|text| text.trim());
    let label = pod.labels.get(ENGINE_TYPE);
    let engine = label
        .map(|text| Engine::from_text(text))
        .filter(|engine| *engine != Engine::Other);
    let annotated_ports = annotation(METRICS_PORT)
        .map(|text| parse_ports(text).ok_or_else(|| AnnotationError::Port(text.into())))
        .transpose()?;
    let annotated_path = annotation(METRICS_PATH)
        .map(|text| parse_path(text).ok_or_else(|| AnnotationError::Path(text.into())))
        .transpose()?;
    let is_declared = annotated_ports.is_some() || annotated_path.is_some() || label.is_some();
    let evidence = if is_declared {
        EngineEvidence::Declared
    } else {
        EngineEvidence::Guessed
    };
    let prometheus_address = PROMETHEUS.iter().find_map(|prefix| {
        let prometheus_annotation = |name: &str| annotation(&format!("{prefix}{name}"));
        let scheme = if prometheus_annotation("scheme") == Some("https") {
            Scheme::Https
        } else {
            Scheme::Http
        };
        Some((
            parse_port(prometheus_annotation("port")?)?,
            prometheus_annotation("path").and_then(parse_path),
            scheme,
        ))
    });
    let mut ports = annotated_ports.clone().unwrap_or_else(|| {
        prometheus_address
            .iter()
            .map(|(port, ..)| *port)
            .chain(pod.ports.iter().copied())
            .collect()
    });
    dedup(&mut ports);
    let mut addresses = Addresses {
        annotated_path,
        list: Vec::new(),
    };
    // The path for a port of which only the number is known, and those at which other engines have theirs.
    let default_path = PathAndQuery::from_static(engine.unwrap_or_default().declaration().path);
    let other_engines_paths = DECLARATIONS
        .iter()
        .map(|one| PathAndQuery::from_static(one.path));
    if let (Some((port, path, scheme)), None) = (prometheus_address, &annotated_ports) {
        addresses.add(scheme, port, path.as_ref().unwrap_or(&default_path));
    }
    let guesses = match (owner, engine) {
        _ if annotated_ports.is_some() => Vec::new(),
        (AddressOwner::Shared, _) => Vec::new(),
        (AddressOwner::Pod, Some(engine)) => default_addresses(engine),
        (AddressOwner::Pod, None) => Engine::ALL
            .into_iter()
            .flat_map(default_addresses)
            .collect(),
    };
    // A named engine's default port is a better guess than one of several that the pod declares.
    let (before, after) = if engine.is_some() {
        (&guesses[..], &[][..])
    } else {
        (&[][..], &guesses[..])
    };
    before
        .iter()
        .for_each(|(port, path)| addresses.add(Scheme::Http, *port, path));
    ports
        .iter()
        .for_each(|&port| addresses.add(Scheme::Http, port, &default_path));
    for path in other_engines_paths {
        ports
            .iter()
            .for_each(|&port| addresses.add(Scheme::Http, port, &path));
    }
    after
        .iter()
        .for_each(|(port, path)| addresses.add(Scheme::Http, *port, path));
    Ok(EngineQuery {
        engine,
        evidence,
        addresses: addresses.list,
        ports,
    })
}

impl EngineQuery {
    /// The query for one of the pod's ports. A port beside that of a known engine may be anything, unless the pod's own annotation
    /// names it.
    pub fn at_port(&self, port: u16, evidence: EngineEvidence) -> Self {
        let addresses = self
            .addresses
            .iter()
            .filter(|address| address.port == port)
            .cloned()
            .collect();
        Self {
            engine: self.engine,
            evidence,
            addresses,
            ports: vec![port],
        }
    }
}

struct Addresses {
    /// The path of the pod's annotation, which replaces every other path.
    annotated_path: Option<PathAndQuery>,
    list: Vec<MetricsAddress>,
}

impl Addresses {
    fn add(&mut self, scheme: Scheme, port: u16, path: &PathAndQuery) {
        let path = self.annotated_path.as_ref().unwrap_or(path);
        if !self
            .list
            .iter()
            .any(|other| other.port == port && other.path == *path)
        {
            self.list.push(MetricsAddress {
                scheme,
                port,
                path: path.clone(),
            });
        }
    }
}

fn parse_port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|&port| port != 0)
}

fn parse_ports(text: &str) -> Option<Vec<u16>> {
    let mut ports: Vec<u16> = text
        .split(',')
        .map(|text| parse_port(text.trim()))
        .collect::<Option<_>>()?;
    let is_within = ports.len() <= MAX_ENGINE_PORTS;
    dedup(&mut ports);
    is_within.then_some(ports)
}

/// Each once, in order, and no more than are probed.
fn dedup(ports: &mut Vec<u16>) {
    let mut kept = Vec::new();
    ports.retain(|port| {
        !kept.contains(port) && kept.len() < MAX_ENGINE_PORTS && {
            kept.push(*port);
            true
        }
    });
}

fn parse_path(text: &str) -> Option<PathAndQuery> {
    text.starts_with('/').then(|| text.parse().ok()).flatten()
}

/// An engine's default metrics addresses.
fn default_addresses(engine: Engine) -> Vec<(u16, PathAndQuery)> {
    let one = engine.declaration();
    one.ports
        .iter()
        .map(|&port| (port, PathAndQuery::from_static(one.path)))
        .collect()
}

/// The health endpoint of an engine whose metrics are at `metrics`, if it has one. A server of which no engine is known is asked
/// where most engines have theirs.
pub fn health_address(engine: Option<Engine>, metrics: &MetricsAddress) -> Option<MetricsAddress> {
    let endpoint = engine.unwrap_or(Engine::Vllm).declaration().health?;
    Some(MetricsAddress {
        scheme: metrics.scheme,
        port: endpoint.port.unwrap_or(metrics.port),
        path: PathAndQuery::from_static(endpoint.path),
    })
}

/// The endpoint where llama.cpp reports the size of its KV cache.
pub fn properties_address(metrics: &MetricsAddress) -> MetricsAddress {
    MetricsAddress {
        path: PathAndQuery::from_static("/props"),
        ..metrics.clone()
    }
}
