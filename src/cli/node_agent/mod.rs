//! `stowage agent`: its arguments, and the sources that they name.

mod tables;

use super::duration;
use super::log::LogArgs;
use super::output::OutputArgs;
use anyhow::{Context, Result, ensure};
use clap::Args;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;
use stowage_agent::models::images::NodeImages;
use stowage_agent::models::{
    CombinedModelSources, ModelSource, NodeModels, default_hugging_face_caches,
};
use stowage_agent::nvml::{Nvml, NvmlOptions};
use stowage_agent::ownership::Owners;
use stowage_agent::pods::watched::WatchedPods;
use stowage_agent::pods::{NoPods, PodOnNode, PodSource};
use stowage_agent::publish::{Destination, Publisher};
use stowage_agent::run::{self, AgentOptions};
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_report::NodeReport;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::units::Bytes;
use stowage_server::kubernetes;
use stowage_telemetry::listening;

#[derive(Debug, Args)]
#[command(after_help = super::EXIT_CODES_OF_AGENT)]
#[command(mut_arg("output", |output| output.requires("once")), mut_arg("json", |json| json.requires("once")))]
pub struct AgentArgs {
    /// The Node object's name [default: this machine's host name]
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node: Option<String>,

    /// Where to report: https://HOST:PORT, once for each replica, or a name that resolves to all of them
    #[arg(long, value_name = "URL")]
    extender: Vec<Destination>,

    /// CA certificates to trust, PEM
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// The service account token to report with; it is read again when it is renewed
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// Time from one report to the next, from 100ms to 15s. A report counts as fresh for 5 s; from 4s on, raise telemetry.fresh,
    /// telemetry.stale and telemetry.smoothing of the policy, too
    #[arg(long, value_name = "DURATION", default_value = "1s", value_parser = interval)]
    interval: Duration,

    /// An NVML library in place of the driver's own
    #[arg(long, value_name = "FILE")]
    nvml_lib: Option<PathBuf>,

    /// The size of a GPU that shares the host's memory and does not report it, such as 120Gi
    #[arg(long, value_name = "QUANTITY", value_parser = quantity)]
    gpu_memory: Option<Bytes>,

    /// An MPS daemon serves the GPUs: pods may share one in compute mode exclusive-process
    #[arg(long)]
    mps: bool,

    /// The kubelet's pod-resources socket
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pod_resources: PathBuf,

    /// The host's /proc
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    proc: PathBuf,

    /// The host's cgroups, where VRAM limits are read
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/cgroup")]
    cgroup_root: PathBuf,

    /// A Hugging Face cache, the folder with models--* in it; once for each [default: the hub client's own]
    #[arg(long, value_name = "DIR")]
    hf_cache: Vec<PathBuf>,

    /// A folder of KServe's local models; once for each
    #[arg(long, value_name = "DIR")]
    kserve_models: Vec<PathBuf>,

    /// Kubeconfig of the cluster with this node's pods [default: KUBECONFIG, ~/.kube/config, then the pod's service account]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Where to serve metrics for Prometheus, such as 0.0.0.0:9447; without it they are not served
    #[arg(long, value_name = "ADDRESS", value_parser = super::address::address, conflicts_with = "once")]
    metrics_listen: Option<SocketAddr>,

    /// A socket at which pods ask for their turn to start (`stowage wait-turn`), in a folder that they mount
    #[arg(long, value_name = "FILE", conflicts_with = "once")]
    turns: Option<PathBuf>,

    /// Sample once, print the report, and exit; with --extender, report it too
    #[arg(long)]
    once: bool,

    /// Print tables (the default with --once)
    #[arg(long, requires = "once", conflicts_with_all = ["json", "output"])]
    print: bool,

    #[command(flatten)]
    output: OutputArgs,

    #[command(flatten)]
    pub log: LogArgs,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    match interval.as_millis() {
        100..=15_000 => Ok(interval),
        _ => Err("write a duration from 100ms to 15s, such as 1s".into()),
    }
}

fn quantity(text: &str) -> Result<Bytes, String> {
    Bytes::parse_quantity(text).map_err(|error| error.to_string())
}

impl AgentArgs {
    /// Whether it samples only once: missing parts are then printed, not logged.
    pub fn is_single_sample(&self) -> bool {
        self.once
    }

    pub async fn run(self) -> Result<()> {
        let (once, output) = (self.once, self.output);
        let options = self.options().await?;
        if !once {
            return run::run(options).await;
        }
        let print = |report: &NodeReport, pods: &[PodOnNode]| {
            let text = |report: &NodeReport, columns| tables::render_tables(report, pods, columns);
            output.print(report, text)
        };
        run::sample_once(options, print).await
    }

    async fn options(self) -> Result<AgentOptions> {
        let node = node_name(self.node)?;
        let publisher = match self.extender.is_empty() {
            true => None,
            false => Some(Publisher::new(self.extender, self.token_file, self.ca)?),
        };
        let hf_caches = match self.hf_cache.is_empty() {
            true => default_hugging_face_caches(|variable| std::env::var_os(variable)),
            false => self.hf_cache,
        };
        let nvml = NvmlOptions {
            library: self.nvml_lib,
            gpu_memory: self.gpu_memory,
            mps: self.mps,
            ..NvmlOptions::default()
        };
        let mut models: Vec<Box<dyn ModelSource>> =
            vec![Box::new(NodeModels::new(hf_caches, self.kserve_models))];
        // Without a cluster the pods have no names, and no engines are found; everything else is reported. A cluster that is
        // named must exist.
        let pods: Box<dyn PodSource> =
            match kubernetes::connect(self.kubeconfig.as_deref(), WriteTimes::default()).await {
                Ok(client) => {
                    models.push(Box::new(NodeImages::start(client.clone(), &node)));
                    Box::new(WatchedPods::start(client, &node))
                }
                Err(error) if self.kubeconfig.is_none() => Box::new(NoPods(error.to_string())),
                Err(error) => return Err(error).context("--kubeconfig"),
            };
        let metrics = self.metrics_listen.map(listen).transpose()?;
        Ok(AgentOptions {
            metrics,
            turns: self.turns.map(|socket| (socket, self.proc.clone())),
            interval: self.interval,
            gpus: Box::new(Nvml::new(nvml)),
            owners: Box::new(Owners::new(self.proc, self.cgroup_root, self.pod_resources)),
            pods,
            models: Box::new(CombinedModelSources(models)),
            publisher,
            node,
        })
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    listening::listen(address).with_context(|| format!("--metrics-listen {address}"))
}

/// The kubelet's default name of its node: the machine's host name in lower case.
fn node_name(given: Option<String>) -> Result<NodeName> {
    let name = given.filter(|name| !name.is_empty());
    let name = name.or_else(|| super::hostname().map(|name| name.to_ascii_lowercase()));
    let name =
        name.context("this machine tells no host name: give --node, its Node object's name")?;
    let is_allowed =
        |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    ensure!(
        name.chars().all(is_allowed),
        "--node: {name:?} is no Node's name, which has small letters, digits, '-' and '.'; kubectl get nodes lists them"
    );
    NodeName::parse(&name).context("--node")
}
