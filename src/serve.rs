//! `stowage serve`: puts the edges together, runs them until told to stop, and takes them down in order.

use crate::cluster::dump::{Dump, DumpControlPlane};
use crate::cluster::index::Index;
use crate::cluster::{self, LeadWith, upkeep};
use crate::control_plane::ControlPlane;
use crate::extender::request::Limits;
use crate::extender::tls::{self, TlsFiles};
use crate::extender::{Extender, server};
use crate::scheduling::policy::Policy;
use crate::service::Service;
use anyhow::{Context, Result, bail};
use futures::FutureExt;
use parking_lot::Mutex;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

#[derive(Debug)]
pub struct ServeOptions {
    pub source: Source,
    pub listen: SocketAddr,
    pub admin: SocketAddr,
    pub tls: Option<TlsFiles>,
    pub limits: Limits,
}

/// Where the cluster is.
#[derive(Debug)]
pub enum Source {
    ApiServer { kubeconfig: Option<PathBuf>, lead_with: LeadWith, identity: String, cdi_kind: String },
    Dump(PathBuf),
}

pub async fn serve(options: ServeOptions) -> Result<()> {
    let scheduler = listen("--listen", options.listen)?;
    let operators = listen("--admin", options.admin)?;
    let tls = options.tls.as_ref().map(tls::load).transpose()?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let service = Service::new(Policy::default());
    let stop_cluster = CancellationToken::new();
    let (control_plane, mut tasks) = connect(&options.source, &service, &stop_cluster).await?;
    let extender = Extender::new(service.clone(), control_plane, options.limits);

    info!("the scheduler and the agents: {scheme}://{}", scheduler.local_addr()?);
    info!("operators: http://{}", operators.local_addr()?);
    let stop_http = CancellationToken::new();
    let on_signal = tokio::spawn(stop_on_signal(stop_http.clone()));
    let http = server::serve(extender, scheduler, operators, tls, stop_http.clone());
    let outcome = tokio::select! {
        outcome = http => outcome.context("an address could not be served"),
        ended = tasks.join_next() => Err(anyhow::anyhow!("a task that should run for ever ended: {ended:?}")),
    };
    on_signal.abort();
    // The HTTP side first: what it still had in hand needed the gate open, and the Lease is given up here.
    stop_cluster.cancel();
    while tasks.join_next().await.is_some() {}
    info!("stopped");
    outcome
}

async fn connect(
    source: &Source,
    service: &Arc<Service>,
    shutdown: &CancellationToken,
) -> Result<(Arc<dyn ControlPlane>, JoinSet<()>)> {
    match source {
        Source::Dump(path) => load(path, service, shutdown),
        Source::ApiServer { kubeconfig, lead_with, identity, cdi_kind } => {
            let client = cluster::connect(kubeconfig.as_deref()).await?;
            let mut options = cluster::Options::new(lead_with.clone(), identity.clone());
            options.cdi_kind.clone_from(cdi_kind);
            let (control_plane, tasks) = cluster::start(client, service.clone(), options, shutdown.clone());
            Ok((control_plane, tasks))
        }
    }
}

fn load(
    path: &Path,
    service: &Arc<Service>,
    shutdown: &CancellationToken,
) -> Result<(Arc<dyn ControlPlane>, JoinSet<()>)> {
    let dump = Dump::read(path)?;
    let mut index = Index::default();
    let control_plane = Arc::new(DumpControlPlane::load(&dump, service, &mut index)?);
    drop(dump);
    let totals = service.ledger().totals();
    info!(
        "{}: {} nodes, {} GPUs, {} pods bound, {} waiting",
        path.display(),
        totals.nodes,
        totals.gpus,
        totals.bound + totals.unplaced,
        totals.waiting
    );
    if totals.gpus == 0 {
        warn!(
            "no node has GPU labels (nvidia.com/gpu.count, .memory): nothing fits until agents post to /v1/reports"
        );
    }
    let mut tasks = JoinSet::new();
    let upkeep = upkeep::run(service.clone(), Arc::new(Mutex::new(index)), control_plane.clone());
    tasks.spawn(shutdown.clone().run_until_cancelled_owned(upkeep).map(drop));
    Ok((control_plane, tasks))
}

fn listen(flag: &str, address: SocketAddr) -> Result<TcpListener> {
    let listener = match TcpListener::bind(address) {
        Ok(listener) => listener,
        Err(error) => bail!("{flag} {address}: {error}"),
    };
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The first signal stops in order; a second one stops at once.
async fn stop_on_signal(stop: CancellationToken) {
    let mut terminate = signal(SignalKind::terminate()).expect("signal handlers can be installed");
    let mut received = async || {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    received().await;
    info!("stopping: finishing what is under way; signal again to stop at once");
    stop.cancel();
    received().await;
    std::process::exit(130);
}
