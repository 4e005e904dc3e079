//! The node agents of all machines: they report each machine's GPUs once a second, as an agent on the node would.

use crate::ids::{GpuModel, GpuUuid, NodeName};
use crate::report::{GpuReport, NodeReport};
use crate::scheduling::device::Health;
use crate::units::{Bytes, Millis};
use bytes::Bytes as Body;
use http::Request;
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::task::JoinHandle;

/// One node's hardware.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub node: &'static str,
    pub model: &'static str,
    pub gpus: u32,
    pub gib: u64,
}

const EVERY: Duration = Duration::from_secs(1);

/// Running agents; dropping this stops them.
pub struct Agents {
    task: JoinHandle<()>,
}

impl Agents {
    /// Must be called inside a tokio runtime.
    pub fn start(machines: &[Machine], stowage: SocketAddr) -> Self {
        Self { task: tokio::spawn(run(machines.to_vec(), stowage)) }
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(machines: Vec<Machine>, stowage: SocketAddr) {
    let client: Client<HttpConnector, Full<Body>> = Client::builder(TokioExecutor::new()).build_http();
    let mut ticks = tokio::time::interval(EVERY);
    for sequence in 1.. {
        ticks.tick().await;
        for machine in &machines {
            let report = serde_json::to_vec(&report(machine, sequence)).expect("a report is plain data");
            let request = Request::post(format!("http://{stowage}/v1/reports"))
                .header(http::header::CONTENT_TYPE, "application/json")
                .body(Full::from(report))
                .expect("an address makes a URI");
            // Stowage may not know the node yet, or be gone: the next report is a second away.
            let _ = client.request(request).await;
        }
    }
}

fn report(machine: &Machine, sequence: u64) -> NodeReport {
    let gpu = |index| GpuReport {
        uuid: GpuUuid::parse(&format!("GPU-{}-{index}", machine.node)).expect("a name"),
        index,
        model: GpuModel::parse(machine.model).expect("a name"),
        parent: None,
        total_bytes: Bytes::gib(machine.gib),
        reserved_bytes: Bytes::ZERO,
        used_bytes: Some(Bytes::ZERO),
        utilization_percent: None,
        health: Health::Healthy,
        health_reason: None,
        numa_node: None,
        nvlink_island: None,
        processes: None,
    };
    NodeReport {
        node: NodeName::parse(machine.node).expect("a name"),
        boot_id: "demo".into(),
        sequence,
        age_millis: Millis(0),
        gpus: Some((0..machine.gpus).map(gpu).collect()),
        engines: Vec::new(),
        models: Vec::new(),
        findings: Vec::new(),
        missing: Vec::new(),
    }
}
