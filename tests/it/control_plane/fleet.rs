//! Nodes with GPUs, the agents that report them, and pods that request some.

use super::world::{Ports, http_request};
use k8s_openapi::api::core::v1::{Node, Pod};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Interval of reports: that of an agent.
pub const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Reports in one request: what is posted at once is limited.
const REPORTS_PER_REQUEST: usize = 100;

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
    GpuNode {
        name: name.into(),
        gpus,
        mib,
        reserved_mib: 0,
        model,
    }
}

impl GpuNode {
    pub fn uuid(&self, index: u32) -> String {
        let name: u32 = self.name.bytes().fold(7, |sum, byte| {
            sum.wrapping_mul(31).wrapping_add(byte.into())
        });
        format!("GPU-{name:08x}-0000-4000-8000-{index:012x}")
    }

    pub fn object(&self) -> Node {
        let Self {
            name,
            gpus,
            mib,
            model,
            ..
        } = self;
        from_json(json!({ "metadata": { "name": name, "labels": {
            "kubernetes.io/hostname": name,
            "nvidia.com/gpu.count": gpus.to_string(),
            "nvidia.com/gpu.memory": mib.to_string(),
            "nvidia.com/gpu.product": model,
        } } }))
    }

    /// As a kubelet fills it in, before VRAM is advertised.
    pub fn status(&self) -> Value {
        let amounts = json!({ "cpu": "128", "memory": "1024Gi", "pods": "250", "ephemeral-storage": "1024Gi" });
        json!({
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady" }],
        })
    }

    fn report(&self, sequence: u64, measured: &Measured) -> Value {
        let gpu = |index| {
            let uuid = self.uuid(index);
            let used = measured.unaccounted.get(&uuid).copied().unwrap_or_default();
            let engine = measured.engines.get(&uuid);
            let by_engine = engine.map_or(0, |engine| engine["bytes"].as_u64().unwrap());
            let process = engine
                .map(|engine| json!({ "pid": 1, "usedBytes": by_engine, "pod": engine["pod"] }));
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
        let engine = |index| {
            let uuid = self.uuid(index);
            if let Some(engine) = measured.engines.get(&uuid) {
                let (pod, state) = (&engine["pod"], &engine["state"]);
                return Some(
                    json!({ "pod": pod, "engine": "vllm", "gpus": [uuid], "state": state }),
                );
            }
            let usage = measured.caches.get(&uuid)?;
            Some(json!({
                "pod": format!("engine-on-{uuid}"), "engine": "vllm", "gpus": [uuid], "state": "serving",
                "kvCacheUsage": usage, "waiting": 0, "running": 1,
            }))
        };
        let engines: Vec<Value> = (0..self.gpus).filter_map(engine).collect();
        json!({ "node": self.name, "bootId": "1", "sequence": sequence, "gpus": gpus, "engines": engines })
    }
}

/// What no API event shows, by GPU.
#[derive(Debug, Clone, Default)]
struct Measured {
    /// The VRAM that processes outside of pods use, in MiB.
    unaccounted: BTreeMap<String, u64>,
    /// The share of its KV cache that the engine there uses.
    caches: BTreeMap<String, f64>,
    /// The one engine there: its pod, its state, and its bytes.
    engines: BTreeMap<String, Value>,
}

/// The agents of all nodes; dropping this stops them.
pub struct FleetAgents {
    measured: Arc<Mutex<Measured>>,
    task: JoinHandle<()>,
}

impl FleetAgents {
    /// They report to every replica, whether it listens or not.
    pub fn start(pause: Duration, nodes: Vec<GpuNode>, replicas: Vec<Ports>) -> Self {
        let measured: Arc<Mutex<Measured>> = Arc::default();
        let shared = measured.clone();
        let task = tokio::spawn(async move {
            for sequence in 1.. {
                let measured = shared.lock().clone();
                let reports: Vec<Value> = nodes
                    .iter()
                    .map(|node| node.report(sequence, &measured))
                    .collect();
                for reports in reports.chunks(REPORTS_PER_REQUEST) {
                    post_report(&replicas, &Value::from(reports).to_string()).await;
                }
                tokio::time::sleep(pause).await;
            }
        });
        Self { measured, task }
    }

    /// From the next report on.
    pub fn report_engine(&self, uuid: &str, pod: &str, mib: u64, state: &str) {
        let engine = json!({ "pod": pod, "bytes": mib << 20, "state": state });
        self.measured.lock().engines.insert(uuid.to_owned(), engine);
    }

    /// From the next report on.
    pub fn set_unaccounted_mib(&self, uuid: &str, mib: u64) {
        self.measured
            .lock()
            .unaccounted
            .insert(uuid.to_owned(), mib);
    }

    /// From the next report on.
    pub fn set_kv_cache_usage(&self, uuid: &str, share: f64) {
        self.measured.lock().caches.insert(uuid.to_owned(), share);
    }
}

async fn post_report(replicas: &[Ports], body: &str) {
    for ports in replicas {
        let url = format!("http://127.0.0.1:{}/v1/reports", ports.agents);
        // A replica that has just started may not know the nodes yet.
        let heard = http_request("POST", &url, body).await;
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
    let resources = json!({ "limits": { "stowage.dev/vram": format!("{gib}Gi") }, "requests": { "cpu": "100m" } });
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
