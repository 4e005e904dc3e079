//! The command as a user runs it: its output, its exit code, and that it stops cleanly.

use crate::client::{Client, TEST_TIMEOUT, post_head};
use crate::served::{args, bind_args, bound_on, gpu_labels, node, pod};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::api_server::faults::{InjectedFault, Operation};
use tempfile::TempDir;
use tokio::runtime::Runtime;

fn stowage(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(arguments)
        .output()
        .unwrap()
}

/// Waits until it holds, on the thread of the test.
pub fn eventually(what: &str, holds: impl FnMut() -> bool) {
    eventually_within(TEST_TIMEOUT, what, holds);
}

/// The same for what takes a process a while on any machine.
pub fn eventually_within(patience: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < patience, "it never came that {what}");
        std::thread::park_timeout(Duration::from_millis(100));
    }
}

/// Exit code and what stands on stderr.
pub fn expect_failure(arguments: &[&str]) -> (i32, String) {
    let output = stowage(arguments);
    assert_eq!(output.stdout, b"", "errors go to stderr");
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

/// A `stowage serve` on ports of its own choice.
pub struct RunningServe {
    child: Child,
    /// What it said before it had said where it listens.
    early: RefCell<VecDeque<String>>,
    log: Receiver<String>,
    pub scheduler: SocketAddr,
    pub agents: SocketAddr,
    pub operators: SocketAddr,
}

impl RunningServe {
    fn serve(dump: &Path) -> Self {
        Self::serve_with(dump, &[])
    }

    pub fn serve_with(dump: &Path, arguments: &[&str]) -> Self {
        Self::start(Command::new(env!("CARGO_BIN_EXE_stowage")), dump, arguments)
    }

    /// One that may open this many descriptors.
    pub fn with_descriptors(dump: &Path, most: u32) -> Self {
        let mut shell = Command::new("sh");
        let limited = format!("ulimit -n {most} && exec \"$0\" \"$@\"");
        shell.args(["-c", &limited, env!("CARGO_BIN_EXE_stowage")]);
        Self::start(shell, dump, &[])
    }

    /// One with a disk of its own at this folder, of so many KiB: nothing else sees it, and it goes with the process. `None` where
    /// that needs a privilege that there is not.
    pub fn with_small_disk(
        dump: &Path,
        folder: &Path,
        kib: u32,
        arguments: &[&str],
    ) -> Option<Self> {
        let mount = format!("mount -t tmpfs -o size={kib}k tmpfs '{}'", folder.display());
        let in_namespace = |then: &str| {
            let mut command = Command::new("unshare");
            command.args(["--mount", "sh", "-c", &format!("{mount} && {then}")]);
            command
        };
        let may = in_namespace("true")
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        may.then(|| {
            let mut command = in_namespace("exec \"$0\" \"$@\"");
            command.arg(env!("CARGO_BIN_EXE_stowage"));
            Self::start(command, dump, arguments)
        })
    }

    /// A path as the process sees it.
    pub fn seen(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{}", self.child.id(), path.display()))
    }

    /// One replica of an API server, which leads at once.
    pub fn serve_from_api_server(kubeconfig: &Path, arguments: &[&str]) -> Self {
        Self::run(&mut Self::serve_command(kubeconfig, arguments))
    }

    pub fn serve_command(kubeconfig: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        command.args([
            "serve",
            "--lead-with",
            "always",
            "--write-deadline",
            "100ms",
            "--kubeconfig",
        ]);
        command.arg(kubeconfig).args(arguments);
        command
    }

    fn start(mut command: Command, dump: &Path, arguments: &[&str]) -> Self {
        command.args(["serve", "--admin", "127.0.0.1:0", "--cluster"]);
        Self::run(command.arg(dump).args(arguments))
    }

    pub fn run(command: &mut Command) -> Self {
        let mut child = command
            .args(["--listen", "127.0.0.1:0", "--agents", "127.0.0.1:0"])
            .env_remove("RUST_LOG")
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
        let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
        let early = RefCell::default();
        let mut running = Self {
            child,
            early,
            log,
            scheduler: unknown,
            agents: unknown,
            operators: unknown,
        };
        let mut early = VecDeque::new();
        running.scheduler = address(&running.line_after("the scheduler: http", &mut early));
        running.agents = address(&running.line_after("agents: http", &mut early));
        running.operators = address(&running.line_after("operators: http", &mut early));
        running.early = RefCell::new(early);
        running
    }

    /// The next line of its log that has `text` in it.
    pub fn wait_for_line(&self, text: &str) -> String {
        let mut early = self.early.borrow_mut();
        while let Some(line) = early.pop_front() {
            if line.contains(text) {
                return line;
            }
        }
        self.line_after(text, &mut VecDeque::new())
    }

    /// The lines from here to the next one that has `text` in it.
    pub fn read_lines_until(&self, text: &str) -> Vec<String> {
        let mut early = self.early.borrow_mut();
        let mut between: VecDeque<String> = VecDeque::new();
        while let Some(line) = early.pop_front() {
            if line.contains(text) {
                return between.into();
            }
            between.push_back(line);
        }
        self.line_after(text, &mut between);
        between.into()
    }

    fn line_after(&self, text: &str, before: &mut VecDeque<String>) -> String {
        loop {
            // Between two lines it may read a large cluster.
            match self.log.recv_timeout(4 * TEST_TIMEOUT) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => before.push_back(line),
                Err(_) => panic!("its log never said {text:?}"),
            }
        }
    }

    /// A line of its memory in KiB, such as `VmRSS`, or `VmHWM` for the most it ever was.
    pub fn memory(&self, line: &str) -> u64 {
        memory(&self.child, line)
    }

    fn terminate(&self) {
        let sent = Command::new("sh")
            .args(["-c", &format!("kill -TERM {}", self.child.id())])
            .status()
            .unwrap();
        assert!(sent.success());
    }
}

impl Drop for RunningServe {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line of a process' memory in KiB.
pub fn memory(child: &Child, line: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let found = status
        .lines()
        .find_map(|found| found.strip_prefix(line)?.strip_prefix(':'));
    found
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

fn address(line: &str) -> SocketAddr {
    assert!(
        !line.contains('\u{1b}'),
        "colors are for terminals: {line:?}"
    );
    line.rsplit("//").next().unwrap().trim().parse().unwrap()
}

fn labelled(name: &str, gpus: u32) -> Value {
    let mut node = node(name);
    node["metadata"]["labels"] = gpu_labels(gpus);
    node
}

fn write(folder: &TempDir, name: &str, text: &str) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// What kubectl prints with `-o json`.
pub fn json_dump(folder: &TempDir) -> PathBuf {
    let mut tenant = bound_on(pod("tenant", "60Gi"), "node-a", &[0], 60 << 30);
    // Labels show only the index of a GPU.
    tenant["metadata"]["annotations"]["stowage.dev/devices"] = json!("index-0");
    let items = [
        labelled("node-a", 2),
        labelled("node-b", 1),
        pod("llm", "40Gi"),
        tenant,
    ];
    write(
        folder,
        "dump.json",
        &json!({ "apiVersion": "v1", "kind": "List", "items": items }).to_string(),
    )
}

/// The same with `-o yaml`.
fn yaml_dump(folder: &TempDir) -> PathBuf {
    let node = |name: &str, gpus: u32| {
        format!(
            "- apiVersion: v1\n  kind: Node\n  metadata:\n    labels:\n      nvidia.com/gpu.count: \"{gpus}\"\n      nvidia.com/gpu.memory: \"81920\"\n      nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3\n    name: {name}\n  status: {{}}\n"
        )
    };
    let pod = |name: &str, vram: &str, annotations: &str, node: &str| {
        format!(
            "- apiVersion: v1\n  kind: Pod\n  metadata:\n    annotations:{annotations}\n    name: {name}\n    namespace: default\n    uid: uid-{name}\n  spec:\n    containers:\n    - name: engine\n      resources:\n        limits:\n          stowage.dev/vram: {vram}\n{node}    schedulerName: stowage\n  status:\n    phase: Pending\n"
        )
    };
    let granted = format!(
        "\n      stowage.dev/devices: index-0\n      stowage.dev/vram-granted: \"{}\"",
        60u64 << 30
    );
    let items = [
        node("node-a", 2),
        node("node-b", 1),
        pod("llm", "40Gi", " {}", ""),
        pod("tenant", "60Gi", &granted, "    nodeName: node-a\n"),
    ];
    write(
        folder,
        "dump.yaml",
        &format!(
            "apiVersion: v1\nitems:\n{}kind: List\nmetadata:\n  resourceVersion: \"\"\n",
            items.concat()
        ),
    )
}

#[test]
fn help_names_every_command_and_a_wrong_flag_exits_with_2() {
    let help = stowage(&["--help"]);
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(
        help.status.success() && text.contains("serve") && text.contains("demo"),
        "{text}"
    );
    let (code, error) = expect_failure(&["serve", "--listne", "127.0.0.1:0"]);
    assert_eq!(code, 2);
    assert!(
        error.contains("--listne") && error.contains("--listen"),
        "it says what was meant: {error}"
    );
    assert_eq!(expect_failure(&["serve", "--listen", "nowhere"]).0, 2);
    assert_eq!(
        expect_failure(&["serve", "--cluster", "x", "--kubeconfig", "y"]).0,
        2
    );
    assert_eq!(expect_failure(&["serve", "--tls-cert", "x"]).0, 2);
    assert_eq!(expect_failure(&[]).0, 2);
}

#[test]
fn plain_http_on_a_reachable_address_is_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let dump = yaml_dump(&folder);
    for address in ["0.0.0.0:0", "[::]:0"] {
        let (code, error) = expect_failure(&[
            "serve",
            "--listen",
            address,
            "--cluster",
            dump.to_str().unwrap(),
        ]);
        assert_eq!(code, 1);
        for part in [
            address,
            "--tls-cert",
            "--tls-key",
            "--client-ca",
            "127.0.0.1",
            "--insecure",
        ] {
            assert!(error.contains(part), "{error} does not say {part}");
        }
    }
}

#[test]
fn agents_of_other_hosts_need_tokens_and_tls() {
    let folder = tempfile::tempdir().unwrap();
    let dump = yaml_dump(&folder);
    let dump = dump.to_str().unwrap();
    // The wrong argument is found before the cluster, which does not exist, is contacted.
    let nowhere = folder.path().join("kubeconfig");
    let serve = |arguments: &[&str]| {
        expect_failure(&[&["serve", "--listen", "127.0.0.1:0"], arguments].concat())
    };
    let cluster = [
        "--kubeconfig",
        nowhere.to_str().unwrap(),
        "--lead-with",
        "always",
    ];
    let cases: [(&[&str], &[&str]); 6] = [
        (
            &["--agents", "0.0.0.0:0"],
            &[
                "0.0.0.0:0",
                "--agents-tls-cert",
                "--agents-tls-key",
                "--insecure",
            ],
        ),
        (
            &[
                "--agents",
                "0.0.0.0:0",
                "--agents-auth",
                "none",
                "--insecure",
            ],
            &["0.0.0.0:0", "leave out --agents-auth none", "127.0.0.1"],
        ),
        (
            &["--agents-service-account", "stowage-agent"],
            &["\"stowage-agent\"", "NAMESPACE/NAME"],
        ),
        (&["--agents-service-account", "a/b:c"], &["NAMESPACE/NAME"]),
        (&["--agents-audience", ""], &["--agents-audience is empty"]),
        (
            &[
                "--agents",
                "127.0.0.1:0",
                "--agents-tls-cert",
                "none.crt",
                "--agents-tls-key",
                "none.key",
            ],
            &["cannot read the private key from none.key"],
        ),
    ];
    for (arguments, parts) in cases {
        let (code, error) = serve(&[&cluster[..], arguments].concat());
        assert_eq!(code, 1, "{error}");
        parts
            .iter()
            .for_each(|part| assert!(error.contains(part), "{error} does not say {part}"));
    }
    let (code, error) = serve(&["--cluster", dump, "--agents-auth", "token"]);
    assert!(code == 1 && error.contains("--cluster has none"), "{error}");
    let (code, error) = serve(&["--cluster", dump, "--agents", "0.0.0.0:0", "--insecure"]);
    assert!(code == 1 && error.contains("without tokens"), "{error}");
    assert_eq!(serve(&["--cluster", dump, "--agents-tls-cert", "x"]).0, 2);
}

#[test]
fn the_printed_report_schema_matches_a_report() {
    let output = stowage(&["schema", "report"]);
    assert!(output.status.success());
    let schema: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(schema["title"], "NodeReport");
    for field in [
        "node",
        "bootId",
        "sequence",
        "ageMillis",
        "gpus",
        "engines",
        "models",
        "findings",
        "missing",
    ] {
        assert!(schema["properties"][field].is_object(), "{field}");
    }
    let required: Vec<&str> = schema["required"]
        .as_array()
        .unwrap()
        .iter()
        .map(|field| field.as_str().unwrap())
        .collect();
    assert_eq!(required, ["node", "bootId", "sequence", "gpus"]);
    assert_eq!(expect_failure(&["schema", "reports"]).0, 2);
}

#[test]
fn an_unreadable_dump_is_reported_with_its_position() {
    let folder = tempfile::tempdir().unwrap();
    let serve = |path: &Path| {
        let (code, error) = expect_failure(&[
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--agents",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--cluster",
            path.to_str().unwrap(),
        ]);
        assert_eq!(code, 1, "{error}");
        assert!(
            error.starts_with("error: ") && error.contains(path.to_str().unwrap()),
            "{error}"
        );
        error
    };
    assert!(serve(&folder.path().join("missing.yaml")).contains("No such file"));
    let text = std::fs::read_to_string(yaml_dump(&folder)).unwrap();
    let broken = text.replacen("    name: node-b\n", "    name: [node-b\n", 1);
    let line = broken
        .lines()
        .position(|line| line.contains("[node-b"))
        .unwrap()
        + 1;
    let error = serve(&write(&folder, "broken.yaml", &broken));
    let near = (line..line + 3).any(|line| error.contains(&format!("line {line}")));
    assert!(near, "the error is in line {line}: {error}");
    let text = std::fs::read_to_string(json_dump(&folder)).unwrap();
    let error = serve(&write(&folder, "broken.json", &text[..text.len() / 2]));
    assert!(error.contains("line 1 column"), "{error}");
    let error = serve(&write(
        &folder,
        "typed.json",
        &json!({ "items": [labelled("a", 1), { "kind": "Pod", "spec": 7 }] }).to_string(),
    ));
    assert!(error.contains("item 1 (Pod)"), "{error}");
    assert!(
        serve(&write(
            &folder,
            "pods.json",
            &json!({ "items": [pod("p", "1Gi")] }).to_string()
        ))
        .contains("has no nodes")
    );
    assert!(
        serve(&write(
            &folder,
            "kindless.yaml",
            "items:\n- metadata: {}\nkind: List\n"
        ))
        .contains("item 0 has no `kind`")
    );
}

#[test]
fn a_port_in_use_is_reported_with_its_flag() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, error) = expect_failure(&[
        "serve",
        "--cluster",
        yaml_dump(&folder).to_str().unwrap(),
        "--listen",
        &address,
    ]);
    assert_eq!(code, 1);
    assert!(
        error.contains(&format!("--listen {address}")) && error.contains("in use"),
        "{error}"
    );
}

#[test]
fn a_dump_is_served_as_yaml_and_as_json_alike() {
    let folder = tempfile::tempdir().unwrap();
    for dump in [yaml_dump(&folder), json_dump(&folder)] {
        let running = RunningServe::serve(&dump);
        let mut operators = Client::connect(running.operators);
        assert_eq!(operators.get("/readyz").text(), "ok\n");
        assert_eq!(operators.get("/healthz").text(), "ok\n");
        let metrics = operators.get_page("/metrics");
        assert!(
            metrics.text().contains("\nstowage_gpus 3\n")
                && metrics.text().contains("\nstowage_leader 1\n")
        );
        let llm = pod("llm", "40Gi");
        let mut scheduler = Client::connect(running.scheduler);
        let passed = scheduler
            .post(
                "/scheduler/filter",
                args(&llm, &["node-a", "node-b"]).to_string(),
            )
            .json();
        let mut names: Vec<&str> = passed["NodeNames"]
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_str().unwrap())
            .collect();
        names.sort_unstable();
        assert_eq!(names, ["node-a", "node-b"], "{}", dump.display());
        let bound = scheduler.post("/scheduler/bind", bind_args(&llm, "node-b").to_string());
        assert_eq!(bound.json(), json!({ "Error": "" }));
        let ledger = operators.get_page("/debug/snapshot").json();
        assert_eq!(
            ledger["pods"]["uid-llm"]["phase"]["bound"]["devices"],
            json!(["index-0"])
        );
        assert_eq!(ledger["violations"], json!([]));
        running.terminate();
        let mut running = running;
        assert!(running.child.wait().unwrap().success());
    }
}

#[test]
fn a_stop_finishes_requests_in_progress_and_exits_with_0() {
    let folder = tempfile::tempdir().unwrap();
    let mut running = RunningServe::serve(&json_dump(&folder));
    let body = bind_args(&pod("llm", "40Gi"), "node-b").to_string();
    let mut client = Client::connect(running.scheduler);
    // The head is answered only after the server has seen that the body is to be read: then the request is under way.
    let head = post_head(
        "/scheduler/bind",
        &format!("Content-Length: {}\r\nExpect: 100-continue", body.len()),
    );
    client.write(head.as_bytes()).unwrap();
    assert!(client.has_answer());
    client.skip_line_and_blank("HTTP/1.1 100 Continue");
    running.terminate();
    running.wait_for_line("stopping");
    client.write(body.as_bytes()).unwrap();
    assert_eq!(client.read_answer().unwrap().json(), json!({ "Error": "" }));
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
    running.wait_for_line("stopped");
}

#[test]
fn the_demo_keeps_its_invariants_and_uses_its_agents_reports() {
    let output = stowage(&["demo", "--json"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["violations"], json!([]), "{told}");
    assert!(summary["kvSeenAfterMillis"].is_u64(), "{summary}");
    let [ordinary, planned] = &summary["ways"].as_array().unwrap()[..] else {
        panic!("{summary}")
    };
    assert_eq!(
        (&ordinary["manner"], &planned["manner"]),
        (&json!("ordinary"), &json!("planned"))
    );
    assert!(ordinary["prioritizeCalls"].as_u64() > Some(0), "{summary}");
    let costs =
        ["filterCalls", "nodesAsked", "prioritizeCalls"].map(|figure| planned[figure].clone());
    assert_eq!(
        costs,
        [planned["pods"].clone(), planned["pods"].clone(), json!(0)],
        "{told}"
    );
    let wakes = ["askedWakes", "failedWakes", "unaskedWakes"].map(|figure| summary[figure].clone());
    assert_eq!(wakes, [1, 1, 1].map(|count| json!(count)), "{told}");
    let limits = ["keptGrants", "leftAhead", "endedByDriver"].map(|figure| summary[figure].clone());
    assert_eq!(limits, [1, 1, 1].map(|count| json!(count)), "{told}");
    assert_eq!(summary["keptLatencies"], json!(1), "{told}");
    assert!(summary["takenBack"].as_u64() > Some(0), "{summary}");
    for part in [
        "KV 97 % · 40 waiting · serving",
        "from node-a's disk it answers after 24 s",
        "llama-8b has 2 replicas and needs 6: an HPA that reads stowage_model_desired_replicas starts 4 more",
        "llama-8b needs 2 replicas again",
        "translator's flag is wrong: it allocates 52.0 GiB, and fails at its limit of 42.0 GiB",
        "assistant beside it allocates all of its 30.0 GiB, and has them",
        "chat's page: 12 ms a token, of at most 15 ms; code beside it is idle",
    ] {
        assert!(told.contains(part), "it never shows {part:?}:\n{told}");
    }
    let filled = told.split("Opportunistic jobs fill the rest").nth(1);
    let filled = filled.and_then(|rest| rest.split("\n\n").next()).unwrap();
    let jobs = |sign: &str| {
        filled
            .lines()
            .filter(|line| line.trim_start().starts_with(sign))
            .count()
    };
    assert!(jobs("+ ") > 0, "no job runs:\n{filled}");
    assert!(
        jobs("· ") > 0,
        "no job gets the reason why it runs nowhere:\n{filled}"
    );
}

/// Until it has read its roles, an API server that has just started refuses all.
#[test]
fn early_watch_failures_are_not_reported_as_missing_permissions() {
    let runtime = Runtime::new().unwrap();
    let api = runtime.block_on(ApiServer::start()).unwrap();
    for operation in [
        Operation::ListPods,
        Operation::ListNodes,
        Operation::ListBudgets,
    ] {
        api.faults().fail_next(operation, 2, InjectedFault::Forbids);
    }
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    std::fs::write(
        &kubeconfig,
        crate::agent::world::kubeconfig(&api.uri().to_string()),
    )
    .unwrap();
    let running = RunningServe::serve_from_api_server(&kubeconfig, &["--admin", "127.0.0.1:0"]);
    let log = running.read_lines_until("the watches have synced");
    let lines_with = |text: &str| log.iter().filter(|line| line.contains(text)).count();
    assert_eq!(
        (lines_with("ERROR"), lines_with("rbac.yaml")),
        (0, 0),
        "{log:#?}"
    );
    assert_eq!(
        lines_with("the watch failed and is retried"),
        3,
        "once for each kind: {log:#?}"
    );
    assert_eq!(lines_with("kube_runtime"), 0, "{log:#?}");
    // Nothing is placed without pods and nodes; budgets are not waited for, and may work sooner or later.
    let works = |kind: &str| {
        let is_so = |line: &&String| line.contains("the watch works again") && line.contains(kind);
        log.iter().filter(is_so).count()
    };
    assert_eq!((works("\"pods\""), works("\"nodes\"")), (1, 1), "{log:#?}");
    if works("poddisruptionbudgets") == 0 {
        assert!(
            running
                .wait_for_line("the watch works again")
                .contains("poddisruptionbudgets")
        );
    }
}
