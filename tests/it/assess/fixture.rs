//! A cluster of 12 nodes and 60 pods with a device plugin, and a week of its figures by the hour, made by arithmetic: what is true of
//! them is known.

use serde_json::{Value, json};
use std::path::PathBuf;

pub const HOURS: i64 = 168;
/// 2026-11-16, a Monday, at 00:00 UTC.
pub const START: i64 = 1_794_787_200;

pub fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/assess")
}

/// One workload: its pods, each with its GPUs, and what they show by the hour.
pub struct Made {
    kind: &'static str,
    pub namespace: &'static str,
    pub name: &'static str,
    pub pods: u32,
    resource: (&'static str, u32),
    nodes: &'static str,
    args: &'static [&'static str],
    pub vram_mib: u64,
    /// Per cent of compute at night and by day.
    pub compute: (u64, u64),
    /// Per cent of the KV cache at night and at the peak; tokens that it holds.
    pub kv: Option<(u64, u64, u64)>,
}

const GPU: &str = "nvidia.com/gpu";
const MADE: Made = Made {
    kind: "Deployment",
    namespace: "team-a",
    name: "",
    pods: 1,
    resource: (GPU, 1),
    nodes: "a100",
    args: &[],
    vram_mib: 73_000,
    compute: (0, 30),
    kv: None,
};

pub fn workloads() -> [Made; 10] {
    [
        Made {
            name: "llama-8b",
            pods: 4,
            args: &[
                "serve",
                "meta-llama/Llama-3.1-8B-Instruct",
                "--max-model-len=8192",
            ],
            compute: (0, 60),
            kv: Some((5, 45, 420_000)),
            ..MADE
        },
        Made {
            kind: "StatefulSet",
            name: "mixtral",
            resource: (GPU, 2),
            args: &[
                "--model",
                "mistralai/Mixtral-8x7B-v0.1",
                "--tensor-parallel-size",
                "2",
                "--max-model-len=8192",
            ],
            compute: (10, 90),
            kv: Some((20, 97, 380_000)),
            ..MADE
        },
        Made {
            namespace: "team-b",
            name: "house-model",
            pods: 2,
            args: &["--model=acme/house-13b", "--max-model-len=4096"],
            kv: Some((5, 20, 90_000)),
            ..MADE
        },
        Made {
            namespace: "team-b",
            name: "phi-4",
            pods: 3,
            args: &[
                "--model=microsoft/phi-4",
                "--max-model-len=8192",
                "--gpu-memory-utilization=0.9",
            ],
            compute: (0, 20),
            kv: Some((2, 12, 200_000)),
            ..MADE
        },
        Made {
            kind: "Pod",
            namespace: "team-c",
            name: "notebook",
            vram_mib: 6_144,
            compute: (0, 4),
            ..MADE
        },
        Made {
            kind: "Job",
            namespace: "team-d",
            name: "train",
            pods: 2,
            vram_mib: 61_440,
            compute: (95, 98),
            ..MADE
        },
        Made {
            namespace: "team-b",
            name: "qwen-7b",
            pods: 4,
            nodes: "l40s",
            args: &["--model=Qwen/Qwen2.5-7B-Instruct", "--max-model-len=8192"],
            vram_mib: 41_000,
            compute: (0, 40),
            kv: Some((3, 30, 400_000)),
            ..MADE
        },
        Made {
            kind: "Job",
            namespace: "team-d",
            name: "render",
            pods: 2,
            nodes: "l40s",
            vram_mib: 12_288,
            compute: (0, 20),
            ..MADE
        },
        Made {
            namespace: "team-e",
            name: "classifier",
            pods: 4,
            nodes: "mig",
            ..MADE
        },
        Made {
            namespace: "team-f",
            name: "embed",
            pods: 6,
            nodes: "shared",
            ..MADE
        },
    ]
}

impl Made {
    pub fn pod(&self, at: u32) -> String {
        match self.kind {
            "Pod" => self.name.to_owned(),
            "StatefulSet" => format!("{}-{at}", self.name),
            "Deployment" => format!("{}-7c9d4b5f6-x{at}", self.name),
            _ => format!("{}-p{at}", self.name),
        }
    }

    fn object(&self, at: u32, node: String) -> Value {
        let (resource, count) = self.resource;
        let (owner, hash) = match self.kind {
            "Deployment" => ("ReplicaSet", "-7c9d4b5f6"),
            kind => (kind, ""),
        };
        let owners = json!([{ "apiVersion": "v1", "kind": owner, "name": format!("{}{hash}", self.name), "uid": self.name, "controller": true }]);
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": self.pod(at), "namespace": self.namespace, "uid": format!("{}-{at}", self.name),
                "labels": if hash.is_empty() { json!({}) } else { json!({ "pod-template-hash": &hash[1..] }) },
                "ownerReferences": if self.kind == "Pod" { json!([]) } else { owners },
            },
            "spec": {
                "nodeName": node,
                "containers": [{
                    "name": "main", "image": if self.kv.is_some() { "vllm/vllm-openai:v0.12.0" } else { "example/main:1" }, "args": self.args,
                    "resources": { "limits": { resource: count.to_string() }, "requests": { resource: count.to_string(), "cpu": "2", "memory": "8Gi" } },
                }],
            },
            "status": { "phase": "Running" },
        })
    }

    /// The day's curve, from 0 at night to 100 at 14:00.
    fn curve(hour: i64) -> u64 {
        (100 - 10 * (hour % 24 - 14).unsigned_abs().min(10)).min(100)
    }

    pub fn compute_at(&self, hour: i64) -> u64 {
        self.compute.0 + (self.compute.1 - self.compute.0) * Self::curve(hour) / 100
    }

    /// The peak is on Thursday; other days have nine tenths of it.
    fn kv_at(&self, hour: i64) -> f64 {
        let (night, peak, _) = self.kv.unwrap();
        let most = if hour / 24 == 3 { peak } else { peak * 9 / 10 };
        (night + (most - night) * Self::curve(hour) / 100) as f64 / 100.0
    }
}

/// Nodes by kind: name, how many, GPUs in each, what each offers, labels.
fn nodes() -> Vec<Value> {
    let labels = |product: &str, count: u32, memory: u32| json!({ "nvidia.com/gpu.product": product, "nvidia.com/gpu.count": count.to_string(), "nvidia.com/gpu.memory": memory.to_string(), "nvidia.com/gpu.replicas": "1" });
    let mut shared = labels("NVIDIA-A100-SXM4-80GB-SHARED", 2, 81_920);
    shared["nvidia.com/gpu.replicas"] = json!("4");
    let kinds = [
        ("a100", 4, 4, labels("NVIDIA-A100-SXM4-80GB", 4, 81_920)),
        ("l40s", 2, 4, labels("NVIDIA-L40S", 4, 46_068)),
        (
            "mig",
            1,
            4,
            labels("NVIDIA-A100-SXM4-80GB-MIG-3g.40gb", 4, 40_192),
        ),
        ("shared", 1, 8, shared),
        ("cpu", 4, 0, json!({})),
    ];
    let of = |(name, count, gpus, labels): (&str, u32, u32, Value)| {
        (0..count).map(move |at| {
            let mut amounts = json!({ "cpu": "128", "memory": "1Ti", "pods": "110" });
            if gpus > 0 {
                amounts[GPU] = json!(gpus.to_string());
            }
            json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": format!("{name}-{at}"), "labels": labels }, "status": { "allocatable": amounts, "capacity": amounts } })
        }).collect::<Vec<_>>()
    };
    kinds.into_iter().flat_map(of).collect()
}

/// A pod of a workload, and its GPUs by node.
type PlacedPod = (Made, u32, Vec<(String, u32)>);

/// The pods take the GPUs of their kind of node one after the other.
fn placed() -> Vec<PlacedPod> {
    let mut used = std::collections::BTreeMap::<&str, u32>::new();
    let mut placed = Vec::new();
    for made in workloads() {
        for at in 0..made.pods {
            let next = used.entry(made.nodes).or_default();
            let gpus = (*next..*next + made.resource.1).map(|gpu| {
                (
                    format!(
                        "{}-{}",
                        made.nodes,
                        if made.nodes == "shared" || made.nodes == "mig" {
                            0
                        } else {
                            gpu / 4
                        }
                    ),
                    gpu % 4,
                )
            });
            placed.push((Made { ..made }, at, gpus.collect()));
            *next += made.resource.1;
        }
    }
    placed
}

pub fn dump() -> Value {
    let gpu_pods = placed()
        .into_iter()
        .map(|(made, at, gpus)| made.object(at, gpus[0].0.clone()));
    let plain = (0..31).map(|at| {
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": format!("front-{at}"), "namespace": "web", "uid": format!("front-{at}") },
            "spec": { "nodeName": format!("cpu-{}", at % 4), "containers": [{ "name": "main", "image": "example/front:1" }] }, "status": { "phase": "Running" } })
    });
    let items: Vec<Value> = nodes().into_iter().chain(gpu_pods).chain(plain).collect();
    json!({ "apiVersion": "v1", "kind": "List", "items": items })
}

/// Labels of a series, and its values by the hour.
pub type Figures = (Vec<(String, String)>, Vec<String>);

/// All series of the week.
pub fn week() -> Vec<Figures> {
    let mut found = Vec::new();
    let mut add = |labels: &[(&str, &str)], value: &dyn Fn(i64) -> String| {
        let labels = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        found.push((labels.collect(), (0..HOURS).map(value).collect()));
    };
    let mut busy = std::collections::BTreeSet::new();
    for (made, at, gpus) in placed() {
        let pod = made.pod(at);
        if matches!(made.nodes, "mig" | "shared") {
            continue;
        }
        for (node, gpu) in &gpus {
            let uuid = format!("GPU-{node}-{gpu}");
            let gpu = gpu.to_string();
            let of = |name| {
                [
                    ("__name__", name),
                    ("UUID", &*uuid),
                    ("gpu", &*gpu),
                    ("Hostname", &**node),
                    ("namespace", "gpu-operator"),
                    ("pod", "nvidia-dcgm-exporter-x"),
                    ("exported_namespace", made.namespace),
                    ("exported_pod", &*pod),
                ]
            };
            add(&of("DCGM_FI_DEV_FB_USED"), &|_| made.vram_mib.to_string());
            add(&of("DCGM_FI_DEV_GPU_UTIL"), &|hour| {
                made.compute_at(hour).to_string()
            });
            busy.insert(uuid.clone());
        }
        if let Some((_, _, tokens)) = made.kv {
            let of = |name| {
                [
                    ("__name__", name),
                    ("namespace", made.namespace),
                    ("pod", &*pod),
                    ("model_name", "served"),
                ]
            };
            add(&of("vllm:kv_cache_usage_perc"), &|hour| {
                made.kv_at(hour).to_string()
            });
            if at == 0 {
                add(&of("vllm:num_requests_waiting"), &|hour| {
                    u64::from(made.kv_at(hour) > 0.9).to_string()
                });
                let blocks = (tokens / 16).to_string();
                let config = [
                    &of("vllm:cache_config_info")[..],
                    &[("block_size", "16"), ("num_gpu_blocks", &*blocks)],
                ]
                .concat();
                add(&config, &|_| "1".into());
            }
        }
    }
    for (kind, count) in [("a100", 4), ("l40s", 2)] {
        for (node, gpu) in (0..count).flat_map(|node| (0..4).map(move |gpu| (node, gpu))) {
            let uuid = format!("GPU-{kind}-{node}-{gpu}");
            if !busy.contains(&uuid) {
                add(
                    &[
                        ("__name__", "DCGM_FI_DEV_GPU_UTIL"),
                        ("UUID", &uuid),
                        ("Hostname", &format!("{kind}-{node}")),
                    ],
                    &|_| "0".into(),
                );
            }
        }
    }
    found
}

/// What a Prometheus answers for these series.
pub fn answer<'f>(series: impl IntoIterator<Item = &'f Figures>) -> Value {
    let result = series.into_iter().map(|(labels, values)| {
        let metric: serde_json::Map<String, Value> = labels
            .iter()
            .map(|(key, value)| (key.clone(), json!(value)))
            .collect();
        let values: Vec<Value> = (0..)
            .zip(values)
            .map(|(hour, value)| json!([START + hour * 3600, value]))
            .collect();
        json!({ "metric": metric, "values": values })
    });
    json!({ "status": "success", "data": { "resultType": "matrix", "result": result.collect::<Vec<_>>() } })
}

/// Of how many GPUs the exporter says that they compute nothing at this hour of each day.
pub fn idle_gpus(hour: i64) -> u32 {
    let measured = placed()
        .into_iter()
        .filter(|(made, ..)| !matches!(made.nodes, "mig" | "shared"));
    let busy = measured.filter(|(made, ..)| made.compute_at(hour) > 0);
    24 - busy.map(|(_, _, gpus)| gpus.len() as u32).sum::<u32>()
}
