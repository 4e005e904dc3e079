//! S1: one accept loop for all three addresses: HTTP/1 only, and no peer keeps a connection that it does not use.

use super::source::{ATTACKER, ClientAddress};
use crate::client::{Client, TEST_TIMEOUT, post_head};
use crate::process::{RunningServe, json_dump};
use crate::served::{Served, ServedCluster, args, endpoints, eventually, node, pod, report};
use crate::tls::{Ca, TlsFixture};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::server;
use stowage_server::extender::server::limits::ConnectionLimits;
use stowage_server::extender::tls::{ServerFiles, load_server};
use tokio_util::sync::CancellationToken;

/// What a client sends that knows without asking that a server speaks HTTP/2, and an empty SETTINGS frame.
const HTTP_2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

#[test]
fn no_address_speaks_http_2() {
    let served = ServedCluster::with_gpus(&[("node-a", 1)]).serve();
    for address in [served.scheduler, served.agents, served.operators] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        stream.write_all(HTTP_2).unwrap();
        let mut answer = [0; 9];
        let read = stream.read(&mut answer).unwrap_or(0);
        let answer = &answer[..read];
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1"),
            "{address} answers a frame: {answer:?}"
        );
    }
}

/// As few descriptors as a shell may leave a process: what happens with 1,024 happens with these sooner.
const FILE_DESCRIPTOR_LIMIT: u32 = 128;
/// More than those, and not more than beside them fit into a listener's backlog.
const SILENT_CONNECTIONS: u32 = FILE_DESCRIPTOR_LIMIT + FILE_DESCRIPTOR_LIMIT / 2;

#[test]
fn silent_connections_on_one_address_do_not_stop_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let running = RunningServe::with_descriptors(&json_dump(&folder), FILE_DESCRIPTOR_LIMIT);
    let attacker = ClientAddress::at(ATTACKER);
    let silent = |address: SocketAddr| -> Vec<TcpStream> {
        (0..SILENT_CONNECTIONS)
            .map(|_| attacker.connect(address).unwrap())
            .collect()
    };
    for crowded in [running.operators, running.agents, running.scheduler] {
        let connections = silent(crowded);
        let mut scheduler = Client::connect(running.scheduler);
        let body = args(&pod("llm", "40Gi"), &["node-a", "node-b"]).to_string();
        let answer = scheduler.try_post("/scheduler/filter", body.as_bytes());
        assert_eq!(answer.expect("the scheduler is answered").status, 200);
        let taken = report("node-a", "boot", u64::from(crowded.port()), 2).to_string();
        let answer = Client::connect(running.agents).try_post("/v1/reports", taken.as_bytes());
        assert!(answer.is_ok(), "an agent is answered");
        assert_eq!(
            Client::connect(running.operators).get("/healthz").status,
            200
        );
        drop(connections);
    }
}

/// A limit that a test can wait for. A busy machine may keep any client waiting for as long: beside the one that exceeds it there
/// is none, or it asks again.
const SHORT_TIMEOUT: Duration = Duration::from_millis(200);

fn limits(shorten: fn(&mut ConnectionLimits)) -> RequestLimits {
    let mut connections = ConnectionLimits::default();
    shorten(&mut connections);
    RequestLimits {
        connections,
        ..RequestLimits::default()
    }
}

fn served_within(limits: RequestLimits, gpus: &[(&str, u32)]) -> Served {
    let mut cluster = ServedCluster::with_gpus(gpus);
    if gpus.is_empty() {
        // Without a report, which would have to come within the limits.
        cluster.nodes.push(node("node-a"));
    }
    cluster.limits = limits;
    cluster.serve()
}

/// Says this, and waits until the connection is closed; what was answered until then.
fn send_and_read(address: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            panic!("{text:?} keeps its connection")
        }
        _ => String::from_utf8(answer).unwrap(),
    }
}

fn dropped(served: &Served, address: &str, reason: &str) -> u64 {
    served.metric_without_limits(&format!(
        "stowage_connections_dropped_total{{address=\"{address}\",reason=\"{reason}\"}}"
    ))
}

/// What a client does, what is answered, as what it is counted, and the limit that it exceeds.
struct Misuse {
    says: &'static str,
    answer: &'static str,
    cause: &'static str,
    shorten: fn(&mut ConnectionLimits),
}

#[test]
fn each_step_of_a_connection_has_a_timeout_and_timeouts_are_counted() {
    let misuses = [
        Misuse {
            says: "",
            answer: "",
            cause: "no-request",
            shorten: |limits| limits.first_byte = SHORT_TIMEOUT,
        },
        Misuse {
            says: "GET /healthz HTTP/1.1\r\nHost: st",
            answer: "",
            cause: "slow-head",
            shorten: |limits| limits.head = SHORT_TIMEOUT,
        },
        Misuse {
            says: "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
            answer: "HTTP/1.1 ",
            cause: "idle",
            shorten: |limits| limits.idle = SHORT_TIMEOUT,
        },
        Misuse {
            says: "nonsense\r\n\r\n",
            answer: "HTTP/1.1 400",
            cause: "bad-http",
            shorten: |_| {},
        },
    ];
    for Misuse {
        says: text,
        answer,
        cause,
        shorten,
    } in misuses
    {
        let served = served_within(limits(shorten), &[]);
        for (address, name) in [
            (served.scheduler, "scheduler"),
            (served.agents, "agents"),
            (served.operators, "operators"),
        ] {
            let answered = send_and_read(address, text);
            assert!(answered.starts_with(answer), "{name} {cause}: {answered}");
            assert_eq!(
                answered.is_empty(),
                answer.is_empty(),
                "{name} {cause}: {answered}"
            );
            eventually("it is counted", || dropped(&served, name, cause) >= 1);
        }
        eventually(&format!("another one is answered after {cause}"), || {
            Client::connect(served.operators)
                .try_get("/healthz")
                .is_ok_and(|answer| answer.status == 200)
        });
    }
}

#[test]
fn a_request_has_a_timeout_as_a_whole() {
    let served = served_within(limits(|limits| limits.request = SHORT_TIMEOUT), &[]);
    for (address, name, path) in [
        (served.scheduler, "scheduler", "/scheduler/filter"),
        (served.agents, "agents", "/v1/reports"),
    ] {
        // Its body never comes.
        let head = post_head(path, "Content-Length: 1000");
        assert_eq!(send_and_read(address, &head), "");
        eventually("it is counted", || {
            dropped(&served, name, "slow-request") == 1
        });
    }
}

#[test]
fn a_tls_handshake_has_a_timeout() {
    let (ca, files) = (Ca::new("ca"), TlsFixture::new());
    let identity = ca.issue_for("127.0.0.1");
    let (cert, key) = (
        files.write("tls.crt", &identity.cert),
        files.write("tls.key", &identity.key),
    );
    let certificate = ServerFiles { cert, key };
    let first_bytes_of_a_handshake = "\u{16}\u{3}\u{1}";
    for (text, cause, limits) in [
        (
            "",
            "handshake-timeout",
            limits(|limits| limits.handshake = SHORT_TIMEOUT),
        ),
        (
            first_bytes_of_a_handshake,
            "handshake-timeout",
            limits(|limits| limits.handshake = SHORT_TIMEOUT),
        ),
        (
            "GET / HTTP/1.1\r\n\r\n",
            "handshake-failed",
            RequestLimits::default(),
        ),
    ] {
        let served = served_within(limits, &[]);
        let (mut endpoints, [_, address, _]) = endpoints();
        endpoints.agents.tls = Some(load_server(&certificate).unwrap());
        let stop = CancellationToken::new();
        let serving = served.spawn(server::serve(
            served.extender.clone(),
            endpoints,
            stop.clone(),
        ));
        send_and_read(address, text);
        eventually("it is counted", || dropped(&served, "agents", cause) == 1);
        stop.cancel();
        served.run(serving).unwrap().unwrap();
    }
}

#[test]
fn a_client_that_does_not_read_is_disconnected_and_delays_no_other() {
    let names: Vec<String> = (0..600).map(|node| format!("node-{node}")).collect();
    let gpus: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 8)).collect();
    let served = served_within(limits(|limits| limits.write = 10 * SHORT_TIMEOUT), &gpus);
    let mut unread = TcpStream::connect(served.operators).unwrap();
    unread
        .write_all(b"GET /debug/snapshot HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .unwrap();
    eventually("it is counted", || {
        dropped(&served, "operators", "not-reading") == 1
    });
    eventually("another one is sent the page", || {
        Client::connect(served.operators)
            .try_get_page("/debug/snapshot")
            .is_ok_and(|page| page.status == 200)
    });
    drop(unread);
}

#[test]
fn a_source_at_its_connection_limit_loses_its_own_connections() {
    let served = served_within(
        RequestLimits {
            // Nobody loses a connection for being silent, however slow the machine is.
            connections: ConnectionLimits {
                per_source: 8,
                first_byte: 10 * TEST_TIMEOUT,
                ..ConnectionLimits::default()
            },
            ..RequestLimits::default()
        },
        &[("node-a", 1)],
    );
    let attacker = ClientAddress::at(ATTACKER);
    let mut kept = Client::connect(served.agents);
    assert_eq!(
        kept.post("/v1/reports", report("node-a", "boot", 2, 1).to_string())
            .status,
        200
    );
    let silent: Vec<TcpStream> = (0..40)
        .map(|_| attacker.connect(served.agents).unwrap())
        .collect();
    eventually("all but eight are displaced", || {
        dropped(&served, "agents", "displaced") == 32
    });
    let answer = attacker
        .client(served.agents)
        .post("/v1/reports", report("node-a", "boot", 3, 1).to_string());
    assert_eq!(answer.status, 200, "a newcomer of the same source is heard");
    assert_eq!(
        kept.post("/v1/reports", report("node-a", "boot", 4, 1).to_string())
            .status,
        200
    );
    let open = || served.metric("stowage_connections{address=\"agents\"}");
    eventually("seven of theirs are left, and one of ours", || open() == 8);
    drop(silent);
}
