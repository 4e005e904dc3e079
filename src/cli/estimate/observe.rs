//! A running engine, as its metrics page, an agent's report, or a running service shows it.

use super::ObserveArgs;
use crate::cli::http_get::{MAX_ANSWER_BYTES, get};
use crate::cli::operators_client;
use crate::cli::pod_argument::pod_key;
use crate::cli::standard_input::is_standard_input;
use anyhow::{Context, Result, bail};
use bytes::Bytes as Chunk;
use http::{Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::time::Duration;
use stowage_report::engine_metrics;
use stowage_report::{EngineReport, NodeReport};
use stowage_scheduling::explaining::fleet::Fleet;
use stowage_scheduling::ids::{NodeName, PodKey, PodUid};
use stowage_scheduling::units::Bytes;
use stowage_sizing::estimate::right_size::Observation;

/// A node's report, as `/debug/reports` prints it.
#[derive(Debug, Deserialize)]
struct Reported {
    report: NodeReport,
}

/// Timeout for a metrics page: an engine that is busy answers late.
const METRICS_PAGE_TIMEOUT: Duration = Duration::from_secs(20);

pub async fn observe(what: &str, args: &ObserveArgs) -> Result<Observation> {
    if what.starts_with("http://") {
        return from_metrics_page(&fetch(what).await?);
    }
    if what.starts_with("https://") {
        bail!(
            "only http:// is read: use `kubectl port-forward` to the engine's port, and http://127.0.0.1:PORT/metrics"
        );
    }
    let path = Path::new(what);
    if is_standard_input(path) {
        return from_file(&read_limited(std::io::stdin())?);
    }
    if path.is_file() {
        return from_file(&read_limited(std::fs::File::open(path)?)?);
    }
    if path.extension().is_some_and(|kind| {
        ["json", "txt", "prom"]
            .iter()
            .any(|file_kind| kind == *file_kind)
    }) {
        bail!("there is no such file");
    }
    let key = pod_key(what, args.namespace.as_deref()).context(
        "it is no file, and neither a URL nor a pod: write http://HOST:PORT/metrics, or NAMESPACE/NAME",
    )?;
    from_service(&key, args).await
}

fn read_limited(source: impl Read) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source
        .take(MAX_ANSWER_BYTES as u64 + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() > MAX_ANSWER_BYTES {
        bail!(
            "it is larger than {}, which neither a metrics page nor a report is",
            Bytes(MAX_ANSWER_BYTES as u64)
        );
    }
    Ok(bytes)
}

fn from_file(bytes: &[u8]) -> Result<Observation> {
    let is_json = serde_json::from_slice::<IgnoredAny>(bytes).is_ok();
    if is_json {
        from_reports(reports(bytes)?)
    } else {
        from_metrics_page(bytes)
    }
}

fn from_metrics_page(metrics_page: &[u8]) -> Result<Observation> {
    let figures = engine_metrics::parse_page(metrics_page, None)
        .context("this is the metrics page of no known engine")?;
    let problems = figures
        .problems
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>();
    if figures.kv_cache_usage.is_none() && !problems.is_empty() {
        bail!("{}", problems.join("; "));
    }
    Ok(Observation {
        kv_cache_usage: figures.kv_cache_usage,
        kv_cache_tokens: figures.kv_cache_tokens,
        running: figures.running,
        waiting: figures.waiting,
        ..Observation::default()
    })
}

/// A report as `stowage agent --once --json` prints it, several, or what `/debug/reports` answers.
fn reports(bytes: &[u8]) -> Result<Vec<NodeReport>> {
    if let Ok(one) = serde_json::from_slice::<NodeReport>(bytes) {
        return Ok(vec![one]);
    }
    if let Ok(several) = serde_json::from_slice::<Vec<NodeReport>>(bytes) {
        return Ok(several);
    }
    let by_node: BTreeMap<NodeName, Reported> = serde_json::from_slice(bytes)
        .context("this JSON is neither an agent's report nor what /debug/reports answers")?;
    Ok(by_node
        .into_values()
        .map(|reported| reported.report)
        .collect())
}

/// The observation of the only engine in the reports.
fn from_reports(reports: Vec<NodeReport>) -> Result<Observation> {
    let engines: Vec<(&NodeReport, &EngineReport)> = reports
        .iter()
        .flat_map(|report| report.engines.iter().map(move |engine| (report, engine)))
        .collect();
    match engines[..] {
        [] => bail!("the reports show no engine"),
        [(report, engine)] => Ok(from_engine_report(report, engine)),
        _ => bail!(
            "the reports show {} engines: name the pod in place of the file, and a running service with --server",
            engines.len()
        ),
    }
}

fn from_engine_report(report: &NodeReport, engine: &EngineReport) -> Observation {
    Observation {
        reserved: None,
        used: used_by(report, &engine.pod),
        kv_cache_usage: engine.kv_cache_usage,
        kv_cache_tokens: engine.kv_cache_tokens,
        running: engine.running,
        waiting: engine.waiting,
        preempting: engine.preempting,
    }
}

/// What the pod's processes have on all GPUs; `None` if the driver does not say it of each.
fn used_by(report: &NodeReport, pod: &PodUid) -> Option<Bytes> {
    let processes = report
        .gpus
        .iter()
        .flatten()
        .flat_map(|gpu| gpu.processes.iter().flatten());
    let pod_usage: Option<Vec<Bytes>> = processes
        .filter(|process| process.pod.as_ref() == Some(pod))
        .map(|process| process.used_bytes)
        .collect();
    pod_usage
        .filter(|own| !own.is_empty())
        .map(|own| own.into_iter().sum())
}

/// What the service knows of a pod: its grant from the ledger, and the rest from its node's agent.
async fn from_service(key: &PodKey, args: &ObserveArgs) -> Result<Observation> {
    let access = args.access.read().await?;
    let fleet: Fleet = operators_client::get(&access, "/v1/fleet", "fleet").await?;
    let pods = fleet
        .nodes
        .iter()
        .flat_map(|node| node.pods.iter().map(move |pod| (node, pod)));
    let Some((node, pod)) = pods.into_iter().find(|(_, pod)| pod.pod == *key) else {
        bail!("no pod {key} has a GPU; is it bound, and is this its namespace?");
    };
    let mut by_node: BTreeMap<NodeName, Reported> =
        operators_client::get(&access, "/debug/reports", "list of reports").await?;
    let no_engine = || format!("the agent of {} shows no engine in {key}", node.name);
    let reported = by_node.remove(&node.name).with_context(no_engine)?;
    let engine = reported
        .report
        .engines
        .iter()
        .find(|engine| engine.pod == pod.uid)
        .with_context(no_engine)?;
    let reserved = pod.bytes_per_gpu.times(pod.gpus.len() as u64);
    Ok(Observation {
        reserved: Some(reserved),
        ..from_engine_report(&reported.report, engine)
    })
}

async fn fetch(url: &str) -> Result<Chunk> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let (status, page) = get(&client, Request::get(url), METRICS_PAGE_TIMEOUT, "").await?;
    match status {
        StatusCode::OK => Ok(page),
        _ => bail!("it answers {status}; the page is usually at /metrics"),
    }
}
