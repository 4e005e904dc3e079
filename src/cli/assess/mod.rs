//! `stowage assess`: what sharing GPUs would save in a cluster as it is. [`nodes`] reads how it hands out GPUs, [`dump`] what pods have of
//! them, [`prometheus`] what they use, [`model`] which models they serve; [`text`] and [`page`] print the answer. Nothing is decided here.

mod dump;
mod model;
mod nodes;
mod page;
mod prometheus;
mod text;

use super::output::OutputArgs;
use super::plan::gather::{fleet_from_objects, policy_for};
use super::{NO_ANSWER, duration, exit_without_answer, standard_input};
use anyhow::{Context, Result, ensure};
use clap::Args;
use dump::{Ask, Cluster};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use prometheus::{Prometheus, Reader};
use std::collections::BTreeMap;
#[cfg(feature = "lab")]
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use stowage_policy_file::format::parse_quantity;
use stowage_scheduling::ids::printable;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, plural};
use stowage_server::kubernetes::manifests::MAX_PODS;
use stowage_sizing::assess::need::Workload;
use stowage_sizing::assess::report::Assessment;
use stowage_sizing::assess::{AssessQuestion, assess};
use stowage_sizing::capacity_plan::question::PodToPlace;

/// The quantile, unless another is asked for.
const QUANTILE: u8 = 99;
const HELP: &str = "Exit codes: 0 with an answer, 1 if pods have no place in it, 2 if something cannot be read or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct AssessArgs {
    /// What `kubectl get nodes,pods,namespaces -A -o json` printed, with resourceclaims,resourceslices where DRA is used; `-` is
    /// standard input
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,

    /// A Prometheus with figures of the DCGM exporter and of engines, such as http://127.0.0.1:9090; it is only read
    #[arg(long, value_name = "URL", conflicts_with = "metrics")]
    prometheus: Option<String>,

    /// CA certificates to trust for --prometheus, PEM
    #[arg(long, value_name = "FILE", requires = "prometheus")]
    prometheus_ca: Option<PathBuf>,

    /// A token to present to --prometheus, over https:// only
    #[arg(long, value_name = "FILE", requires = "prometheus")]
    prometheus_token_file: Option<PathBuf>,

    /// A file of what /api/v1/query_range answered, in place of --prometheus
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,

    /// How much of the past to ask --prometheus for
    #[arg(long, value_name = "DURATION", default_value = "7d", value_parser = duration)]
    window: Duration,

    /// The time from one sample of --prometheus to the next
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration)]
    step: Duration,

    /// The quantile that is shown beside the median and the peak
    #[arg(long, value_name = "PERCENT", default_value_t = QUANTILE, value_parser = clap::value_parser!(u8).range(1..=100))]
    quantile: u8,

    /// The policy, a file or a directory [default: the built-in policy]
    #[arg(long, value_name = "PATH")]
    policy: Option<PathBuf>,

    /// The end of the window, and when the policy's windows are open, such as 2026-11-23T22:00:00+01:00 [default: now]
    #[arg(long, value_name = "TIME")]
    at: Option<Timestamp>,

    /// What an opportunistic job requests, such as 20Gi [default: the most that a preemptible pod could request]
    #[arg(long, value_name = "QUANTITY", value_parser = quantity)]
    job: Option<Bytes>,

    /// What a GPU costs for an hour
    #[arg(long, value_name = "PRICE", value_parser = price)]
    gpu_hour_price: Option<f64>,

    /// Also write the answer as a page of HTML
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,
}

fn quantity(text: &str) -> Result<Bytes, String> {
    parse_quantity(text).map_err(|malformed| malformed.to_string())
}

fn price(text: &str) -> Result<f64, String> {
    let price = text.parse().ok().filter(|price| (0.0..1e6).contains(price));
    price.ok_or_else(|| "write a number, such as 2.50".to_owned())
}

impl AssessArgs {
    pub async fn run(self) -> Result<ExitCode> {
        self.try_run().await.or_else(exit_without_answer)
    }

    async fn try_run(self) -> Result<ExitCode> {
        let files = [
            ("--cluster", Some(&self.cluster)),
            ("--policy", self.policy.as_ref()),
            ("--metrics", self.metrics.as_ref()),
        ];
        let named = files
            .into_iter()
            .filter_map(|(flag, path)| Some((flag, path?.as_path())));
        standard_input::check_named_once(named)?;
        let cluster = dump::read(&self.cluster)?;
        let count = cluster.pods.len();
        ensure!(
            count <= MAX_PODS,
            "--cluster has {count} pods with GPUs, and a plan takes {MAX_PODS}: dump some of the nodes and namespaces"
        );
        let path = self.policy.as_deref();
        let at = path.and(self.at);
        let Some(policy) = policy_for(path, at, Some(&cluster.namespaces))? else {
            return Ok(NO_ANSWER.into());
        };
        let asked = Asked::new(&cluster, &policy);
        let mut reader = asked.reader();
        if let Some(path) = &self.metrics {
            let of = || format!("--metrics {}", path.display());
            reader.read_file(path).with_context(of)?;
        }
        if let Some(url) = &self.prometheus {
            let server = Prometheus {
                url: url.clone(),
                ca: self.prometheus_ca.clone(),
                token_file: self.prometheus_token_file.clone(),
            };
            ensure!(
                !self.step.is_zero() && self.step <= self.window,
                "--step must be more than zero, and no longer than --window"
            );
            let end = self.at.unwrap_or_else(Timestamp::now).as_second();
            let seconds = |length: Duration| length.as_secs().max(1) as i64;
            let (window, step) = (seconds(self.window), seconds(self.step));
            let asked = reader.query(&server, end, window, step).await;
            asked.with_context(|| format!("--prometheus {url}"))?;
        }
        let answer = asked.answer(reader, self.quantile, self.job, self.gpu_hour_price)?;
        if let Some(path) = &self.page {
            std::fs::write(path, page::page(&answer))
                .with_context(|| format!("--page {}", path.display()))?;
        }
        self.output.print(&answer, text::text)?;
        Ok(u8::from(!answer.not_held.is_empty()).into())
    }
}

/// What such files say under the built-in policy.
#[cfg(feature = "lab")]
pub fn of_files(cluster: &Path, metrics: &Path) -> Result<(Assessment, Policy)> {
    let cluster = dump::read(cluster)?;
    let policy = policy_for(None, None, Some(&cluster.namespaces))?;
    let policy = policy.context("the built-in policy is one")?;
    let asked = Asked::new(&cluster, &policy);
    let mut reader = asked.reader();
    reader.read_file(metrics)?;
    Ok((asked.answer(reader, QUANTILE, None, None)?, policy))
}

/// A cluster, and what makes its pods; what they use is read next.
struct Asked<'c> {
    cluster: &'c Cluster,
    policy: &'c Policy,
    workloads: Vec<Workload>,
    unreadable: usize,
}

impl<'c> Asked<'c> {
    fn new(cluster: &'c Cluster, policy: &'c Policy) -> Self {
        let (workloads, unreadable) = workloads(cluster, policy);
        Self {
            cluster,
            policy,
            workloads,
            unreadable,
        }
    }

    fn reader(&self) -> Reader {
        let whole = self.workloads.iter().enumerate();
        let whole = whole.filter(|(_, one)| one.kept.is_none());
        Reader::new(
            pods_by_name(self.cluster, &self.workloads),
            whole.map(|(index, _)| index).collect(),
            self.cluster.nodes.keys().cloned().collect(),
        )
    }

    /// `quantile` is in per cent, and `job` what an opportunistic one requests.
    fn answer(
        self,
        reader: Reader,
        quantile: u8,
        job: Option<Bytes>,
        gpu_hour_price: Option<f64>,
    ) -> Result<Assessment> {
        let (cluster, policy, mut workloads) = (self.cluster, self.policy, self.workloads);
        let limit = |class| policy.class(class).latency_limits().time_per_token;
        let planning = policy.clone().without_latency_limits();
        for (index, named) in &reader.models {
            let one = &mut workloads[*index];
            let pod = &cluster.pods[one.pods[0]];
            one.model = Some(model::find(pod, Some(named)));
        }
        let make = |pod: usize, one: &Workload, per_gpu: Option<Bytes>| {
            cluster.place(&cluster.pods[pod], one, per_gpu, &planning)
        };
        let of = |one| move |pod: &usize| make(*pod, one, None);
        let placed = workloads
            .iter()
            .flat_map(|one| one.pods.iter().filter_map(of(one)));
        let placed: Vec<PodToPlace> = placed.collect();
        let nodes = cluster.whole_nodes();
        let kinds = match nodes.is_empty() {
            true => Ok(Vec::new()),
            false => fleet_from_objects(&nodes, &placed, &planning),
        };
        let job = job.map(|job| dump::job(job, &planning)).transpose();
        let gpus = cluster.nodes.iter();
        let question = AssessQuestion {
            node_kinds: kinds.context("--cluster")?,
            gpus: gpus
                .map(|(name, (_, gpus))| (name.clone(), gpus.gpus))
                .collect(),
            unreadable: self.unreadable,
            policy: Arc::new(planning.clone()),
            limit: &limit,
            workloads,
            usage: reader.usage,
            quantile: quantile.into(),
            job: job.context("--job")?,
            gpu_hour_price,
            make: &make,
        };
        let mut answer = assess(&question);
        answer.cautions.extend(reader.warnings);
        answer.cautions.extend(left_out(cluster, reader.foreign));
        Ok(answer)
    }
}

/// What no figure has, for people.
fn left_out(cluster: &Cluster, foreign: usize) -> Vec<String> {
    let mut texts = Vec::new();
    let nodes = cluster.nodes.values();
    let gone = nodes.filter(|(node, _)| !dump::is_ready(node)).count();
    if gone > 0 {
        let nodes = plural(gone, "node");
        texts.push(format!("Without pods and jobs, as not ready: {nodes}."));
    }
    if foreign > 0 {
        texts.push(format!(
            "Left out as their hosts are no nodes of the dump: {foreign} of the time series of GPUs."
        ));
    }
    for (why, what, names) in [
        ("they have no node", "pod", &cluster.unbound),
        (
            "nothing says how many GPUs they have",
            "node",
            &cluster.unread,
        ),
    ] {
        if let Some(first) = names.first() {
            let (count, first) = (plural(names.len(), what), printable(first));
            texts.push(format!("Left out as {why}: {count}, such as {first}."));
        }
    }
    texts
}

/// The pods by what makes them, and of how many it cannot be read what they have.
fn workloads(cluster: &Cluster, policy: &Policy) -> (Vec<Workload>, usize) {
    let mut found: BTreeMap<(String, String), Workload> = BTreeMap::new();
    let mut unreadable = 0;
    for (index, pod) in cluster.pods.iter().enumerate() {
        let Some(Ask { gpus, part, kept }) = cluster.ask(pod, policy) else {
            unreadable += 1;
            continue;
        };
        let (kind, namespace, name) = dump::workload(pod);
        let name = printable(&format!("{kind} {namespace}/{name}"));
        let gpu = cluster.node_of(pod).map(|node| node.gpu.clone());
        // Replicas on other GPUs, or that have them in another way, are a workload of their own.
        let apart = format!(
            "{kept:?} {part} {gpus} {:?}",
            gpu.as_ref().map(|gpu| &gpu.model)
        );
        let new = || Workload {
            name: name.clone(),
            pods: Vec::new(),
            nodes: BTreeMap::new(),
            gpus,
            part,
            kept,
            gpu,
            model: model::shows_engine(pod).then(|| model::find(pod, None)),
        };
        let one = found.entry((name.clone(), apart)).or_insert_with(new);
        one.pods.push(index);
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        *one.nodes.entry(node.unwrap_or_default()).or_default() += 1;
    }
    (found.into_values().collect(), unreadable)
}

/// Workloads by namespace and name of their pods, and by what names of other pods that they make begin with.
fn pods_by_name(cluster: &Cluster, workloads: &[Workload]) -> BTreeMap<(String, String), usize> {
    let mut found = BTreeMap::new();
    for (index, one) in workloads.iter().enumerate() {
        for pod in &one.pods {
            let pod: &Pod = &cluster.pods[*pod];
            let (kind, namespace, name) = dump::workload(pod);
            if kind != "Pod" {
                let began = (namespace.clone(), format!("{name}-"));
                found.entry(began).or_insert(index);
            }
            found.insert(
                (namespace, pod.metadata.name.clone().unwrap_or_default()),
                index,
            );
        }
    }
    found
}
