//! S1: one accept loop for all three addresses: HTTP/1 only, and no peer keeps a connection that it does not use.

use super::source::{ATTACKER, Source};
use crate::client::{Client, PATIENCE};
use crate::process::{Running, json_dump};
use crate::served::{Cluster, args, pod, report};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

/// What a client sends that knows without asking that a server speaks HTTP/2, and an empty SETTINGS frame.
const HTTP_2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";

#[test]
fn s1_no_address_speaks_http_2() {
    let served = Cluster::of(&[("node-a", 1)]).serve();
    for address in [served.scheduler, served.agents, served.operators] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(HTTP_2).unwrap();
        let mut answer = [0; 9];
        let read = stream.read(&mut answer).unwrap_or(0);
        let answer = &answer[..read];
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1"), "{address} answers a frame: {answer:?}");
    }
}

/// As few descriptors as a shell may leave a process: what happens with 1,024 happens with these sooner.
const DESCRIPTORS: u32 = 128;
/// More than those, and not more than beside them fit into a listener's backlog.
const SILENT: u32 = DESCRIPTORS + DESCRIPTORS / 2;

#[test]
fn s1_silent_connections_on_one_address_do_not_stop_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let running = Running::with_descriptors(&json_dump(&folder), DESCRIPTORS);
    let attacker = Source::at(ATTACKER);
    let silent = |address: SocketAddr| -> Vec<TcpStream> {
        (0..SILENT).map(|_| attacker.connect(address).unwrap()).collect()
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
        assert_eq!(Client::connect(running.operators).get("/healthz").status, 200);
        drop(connections);
    }
}
