//! Nodes with GPUs, the agents that report them, and pods that request some.

use super::world::{Ports, ask};
use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// As an agent reports.
pub const REPORT_EVERY: Duration = Duration::from_secs(1);
/// Reports in one request: what is posted at once is limited.
const AT_ONCE: usize = 100;

#[derive(Debug, Clone)]
pub struct GpuNode {
    pub name: String,
    pub gpus: u32,
    pub mib: u64,
    /// What the driver keeps of each GPU; labels do not show it.
    pub reserved_mib: u64,
    pub model: &'static str,
}

pub fn node(name: &str, gpus: u32, mib: u64, model: &'static str) -> GpuNode {
    GpuNode { name: name.into(), gpus, mib, reserved_mib: 0, model }
}

impl GpuNode {
    pub fn uuid(&self, index: u32) -> String {
        let name: u32 = self.name.bytes().fold(7, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        format!("GPU-{name:08x}-0000-4000-8000-{index:012x}")
    }

    pub fn object(&self) -> Node {
        let Self { name, gpus, mib, model, .. } = self;
        from_json(json!({ "metadata": { "name": name, "labels": {
            "kubernetes.io/hostname": name,
            "nvidia.com/gpu.count": gpus.to_string(),
            "nvidia.com/gpu.memory": mib.to_string(),
            "nvidia.com/gpu.product": model,
        } } }))
    }

    /// As a kubelet fills it in, before VRAM is advertised.
    pub fn status(&self) -> Value {
        let amounts =
            json!({ "cpu": "128", "memory": "1024Gi", "pods": "250", "ephemeral-storage": "1024Gi" });
        json!({
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady" }],
        })
    }

    fn report(
        &self,
        sequence: u64,
        strangers: &BTreeMap<String, u64>,
        engines: &BTreeMap<String, Value>,
    ) -> Value {
        let gpu = |index| {
            let uuid = self.uuid(index);
            let used = strangers.get(&uuid).copied().unwrap_or_default();
            let engine = engines.get(&uuid);
            let by_engine = engine.map_or(0, |engine| engine["bytes"].as_u64().unwrap());
            let process =
                engine.map(|engine| json!({ "pid": 1, "usedBytes": by_engine, "pod": engine["pod"] }));
            json!({
                "uuid": uuid,
                "index": index,
                "model": self.model,
                "totalBytes": self.mib << 20,
                "reservedBytes": self.reserved_mib << 20,
                "usedBytes": (used << 20) + by_engine,
                "processes": process.map(|process| [process]),
            })
        };
        let gpus: Vec<Value> = (0..self.gpus).map(gpu).collect();
        let mine =
            (0..self.gpus).filter_map(|index| Some((self.uuid(index), engines.get(&self.uuid(index))?)));
        let engines: Vec<Value> = mine
            .map(|(uuid, engine)| {
                json!({ "pod": engine["pod"], "engine": "vllm", "gpus": [uuid], "state": engine["state"] })
            })
            .collect();
        json!({ "node": self.name, "bootId": "1", "sequence": sequence, "gpus": gpus, "engines": engines })
    }
}

/// The agents of all nodes; dropping this stops them.
pub struct FleetAgents {
    /// The VRAM that processes outside of pods use of a GPU, in MiB: no API event shows it.
    strangers: Arc<Mutex<BTreeMap<String, u64>>>,
    /// By GPU, the one engine there: its pod, its state, and its bytes.
    engines: Arc<Mutex<BTreeMap<String, Value>>>,
    task: JoinHandle<()>,
}

impl FleetAgents {
    /// They report to every replica, whether it listens or not.
    pub fn start(pause: Duration, nodes: Vec<GpuNode>, replicas: Vec<Ports>) -> Self {
        let strangers: Arc<Mutex<BTreeMap<String, u64>>> = Arc::default();
        let engines: Arc<Mutex<BTreeMap<String, Value>>> = Arc::default();
        let (used, running) = (strangers.clone(), engines.clone());
        let task = tokio::spawn(async move {
            for sequence in 1.. {
                let (used, running) = (used.lock().clone(), running.lock().clone());
                let report = |node: &GpuNode| node.report(sequence, &used, &running);
                let reports: Vec<Value> = nodes.iter().map(report).collect();
                for reports in reports.chunks(AT_ONCE) {
                    tell(&replicas, &Value::from(reports).to_string()).await;
                }
                tokio::time::sleep(pause).await;
            }
        });
        Self { strangers, engines, task }
    }

    /// From the next report on.
    pub fn report_engine(&self, uuid: &str, pod: &str, mib: u64, state: &str) {
        let engine = json!({ "pod": pod, "bytes": mib << 20, "state": state });
        self.engines.lock().insert(uuid.to_owned(), engine);
    }

    /// From the next report on.
    pub fn occupy(&self, uuid: &str, mib: u64) {
        self.strangers.lock().insert(uuid.to_owned(), mib);
    }
}

async fn tell(replicas: &[Ports], body: &str) {
    for ports in replicas {
        let url = format!("http://127.0.0.1:{}/v1/reports", ports.agents);
        // A replica that has just started may not know the nodes yet.
        let heard = ask("POST", &url, body).await;
        if let Some((status, said)) = heard.filter(|(status, _)| ![200, 422].contains(status)) {
            println!("a report was answered {status}: {said}");
        }
    }
}

impl Drop for FleetAgents {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A pod for Stowage that asks for so much VRAM, in GiB, with the given annotations and PriorityClass.
pub fn pod(name: &str, gib: u64, annotations: &Value, priority_class: &str) -> Pod {
    let resources =
        json!({ "limits": { "stowage.dev/vram": format!("{gib}Gi") }, "requests": { "cpu": "100m" } });
    from_json(json!({
        "metadata": { "name": name, "annotations": annotations },
        "spec": {
            "schedulerName": "stowage",
            "priorityClassName": priority_class,
            "terminationGracePeriodSeconds": 2,
            "containers": [{ "name": "engine", "image": "engine", "resources": resources }],
        },
    }))
}

fn from_json<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}
