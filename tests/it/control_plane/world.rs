//! A real control plane on loopback: etcd, kube-apiserver and kube-scheduler as separate processes, Stowage's own binary
//! beside them, and in place of nodes the stand-in kubelet and agents that report.
//!
//! Stowage and the scheduler run with the shipped manifests' rights and nothing more: as the service account of
//! `base/rbac.yaml`, under the admission policy, with the shipped scheduler configuration.

use super::fleet::{FleetAgents, GpuNode, REPORT_INTERVAL};
use super::processes::{CommandOutput, TestProcess, eventually, free_ports, run};
use super::servers::{ADMIN_TOKEN, BINARIES, ClientCa, apiserver, binaries, etcd, kubeconfig};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use rcgen::KeyPair;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use stowage_lab::demo::kubelet;
use stowage_lab::demo::kubelet::Kubelet;
use tempfile::TempDir;
use tokio::sync::{Mutex, MutexGuard};

pub const SCHEDULER_CONFIG: &str = "base/kube-scheduler-config.yaml";
/// A control plane takes some 400 MiB and most of a core: one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

/// Fields are dropped in this order: clients before the servers that answer them.
pub struct RealControlPlane {
    agents: Option<FleetAgents>,
    kubelet: Option<Kubelet>,
    pub scheduler: Option<TestProcess>,
    pub stowage: Option<TestProcess>,
    pub apiserver: TestProcess,
    pub etcd: TestProcess,
    pub client: Client,
    binaries: PathBuf,
    server: String,
    pub ports: Ports,
    folder: TempDir,
    _turn: MutexGuard<'static, ()>,
}

/// Where Stowage listens, each time it is started.
#[derive(Debug, Clone, Copy)]
pub struct Ports {
    pub verbs: u16,
    pub agents: u16,
    pub admin: u16,
}

impl Ports {
    pub fn free() -> Self {
        let [verbs, agents, admin] = free_ports();
        Self {
            verbs,
            agents,
            admin,
        }
    }
}

impl RealControlPlane {
    /// `None`, with a line that says why, where there are no binaries.
    pub async fn start() -> Option<Self> {
        let binaries = binaries()?;
        let turn = ONE_AT_A_TIME.lock().await;
        let folder = tempfile::tempdir().unwrap();
        let [client_port, peer_port, secure_port] = free_ports();
        let etcd = etcd(&binaries, folder.path(), client_port, peer_port);
        let apiserver = apiserver(&binaries, folder.path(), client_port, secure_port);
        let server = format!("https://127.0.0.1:{secure_port}");
        let certificate = folder.path().join("certs/apiserver.crt");
        eventually("the API server has its certificate", async || {
            certificate.exists().then_some(())
        })
        .await;
        let admin = kubeconfig(folder.path(), "admin", &server, ADMIN_TOKEN);
        // Stowage's own client would drop what Stowage does not use.
        let read = Kubeconfig::read_from(&admin).unwrap();
        let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default())
            .await
            .unwrap();
        let client = Client::try_from(config).unwrap();
        let ports = Ports::free();
        let (agents, kubelet, scheduler, stowage) = (None, None, None, None);
        let mut world = Self {
            agents,
            kubelet,
            scheduler,
            stowage,
            apiserver,
            etcd,
            client,
            binaries,
            server,
            ports,
            folder,
            _turn: turn,
        };
        eventually("the API server is ready", async || {
            world.etcd.check();
            world.apiserver.check();
            let readyz = http::Request::get("/readyz").body(Vec::new()).unwrap();
            (world.client.request_text(readyz).await.ok()? == "ok").then_some(())
        })
        .await;
        Some(world)
    }

    /// The same with the objects that a cluster's owner applies, nodes with GPUs, and all components running; `stowage serve`
    /// with the given arguments.
    pub async fn start_all(nodes: Vec<GpuNode>, serve: &[&str]) -> Option<Self> {
        Self::start_all_with_report_interval(REPORT_INTERVAL, nodes, serve).await
    }

    /// The same with further objects beside the nodes, before Stowage starts.
    pub async fn start_all_with_objects(
        nodes: Vec<GpuNode>,
        objects: &[String],
        serve: &[&str],
    ) -> Option<Self> {
        Self::reporting_beside(REPORT_INTERVAL, nodes, objects, serve).await
    }

    /// The same with another pause between reports.
    pub async fn start_all_with_report_interval(
        pause: Duration,
        nodes: Vec<GpuNode>,
        serve: &[&str],
    ) -> Option<Self> {
        Self::reporting_beside(pause, nodes, &[], serve).await
    }

    async fn reporting_beside(
        pause: Duration,
        nodes: Vec<GpuNode>,
        objects: &[String],
        serve: &[&str],
    ) -> Option<Self> {
        let mut world = Self::start().await?;
        world.install();
        world.add_nodes(&nodes).await;
        for object in objects {
            let applied = world.apply(object, &[]);
            assert!(applied.is_success, "{}", applied.output);
        }
        world.kubelet = Some(Kubelet::start(
            world.client.clone(),
            kubelet::KubeletConfig::default(),
        ));
        world.stowage = Some(world.serve("stowage", world.ports, serve));
        world.agents = Some(FleetAgents::start(pause, nodes, vec![world.ports]));
        Some(world)
    }

    /// Pods stay as they were bound: the kubelets' writes are not what is measured.
    pub fn stop_kubelets(&mut self) {
        self.kubelet = None;
    }

    /// What they reported last is all that is known from here on.
    pub fn stop_agents(&mut self) {
        self.agents = None;
    }

    /// Others take their place, which know nothing of what these began.
    pub fn restart_kubelets(&mut self) {
        self.kubelet = Some(Kubelet::start(
            self.client.clone(),
            kubelet::KubeletConfig::default(),
        ));
    }

    /// From now on they report to these alone.
    pub fn report_to(&mut self, nodes: Vec<GpuNode>, replicas: Vec<Ports>) {
        self.agents = Some(FleetAgents::start(REPORT_INTERVAL, nodes, replicas));
    }

    /// From the next report on, processes outside of pods use this much of a GPU.
    pub fn set_unaccounted_mib(&self, uuid: &str, mib: u64) {
        self.agents
            .as_ref()
            .expect("they report")
            .set_unaccounted_mib(uuid, mib);
    }

    /// From the next report on, the engine of a pod uses this much of a GPU, and is in this state.
    pub fn report_engine(&self, uuid: &str, pod: &str, mib: u64, state: &str) {
        self.agents
            .as_ref()
            .expect("they report")
            .report_engine(uuid, pod, mib, state);
    }

    /// From the next report on, an engine on that GPU uses this share of its KV cache.
    pub fn set_kv_cache_usage(&self, uuid: &str, share: f64) {
        self.agents
            .as_ref()
            .expect("they report")
            .set_kv_cache_usage(uuid, share);
    }

    /// Starts the scheduler when the agents have been heard, and waits until the nodes offer VRAM to it.
    pub async fn begin_scheduling(&mut self) {
        self.begin_scheduling_with_change(|_| {}).await;
    }

    /// The same with a changed configuration of the scheduler.
    pub async fn begin_scheduling_with_change(&mut self, change: impl FnOnce(&mut Value)) {
        eventually(
            "the ledger has the GPUs as the agents report them",
            async || {
                self.check();
                let ledger = self.ledger().await?;
                let nodes = ledger["snapshot"]["nodes"].as_array()?;
                let mut gpus = nodes
                    .iter()
                    .flat_map(|node| node["devices"].as_array().unwrap());
                (!nodes.is_empty()
                    && gpus.all(|gpu| gpu["uuid"].as_str().unwrap().starts_with("GPU-")))
                .then_some(())
            },
        )
        .await;
        self.start_scheduler_with_change(SCHEDULER_CONFIG, change);
        let nodes: Api<Node> = Api::all(self.client.clone());
        eventually("every node offers VRAM", async || {
            self.check();
            let nodes = nodes.list(&Default::default()).await.ok()?;
            nodes
                .iter()
                .all(|node| amount(node, "allocatable") > 0)
                .then_some(())
        })
        .await;
    }

    pub fn start_scheduler(&mut self) {
        self.start_scheduler_with(SCHEDULER_CONFIG);
    }

    /// With another of the shipped configurations.
    pub fn start_scheduler_with(&mut self, shipped: &str) {
        self.start_scheduler_with_change(shipped, |_| {});
    }

    /// With one of the shipped configurations, changed.
    pub fn start_scheduler_with_change(&mut self, shipped: &str, change: impl FnOnce(&mut Value)) {
        let config = self.configured(shipped, change);
        let mut command = self.command("kube-scheduler");
        command
            .arg("--config")
            .arg(config)
            .arg("--secure-port=0")
            .arg("--v=2");
        self.scheduler = Some(TestProcess::start(
            "kube-scheduler",
            &mut command,
            self.folder.path(),
        ));
    }

    /// As after a crash: killed, and started again.
    pub fn restart_stowage(&mut self, serve: &[&str]) {
        self.stowage.take().expect("it runs").kill();
        self.stowage = Some(self.serve("stowage", self.ports, serve));
    }

    /// By the binary that was built with these tests, unless `STOWAGE_BINARY` names another.
    pub fn serve(&self, name: &str, ports: Ports, arguments: &[&str]) -> TestProcess {
        let binary = std::env::var_os("STOWAGE_BINARY")
            .unwrap_or_else(|| env!("CARGO_BIN_EXE_stowage").into());
        self.serve_by(Path::new(&binary), name, ports, arguments)
    }

    /// The same by another version's binary.
    pub fn serve_by(
        &self,
        binary: &Path,
        name: &str,
        ports: Ports,
        arguments: &[&str],
    ) -> TestProcess {
        let mut command = Command::new(binary);
        command
            .arg("serve")
            .arg("--kubeconfig")
            .arg(self.service_account());
        command
            .arg("--listen")
            .arg(format!("127.0.0.1:{}", ports.verbs));
        command
            .arg("--agents")
            .arg(format!("127.0.0.1:{}", ports.agents));
        command
            .arg("--admin")
            .arg(format!("127.0.0.1:{}", ports.admin))
            .args(arguments);
        // The agents of most tests have no tokens.
        if !arguments.contains(&"--agents-auth") {
            command.args(["--agents-auth", "none"]);
        }
        TestProcess::start(name, &mut command, self.folder.path())
    }

    /// Fails where a process that should run does not.
    pub fn check(&mut self) {
        self.etcd.check();
        self.apiserver.check();
        self.scheduler
            .iter_mut()
            .chain(&mut self.stowage)
            .for_each(TestProcess::check);
    }

    pub fn kubectl(&self, arguments: &[&str]) -> CommandOutput {
        run(self
            .command("kubectl")
            .arg("--kubeconfig")
            .arg(self.admin())
            .args(arguments))
    }

    /// The kubeconfig of the cluster's owner.
    pub fn admin(&self) -> PathBuf {
        self.folder.path().join("admin")
    }

    /// `kubectl apply` of a file or of text.
    pub fn apply(&self, text: &str, flags: &[&str]) -> CommandOutput {
        let file = self.folder.path().join("applied.yaml");
        // Before 1.33 kubectl takes whatever begins with a brace for JSON.
        std::fs::write(&file, format!("---\n{text}")).unwrap();
        self.kubectl(&[&["apply", "-f", file.to_str().unwrap()], flags].concat())
    }

    pub fn command(&self, binary: &str) -> Command {
        Command::new(self.binaries.join(binary))
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The versions of what runs here, for the record.
    pub fn versions(&self) -> String {
        let version = |name: &&str| {
            let said = run(self.command(name).arg("--version")).output;
            let line = said.lines().next().unwrap_or_default();
            format!("{name} {}", line.rsplit(' ').next().unwrap_or_default())
        };
        BINARIES[..3]
            .iter()
            .map(version)
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// `None` while no server listens.
    pub async fn get(&self, page: &str) -> Option<(u16, String)> {
        http_request(
            "GET",
            &format!("http://127.0.0.1:{}{page}", self.ports.admin),
            "",
        )
        .await
    }

    /// `/debug/snapshot`.
    pub async fn ledger(&self) -> Option<Value> {
        let (status, text) = self.get("/debug/snapshot").await?;
        (status == 200).then(|| serde_json::from_str(&text).unwrap())
    }

    /// The sum over all series of a counter whose labels contain `labels`.
    pub async fn count(&self, counter: &str, labels: &str) -> u64 {
        let (_, text) = self.get("/metrics").await.expect("Stowage is up");
        let values = text
            .lines()
            .filter(|line| line.starts_with(counter) && line.contains(labels))
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
        values.sum::<f64>() as u64
    }

    /// Without the defaults for pods: what a test's pod says is what there is.
    pub fn install(&self) {
        self.install_of("base");
        self.create_runtime_class("nvidia");
    }

    /// One of the folders that `kubectl apply -k` takes.
    pub fn install_of(&self, folder: &str) {
        let applied = self.kubectl(&["apply", "-k", manifest(folder).to_str().unwrap()]);
        assert!(applied.is_success, "{}", applied.output);
    }

    /// As the GPU operator does.
    pub fn create_runtime_class(&self, name: &str) {
        let class = json!({
            "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": { "name": name }, "handler": name,
        });
        let applied = self.apply(&class.to_string(), &[]);
        assert!(applied.is_success, "{}", applied.output);
    }

    pub async fn add_nodes(&self, nodes: &[GpuNode]) {
        let api: Api<Node> = Api::all(self.client.clone());
        for node in nodes {
            let (object, status) = (node.object(), node.status());
            api.create(&PostParams::default(), &object).await.unwrap();
            let params = PatchParams::default();
            api.patch_status(
                &node.name,
                &params,
                &Patch::Merge(json!({ "status": status })),
            )
            .await
            .unwrap();
        }
    }

    /// A certificate and its key, in PEM, of a user in a group.
    pub fn client_certificate(&self, user: &str, group: &str) -> (String, String) {
        let key = std::fs::read_to_string(self.folder.path().join("clients.key")).unwrap();
        ClientCa {
            key: KeyPair::from_pem(&key).unwrap(),
        }
        .issue(user, group)
    }

    /// A kubeconfig of the service account that the shipped manifests set up.
    pub fn service_account(&self) -> PathBuf {
        let token = self.kubectl(&["create", "token", "stowage", "--namespace", "kube-system"]);
        assert!(token.is_success, "{}", token.output);
        kubeconfig(
            self.folder.path(),
            "service-account",
            &self.server,
            token.output.trim(),
        )
    }

    /// The shipped configuration with this cluster's addresses in it.
    pub fn scheduler_config(&self) -> PathBuf {
        self.configured(SCHEDULER_CONFIG, |_| {})
    }

    pub fn configured(&self, shipped: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
        let mut config = yaml(&std::fs::read_to_string(manifest(shipped)).unwrap());
        config["clientConnection"]["kubeconfig"] = self.service_account().to_str().unwrap().into();
        let address = &mut config["extenders"][0]["urlPrefix"];
        assert_eq!(address, "http://127.0.0.1:9444/scheduler");
        *address = format!("http://127.0.0.1:{}/scheduler", self.ports.verbs).into();
        change(&mut config);
        let file = self.folder.path().join("kube-scheduler-config.json");
        std::fs::write(&file, config.to_string()).unwrap();
        file
    }
}

/// The amount of VRAM in a node's `capacity` or `allocatable`.
pub fn amount(node: &Node, list: &str) -> u64 {
    let status = serde_json::to_value(&node.status).unwrap();
    let amount = status[list]["stowage.dev/vram"].as_str().unwrap_or("0");
    stowage_scheduling::units::Bytes::parse_quantity(amount)
        .unwrap()
        .0
}

pub fn manifest(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("manifests")
        .join(file)
}

/// One document.
pub fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap()
}

/// One request to Stowage. `None` while no server listens.
pub async fn http_request(method: &str, url: &str, body: &str) -> Option<(u16, String)> {
    let client = HttpClient::builder(TokioExecutor::new()).build_http();
    let body = Full::new(Bytes::from(body.to_owned()));
    let request = http::Request::builder()
        .method(method)
        .uri(url)
        .body(body)
        .unwrap();
    let answer = client.request(request).await.ok()?;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.ok()?.to_bytes();
    Some((status, String::from_utf8_lossy(&body).into_owned()))
}
