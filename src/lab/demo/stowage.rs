//! Stowage itself in the demo: the same service that `serve` runs, on ports that stay the same when it is restarted.
//!
//! It is stopped as `serve` stops, or dropped as a process dies: only the state on the API server survives.

use super::api_server::ApiServer;
use anyhow::{Context, Result};
use futures::FutureExt;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::policy::Policy;
use stowage_server::extender::autoscaling::ModelAutoscaling;
use stowage_server::extender::reports::Board;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::server::{Endpoint, Endpoints};
use stowage_server::extender::{Extender, autoscaling, server};
use stowage_server::kubernetes;
use stowage_server::kubernetes::LeadWith;
use stowage_server::service::ServerState;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// `serve` evaluates the models every 15 seconds; a short story cannot wait that long.
const AUTOSCALING_INTERVAL: Duration = Duration::from_millis(500);

/// Stowage's addresses, on loopback.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    pub scheduler: SocketAddr,
    pub agents: SocketAddr,
    pub operators: SocketAddr,
}

/// A running Stowage.
pub struct Stowage {
    pub state: Arc<ServerState>,
    /// For reading: only the agents write to it.
    pub board: Arc<Board>,
    /// How many replicas each model needs.
    pub autoscaling: Arc<ModelAutoscaling>,
    pub addresses: Addresses,
    http: JoinHandle<std::io::Result<()>>,
    tasks: JoinSet<()>,
    stop_http: CancellationToken,
    stop_cluster: CancellationToken,
}

impl Stowage {
    /// Starts it on free ports, or on those of an earlier one.
    pub fn start(api: &ApiServer, policy: Policy, addresses: Option<Addresses>) -> Result<Self> {
        let state = ServerState::new(policy);
        let (stop_http, stop_cluster) = (CancellationToken::new(), CancellationToken::new());
        let options = kubernetes::ClusterOptions::new(LeadWith::FromTheStart, "demo".into());
        let (control_plane, mut tasks) = kubernetes::start(
            api.client("stowage")?,
            state.clone(),
            options,
            stop_cluster.clone(),
        );
        let (scheduler_listener, scheduler) = listen(addresses.map(|at| at.scheduler))?;
        let (agents_listener, agents) = listen(addresses.map(|at| at.agents))?;
        let (operators_listener, operators) = listen(addresses.map(|at| at.operators))?;
        let endpoints = Endpoints {
            scheduler: Endpoint::plain(scheduler_listener),
            agents: Endpoint::plain(agents_listener),
            operators: Endpoint::plain(operators_listener),
            webhook: None,
        };
        let extender = Extender::new(state.clone(), control_plane, RequestLimits::default());
        let board = extender.board.clone();
        let replicas = extender.autoscaling.clone();
        let autoscaling = autoscaling::run(extender.clone(), AUTOSCALING_INTERVAL);
        tasks.spawn(
            stop_cluster
                .clone()
                .run_until_cancelled_owned(autoscaling)
                .map(drop),
        );
        let http = tokio::spawn(server::serve(extender, endpoints, stop_http.clone()));
        let addresses = Addresses {
            scheduler,
            agents,
            operators,
        };
        Ok(Self {
            state,
            board,
            autoscaling: replicas,
            addresses,
            http,
            tasks,
            stop_http,
            stop_cluster,
        })
    }

    /// Stops it as `serve` stops: the HTTP side first.
    pub async fn stop(mut self) -> Result<()> {
        self.stop_http.cancel();
        self.http.await??;
        self.stop_cluster.cancel();
        while self.tasks.join_next().await.is_some() {}
        Ok(())
    }

    /// Ends it as a killed process ends: the planner's actions are not finished, and pending watch events are not seen.
    pub async fn kill(mut self) -> Result<()> {
        self.tasks.abort_all();
        while self.tasks.join_next().await.is_some() {}
        // The ports are free only when the last answer has been sent.
        self.stop_http.cancel();
        self.http.await??;
        self.stop_cluster.cancel();
        Ok(())
    }
}

fn listen(at: Option<SocketAddr>) -> Result<(TcpListener, SocketAddr)> {
    let at = at.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, 0).into());
    let listener = TcpListener::bind(at).with_context(|| format!("cannot listen on {at}"))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}
