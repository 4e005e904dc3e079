//! The whole cluster, put together: stand-ins around the very same Stowage that `serve` runs.
//!
//! Everything talks over loopback HTTP. Nothing here reaches past an interface that a real cluster has.

use super::agents::Agents;
use super::api_server::ApiServer;
use super::kubelet::{self, Kubelet};
use super::machine::Machine;
use super::scheduler::Scheduler;
use super::scheduler::config::Config;
use crate::cluster::{self, LeadWith};
use crate::extender::reports::Board;
use crate::extender::request::Limits;
use crate::extender::server::{Door, Doors};
use crate::extender::{Extender, server};
use crate::scheduling::policy::Policy;
use crate::service::Service;
use anyhow::{Context, Result};
use serde_json::Value;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

/// A demo second of a pod's grace period, and its engine's start: short enough to watch.
const GRACE_SECOND: Duration = Duration::from_millis(100);
const START_DELAY: Duration = Duration::from_millis(200);
/// The scheduler's first back-off; a real one waits a second.
const BACK_OFF: Duration = Duration::from_millis(100);

/// A running cluster. Call [`Setup::stop`] to end it in order.
pub struct Setup {
    pub api: Arc<ApiServer>,
    pub scheduler: Scheduler,
    pub service: Arc<Service>,
    /// To be read: what gets there is the agents' to post.
    pub board: Arc<Board>,
    pub operators: SocketAddr,
    _kubelet: Kubelet,
    agents: Agents,
    http: JoinHandle<std::io::Result<()>>,
    tasks: JoinSet<()>,
    stop_http: CancellationToken,
    stop_cluster: CancellationToken,
}

impl Setup {
    pub async fn start(machines: &[Machine]) -> Result<Self> {
        let api = Arc::new(ApiServer::start().await.context("the stand-in API server")?);
        for machine in machines {
            api.create("nodes", machine.registration())
                .map_err(|error| anyhow::anyhow!("node {}: {error:?}", machine.node))?;
        }
        let service = Service::new(Policy::default());
        let (stop_http, stop_cluster) = (CancellationToken::new(), CancellationToken::new());
        let options = cluster::Options::new(LeadWith::Always, "demo".into());
        let (control_plane, tasks) =
            cluster::start(api.client("stowage")?, service.clone(), options, stop_cluster.clone());
        let (scheduler_listener, scheduler_address) = listen()?;
        let (agents_listener, agents_address) = listen()?;
        let (operators_listener, operators) = listen()?;
        let doors = Doors {
            scheduler: Door::plain(scheduler_listener),
            agents: Door::plain(agents_listener),
            operators: Door::plain(operators_listener),
        };
        let extender = Extender::new(service.clone(), control_plane, Limits::default());
        let board = extender.board.clone();
        let http = tokio::spawn(server::serve(extender, doors, stop_http.clone()));
        let agents = Agents::start(machines, &api, agents_address)?;
        let kubelet_config = kubelet::Config {
            start_delay: START_DELAY,
            grace_second: GRACE_SECOND,
            ..kubelet::Config::default()
        };
        let kubelet = Kubelet::start(api.client("kubelet")?, kubelet_config);
        let config = Config {
            initial_back_off: BACK_OFF,
            ..Config::shipped(&format!("http://{scheduler_address}/scheduler"))
        };
        let scheduler = Scheduler::start(api.client("kube-scheduler")?, config);
        let setup = Self {
            api,
            scheduler,
            service,
            board,
            operators,
            _kubelet: kubelet,
            agents,
            http,
            tasks,
            stop_http,
            stop_cluster,
        };
        setup.until_nodes_offer_vram(machines.len()).await;
        setup.until_scheduler_knows_nodes().await;
        Ok(setup)
    }

    /// Ends it as `serve` ends: the HTTP side first.
    pub async fn stop(mut self) -> Result<()> {
        drop(self.scheduler);
        drop(self.agents);
        self.stop_http.cancel();
        self.http.await??;
        self.stop_cluster.cancel();
        while self.tasks.join_next().await.is_some() {}
        Ok(())
    }

    /// The agents have reported, Stowage has advertised what they said, and the kubelets offer it.
    async fn until_nodes_offer_vram(&self, nodes: usize) {
        let offers = |api: &ApiServer| {
            let nodes = api.list("nodes").into_iter();
            nodes.filter(|node| node["status"]["allocatable"]["stowage.dev/vram"].is_string()).count()
        };
        self.api.until(|api| (offers(api) == nodes).then_some(())).await;
    }

    /// A pod that came before would be refused at first, and the story would begin in another order each time.
    async fn until_scheduler_knows_nodes(&self) {
        let version = |node: &Value| node["metadata"]["resourceVersion"].as_str()?.parse::<u64>().ok();
        let latest = self.api.list("nodes").iter().filter_map(|node| version(node)).max();
        let knows = |version| latest.is_none_or(|latest| version >= latest);
        self.scheduler.observations().until(|seen| knows(seen.progress().nodes_version).then_some(())).await;
    }
}

fn listen() -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port on loopback")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}
