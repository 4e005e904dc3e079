//! The environment of one agent: every interface that it uses is real, and a stand-in is behind each.
//!
//! Nothing here asserts what an agent reports.

use crate::client::{Client, TEST_TIMEOUT};
use crate::served::{Served, ServedCluster, eventually, node};
use axum::http::{StatusCode, Uri};
use mock_nvml::{GpuProcess, Mock, NvmlScript, ScriptedGpu};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use stowage_agent::ownership::pod_resources;
use stowage_lab::demo::api_server::ApiServer;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::vocabulary::node_reading::GpuReading;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

// The kubelet that the unit tests of ownership ask, through the same generated code.
#[path = "../../../src/agent/ownership/fake_kubelet.rs"]
#[expect(dead_code, reason = "this world's kubelet never fails")]
pub mod fake_kubelet;

use fake_kubelet::FakeKubelet;

pub const NODE: &str = "node-a";
/// A GiB, as scripts and reports count.
pub const GIB: u64 = 1 << 30;

/// One node and its cluster.
pub struct AgentNode {
    folder: TempDir,
    mock: Mock,
    pub kubelet: FakeKubelet,
    pub api: ApiServer,
    pub runtime: Runtime,
}

impl AgentNode {
    /// A node with these GPUs, and nothing else on it.
    pub fn with_gpus(gpus: impl IntoIterator<Item = ScriptedGpu>) -> Self {
        let runtime = Runtime::new().unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("proc")).unwrap();
        let mock = Mock::install(folder.path(), &script(gpus)).unwrap();
        let (kubelet, api) = runtime.block_on(async {
            (
                FakeKubelet::start(vec![]),
                ApiServer::start().await.unwrap(),
            )
        });
        let world = Self {
            folder,
            mock,
            kubelet,
            api,
            runtime,
        };
        world.api.create("nodes", node(NODE)).unwrap();
        world.set_api_server(&world.api.uri().to_string());
        world
    }

    /// Makes agents watch their pods at this server.
    pub fn set_api_server(&self, server: &str) {
        std::fs::write(self.kubeconfig(), kubeconfig(server)).unwrap();
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.folder().join("kubeconfig")
    }

    /// The driver's library.
    pub fn library(&self) -> &Path {
        self.mock.library()
    }

    /// Changes what the driver says.
    pub fn set_nvml_script(&self, script: &NvmlScript) {
        self.mock.play(script).unwrap();
    }

    /// A process in `/proc`, in that cgroup.
    pub fn add_process(&self, pid: u32, cgroup: &str) {
        let folder = self.folder().join("proc").join(pid.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        let stat = format!("{pid} (engine) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 0");
        std::fs::write(folder.join("stat"), stat).unwrap();
        std::fs::write(folder.join("cgroup"), cgroup).unwrap();
    }

    /// The same for a process of a pod, as a kubelet with the systemd driver and containerd places it.
    pub fn add_process_of_pod(&self, pid: u32, pod: &Value) {
        let uid = uid(pod).replace('-', "_");
        let slice = format!("kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice");
        self.add_process(
            pid,
            &format!(
                "0::/kubepods.slice/{slice}/cri-containerd-{}.scope\n",
                "c".repeat(64)
            ),
        );
    }

    /// A pod of this node with an address of its own; `edit` makes it what the test is about.
    pub fn pod(&self, name: &str, edit: impl FnOnce(&mut Value)) -> Value {
        let limits = json!({ "stowage.dev/vram": "20Gi" });
        let mut pod = json!({
            "metadata": { "name": name, "labels": {}, "annotations": {} },
            "spec": {
                "schedulerName": "stowage", "nodeName": NODE,
                "containers": [{ "name": "engine", "resources": { "limits": limits } }],
            },
            "status": { "phase": "Running", "podIP": Ipv4Addr::LOCALHOST.to_string() },
        });
        edit(&mut pod);
        Value::clone(&self.api.create("pods", pod).unwrap())
    }

    /// `stowage agent` with this whole environment, and `more` arguments.
    pub fn agent(&self, more: &[&str]) -> Command {
        let mut command = stowage_agent();
        command
            .args(["--node", NODE, "--nvml-lib"])
            .arg(self.library())
            .arg("--proc")
            .arg(self.folder().join("proc"))
            .arg("--pod-resources")
            .arg(self.kubelet.socket())
            .arg("--kubeconfig")
            .arg(self.kubeconfig())
            .args(more);
        command
    }

    /// What `--once --json` prints.
    fn report_once(&self, more: &[&str]) -> Value {
        let output = self
            .agent(&[&["--once", "--json"], more].concat())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The same, repeated until it meets the test's condition: on a busy machine a list or an engine takes longer than one run.
    pub fn report_until(&self, more: &[&str], is_there: impl Fn(&Value) -> bool) -> Value {
        let started = Instant::now();
        loop {
            let report = self.report_once(more);
            if is_there(&report) {
                return report;
            }
            assert!(
                started.elapsed() < TEST_TIMEOUT,
                "it never came to this: {report:#}"
            );
        }
    }

    /// The extender of a cluster with this node and the pods that are known to the API server.
    pub fn extender(&self) -> Served {
        self.extender_with([])
    }

    /// The same where these pods wait.
    pub fn extender_with(&self, waiting: impl IntoIterator<Item = Value>) -> Served {
        let mut cluster = ServedCluster::with_gpus(&[]);
        cluster.nodes.push(node(NODE));
        let known = self.api.list("pods");
        cluster
            .with(known.iter().map(|pod| Value::clone(pod)))
            .with(waiting)
            .serve()
    }

    /// The agent as it runs on a node, but ten times a second; it reports to `extender`.
    pub fn start(&self, extender: &str) -> RunningAgent {
        RunningAgent::start(&mut self.agent(&["--interval", "100ms", "--extender", extender]))
    }
}

/// The command in an environment that says nothing of clusters or caches.
pub fn stowage_agent() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    let said = [
        "HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "XDG_CACHE_HOME",
        "KUBECONFIG",
        "NODE_NAME",
        "RUST_LOG",
    ];
    for name in said {
        command.env_remove(name);
    }
    command.env_remove("KUBERNETES_SERVICE_HOST").arg("agent");
    command
}

pub fn kubeconfig(server: &str) -> String {
    let cluster = json!({ "name": "one", "cluster": { "server": server } });
    let context = json!({ "name": "here", "context": { "cluster": "one", "user": "me" } });
    let user = json!({ "name": "me", "user": {} });
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [cluster], "contexts": [context], "users": [user],
    })
    .to_string()
}

/// An agent that reports until it is stopped, or dropped.
pub struct RunningAgent {
    child: Child,
    log: Receiver<String>,
}

impl RunningAgent {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (lines, log) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            stderr
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| lines.send(line))
        });
        Self { child, log }
    }

    /// The next line of its log that has `text` in it.
    pub fn line_with(&self, text: &str) -> String {
        self.lines_until(text).pop().expect("the one with the text")
    }

    /// The lines of its log up to the next that has `text` in it.
    pub fn lines_until(&self, text: &str) -> Vec<String> {
        let started = Instant::now();
        let mut lines = Vec::new();
        loop {
            match self
                .log
                .recv_timeout(TEST_TIMEOUT.saturating_sub(started.elapsed()))
            {
                Ok(line) => {
                    lines.push(line);
                    if lines.last().is_some_and(|line| line.contains(text)) {
                        return lines;
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    panic!("its log never said {text:?}")
                }
            }
        }
    }

    /// A line of its memory in KiB.
    pub fn memory(&self, line: &str) -> u64 {
        crate::process::memory(&self.child, line)
    }

    pub fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(
            Command::new("sh")
                .args(["-c", &kill])
                .status()
                .unwrap()
                .success()
        );
    }

    /// Until it has ended by itself.
    pub fn wait_for_exit(mut self) -> (ExitStatus, Vec<String>) {
        let mut lines = Vec::new();
        // Its log ends with it.
        while let Ok(line) = self.log.recv_timeout(TEST_TIMEOUT) {
            lines.push(line);
        }
        let started = Instant::now();
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return (status, lines),
                None => assert!(started.elapsed() < TEST_TIMEOUT, "it goes on: {lines:?}"),
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for RunningAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An engine that answers what a test lays out for it.
pub struct StubEngine {
    pub port: u16,
    pages: Arc<Mutex<BTreeMap<&'static str, &'static str>>>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl StubEngine {
    /// One that is ready, with this metrics page.
    pub fn serving(world: &AgentNode, metrics: &'static str) -> Self {
        let pages = Arc::new(Mutex::new(BTreeMap::from([
            ("/metrics", metrics),
            ("/health", ""),
        ])));
        let (known, stop) = (pages.clone(), CancellationToken::new());
        let answer = move |uri: Uri| async move {
            known
                .lock()
                .get(uri.path())
                .copied()
                .ok_or(StatusCode::NOT_FOUND)
        };
        let router = axum::Router::new().fallback(answer);
        let listener = world
            .runtime
            .block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
            .unwrap();
        let port = listener.local_addr().unwrap().port();
        let stopped = stop.clone().cancelled_owned();
        let task = world.runtime.spawn(async {
            axum::serve(listener, router)
                .with_graceful_shutdown(stopped)
                .await
                .unwrap();
        });
        Self {
            port,
            pages,
            stop,
            task,
        }
    }

    pub fn set_metrics(&self, metrics: &'static str) {
        self.pages.lock().insert("/metrics", metrics);
    }

    /// Until the address refuses connections and the open ones are closed.
    pub fn end(self, world: &AgentNode) {
        self.stop.cancel();
        world.runtime.block_on(self.task).unwrap();
    }
}

/// Makes a pod one of an engine on that port.
pub fn engine_at(pod: &mut Value, port: u16) {
    pod["metadata"]["annotations"]["stowage.dev/metrics-port"] = json!(port.to_string());
}

/// Makes a pod one that Stowage gave this much on these GPUs.
pub fn bound_to(pod: &mut Value, gpus: &str, granted: u64) {
    pod["metadata"]["annotations"]["stowage.dev/devices"] = json!(gpus);
    pod["metadata"]["annotations"]["stowage.dev/vram-granted"] = json!(granted.to_string());
}

/// The node's latest report, as operators see it; null before the first.
pub fn reported(extender: &Served) -> Value {
    let mut board = Client::connect(extender.operators)
        .get_page("/debug/reports")
        .json();
    board[NODE]["report"].take()
}

/// The same once it says what a test waits for.
pub fn reported_until(extender: &Served, what: &str, is_there: impl Fn(&Value) -> bool) -> Value {
    let mut report = Value::Null;
    eventually(what, || {
        report = reported(extender);
        is_there(&report)
    });
    report
}

/// The measured figures of a GPU of the node in the ledger.
pub fn gpu_reading(extender: &Served, gpu: &str) -> Option<GpuReading> {
    let ledger = extender.service.cluster();
    let reading = ledger.ledger().reading(&NodeName::parse(NODE).unwrap())?;
    reading
        .gpus
        .iter()
        .find(|reading| reading.uuid.as_str() == gpu)
        .cloned()
}

/// Where the node's agent finds an extender.
pub fn agents_url(extender: &Served) -> String {
    format!("http://{}", extender.agents)
}

pub fn uid(pod: &Value) -> &str {
    pod["metadata"]["uid"].as_str().unwrap()
}

pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

// ---- what the driver says ----

pub fn script(gpus: impl IntoIterator<Item = ScriptedGpu>) -> NvmlScript {
    NvmlScript {
        gpus: gpus.into_iter().collect(),
        ..NvmlScript::default()
    }
}

pub fn gpu(letter: &str) -> ScriptedGpu {
    ScriptedGpu {
        uuid: format!("GPU-{letter}"),
        ..ScriptedGpu::default()
    }
}

/// A GPU with these processes, by PID and GiB, and nothing else on it.
pub fn busy(letter: &str, processes: &[(u32, u64)]) -> ScriptedGpu {
    let used = processes.iter().map(|(_, gib)| gib * GIB).sum();
    ScriptedGpu {
        used,
        processes: processes
            .iter()
            .map(|(pid, gib)| process(*pid, *gib))
            .collect(),
        ..gpu(letter)
    }
}

pub fn process(pid: u32, gib: u64) -> GpuProcess {
    GpuProcess {
        pid,
        used: Some(gib * GIB),
        ..GpuProcess::default()
    }
}
