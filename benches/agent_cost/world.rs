//! A node with everything on it: 8 GPUs, 16 pods with a process each, 8 of them engines, and models on disk.

use crate::page;
use axum::Router;
use axum::routing::get;
use mock_nvml::{GpuProcess, Mock, NvmlScript, ScriptedGpu};
use serde_json::json;
use std::fs::{create_dir_all, write};
use std::path::{Path, PathBuf};
use stowage_lab::demo::api_server::ApiServer;

pub const GPUS: usize = 8;
pub const ENGINES: usize = GPUS;
pub const MODELS: usize = 6;
const NODE: &str = "gpu-node-0";
const GIB: u64 = 1 << 30;

pub struct AgentHost {
    folder: PathBuf,
    nvml: Mock,
    _api: ApiServer,
}

impl AgentHost {
    pub async fn new(folder: &Path) -> Self {
        let api = ApiServer::start().await.expect("a port");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c", "cluster": { "server": api.uri().to_string() } }],
            "users": [{ "name": "u", "user": {} }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        });
        write(folder.join("kubeconfig"), config.to_string()).expect("a file");
        api.create("nodes", node()).expect("a node");
        for place in 0..2 * GPUS {
            let port = if place < ENGINES {
                Some(serve_metrics(place).await)
            } else {
                None
            };
            api.create("pods", pod(place, port)).expect("a pod");
            process(&folder.join("proc"), place);
        }
        (0..MODELS).for_each(|place| model(&folder.join("models"), place));
        let nvml = Mock::install(folder, &script()).expect("the library is built beside the bench");
        Self {
            folder: folder.to_owned(),
            nvml,
            _api: api,
        }
    }

    /// The agent's arguments: the addresses and paths of its sources.
    pub fn arguments(&self) -> Vec<String> {
        let path = |name: &str| self.folder.join(name).display().to_string();
        let arguments = [
            ("--node", NODE.into()),
            ("--kubeconfig", path("kubeconfig")),
            ("--proc", path("proc")),
            ("--hf-cache", path("models")),
            ("--pod-resources", path("no.sock")),
            ("--nvml-lib", self.nvml.library().display().to_string()),
        ];
        let named = arguments
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value]);
        std::iter::once("agent".to_owned()).chain(named).collect()
    }
}

/// Each pod has an address of its own, as on a real node.
fn ip(pod: usize) -> String {
    format!("127.0.1.{}", pod + 1)
}

fn uid(pod: usize) -> String {
    format!("0e5c2a4b-93d1-4f7e-8a06-{pod:012x}")
}

fn gpu_uuid(gpu: usize) -> String {
    format!("GPU-5a1e0c44-7c41-4a53-b3d2-{gpu:012x}")
}

fn pid(pod: usize) -> u32 {
    4000 + pod as u32
}

/// Serves an engine's metrics page on the pod's address, and returns the port.
async fn serve_metrics(pod: usize) -> u16 {
    let listener = tokio::net::TcpListener::bind((ip(pod), 0))
        .await
        .expect("all of 127/8 is this machine");
    let port = listener.local_addr().expect("an address").port();
    let page = page::metrics_page();
    let router = Router::new()
        .route("/metrics", get(move || std::future::ready(page.clone())))
        .route("/health", get(|| std::future::ready("")));
    tokio::spawn(async { axum::serve(listener, router).await });
    port
}

/// Node object with one image, as the kubelet lists it.
fn node() -> serde_json::Value {
    let images = json!([{ "names": ["registry.example/app:1"], "sizeBytes": 9_000_000_000_u64 }]);
    json!({ "metadata": { "name": NODE }, "status": { "images": images } })
}

/// Bound pod, two of them on each GPU; those with a port are engines.
fn pod(place: usize, port: Option<u16>) -> serde_json::Value {
    let mut pod = json!({
        "metadata": {
            "name": format!("llm-{place}"), "uid": uid(place),
            "annotations": {
                "stowage.dev/devices": gpu_uuid(place % GPUS), "stowage.dev/vram-granted": (30 * GIB).to_string(),
            },
        },
        "spec": { "nodeName": NODE, "containers": [
            { "name": "server", "image": "app:1", "resources": { "limits": { "stowage.dev/vram": "30Gi" } } },
        ] },
        "status": {
            "phase": "Running", "podIP": ip(place), "conditions": [{ "type": "Ready", "status": "True" }],
        },
    });
    if let Some(port) = port {
        pod["metadata"]["labels"]["llm-d.ai/engine-type"] = "vllm".into();
        pod["metadata"]["annotations"]["stowage.dev/metrics-port"] = port.to_string().into();
    }
    pod
}

/// What the kernel shows of a pod's process.
fn process(proc: &Path, pod: usize) {
    let folder = proc.join(pid(pod).to_string());
    create_dir_all(&folder).expect("a folder");
    let zeros = "0 ".repeat(18);
    write(
        folder.join("stat"),
        format!("{} (python3) S {zeros}{} 0 0\n", pid(pod), 1000 + pod),
    )
    .expect("a file");
    let uid = uid(pod).replace('-', "_");
    let cgroup = format!(
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice/cri-containerd-0.scope\n"
    );
    write(folder.join("cgroup"), cgroup).expect("a file");
}

/// A model of four files in a Hugging Face cache.
fn model(cache: &Path, place: usize) {
    let folder = cache.join(format!("models--organization--model-{place}"));
    let (revision, blobs) = (
        "0123456789abcdef0123456789abcdef01234567",
        folder.join("blobs"),
    );
    let snapshot = folder.join("snapshots").join(revision);
    [&folder.join("refs"), &blobs, &snapshot]
        .into_iter()
        .for_each(|f| create_dir_all(f).expect("a folder"));
    write(folder.join("refs/main"), revision).expect("a file");
    for part in 1..=4 {
        let blob = blobs.join(format!("{part:064x}"));
        write(&blob, [0; 4096]).expect("a file");
        let name = snapshot.join(format!("model-{part:05}-of-00004.safetensors"));
        std::os::unix::fs::symlink(blob, name).expect("a link");
    }
    write(snapshot.join("config.json"), "{}").expect("a file");
}

fn script() -> NvmlScript {
    let process = |pod: usize| GpuProcess {
        pid: pid(pod),
        used: Some(30 * GIB),
        mps: false,
        graphics: false,
        both: false,
    };
    let gpu = |place: usize| ScriptedGpu {
        uuid: gpu_uuid(place),
        pci_bus_id: format!("00000000:{:02X}:00.0", 0x10 + place),
        used: 60 * GIB,
        utilization: 70,
        processes: vec![process(place), process(place + GPUS)],
        nvlink: Some(0),
        ..ScriptedGpu::default()
    };
    NvmlScript {
        gpus: (0..GPUS).map(gpu).collect(),
        ..NvmlScript::default()
    }
}
