//! The node agents of all machines: the rounds of `stowage agent`, over simulated hardware.
//!
//! Pods are watched at the API server, engines are probed over HTTP, and reports are posted to the agents' address. Stowage
//! gets an agent's findings in no other way.

use super::api_server::ApiServer;
use super::hardware::{SimulatedGpus, SimulatedHardware, SimulatedModels};
use super::machine::DemoMachine;
use anyhow::Result;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use stowage_agent::engines::EngineWatcher;
use stowage_agent::engines::limits::EngineLimits;
use stowage_agent::pods::watched::WatchedPods;
use stowage_agent::publish::Publisher;
use stowage_agent::round::{NodeSampler, ReportSources};
use stowage_scheduling::ids::NodeName;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

/// A real agent reports once a second; a short story cannot wait that long.
const REPORT_INTERVAL: Duration = Duration::from_millis(400);

/// Real agents' rates and latencies are of half a minute.
const RATE_WINDOW: Duration = Duration::from_secs(1);

/// Running agents; dropping this stops them.
pub struct DemoAgents {
    tasks: JoinSet<()>,
}

impl DemoAgents {
    /// Must be called inside a tokio runtime.
    pub fn start(
        machines: &[DemoMachine],
        api: &Arc<ApiServer>,
        stowage: SocketAddr,
    ) -> Result<Self> {
        let mut agents = Self {
            tasks: JoinSet::new(),
        };
        for machine in machines {
            agents.add(*machine, api, stowage)?;
        }
        Ok(agents)
    }

    /// Starts the agent of one more.
    pub fn add(
        &mut self,
        machine: DemoMachine,
        api: &Arc<ApiServer>,
        stowage: SocketAddr,
    ) -> Result<()> {
        let publisher = Publisher::new(vec![format!("http://{stowage}").parse()?], None, None)?;
        self.tasks.spawn(run(rounds(machine, api)?, publisher));
        Ok(())
    }
}

fn rounds(machine: DemoMachine, api: &Arc<ApiServer>) -> Result<NodeSampler> {
    let node = NodeName::parse(machine.node)?;
    let hardware = SimulatedHardware::new(machine, api.clone())?;
    let sources = ReportSources {
        owners: Box::new(hardware.owners()),
        gpus: Box::new(SimulatedGpus(hardware)),
        pods: Box::new(WatchedPods::start(api.client("agent")?, &node)),
        models: Box::new(SimulatedModels(machine)),
        engines: EngineWatcher::new(EngineLimits {
            rate_window: RATE_WINDOW,
            ..EngineLimits::default()
        }),
    };
    Ok(NodeSampler::new(node, "demo".into(), sources)?)
}

async fn run(mut rounds: NodeSampler, mut publisher: Publisher) {
    let mut ticks = tokio::time::interval(REPORT_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let round = rounds.run_round().await;
        // The publisher records the result; the next report is less than half a second away.
        publisher.publish(round.report, round.as_of).await;
    }
}
