//! `/v1/fleet/events`, the stream that the page follows: however it is cut into pieces, and by clients that do not read it.

use super::{IS_DRAWN, served, url};
use crate::browser::Browser;
use crate::client::{Client, TEST_TIMEOUT};
use crate::served::{Served, ServedCluster, eventually, pod, with_priority};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::server::limits::ConnectionLimits;

/// The page's requests are answered in pieces of one byte.
const BYTE_BY_BYTE: &str = "const whole = globalThis.fetch; globalThis.fetch = async (...asked) => { \
    const answer = await whole(...asked); \
    const pieces = new TransformStream({ transform(chunk, out) { for (const byte of chunk) out.enqueue(new Uint8Array([byte])); } }); \
    return new Response(answer.body.pipeThrough(pieces), { status: answer.status, headers: answer.headers }); };";

#[test]
fn events_are_parsed_however_the_stream_is_chunked() {
    let served = served();
    let Some(mut browser) = Browser::start() else {
        return;
    };
    browser.before_each_page(BYTE_BY_BYTE);
    browser.go(&url(&served));
    browser.wait_for("the page is drawn", IS_DRAWN);
    assert_eq!(
        served.bind(&with_priority(pod("later", "10Gi"), -10), "node-b"),
        ""
    );
    browser.wait_for(
        "a change is drawn",
        "document.querySelector('.segment[title^=\"default/later\"]')&&1",
    );
    assert_eq!(browser.take_errors(), [""; 0]);
}

/// So many nodes that the first event fills no socket's buffers.
const NODES: usize = 300;
/// More than are sent the cluster at a time.
const UNREAD: usize = 6;
/// As many as follow the cluster at a time.
const WATCHING: usize = 24;

fn follows(served: &Served) -> TcpStream {
    let mut stream = TcpStream::connect(served.operators).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream
        .write_all(b"GET /v1/fleet/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .unwrap();
    stream
}

/// The status line of the answer.
fn status(stream: &TcpStream) -> String {
    let mut line = String::new();
    BufReader::with_capacity(16, stream)
        .read_line(&mut line)
        .unwrap();
    line
}

#[test]
fn clients_that_never_read_are_disconnected_and_others_are_served() {
    let names: Vec<String> = (0..NODES).map(|node| format!("node-{node}")).collect();
    let gpus: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 8)).collect();
    let mut cluster = ServedCluster::with_gpus(&gpus);
    let connections = ConnectionLimits {
        write: Duration::from_millis(300),
        ..ConnectionLimits::default()
    };
    cluster.limits = RequestLimits {
        connections,
        ..RequestLimits::default()
    };
    let served = cluster.serve();
    let unread: Vec<TcpStream> = (0..UNREAD).map(|_| follows(&served)).collect();
    for stream in &unread {
        let status = status(stream);
        assert!(status.contains(" 200 "), "{status}");
    }
    eventually("another client is sent the cluster", || {
        BufReader::new(follows(&served))
            .lines()
            .map_while(Result::ok)
            .any(|line| line.starts_with("data: "))
    });
    let ended = "stowage_connections_dropped_total{address=\"operators\",reason=\"not-reading\"}";
    eventually(
        "as many as are sent the cluster at a time are ended",
        || served.metric_without_limits(ended) >= 2,
    );
    drop(unread);
}

#[test]
fn a_client_beyond_the_stream_limit_gets_a_retry_answer() {
    let served = served();
    let following: Vec<TcpStream> = (0..WATCHING).map(|_| follows(&served)).collect();
    for stream in &following {
        let status = status(stream);
        assert!(status.contains(" 200 "), "{status}");
    }
    let answer = Client::connect(served.operators).get("/v1/fleet/events");
    assert_eq!(answer.status, 503);
    assert!(answer.text().contains("try again"), "{}", answer.text());
    drop(following);
    eventually("the server sees that they are gone", || {
        status(&follows(&served)).contains(" 200 ")
    });
}
