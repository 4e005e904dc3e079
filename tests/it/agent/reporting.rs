//! An agent and its extenders: with TLS and a token, and when either restarts.

use super::world::{
    AgentNode, NODE, RunningAgent, agents_url, gpu, reported, reported_until, text,
};
use crate::agent_auth::GuardedReports;
use crate::client::Client;
use crate::served::{Served, endpoints, eventually};
use crate::tls::{Ca, TlsFixture};
use axum::body::Bytes;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use stowage_server::extender::server;
use stowage_server::extender::tls::{ServerFiles, load_server};
use tokio_util::sync::CancellationToken;

/// An agents' address of an extender that a test closes as a whole, connections and all.
struct OpenAddress<'a> {
    extender: &'a Served,
    stop: CancellationToken,
    serving: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl<'a> OpenAddress<'a> {
    fn at(extender: &'a Served, listener: TcpListener) -> Self {
        listener.set_nonblocking(true).unwrap();
        let stop = CancellationToken::new();
        let (mut endpoints, _) = endpoints();
        endpoints.agents.listener = listener;
        let serving = extender.spawn(server::serve(
            extender.extender.clone(),
            endpoints,
            stop.clone(),
        ));
        Self {
            extender,
            stop,
            serving,
        }
    }

    fn close(self) {
        self.stop.cancel();
        self.extender.run(self.serving).unwrap().unwrap();
    }
}

/// The sequence numbers that came in, by boot id: of every report, in order.
#[derive(Clone, Default)]
struct Recorded(Arc<Mutex<BTreeMap<String, Vec<u64>>>>);

impl Recorded {
    fn of_boot(&self, boot: &Value) -> Vec<u64> {
        self.0
            .lock()
            .get(boot.as_str().unwrap())
            .cloned()
            .unwrap_or_default()
    }

    /// Takes reports as an extender does; answers where.
    fn start(&self, world: &AgentNode) -> SocketAddr {
        let recorded = self.clone();
        let take = move |body: Bytes| async move {
            let report: Value = serde_json::from_slice(&body).unwrap();
            let boot = report["bootId"].as_str().unwrap().to_owned();
            recorded
                .0
                .lock()
                .entry(boot)
                .or_default()
                .push(report["sequence"].as_u64().unwrap());
            r#"{"accepted":1,"dropped":0}"#
        };
        let router = axum::Router::new().route("/v1/reports", axum::routing::post(take));
        let listener = world
            .runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .unwrap();
        let address = listener.local_addr().unwrap();
        world
            .runtime
            .spawn(async { axum::serve(listener, router).await.unwrap() });
        address
    }
}

#[test]
fn a_restarted_agent_counts_from_one_under_a_new_boot_id_and_is_accepted() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let (extender, recorded) = (world.extender(), Recorded::default());
    let record = format!("http://{}", recorded.start(&world));
    let start = || -> RunningAgent {
        let both = [
            "--interval",
            "100ms",
            "--extender",
            &agents_url(&extender),
            "--extender",
            &record,
        ];
        RunningAgent::start(&mut world.agent(&both))
    };
    let first = start();
    let before = reported_until(&extender, "the first has reported a while", |report| {
        report["sequence"]
            .as_u64()
            .is_some_and(|sequence| sequence > 9)
    });
    let of_first = || recorded.of_boot(&before["bootId"]);
    eventually("that is recorded", || {
        of_first().into_iter().max() > Some(9)
    });
    drop(first);
    let _second = start();
    let after = reported_until(&extender, "the second reports", |r| {
        r["bootId"] != before["bootId"]
    });
    assert_eq!(after["gpus"][0]["uuid"], "GPU-a");
    let of_second = || recorded.of_boot(&after["bootId"]);
    eventually("the second is recorded", || !of_second().is_empty());
    // A report that was given up may come in late or not at all: number one is not required.
    let (first, second) = (of_first(), of_second());
    assert!(
        second.iter().min() < first.iter().max(),
        "{first:?} {second:?}"
    );
}

#[test]
fn a_restarted_extender_gets_a_full_report_from_the_running_agent() {
    let world = AgentNode::with_gpus([gpu("a")]);
    // No other listener gets this address while the port is free.
    let listener = TcpListener::bind("127.83.22.9:0").unwrap();
    let address = listener.local_addr().unwrap();
    let first = world.extender();
    let open = OpenAddress::at(&first, listener);
    let agent = world.start(&format!("http://{address}"));
    reported_until(&first, "it reports", |report| report["gpus"][0].is_object());
    agent.line_with("accepted");
    open.close();
    agent.line_with("unreachable");
    // Its ledger is empty.
    let second = world.extender();
    assert_eq!(reported(&second), Value::Null);
    let open = OpenAddress::at(&second, TcpListener::bind(address).unwrap());
    reported_until(&second, "it reports to the new one", |report| {
        report["gpus"][0].is_object()
    });
    // Its report is in the ledger before it has the answer.
    let mut lines = agent.lines_until("accepted");
    agent.signal("TERM");
    let (status, rest) = agent.wait_for_exit();
    assert!(status.success());
    lines.extend(rest);
    let said = lines.iter().filter(|line| line.contains("reports to"));
    let said: Vec<bool> = said.map(|line| line.ends_with("accepted")).collect();
    // An answer may have come late once more by then, which is said, too.
    assert!(
        said.iter().is_sorted_by(|one, next| one != next),
        "{lines:#?}"
    );
    open.close();
}

#[test]
fn with_tls_and_a_token_an_agent_reports_for_its_own_node_only() {
    let (world, guarded, files) = (
        AgentNode::with_gpus([gpu("a")]),
        GuardedReports::start(),
        TlsFixture::new(),
    );
    let ca = Ca::new("ours");
    let server = ca.issue_for("localhost");
    let (cert, key) = (
        files.write("tls.crt", &server.cert),
        files.write("tls.key", &server.key),
    );
    let (mut endpoints, [_, address, _]) = endpoints();
    endpoints.agents.tls = Some(load_server(&ServerFiles { cert, key }).unwrap());
    let stop = CancellationToken::new();
    let served = &guarded.served;
    let serving = served.spawn(server::serve(
        served.extender.clone(),
        endpoints,
        stop.clone(),
    ));
    let (ca, token) = (
        files.write("ca.crt", &ca.pem),
        files.write("token", &guarded.token("node-b")),
    );
    let extender = format!("https://localhost:{}", address.port());
    let [ca, token] = [&ca, &token].map(|path| path.to_str().unwrap());
    let flags = ["--ca", ca, "--token-file", token, "--extender", &extender];
    eventually("a look says why it is refused", || {
        let look = world
            .agent(&[&["--once"], &flags[..]].concat())
            .output()
            .unwrap();
        assert_eq!(look.status.code(), Some(1));
        text(&look.stderr).contains("which cannot speak for node-a")
    });
    let agent =
        RunningAgent::start(&mut world.agent(&[&["--interval", "100ms"], &flags[..]].concat()));
    agent.line_with("refused (403)");
    assert_eq!(
        Client::connect(served.operators)
            .get_page("/debug/reports")
            .json(),
        serde_json::json!({})
    );
    // As the kubelet does when it renews one.
    files.write("token", &guarded.token(NODE));
    eventually("its own token is read", || {
        reported(served)["gpus"][0]["uuid"] == "GPU-a"
    });
    agent.signal("TERM");
    assert_eq!(agent.wait_for_exit().0.code(), Some(0));
    stop.cancel();
    served.run(serving).unwrap().unwrap();
}

/// A CDI specification sets the variable to `void`; the hook of NVIDIA's legacy mode leaves it as it is.
#[test]
fn an_agent_whose_gpus_came_by_the_hook_of_legacy_mode_reports_that() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let reports = |visible: Option<&str>| {
        let mut look = world.agent(&["--once", "--json"]);
        match visible {
            Some(visible) => look.env("NVIDIA_VISIBLE_DEVICES", visible),
            None => look.env_remove("NVIDIA_VISIBLE_DEVICES"),
        };
        let report: Value = serde_json::from_slice(&look.output().unwrap().stdout).unwrap();
        report["legacyRuntime"].clone()
    };
    assert_eq!(reports(Some("all")), true);
    assert_eq!(reports(Some("GPU-1,GPU-2")), true);
    for unsaid in [Some("void"), Some(""), Some("none"), None] {
        assert_eq!(reports(unsaid), Value::Null, "{unsaid:?}");
    }
}
