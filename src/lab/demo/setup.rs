//! Assembles the demo's cluster: stand-ins around the same Stowage that `serve` runs.
//!
//! All components communicate over loopback HTTP, and only through interfaces that a real cluster has.

use super::agents::DemoAgents;
use super::api_server::ApiServer;
use super::kubelet::{self, Kubelet};
use super::machine::DemoMachine;
use super::scheduler::StandInScheduler;
use super::scheduler::config::SchedulerConfig;
use super::stowage::Stowage;
use anyhow::{Context, Result};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::policy::Policy;

/// How long a second of a pod's grace period takes in the demo: short enough to watch.
const GRACE_SECOND: Duration = Duration::from_millis(100);
/// How long an engine takes to start in the demo: short enough to watch.
const START_DELAY: Duration = Duration::from_millis(200);
/// The scheduler's first back-off; a real one waits a second.
const INITIAL_BACK_OFF: Duration = Duration::from_millis(100);

/// A running cluster. Call [`Setup::stop`] to end it in order.
pub struct Setup {
    pub api: Arc<ApiServer>,
    pub scheduler: StandInScheduler,
    pub stowage: Stowage,
    pub(super) machines: Vec<DemoMachine>,
    _kubelet: Kubelet,
    agents: DemoAgents,
}

impl Setup {
    /// Starts nodes of these machines, and all stand-ins.
    pub async fn start(machines: &[DemoMachine]) -> Result<Self> {
        Self::with_policy(Policy::default(), machines).await
    }

    /// Starts nodes of these machines, and all stand-ins, under a policy.
    pub async fn with_policy(policy: Policy, machines: &[DemoMachine]) -> Result<Self> {
        let api = Arc::new(
            ApiServer::start()
                .await
                .context("the stand-in API server")?,
        );
        for machine in machines {
            api.create("nodes", machine.node_object())
                .map_err(|error| anyhow::anyhow!("node {}: {error:?}", machine.node))?;
        }
        let stowage = Stowage::start(&api, policy, None)?;
        let agents = DemoAgents::start(machines, &api, stowage.addresses.agents)?;
        let kubelet_config = kubelet::KubeletConfig {
            start_delay: START_DELAY,
            grace_second: GRACE_SECOND,
            ..kubelet::KubeletConfig::default()
        };
        let kubelet = Kubelet::start(api.client("kubelet")?, kubelet_config);
        let config = SchedulerConfig {
            initial_back_off: INITIAL_BACK_OFF,
            ..SchedulerConfig::as_shipped(&format!(
                "http://{}/scheduler",
                stowage.addresses.scheduler
            ))
        };
        let scheduler = StandInScheduler::start(api.client("kube-scheduler")?, config);
        let setup = Self {
            api,
            scheduler,
            stowage,
            machines: machines.to_vec(),
            _kubelet: kubelet,
            agents,
        };
        setup.wait_for_advertised_vram().await;
        setup.wait_for_scheduler_to_observe_nodes().await;
        Ok(setup)
    }

    /// Adds a node.
    pub async fn join(&mut self, machine: DemoMachine, node: Value) -> Result<()> {
        let created = self.api.create("nodes", node);
        created.map_err(|error| anyhow::anyhow!("node {}: {error:?}", machine.node))?;
        self.agents
            .add(machine, &self.api, self.stowage.addresses.agents)?;
        self.machines.push(machine);
        self.wait_for_advertised_vram().await;
        self.wait_for_scheduler_to_observe_nodes().await;
        Ok(())
    }

    /// Kills Stowage, and starts another in its place that knows only what the API server has.
    pub async fn restart_stowage(self, policy: Policy) -> Result<Self> {
        let addresses = self.stowage.addresses;
        self.stowage.kill().await?;
        let stowage = Stowage::start(&self.api, policy, Some(addresses))?;
        Ok(Self { stowage, ..self })
    }

    /// Ends it as `serve` ends.
    pub async fn stop(self) -> Result<()> {
        drop(self.scheduler);
        drop(self.agents);
        self.stowage.stop().await
    }

    /// Waits until the agents have reported, Stowage has advertised the capacity, and the kubelets have copied it.
    async fn wait_for_advertised_vram(&self) {
        let nodes = self.machines.len();
        let advertising_nodes = |api: &ApiServer| {
            let nodes = api.list("nodes").into_iter();
            nodes
                .filter(|node| node["status"]["allocatable"]["stowage.dev/vram"].is_string())
                .count()
        };
        self.api
            .until(|api| (advertising_nodes(api) == nodes).then_some(()))
            .await;
    }

    /// A pod created earlier would be rejected at first, and the story would begin in another order each time.
    pub async fn wait_for_scheduler_to_observe_nodes(&self) {
        let version = |node: &Value| {
            node["metadata"]["resourceVersion"]
                .as_str()?
                .parse::<u64>()
                .ok()
        };
        let latest = self
            .api
            .list("nodes")
            .iter()
            .filter_map(|node| version(node))
            .max();
        let is_observed = |version| latest.is_none_or(|latest| version >= latest);
        self.scheduler
            .observations()
            .until(|observed| is_observed(observed.progress().nodes_version).then_some(()))
            .await;
    }
}
