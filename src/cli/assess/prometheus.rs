//! Figures of the DCGM exporter and of engines, as the HTTP API of a Prometheus answers them: from one that runs, a day at a time, or
//! from a file of its answers. They are folded answer by answer.

use crate::cli::access::connector;
use crate::cli::http_get::get;
use crate::cli::operators_client::escape_query_value;
use anyhow::{Context, Result, bail, ensure};
use http::{Request, header};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;
use stowage_scheduling::engines::{DECLARATIONS, MetricQuantity, MetricReading};
use stowage_scheduling::ids::printable;
use stowage_sizing::assess::usage::{Answer, Quantity, Series, Usage};
use stowage_telemetry::trust::{Trust, authorization};

/// How long one query of `stowage assess` waits: Prometheus itself gives up after two minutes.
const PROMETHEUS_TIMEOUT: Duration = Duration::from_secs(130);
const ASK_FOR_LESS: &str = "; a longer --step asks for less";
const DAY_S: i64 = 86_400;
const GPU_METRICS: [(&str, Quantity); 3] = [
    ("DCGM_FI_DEV_FB_USED", Quantity::Vram),
    ("DCGM_FI_DEV_GPU_UTIL", Quantity::Utilization),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", Quantity::Active),
];
/// Letters of random names, in which Kubernetes has no vowels, and of ordinals.
const APPENDED: &[u8] = b"bcdfghjklmnpqrstvwxz0123456789";
const ADDRESS: &str = "give the address before /api/v1, such as http://127.0.0.1:9090";

pub struct Prometheus {
    pub url: String,
    pub ca: Option<PathBuf>,
    pub token_file: Option<PathBuf>,
}

#[derive(Deserialize)]
struct ApiAnswer<'a> {
    status: Cow<'a, str>,
    error: Option<String>,
    warnings: Option<Vec<String>>,
    /// VictoriaMetrics' warning.
    #[serde(default, rename = "isPartial")]
    is_partial: bool,
    #[serde(borrow)]
    data: Option<Matrix<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Matrix<'a> {
    result_type: Cow<'a, str>,
    #[serde(borrow)]
    result: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawSeries<'a> {
    metric: BTreeMap<String, String>,
    #[serde(borrow, default)]
    values: Vec<(f64, Cow<'a, str>)>,
}

impl RawSeries<'_> {
    /// The first of these labels that is there, and not empty.
    fn label(&self, names: &[&str]) -> Option<&str> {
        let values = names.iter().filter_map(|name| self.metric.get(*name));
        values.map(String::as_str).find(|value| !value.is_empty())
    }
}

/// Reads figures of some workloads.
pub struct Reader {
    pub usage: Usage,
    /// What may be incomplete.
    pub warnings: BTreeSet<String>,
    /// The models that metrics name, by workload.
    pub models: BTreeMap<usize, String>,
    /// Workloads by namespace and name of a pod, or what one begins with and a hyphen.
    pods: BTreeMap<(String, String), usize>,
    /// Workloads of which a GPU's figures are figures.
    whole: BTreeSet<usize>,
    nodes: BTreeSet<String>,
    /// Series of GPUs of other nodes.
    pub foreign: usize,
    engine_metrics: BTreeMap<String, (Quantity, &'static MetricReading)>,
}

impl Reader {
    pub fn new(
        pods: BTreeMap<(String, String), usize>,
        whole: BTreeSet<usize>,
        nodes: BTreeSet<String>,
    ) -> Self {
        let dialects = DECLARATIONS.iter().flat_map(|one| one.dialects);
        let metrics = dialects.flat_map(|dialect| {
            let metrics = dialect.metrics.iter();
            metrics.filter_map(|(name, reading)| {
                Some((
                    format!("{}{name}", dialect.prefix),
                    (quantity(reading)?, reading),
                ))
            })
        });
        Self {
            usage: Usage::default(),
            warnings: BTreeSet::new(),
            models: BTreeMap::new(),
            pods,
            whole,
            nodes,
            foreign: 0,
            engine_metrics: metrics.collect(),
        }
    }

    /// Reads answers to range queries: an array of them, or one after the other.
    pub fn read_file(&mut self, path: &Path) -> Result<()> {
        let bytes = std::fs::read(path)?;
        let answers = match bytes.trim_ascii_start().starts_with(b"[") {
            true => serde_json::from_slice(&bytes),
            false => serde_json::Deserializer::from_slice(&bytes)
                .into_iter()
                .collect(),
        };
        let answers: Vec<ApiAnswer<'_>> = answers
            .context("it should have what /api/v1/query_range answers, several in an array")?;
        answers.into_iter().try_for_each(|answer| self.fold(answer))
    }

    /// Asks a Prometheus for the window that ends at `end`, in seconds.
    pub async fn query(
        &mut self,
        from: &Prometheus,
        end: i64,
        window: i64,
        step: i64,
    ) -> Result<()> {
        let end = end - end.rem_euclid(step);
        let start = end - window + step;
        (self.usage.window, self.usage.step) = (Some((start, end)), Some(step));
        let is_tls = from.url.starts_with("https://");
        ensure!(
            !is_tls || from.ca.is_some(),
            "https:// needs --prometheus-ca"
        );
        let token_file = from.token_file.as_ref();
        ensure!(
            is_tls || token_file.is_none(),
            "a token is sent over https:// only"
        );
        let token = token_file.map(|file| authorization(file)).transpose()?;
        let trust = Trust::new(from.ca.clone()).context("--prometheus-ca")?;
        let client = Client::builder(TokioExecutor::new()).build(connector(&trust.config, None));
        let engines: Vec<&str> = self.engine_metrics.keys().map(String::as_str).collect();
        let engines = format!("{{__name__=~\"{}\"}}", engines.join("|"));
        let queries = GPU_METRICS.map(|(name, _)| name.to_owned()).into_iter();
        let queries: Vec<String> = queries.chain([engines]).collect();
        let base = from.url.trim_end_matches('/');
        let mut first = start;
        while first <= end {
            let last = end.min(first + DAY_S.max(step) - step);
            for query in &queries {
                let query = escape_query_value(query);
                let mut request = Request::get(format!(
                    "{base}/api/v1/query_range?query={query}&start={first}&end={last}&step={step}"
                ));
                if let Some(token) = &token {
                    request = request.header(header::AUTHORIZATION, token);
                }
                let (status, body) =
                    get(&client, request, PROMETHEUS_TIMEOUT, ASK_FOR_LESS).await?;
                match serde_json::from_slice(&body) {
                    Ok(answer) => self.fold(answer)?,
                    Err(_) if !status.is_success() => bail!("it answers {status}; {ADDRESS}"),
                    Err(error) => {
                        let what = format!("that is no answer of a Prometheus; {ADDRESS}");
                        return Err(error).context(what);
                    }
                }
            }
            first = last + step;
        }
        Ok(())
    }

    fn fold(&mut self, answer: ApiAnswer<'_>) -> Result<()> {
        if answer.status != "success" {
            bail!(
                "it answers: {}",
                printable(&answer.error.unwrap_or_default())
            );
        }
        let incomplete =
            |warning: String| format!("Figures may be incomplete: {}.", printable(&warning));
        let partial = "not all storage nodes have answered";
        let partial = answer.is_partial.then(|| partial.to_owned());
        let warnings = answer.warnings.into_iter().flatten().chain(partial);
        self.warnings.extend(warnings.map(incomplete));
        let matrix = answer.data.context("an answer has no data")?;
        let kind = matrix.result_type;
        ensure!(kind == "matrix", "a {kind} is no answer to a range query");
        let mut folded = Answer::default();
        for raw in matrix.result {
            let series: RawSeries<'_> = serde_json::from_str(raw.get())?;
            if let Some(series) = self.series(&series) {
                folded.add(series, &mut self.usage);
            }
        }
        folded.fold(&mut self.usage);
        Ok(())
    }

    /// `None` for what is not needed, or of no pod.
    fn series(&mut self, raw: &RawSeries<'_>) -> Option<Series> {
        let name = raw.label(&["__name__"])?;
        // Prometheus renames what clashes with the labels of the exporter's own pod.
        let pod = raw.label(&["exported_pod", "pod", "pod_name"]);
        let namespace = raw.label(&["exported_namespace", "namespace", "pod_namespace"]);
        let workload = namespace
            .zip(pod)
            .and_then(|(namespace, pod)| self.workload(namespace, pod));
        let gpu_metric = GPU_METRICS.iter().find(|(known, _)| *known == name);
        let (quantity, device, workload, value) = match gpu_metric {
            Some((_, quantity)) => {
                let host = raw.label(&["Hostname", "hostname"]);
                if host.is_some_and(|host| !self.nodes.contains(host)) {
                    self.foreign += 1;
                    return None;
                }
                // Of a shared GPU the label names one pod of several.
                let own = workload.filter(|index| self.whole.contains(index));
                let gpu = raw.label(&["UUID", "uuid"]);
                // A slice has no figure of its GPU.
                let gpu = gpu.filter(|_| raw.label(&["GPU_I_ID"]).is_none())?;
                (*quantity, gpu.to_owned(), own, None)
            }
            None => {
                let model = raw.label(&["model_name"]).map(printable);
                self.models.extend(workload.zip(model));
                let (quantity, reading) = *self.engine_metrics.get(name)?;
                let value = match reading {
                    MetricReading::Labels(labels) => Some(kv_tokens(labels, raw)?),
                    _ => None,
                };
                let engine = format!("{}/{}", namespace?, pod?);
                (quantity, engine, Some(workload?), value)
            }
        };
        let values = raw.values.iter().map(|(time, text)| {
            let value = value.or_else(|| text.parse().ok());
            (*time as i64, value.unwrap_or(f64::NAN))
        });
        Some(Series {
            quantity,
            device: device.into(),
            workload,
            samples: values.collect(),
        })
    }

    /// The workload of a pod. One that has gone is known by what its name begins with, before what controllers append.
    fn workload(&self, namespace: &str, pod: &str) -> Option<usize> {
        let is_appended = |part: &str| part.bytes().all(|letter| APPENDED.contains(&letter));
        let find = |name: &str| self.pods.get(&(namespace.into(), name.into())).copied();
        let mut found = find(pod);
        let mut name = pod;
        for _ in 0..2 {
            let appended = name.rsplit_once('-').filter(|(_, part)| is_appended(part));
            name = appended.map_or("", |(before, _)| before);
            found = found.or_else(|| find(&format!("{name}-")));
        }
        found
    }
}

/// What a series of an engine measures, if that is needed.
fn quantity(reading: &MetricReading) -> Option<Quantity> {
    Some(match reading {
        MetricReading::Labels(_) => Quantity::KvTokens,
        MetricReading::Value(of) => match of {
            MetricQuantity::KvUsage | MetricQuantity::KvUsageOldName => Quantity::KvUsage,
            MetricQuantity::Waiting => Quantity::Waiting,
            MetricQuantity::Running => Quantity::Running,
            MetricQuantity::KvTokens => Quantity::KvTokens,
            MetricQuantity::Preemptions => Quantity::Preemptions,
            _ => return None,
        },
        _ => return None,
    })
}

/// Tokens that the KV cache holds, as labels say it.
fn kv_tokens(labels: &[(&str, MetricQuantity)], raw: &RawSeries<'_>) -> Option<f64> {
    let number = |wanted| {
        let (key, _) = labels.iter().find(|(_, of)| *of == wanted)?;
        raw.label(&[*key])?.parse::<f64>().ok()
    };
    let blocks = number(MetricQuantity::KvBlocks).zip(number(MetricQuantity::BlockTokens));
    number(MetricQuantity::KvTokens).or(blocks.map(|(count, each)| count * each))
}
