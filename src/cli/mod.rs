//! The command line: validates raw arguments, and turns errors into exit codes; the only place that does.

mod access;
mod address;
mod admin;
mod agents;
mod assess;
mod bundle;
mod cluster_credentials;
mod connections;
mod estimate;
mod explain;
mod http_get;
mod leader_forward;
mod log;
mod models;
mod node_agent;
mod operators_client;
mod output;
mod plan;
mod plugin;
mod pod_argument;
mod policy;
mod preflight;
mod recording;
mod reference;
mod replay;
mod serve_policy;
#[cfg(feature = "lab")]
mod simulate;
mod standard_input;
mod top;
mod traces;
mod ui;
mod uninstall;
mod wait_turn;

use admin::AdminArgs;
use agents::AgentsArgs;
use anyhow::{Context, Result, bail};
use assess::AssessArgs;
use bundle::BundleArgs;
use clap::error::ErrorKind;
use clap::{Args, FromArgMatches, Parser, Subcommand, ValueEnum};
use connections::ConnectionArgs;
use estimate::EstimateArgs;
use explain::ExplainArgs;
use log::LogArgs;
use models::ModelsArgs;
use node_agent::AgentArgs;
use output::OutputArgs;
use plan::PlanArgs;
use policy::{PolicyArgs, print_policy_schema};
use preflight::PreflightArgs;
use recording::RecordArgs;
use reference::{CompletionArgs, ManArgs};
use replay::ReplayArgs;
use serde_json::json;
use serve_policy::ServePolicyArgs;
#[cfg(feature = "lab")]
use simulate::SimulateArgs;
use std::io::Write;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use stowage_kubernetes_objects::port::WriteTimes;
#[cfg(feature = "lab")]
use stowage_lab::demo::{self, DemoMode};
use stowage_policy_file::format;
use stowage_report::NodeReport;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::tls::TlsFiles;
use stowage_server::kubernetes;
use stowage_server::kubernetes::{LeadWith, LeaseName};
use stowage_server::serve::{self, AgentsTls, ClusterSource, ServeOptions};
use stowage_telemetry::build_info;
use top::TopArgs;
use traces::TraceArgs;
use ui::UiArgs;
use uninstall::UninstallArgs;
use wait_turn::WaitTurnArgs;

/// Places LLM pods on single GPUs: an HTTP extender of the stock kube-scheduler.
#[derive(Debug, Parser)]
#[command(version = build_info::text(), max_term_width = 100, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Exit codes of every command; what a command adds is in its own help.
const EXIT_CODES: &str = "Exit codes: 0 for success, 1 for a failure, 2 for invalid arguments, and 141 if standard output \
                          is closed early (a broken pipe). For `assess`, `estimate`, `explain`, `models`, `plan`, `policy`, `preflight`, \
                          `replay` and `top`, 1 is a negative answer and 2 means that there is no answer.";
const EXIT_CODES_OF_SERVE: &str = "Exit codes: 0 after SIGTERM or SIGINT, 1 if it cannot start or cannot go on, 2 for invalid \
                                   arguments, 130 after a second signal.";
const EXIT_CODES_OF_AGENT: &str = "Exit codes: 0 after SIGTERM or SIGINT, 1 if it cannot start or cannot go on, 2 for invalid arguments.";
#[cfg(feature = "lab")]
const EXIT_CODES_OF_DEMO: &str =
    "Exit codes: 0 if every invariant held, 1 if one did not, 2 for invalid arguments.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer a kube-scheduler: filter, prioritize, preempt, bind
    Serve(Box<ServeArgs>),
    /// Report what this node's GPUs, engines and models are doing; runs on every GPU node
    Agent(Box<AgentArgs>),
    /// Run a scripted scenario on a simulated cluster in this process; needs no Kubernetes and no GPU
    #[cfg(feature = "lab")]
    Demo(DemoArgs),
    /// Check, show and describe policies
    Policy(PolicyArgs),
    /// Explain why a pod runs where it does or stays pending, and what would make it fit
    Explain(ExplainArgs),
    /// Estimate the VRAM of a model from its config.json, and print the lines of a pod that asks for it
    Estimate(Box<EstimateArgs>),
    /// Assess what sharing GPUs would save in a cluster as it is
    Assess(Box<AssessArgs>),
    /// Plan clusters that do not exist yet: how many GPUs some pods need
    Plan(PlanArgs),
    /// Show what an installation would do to a cluster: its pods, whose nodes would be whose, and what is missing
    Preflight(PreflightArgs),
    /// Show where models are loaded, asleep or on disk, and how soon a pod of each answers
    Models(ModelsArgs),
    /// Show the fleet live: nodes, GPUs, pods, what waits, and models
    Top(TopArgs),
    /// Fetch the last minutes of a running service's flight recording
    Bundle(BundleArgs),
    /// Replay a recording of `serve --record`, and report the first answer that differs
    Replay(ReplayArgs),
    /// Open the operators' page in a browser, with your kubeconfig's access
    Ui(UiArgs),
    /// Simulate workloads with Stowage's scheduler and with others
    #[cfg(feature = "lab")]
    Simulate(SimulateArgs),
    /// Remove what Stowage wrote to nodes and pods, after you delete its manifests
    Uninstall(UninstallArgs),
    /// Wait until it is this pod's turn to start; for an init container of the component start-turns
    WaitTurn(WaitTurnArgs),
    /// Print a shell's completion script
    Completion(CompletionArgs),
    /// Write the man pages
    Man(ManArgs),
    /// Print the JSON Schema of something Stowage reads or writes
    Schema {
        #[arg(value_enum)]
        of: SchemaOf,
    },
    /// Print the version
    Version(OutputArgs),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SchemaOf {
    /// What an agent posts to /v1/reports
    Report,
    /// A policy file
    Policy,
}

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES_OF_SERVE)]
struct ServeArgs {
    /// Kubeconfig of the cluster [default: KUBECONFIG, ~/.kube/config, then the pod's service account]
    #[arg(long, value_name = "FILE", conflicts_with = "cluster")]
    kubeconfig: Option<PathBuf>,

    /// Serve what `kubectl get nodes,pods -A -o yaml` printed, in place of an API server; binds change the copy
    /// in memory. `-` is standard input
    #[arg(long, value_name = "FILE")]
    cluster: Option<PathBuf>,

    /// The address that kube-scheduler calls
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9444", value_parser = address::address)]
    listen: SocketAddr,

    /// Certificate for --listen, PEM
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_key",
        requires = "client_ca"
    )]
    tls_cert: Option<PathBuf>,

    /// Private key for --listen, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// CA of the clients that may call --listen, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    client_ca: Option<PathBuf>,

    #[command(flatten)]
    policy: ServePolicyArgs,

    #[command(flatten)]
    admin: AdminArgs,

    #[command(flatten)]
    agents: AgentsArgs,

    /// Allow plain HTTP on addresses other than loopback
    #[arg(long)]
    insecure: bool,

    /// Largest request body, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    body_limit: u16,

    /// When this replica acts as the leader: while the kube-scheduler in the same pod holds its Lease, while this replica holds
    /// Stowage's own Lease, or always (one replica only)
    #[arg(long, value_enum, default_value_t = Lead::KubeScheduler, conflicts_with = "cluster")]
    lead_with: Lead,

    /// The Lease to watch or hold, as NAMESPACE/NAME [default: kube-system/kube-scheduler or kube-system/stowage]
    #[arg(long, value_name = "LEASE", conflicts_with = "cluster")]
    lease: Option<String>,

    /// Time limit of each stage of a write to the API server: the client's timeout, the kernel's send timeout, and the API
    /// server's timeout. Before it acts, a new leader waits for the sum of the three, plus a fifth of this value for the commit
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = write_deadline, conflicts_with = "cluster")]
    write_deadline: Duration,

    /// This replica's host name, the part of the Lease holder's identity before the last underscore
    #[arg(long, value_name = "NAME", env = "HOSTNAME")]
    identity: Option<String>,

    /// The part before `=` of the CDI names written on pods. With another kind than the default, of which the nodes need a
    /// specification, NVIDIA's NRI plugin gets them, too. Nodes whose agent reports NVIDIA's legacy mode get bare UUIDs
    #[arg(long, value_name = "KIND", default_value = kubernetes::CDI_KIND, value_parser = cdi_kind)]
    cdi_kind: String,

    #[command(flatten)]
    connections: ConnectionArgs,

    #[command(flatten)]
    traces: TraceArgs,

    #[command(flatten)]
    record: RecordArgs,

    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Lead {
    KubeScheduler,
    Lease,
    Always,
}

#[cfg(feature = "lab")]
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES_OF_DEMO)]
struct DemoArgs {
    /// Run the scenario once and exit: 0 if every invariant held
    #[arg(long)]
    once: bool,

    /// For programs: the story is told on stderr, and its summary is printed
    #[command(flatten)]
    output: OutputArgs,

    /// Record into this directory, as `serve --record` does, for `stowage replay`
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
}

impl Cli {
    /// Parses the command line, as `stowage` or as the plugin of kubectl; a mistake ends the process.
    pub fn from_command_line() -> Self {
        if !plugin::is_plugin(std::env::args_os().next().as_deref()) {
            return Self::parse();
        }
        let mut command = plugin::command();
        let found = command.get_matches_mut();
        if let Some(name) = found
            .subcommand_name()
            .filter(|name| !plugin::has_command(name))
        {
            let text = format!("`{name}` is no command of the plugin; it is one of `stowage`");
            command.error(ErrorKind::InvalidSubcommand, text).exit();
        }
        Self::from_arg_matches(&found).unwrap_or_else(|error| error.exit())
    }

    pub fn run(self) -> Result<ExitCode> {
        let mut runtime = match self.command {
            // One thread is enough for a report a second, and each more costs memory on every node.
            Command::Agent(_) => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = runtime.enable_all().build().context("no threads")?;
        match self.command {
            Command::Serve(args) => {
                args.log.to_stderr(SERVE_LOG_FILTER);
                let outcome = runtime.block_on(serve::serve(args.validate()?));
                // All orderly work is finished. A thread that still runs does nothing that is needed.
                runtime.shutdown_timeout(THREAD_SHUTDOWN_TIMEOUT);
                outcome.map(|()| ExitCode::SUCCESS)
            }
            Command::Agent(args) => {
                args.log.to_stderr(if args.is_single_sample() {
                    SINGLE_SAMPLE_LOG_FILTER
                } else {
                    AGENT_LOG_FILTER
                });
                let outcome = runtime.block_on(args.run());
                // A driver or a name server that hangs has a thread of its own, and the exit does not wait for it.
                runtime.shutdown_background();
                outcome.map(|()| ExitCode::SUCCESS)
            }
            #[cfg(feature = "lab")]
            Command::Demo(args) => {
                LogArgs::default().to_stderr("error");
                let mode = args.mode();
                let summary = runtime.block_on(demo::run(mode, args.record))?;
                if mode == DemoMode::Data {
                    args.output.print(&summary, |_, _| String::new())?;
                }
                Ok(match summary.is_sound() {
                    true => ExitCode::SUCCESS,
                    false => ExitCode::FAILURE,
                })
            }
            Command::Policy(args) => args.run(),
            Command::Plan(args) => args.run(),
            Command::Preflight(args) => args.run(),
            Command::Bundle(args) => {
                LogArgs::default().to_stderr("error");
                runtime.block_on(args.run())
            }
            Command::Replay(args) => args.run(),
            #[cfg(feature = "lab")]
            Command::Simulate(args) => args.run(),
            Command::Explain(args) => {
                LogArgs::default().to_stderr("error");
                runtime.block_on(args.run())
            }
            Command::Estimate(args) => {
                LogArgs::default().to_stderr("error");
                runtime.block_on(args.run())
            }
            Command::Assess(args) => {
                LogArgs::default().to_stderr("error");
                runtime.block_on(args.run())
            }
            Command::Models(args) => {
                LogArgs::default().to_stderr("error");
                runtime.block_on(args.run())
            }
            Command::Top(args) => {
                LogArgs::default().to_stderr("off");
                let outcome = runtime.block_on(args.run());
                // A question that is not answered yet is not waited for.
                runtime.shutdown_background();
                outcome
            }
            Command::Ui(args) => {
                LogArgs::default().to_stderr("error");
                runtime.block_on(args.run())
            }
            Command::Uninstall(args) => {
                LogArgs::default().to_stderr("error");
                runtime.block_on(args.run())
            }
            Command::WaitTurn(args) => Ok(runtime.block_on(args.run())),
            Command::Completion(args) => args.run(),
            Command::Man(args) => args.run(),
            Command::Version(output) => {
                let version = json!({ "version": build_info::text() });
                let text = |_: &_, _| format!("stowage {}\n", build_info::text());
                output.print(&version, text).map(|()| ExitCode::SUCCESS)
            }
            Command::Schema {
                of: SchemaOf::Policy,
            } => print_policy_schema(),
            Command::Schema {
                of: SchemaOf::Report,
            } => {
                let schema = schemars::schema_for!(NodeReport);
                writeln!(
                    std::io::stdout(),
                    "{}",
                    serde_json::to_string_pretty(&schema)?
                )?;
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

/// Whether the reader of standard output, such as `head`, has read enough.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The exit code for an error before there is an answer: a script shall not take it for one.
pub const NO_ANSWER: u8 = 2;

/// Prints a line on standard error. If its reader has gone, as in `stowage ... 2>&1 | head`, it is not printed; `eprintln!` would
/// panic.
pub fn print_to_stderr(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints the error and returns the exit code for "no answer"; a broken pipe and invalid arguments stay errors.
pub fn exit_without_answer(error: anyhow::Error) -> Result<ExitCode> {
    if is_broken_pipe(&error) || error.is::<clap::Error>() {
        return Err(error);
    }
    print_to_stderr(format_args!("error: {error:#}"));
    Ok(NO_ANSWER.into())
}

/// How long the exit waits for threads that still run: they were told to stop, and check for it at every node.
const THREAD_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// The client's own log repeats at each attempt what Stowage logs once.
const SERVE_LOG_FILTER: &str = "info,kube_runtime::watcher=off";
const AGENT_LOG_FILTER: &str = "info,kube_client=off";
const SINGLE_SAMPLE_LOG_FILTER: &str = "error,kube_client=off";

#[cfg(feature = "lab")]
impl DemoArgs {
    fn mode(&self) -> DemoMode {
        match (self.output.is_data(), self.once) {
            (true, _) => DemoMode::Data,
            (false, true) => DemoMode::Once,
            (false, false) => DemoMode::Stay,
        }
    }
}

impl ServeArgs {
    fn validate(self) -> Result<ServeOptions> {
        let tls = match (self.tls_cert, self.tls_key, self.client_ca) {
            (Some(cert), Some(key), Some(client_ca)) => Some(TlsFiles {
                cert,
                key,
                client_ca,
            }),
            _ => None,
        };
        if tls.is_none() && !self.listen.ip().is_loopback() && !self.insecure {
            bail!(
                "--listen {} can be reached from elsewhere, and any client there can bind pods: give --tls-cert, \
                 --tls-key and --client-ca, or listen on 127.0.0.1, or say --insecure",
                self.listen
            );
        }
        let (agents, webhook) = self
            .agents
            .validate(self.cluster.is_some(), self.insecure)?;
        let has_kept_certificate = matches!(agents.tls, Some(AgentsTls::Secret(_)));
        let admin =
            self.admin
                .validate(self.cluster.is_some(), self.insecure, has_kept_certificate)?;
        let identity = self.identity.filter(|name| !name.is_empty());
        let instance = identity
            .clone()
            .or_else(hostname)
            .unwrap_or_else(|| "stowage".into());
        let traces = self
            .traces
            .validate(&instance, |variable| std::env::var(variable).ok())?;
        let source = match self.cluster {
            Some(dump) => ClusterSource::Dump(dump),
            None => ClusterSource::ApiServer {
                kubeconfig: self.kubeconfig,
                lead_with: lead_with(self.lead_with, self.lease.as_deref(), identity.as_deref())?,
                identity: identity.unwrap_or_else(|| "stowage".into()),
                cdi_kind: self.cdi_kind,
                times: WriteTimes::from_deadline(self.write_deadline),
            },
        };
        let body = usize::from(self.body_limit) << 20;
        let limits = RequestLimits {
            body,
            connections: self.connections.limits(),
            ..RequestLimits::default()
        };
        let policy = self.policy.validate()?;
        let record = self.record.options();
        Ok(ServeOptions {
            source,
            listen: self.listen,
            admin,
            tls,
            agents,
            webhook,
            limits,
            policy,
            traces,
            record,
        })
    }
}

fn lead_with(lead: Lead, lease: Option<&str>, identity: Option<&str>) -> Result<LeadWith> {
    let lease = lease.map(lease_name).transpose()?;
    let identity = || {
        identity.map(str::to_owned).or_else(hostname).context(
            "this machine tells no host name: give --identity, the host name of this replica's pod",
        )
    };
    Ok(match lead {
        Lead::Always => LeadWith::Always,
        Lead::KubeScheduler => LeadWith::KubeScheduler {
            lease: lease.unwrap_or_else(LeaseName::for_kube_scheduler),
            hostname: identity()?,
        },
        Lead::Lease => LeadWith::Lease {
            lease: lease.unwrap_or_else(|| LeaseName::for_stowage("kube-system")),
            identity: identity()?,
        },
    })
}

/// The kernel's host name; a pod has its own.
fn hostname() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

fn lease_name(text: &str) -> Result<LeaseName> {
    match text.split_once('/') {
        Some((namespace, name))
            if !namespace.is_empty() && !name.is_empty() && !name.contains('/') =>
        {
            Ok(LeaseName {
                namespace: namespace.into(),
                name: name.into(),
            })
        }
        _ => bail!("--lease is {text:?}; write NAMESPACE/NAME, such as kube-system/kube-scheduler"),
    }
}

/// Shorter, a merely busy API server would not answer in time; longer, a new leader would wait for minutes.
const WRITE_DEADLINES: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(60);

/// As the Container Device Interface allows it; the names on pods continue it with `=` and a device.
fn cdi_kind(text: &str) -> Result<String, String> {
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part
                .bytes()
                .all(|c| c.is_ascii_alphanumeric() || b".-_".contains(&c))
    };
    match text
        .split_once('/')
        .is_some_and(|(vendor, class)| is_name(vendor) && is_name(class))
    {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "it is no CDI kind: write VENDOR/CLASS, such as {}",
            kubernetes::CDI_KIND
        )),
    }
}

/// A duration as policies write it.
fn duration(text: &str) -> Result<Duration, String> {
    format::parse_duration(text)
        .map(|millis| Duration::from_millis(millis.0))
        .map_err(|malformed| malformed.to_string())
}

fn write_deadline(text: &str) -> Result<Duration, String> {
    let deadline = duration(text)?;
    match WRITE_DEADLINES.contains(&deadline) {
        true => Ok(deadline),
        false => Err("write a duration from 100ms to 1m, such as 5s".into()),
    }
}
