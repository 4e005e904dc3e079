//! `stowage serve`: assembles the edges, runs them until shutdown, and stops them in order.

use crate::extender::certificate_reload::{CertificateFiles, CertificateReload};
use crate::extender::page_auth::PageAuth;
use crate::extender::reports::{AgentAuth, TokenGuard};
use crate::extender::request::RequestLimits;
use crate::extender::server::limits::raise_descriptor_limit;
use crate::extender::server::{Endpoint, Endpoints};
use crate::extender::tls::{self, ServerFiles, Tls, TlsFiles};
use crate::extender::{Extender, autoscaling, server};
use crate::flight_recorder::{FlightRecorder, RecordOptions, Recordings};
use crate::kubernetes;
use crate::kubernetes::certificates::{self, CertificateOptions};
use crate::kubernetes::dump::{Dump, DumpControlPlane, left_out_text};
use crate::kubernetes::index::ClusterIndex;
use crate::kubernetes::observed::ActivityRecordingControlPlane;
use crate::kubernetes::{
    AccessReviews, AgentAccount, LeadWith, TokenReviews, conflict_audit, runtime_class, tick,
};
use crate::policy_watch::{self, LastGoodStore, OwnPod, PolicyWatch};
use crate::service::{BundleSource, DefaultRuntimeClass, ServerState};
use anyhow::{Context, Result, bail};
use futures::FutureExt;
use http::Uri;
use hyper_rustls::HttpsConnectorBuilder;
use parking_lot::Mutex;
use rustls::ClientConfig;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::port::{AgentAuthority, ControlPlane, WriteTimes};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::plural;
use stowage_telemetry::devices::GpuSeries;
use stowage_telemetry::listening;
use stowage_telemetry::traces::{self, Collector, ExporterThread};
use stowage_telemetry::trust::Trust;
use tokio::runtime::{Handle, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

#[derive(Debug)]
pub struct ServeOptions {
    pub source: ClusterSource,
    pub listen: SocketAddr,
    pub admin: AdminOptions,
    pub tls: Option<TlsFiles>,
    pub agents: AgentsOptions,
    pub webhook: Option<WebhookOptions>,
    pub limits: RequestLimits,
    pub policy: PolicyOptions,
    /// Where spans go; nowhere without it.
    pub traces: Option<TraceOptions>,
    /// Where to record; nowhere without it.
    pub record: Option<RecordOptions>,
}

/// An OTLP collector.
#[derive(Debug, Clone)]
pub struct TraceOptions {
    pub endpoint: Uri,
    /// Trusted for `https`.
    pub ca: Option<PathBuf>,
    /// This replica's name among the others.
    pub instance: String,
}

/// The policy's files, and where their state is reported.
#[derive(Debug, Default)]
pub struct PolicyOptions {
    /// A file or a directory, watched from the start on; without one, the built-in policy.
    pub path: Option<PathBuf>,
    /// Where the last good policy is stored for the next start.
    pub cache: Option<PathBuf>,
    /// The pod on which Events about it are recorded.
    pub own_pod: Option<OwnPod>,
}

/// The agents' address.
#[derive(Debug)]
pub struct AgentsOptions {
    pub listen: SocketAddr,
    pub tls: Option<AgentsTls>,
    /// The service account whose tokens are admitted; without one, every client is admitted.
    pub account: Option<AgentAccount>,
}

/// The webhook's address; its certificate is the agents'.
#[derive(Debug)]
pub struct WebhookOptions {
    pub listen: SocketAddr,
    /// The runtime class of pods that name none, if the cluster has it.
    pub runtime_class: Option<String>,
}

/// Where the certificate of the agents' address is.
#[derive(Debug)]
pub enum AgentsTls {
    Files(ServerFiles),
    /// In a Secret, which Stowage fills and renews if it is empty.
    Secret(CertificateOptions),
}

/// The operators' address and its access.
#[derive(Debug)]
pub struct AdminOptions {
    pub listen: SocketAddr,
    pub tls: Option<AdminTls>,
    /// Whether pages require a token that the API server allows to see the page; otherwise every client is admitted.
    pub requires_tokens: bool,
    /// Whether the metrics name each GPU.
    pub gpu_series: GpuSeries,
}

/// Where the certificate of the operators' address is.
#[derive(Debug)]
pub enum AdminTls {
    Files(ServerFiles),
    /// The operators' address serves the agents' certificate.
    Agents,
}

/// The source of the cluster's state.
#[derive(Debug)]
pub enum ClusterSource {
    ApiServer {
        kubeconfig: Option<PathBuf>,
        lead_with: LeadWith,
        identity: String,
        cdi_kind: String,
        times: WriteTimes,
    },
    Dump(PathBuf),
}

/// Threads for all tasks beside the requests. The verbs have the main runtime to themselves: a worker of tokio's that computes
/// for a while, such as the upkeep of the ledger, or a page of a list, may be the one that reads from connections, and then no
/// other reads from them meanwhile.
struct BackgroundRuntime(Option<Runtime>);

impl BackgroundRuntime {
    fn start() -> Result<Self> {
        let mut threads = tokio::runtime::Builder::new_multi_thread();
        threads.enable_all().thread_name("cluster");
        Ok(Self(Some(threads.build().context("no threads")?)))
    }

    fn handle(&self) -> &Handle {
        self.0
            .as_ref()
            .expect("it is there until it is dropped")
            .handle()
    }
}

impl Drop for BackgroundRuntime {
    /// A runtime must not wait for its threads on a thread of another.
    fn drop(&mut self) {
        self.0
            .take()
            .into_iter()
            .for_each(Runtime::shutdown_background);
    }
}

/// What a source provides: where to write, the tasks beside the requests, and the authority for tokens.
struct Connected {
    control_plane: Arc<dyn ControlPlane>,
    tasks: JoinSet<()>,
    agent_auth: AgentAuth,
    page_auth: PageAuth,
}

pub async fn serve(mut options: ServeOptions) -> Result<()> {
    fit_descriptors(&mut options.limits);
    let (endpoints, renewals, secret_certificate) = open_endpoints(&options)?;
    let (policy, watch) = open_policy(&options.policy)?;
    let state = ServerState::new(policy);
    // Dropped last: it sends the spans of what was finished at the end.
    let _exporting = options
        .traces
        .as_ref()
        .map(|traces| start_traces(traces, &state))
        .transpose()?;
    // Before anything is known of the cluster, and dropped after everything has stopped.
    let _recorder = options
        .record
        .as_ref()
        .map(|record| start_recorder(record, &state))
        .transpose()?;
    let (background, stop_cluster) = (BackgroundRuntime::start()?, CancellationToken::new());
    let connected = connect(
        &options,
        &state,
        secret_certificate,
        &background,
        &stop_cluster,
    )
    .await?;
    let Connected {
        control_plane,
        mut tasks,
        agent_auth,
        page_auth,
    } = connected;
    if let Some(watch) = watch {
        let watching = watch.run(state.clone(), control_plane.clone(), options.policy.own_pod);
        let watching = stop_cluster
            .clone()
            .run_until_cancelled_owned(watching)
            .map(drop);
        tasks.spawn_on(watching, background.handle());
    }
    let extender =
        Extender::new(state.clone(), control_plane, options.limits).with_agent_auth(agent_auth);
    let extender = extender
        .with_page_auth(page_auth)
        .with_gpu_series(options.admin.gpu_series);
    let extender = extender.with_bundles(options.record.map(|record| {
        Arc::new(Recordings {
            directory: record.directory,
        }) as Arc<dyn BundleSource>
    }));
    let autoscaling = autoscaling::run(extender.clone(), autoscaling::EVALUATION_INTERVAL);
    let autoscaling = stop_cluster
        .clone()
        .run_until_cancelled_owned(autoscaling)
        .map(drop);
    tasks.spawn_on(autoscaling, background.handle());

    wait_for_first_certificate(&state).await;
    let stop_http = CancellationToken::new();
    stop_on_signal(stop_http.clone())?;
    info!(policy = %state.cluster().ledger().policy().digest, "the policy in force");
    log_address("the scheduler", &endpoints.scheduler)?;
    log_address("agents", &endpoints.agents)?;
    log_address("operators", &endpoints.operators)?;
    if let Some(webhook) = &endpoints.webhook {
        log_address("the webhook", webhook)?;
    }
    let mut renewing = JoinSet::new();
    for renewal in renewals {
        renewing.spawn(renewal.run(state.metrics.edge.clone()));
    }
    let http = server::serve(extender, endpoints, stop_http.clone());
    let outcome = tokio::select! {
        outcome = http => outcome.context("an address could not be served"),
        ended = tasks.join_next() => Err(task_ended_error(ended)),
    };
    renewing.abort_all();
    // The HTTP side first: its requests in progress need leadership, and the Lease is given up here.
    stop_cluster.cancel();
    while tasks.join_next().await.is_some() {}
    info!("stopped");
    outcome
}

fn start_recorder(options: &RecordOptions, state: &Arc<ServerState>) -> Result<FlightRecorder> {
    let recorder = FlightRecorder::start(options, state)?;
    info!(directory = %options.directory.display(), "the flight recorder records");
    Ok(recorder)
}

/// Records spans from here on, and exports them to the collector.
fn start_traces(options: &TraceOptions, state: &ServerState) -> Result<ExporterThread> {
    let trust = Trust::new(options.ca.clone()).context("--otlp-ca")?;
    let connector =
        HttpsConnectorBuilder::new().with_tls_config(ClientConfig::clone(&trust.config));
    let connector = connector.https_or_http().enable_http1().build();
    let collector = Collector {
        endpoint: options.endpoint.clone(),
        instance: options.instance.clone(),
    };
    let (traces, exporting) = traces::start(collector, connector, &state.metrics.traces)?;
    state.set_traces(traces);
    info!(collector = %options.endpoint, "spans are sent to a collector");
    Ok(exporting)
}

/// The error of a task that ended though it should run forever. A panic is on standard error by then, with its location.
fn task_ended_error(ended: Option<Result<(), JoinError>>) -> anyhow::Error {
    let why = match ended {
        Some(Err(error)) => error.to_string(),
        _ => "it returned".into(),
    };
    anyhow::anyhow!("a task that should run forever ended: {why}")
}

fn open_policy(options: &PolicyOptions) -> Result<(Policy, Option<PolicyWatch>)> {
    let Some(path) = options.path.clone() else {
        return Ok((policy_watch::built_in(), None));
    };
    let last_good = options.cache.clone().map(LastGoodStore::in_directory);
    let (policy, watch) = policy_watch::open(path, last_good)?;
    Ok((policy, Some(watch)))
}

/// Waits for the certificate that is read from the API server: agents that connect before are not answered. After the
/// timeout everything else is served without it.
async fn wait_for_first_certificate(state: &ServerState) {
    let mut certificate = state.missing_certificate_reason.subscribe();
    let _ = tokio::time::timeout(
        FIRST_CERTIFICATE_TIMEOUT,
        certificate.wait_for(Option::is_none),
    )
    .await;
}

/// How long a start waits for the certificate: several times what two reads take; a kubelet's probe waits no longer.
const FIRST_CERTIFICATE_TIMEOUT: Duration = Duration::from_secs(3);

/// A certificate in a Secret, and the addresses that serve it.
struct SecretCertificate {
    options: CertificateOptions,
    tls: Tls,
    addresses: Vec<&'static str>,
}

impl SecretCertificate {
    fn run(self, client: kube::Client, state: Arc<ServerState>) -> impl Future<Output = ()> + Send {
        let Self {
            options,
            tls,
            addresses,
        } = self;
        certificates::run(client, state, options, addresses, move |found| {
            let loaded =
                tls::from_pem(&found.chain, &found.key.0).map_err(|error| error.to_string())?;
            tls.replace(&loaded);
            Ok(())
        })
    }
}

/// Opens the addresses. Returns them, the certificates to reload from files, and the one in a Secret.
fn open_endpoints(
    options: &ServeOptions,
) -> Result<(Endpoints, Vec<CertificateReload>, Option<SecretCertificate>)> {
    let scheduler = listen("--listen", options.listen)?;
    let agents = listen("--agents", options.agents.listen)?;
    let operators = listen("--admin", options.admin.listen)?;
    let mut renewals = Vec::new();
    let mut tls = |address, flag, files: Option<CertificateFiles>| -> Result<Option<Tls>> {
        let Some(files) = files else { return Ok(None) };
        let (renewal, tls) = CertificateReload::load(address, flag, files)?;
        renewals.push(renewal);
        Ok(Some(tls))
    };
    let scheduler_tls = tls(
        "scheduler",
        "--tls-cert",
        options.tls.clone().map(CertificateFiles::Mutual),
    )?;
    let mut secret_certificate = None;
    let agents_tls = match &options.agents.tls {
        None => None,
        Some(AgentsTls::Files(files)) => tls(
            "agents",
            "--agents-tls-cert",
            Some(CertificateFiles::Server(files.clone())),
        )?,
        Some(AgentsTls::Secret(options)) => {
            let (options, tls) = (options.clone(), Tls::self_signed()?);
            secret_certificate = Some(SecretCertificate {
                options,
                tls: tls.clone(),
                addresses: vec!["agents"],
            });
            Some(tls)
        }
    };
    let operators_tls = match &options.admin.tls {
        None => None,
        Some(AdminTls::Files(files)) => tls(
            "operators",
            "--admin-tls-cert",
            Some(CertificateFiles::Server(files.clone())),
        )?,
        Some(AdminTls::Agents) => {
            secret_certificate
                .iter_mut()
                .for_each(|secret_certificate| secret_certificate.addresses.push("operators"));
            agents_tls.clone()
        }
    };
    let webhook = options.webhook.as_ref().map(|webhook| {
        secret_certificate
            .iter_mut()
            .for_each(|secret_certificate| secret_certificate.addresses.push("webhook"));
        let listener = listen("--webhook", webhook.listen)?;
        anyhow::Ok(Endpoint {
            listener,
            tls: agents_tls.clone(),
        })
    });
    let endpoints = Endpoints {
        webhook: webhook.transpose()?,
        scheduler: Endpoint {
            listener: scheduler,
            tls: scheduler_tls,
        },
        agents: Endpoint {
            listener: agents,
            tls: agents_tls,
        },
        operators: Endpoint {
            listener: operators,
            tls: operators_tls,
        },
    };
    Ok((endpoints, renewals, secret_certificate))
}

/// Raises the limit of descriptors, and reduces the connection limits to fit.
fn fit_descriptors(limits: &mut RequestLimits) {
    let Some(descriptors) = raise_descriptor_limit() else {
        return;
    };
    let fitted = limits.connections.fit_to(descriptors);
    if fitted != limits.connections {
        warn!(
            "this process may open {descriptors} files: at most {} connections on --listen, {} on --agents and {} on --admin. \
             Raise its limit on open files (ulimit -n) to have more",
            fitted.scheduler, fitted.agents, fitted.operators
        );
    }
    limits.connections = fitted;
}

fn log_address(who: &str, endpoint: &Endpoint) -> Result<()> {
    let scheme = if endpoint.tls.is_some() {
        "https"
    } else {
        "http"
    };
    info!("{who}: {scheme}://{}", endpoint.listener.local_addr()?);
    Ok(())
}

async fn connect(
    options: &ServeOptions,
    state: &Arc<ServerState>,
    secret_certificate: Option<SecretCertificate>,
    background: &BackgroundRuntime,
    shutdown: &CancellationToken,
) -> Result<Connected> {
    match &options.source {
        ClusterSource::Dump(path) => load_dump(path, state, background, shutdown),
        ClusterSource::ApiServer {
            kubeconfig,
            lead_with,
            identity,
            cdi_kind,
            times,
        } => {
            let client = kubernetes::connect(kubeconfig.as_deref(), *times).await?;
            // Connections of their own: however many tokens are reviewed, a Binding does not wait behind them.
            let reviews = kubernetes::connect(kubeconfig.as_deref(), *times).await?;
            let agent_auth = match options.agents.account.clone() {
                None => AgentAuth::Anyone,
                Some(account) => {
                    let authority: Arc<dyn AgentAuthority> =
                        Arc::new(TokenReviews::new(reviews.clone(), account));
                    AgentAuth::Token(TokenGuard::new(authority, state.clone()))
                }
            };
            let page_auth = match options.admin.requires_tokens {
                true => PageAuth::new(Arc::new(AccessReviews::new(reviews)), state.clone()),
                false => PageAuth::Anyone,
            };
            let runtime_class = options.webhook.as_ref();
            let runtime_class = runtime_class.and_then(|webhook| webhook.runtime_class.clone());
            let mut options = kubernetes::ClusterOptions::new(lead_with.clone(), identity.clone());
            options.cdi_kind.clone_from(cdi_kind);
            options.times = *times;
            let (control_plane, mut tasks) = {
                let _inside = background.handle().enter();
                kubernetes::start(client.clone(), state.clone(), options, shutdown.clone())
            };
            match runtime_class {
                None => drop(
                    state
                        .default_runtime_class
                        .send_replace(DefaultRuntimeClass::None),
                ),
                Some(name) => {
                    let reading = runtime_class::run(client.clone(), state.clone(), name);
                    let reading = shutdown
                        .clone()
                        .run_until_cancelled_owned(reading)
                        .map(drop);
                    tasks.spawn_on(reading, background.handle());
                }
            }
            if let Some(secret_certificate) = secret_certificate {
                // Until then there is none, whoever asks first.
                state
                    .missing_certificate_reason
                    .send_replace(Some("the Secret was not read yet".into()));
                let renewing = secret_certificate.run(client, state.clone());
                let renewing = shutdown
                    .clone()
                    .run_until_cancelled_owned(renewing)
                    .map(drop);
                tasks.spawn_on(renewing, background.handle());
            }
            Ok(Connected {
                control_plane,
                tasks,
                agent_auth,
                page_auth,
            })
        }
    }
}

fn load_dump(
    path: &Path,
    state: &Arc<ServerState>,
    background: &BackgroundRuntime,
    shutdown: &CancellationToken,
) -> Result<Connected> {
    let dump = Dump::read(path)?;
    let mut index = ClusterIndex::default();
    let control_plane = DumpControlPlane::load(&dump, state, &mut index)?;
    let left_out = left_out_text(control_plane.left_out());
    let control_plane = ActivityRecordingControlPlane::new(Arc::new(control_plane), state.clone());
    drop(dump);
    let totals = state.cluster().ledger().totals();
    info!(
        "{}: {}, {}, {} bound, {} waiting",
        path.display(),
        plural(totals.nodes, "node"),
        plural(totals.gpus, "GPU"),
        plural(totals.bound + totals.unplaced, "pod"),
        totals.waiting
    );
    if let Some(left_out) = left_out {
        warn!("{left_out}");
    }
    if totals.gpus == 0 {
        warn!(
            "no node has GPU labels (nvidia.com/gpu.count, .memory): nothing fits until agents post to /v1/reports"
        );
    }
    let (mut tasks, threads) = (JoinSet::new(), background.handle());
    let ticks = tick::run(
        state.clone(),
        Arc::new(Mutex::new(index)),
        control_plane.clone(),
    );
    tasks.spawn_on(
        shutdown.clone().run_until_cancelled_owned(ticks).map(drop),
        threads,
    );
    let audit = conflict_audit::run(state.clone(), control_plane.clone());
    tasks.spawn_on(
        shutdown.clone().run_until_cancelled_owned(audit).map(drop),
        threads,
    );
    Ok(Connected {
        control_plane,
        tasks,
        agent_auth: AgentAuth::Anyone,
        page_auth: PageAuth::Anyone,
    })
}

fn listen(flag: &str, address: SocketAddr) -> Result<TcpListener> {
    match listening::listen(address) {
        Ok(listener) => Ok(listener),
        Err(error) => bail!("{flag} {address}: {error}"),
    }
}

/// The first signal begins an orderly shutdown; a second one ends the process at once. On a thread and a runtime of its own, so
/// that a signal is handled however busy the others are.
fn stop_on_signal(stop: CancellationToken) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("no threads")?;
    let guard = runtime.enter();
    // From here on no signal ends the process by default.
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    drop(guard);
    let listen = async move {
        let mut received = async || {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        received().await;
        info!("stopping: finishing what is under way; signal again to stop at once");
        stop.cancel();
        received().await;
        std::process::exit(130);
    };
    let thread = std::thread::Builder::new().name("signals".into());
    thread
        .spawn(move || runtime.block_on(listen))
        .context("no threads")?;
    Ok(())
}
