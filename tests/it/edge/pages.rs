//! S2: the operators' pages: which clients may read them, and that no client can make more than one cost memory at a time.

use crate::client::Client;
use crate::process::json_dump;
use crate::served::{Served, ServedCluster, args, endpoints, pod};
use crate::tls::{Ca, TlsFixture};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::api_server::faults::{InjectedFault, Operation};
use stowage_server::extender::operators::{Guard, guards};
use stowage_server::extender::server;
use stowage_server::extender::tls::{ServerFiles, load_server};
use stowage_server::kubernetes::AccessReviews;
use stowage_server::service::TimeSource;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

#[test]
fn a_reachable_operators_address_is_refused_without_tokens_and_tls() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args([
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--agents",
            "127.0.0.1:0",
            "--admin",
            "0.0.0.0:0",
        ])
        .arg("--cluster")
        .arg(json_dump(&folder))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let said: Vec<String> = BufReader::new(child.stderr.take().unwrap())
        .lines()
        .map_while(Result::ok)
        .take_while(|line| !line.contains("operators: http"))
        .collect();
    let _ = child.kill();
    let code = child.wait().unwrap().code();
    assert_eq!(code, Some(1), "it serves: {said:?}");
    let said = said.join("\n");
    assert!(
        said.contains("--admin 0.0.0.0:0") && said.contains("listen on 127.0.0.1"),
        "{said}"
    );
}

/// So many nodes that a snapshot of them fills no socket's buffers.
const NODES: usize = 600;

#[test]
fn large_pages_are_sent_one_at_a_time_and_a_slow_reader_delays_no_other_client() {
    let names: Vec<String> = (0..NODES).map(|node| format!("node-{node}")).collect();
    let gpus: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 8)).collect();
    let served = ServedCluster::with_gpus(&gpus).serve();
    let unread: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = TcpStream::connect(served.operators).unwrap();
            stream
                .write_all(b"GET /debug/snapshot HTTP/1.1\r\nHost: localhost\r\n\r\n")
                .unwrap();
            stream
        })
        .collect();
    let mut answers: Vec<String> = Vec::new();
    for stream in &unread {
        stream
            .set_read_timeout(Some(crate::client::TEST_TIMEOUT))
            .unwrap();
        let mut line = String::new();
        BufReader::with_capacity(16, stream)
            .read_line(&mut line)
            .unwrap();
        answers.push(line.trim_end().to_owned());
    }
    let count = |status: &str| answers.iter().filter(|line| line.contains(status)).count();
    assert_eq!((count(" 200 "), count(" 503 ")), (1, 19), "{answers:?}");
    let body = args(&pod("llm", "40Gi"), &["node-0"]).to_string();
    assert_eq!(
        Client::connect(served.scheduler)
            .post("/scheduler/filter", body)
            .status,
        200
    );
    assert_eq!(
        Client::connect(served.operators)
            .get_page("/metrics")
            .status,
        200
    );
    drop(unread);
}

#[test]
fn the_snapshot_has_no_number_that_javascript_would_round() {
    fn largest(value: &serde_json::Value) -> u64 {
        match value {
            serde_json::Value::Number(number) => number.as_u64().unwrap_or(0),
            serde_json::Value::Array(items) => items.iter().map(largest).max().unwrap_or(0),
            serde_json::Value::Object(fields) => fields.values().map(largest).max().unwrap_or(0),
            _ => 0,
        }
    }
    let served = ServedCluster::with_gpus(&[("node-0", 2)])
        .with([pod("llm", "40Gi")])
        .serve();
    let ledger = serde_json::from_str(&served.ledger()).unwrap();
    assert!(largest(&ledger) < 1 << 53, "{ledger:#}");
}

/// A Stowage whose pages are authorized by a stand-in API server.
struct GuardedPages {
    served: Served,
    api: ApiServer,
    /// What this test does until the service may have more to ask.
    deferred: fn(),
    _runtime: Runtime,
}

const PROMETHEUS_ACCOUNT: &str = "monitoring/prometheus";
const USER_ACCOUNT: &str = "team-a/jane";

impl GuardedPages {
    fn start() -> Self {
        Self::start_by(TimeSource::SYSTEM, || {
            std::thread::park_timeout(Duration::from_millis(100))
        })
    }

    fn start_by(time: TimeSource, deferred: fn()) -> Self {
        let runtime = Runtime::new().unwrap();
        let api = runtime.block_on(ApiServer::start()).unwrap();
        let client = {
            let _inside = runtime.enter();
            api.client("stowage").unwrap()
        };
        let mut cluster = ServedCluster::with_gpus(&[("node-a", 1)]).with([pod("llm", "40Gi")]);
        cluster.pages = Some(Arc::new(AccessReviews::new(client)));
        cluster.time = time;
        Self {
            served: cluster.serve(),
            api,
            deferred,
            _runtime: runtime,
        }
    }

    fn token(&self, account: &str) -> String {
        self.api
            .issue_token(account, None, "https://kubernetes.default.svc")
    }

    /// Asks again while the service defers: one source may ask about so many pages at once, and then about some a second.
    fn status(&self, page: &str, token: Option<&str>) -> (u16, String) {
        let began = Instant::now();
        loop {
            let answer = self.status_now(page, token);
            if answer.0 != 503 || began.elapsed() > crate::client::TEST_TIMEOUT {
                break answer;
            }
            (self.deferred)();
        }
    }

    fn status_now(&self, page: &str, token: Option<&str>) -> (u16, String) {
        let line = token
            .map(|token| format!("Authorization: Bearer {token}\r\n"))
            .unwrap_or_default();
        let mut client = Client::connect(self.served.operators);
        client
            .write(format!("GET {page} HTTP/1.1\r\nHost: localhost\r\n{line}\r\n").as_bytes())
            .unwrap();
        let answer = client.read_page().unwrap();
        (answer.status, answer.text().to_owned())
    }

    fn reviews(&self) -> u64 {
        self.api.calls().count("create", "subjectaccessreviews")
    }
}

/// Every page that needs a token, as a client asks for it.
fn guarded_pages() -> Vec<&'static str> {
    let as_asked = |(path, guard): (&'static str, Guard)| match (path, guard) {
        (_, Guard::None) => None,
        ("/v1/models", Guard::Path) => Some("/v1/models?model=llm"),
        ("/v1/models/desired-replicas", Guard::Path) => Some("/v1/models/desired-replicas?model=m"),
        (path, Guard::Path) => Some(path),
        ("/v1/explain", Guard::Pod) => Some("/v1/explain?pod=llm"),
        (path, Guard::Pod) => panic!("{path}: say here how a client asks for it"),
    };
    guards().filter_map(as_asked).collect()
}

#[test]
fn every_page_enforces_its_guard() {
    let guarded = GuardedPages::start();
    for (path, guard) in guards().filter(|(_, guard)| *guard == Guard::None) {
        // The files of the page in a browser are part of the program.
        let open = ["/healthz", "/readyz", "/", "/assets/{file}"];
        assert!(open.contains(&path), "{path} is open, {guard:?}");
        let (status, text) = guarded.status(&path.replace("{file}", "app.js"), None);
        assert_eq!(status, 200, "{path}");
        assert!(!text.contains("default/llm"), "{path} names a pod: {text}");
    }
    for page in guarded_pages() {
        let (status, text) = guarded.status(page, None);
        assert_eq!(status, 401, "{page}: {text}");
        assert!(
            text.contains("--token-file") && !text.contains("llm"),
            "{text}"
        );
        let (status, text) = guarded.status(page, Some("made-up"));
        assert_eq!(status, 401, "{page}: {text}");
        assert!(text.contains("invalid bearer token"), "{text}");
        let (status, text) = guarded.status(page, Some(&guarded.token(USER_ACCOUNT)));
        assert_eq!(status, 403, "{page}: {text}");
        assert!(
            text.contains("system:serviceaccount:team-a:jane") && text.contains("may not get"),
            "{text}"
        );
    }
}

#[test]
fn an_agents_token_grants_reports_only() {
    let guarded = GuardedPages::start();
    let agent = guarded
        .api
        .issue_token("kube-system/stowage-agent", None, "stowage.dev/reports");
    for page in guarded_pages() {
        let (status, text) = guarded.status(page, Some(&agent));
        assert_eq!(status, 401, "{page}: {text}");
    }
}

/// A clock that stands still while the service answers, however long a busy machine takes: a refusal is remembered for seconds.
static ASKED_MILLIS: AtomicU64 = AtomicU64::new(0);

#[test]
fn access_to_one_page_grants_that_page_only() {
    let monotonic = || Duration::from_millis(ASKED_MILLIS.load(Ordering::SeqCst));
    let guarded = GuardedPages::start_by(
        TimeSource {
            monotonic,
            ..TimeSource::SYSTEM
        },
        || {
            ASKED_MILLIS.fetch_add(100, Ordering::SeqCst);
        },
    );
    let (prometheus, jane) = (
        guarded.token(PROMETHEUS_ACCOUNT),
        guarded.token(USER_ACCOUNT),
    );
    guarded.api.allow(PROMETHEUS_ACCOUNT, "/metrics");
    guarded.api.allow(USER_ACCOUNT, "default");
    let status = |page: &str, token: &str| guarded.status(page, Some(token)).0;
    let seen = |token: &str| -> Vec<&str> {
        guarded_pages()
            .into_iter()
            .filter(|page| status(page, token) == 200)
            .collect()
    };
    assert_eq!(seen(&prometheus), ["/metrics"]);
    assert_eq!(seen(&jane), ["/v1/explain?pod=llm"]);
    assert_eq!(
        status("/v1/explain?pod=team-b/llm", &jane),
        403,
        "another namespace"
    );
    let asked = guarded.reviews();
    assert_eq!(seen(&prometheus), ["/metrics"]);
    assert_eq!(guarded.reviews(), asked, "what was answered is remembered");
}

#[test]
fn while_the_api_server_fails_only_the_probes_answer() {
    let guarded = GuardedPages::start();
    let prometheus = guarded.token(PROMETHEUS_ACCOUNT);
    guarded.api.allow(PROMETHEUS_ACCOUNT, "/metrics");
    guarded
        .api
        .faults()
        .fail_next(Operation::TokenReview, 1, InjectedFault::Fails);
    let (status, text) = guarded.status_now("/metrics", Some(&prometheus));
    assert!(
        status == 503 && text.contains("cannot be checked now"),
        "{status} {text}"
    );
    assert_eq!(
        guarded.status("/metrics", Some(&prometheus)).0,
        200,
        "as soon as it can"
    );
}

#[test]
fn explain_sends_its_token_to_a_verified_server_only() {
    let (ca, files, guarded) = (Ca::new("ca"), TlsFixture::new(), GuardedPages::start());
    guarded.api.allow(USER_ACCOUNT, "default");
    let identity = ca.issue_for("stowage-admin");
    let (cert, key) = (
        files.write("tls.crt", &identity.cert),
        files.write("tls.key", &identity.key),
    );
    let (mut endpoints, [.., address]) = endpoints();
    endpoints.operators.tls = Some(load_server(&ServerFiles { cert, key }).unwrap());
    let stop = CancellationToken::new();
    let serving = guarded.served.spawn(server::serve(
        guarded.served.extender.clone(),
        endpoints,
        stop.clone(),
    ));
    let path = |name: &str, text: &str| files.write(name, text).to_str().unwrap().to_owned();
    let (ca_file, token_file) = (
        path("ca.crt", &ca.pem),
        path("token", &guarded.token(USER_ACCOUNT)),
    );
    let explain = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_stowage"))
            .args(["explain", "llm"])
            .args(arguments)
            // The kubeconfig of the machine that runs the tests is not used.
            .env("KUBECONFIG", "/nonexistent")
            .output()
            .unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (
            output.status.code().unwrap(),
            text(output.stdout) + &text(output.stderr),
        )
    };
    let server = format!("https://{address}");
    let believed = [
        "--server",
        &server,
        "--ca",
        &ca_file,
        "--tls-server-name",
        "stowage-admin",
    ];
    let (code, text) = explain(&[&believed[..], &["--token-file", &token_file]].concat());
    assert!(
        code == 0 && text.starts_with("default/llm fits"),
        "{code} {text}"
    );
    let (code, text) = explain(&believed);
    assert!(
        code == 2 && text.contains("does not let you see it: no token"),
        "{code} {text}"
    );
    let (code, text) = explain(&["--server", &server, "--token-file", &token_file]);
    assert!(
        code == 2 && text.contains("certificate"),
        "nobody is believed without --ca: {text}"
    );
    let clear = format!("http://{address}");
    let (code, text) = explain(&["--server", &clear, "--token-file", &token_file]);
    assert!(code == 2 && text.contains("in the clear"), "{code} {text}");
    stop.cancel();
    guarded.served.run(serving).unwrap().unwrap();
}
