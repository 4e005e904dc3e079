//! S2: the operators' pages: who sees them, and that nobody can make them cost more than one at a time.

use crate::client::Client;
use crate::process::json_dump;
use crate::served::{Cluster, args, pod};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

#[test]
fn s2_an_operators_address_that_others_reach_is_refused_without_tokens_and_tls() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(["serve", "--listen", "127.0.0.1:0", "--agents", "127.0.0.1:0", "--admin", "0.0.0.0:0"])
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
    assert!(said.contains("--admin 0.0.0.0:0") && said.contains("listen on 127.0.0.1"), "{said}");
}

/// So many nodes that a snapshot of them fills no socket's buffers.
const NODES: usize = 600;

#[test]
fn s2_one_large_page_is_written_at_a_time_and_who_does_not_read_it_holds_nobody_up() {
    let names: Vec<String> = (0..NODES).map(|node| format!("node-{node}")).collect();
    let gpus: Vec<(&str, u32)> = names.iter().map(|name| (name.as_str(), 8)).collect();
    let served = Cluster::of(&gpus).serve();
    let unread: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = TcpStream::connect(served.operators).unwrap();
            stream.write_all(b"GET /debug/snapshot HTTP/1.1\r\nHost: stowage\r\n\r\n").unwrap();
            stream
        })
        .collect();
    let mut answers: Vec<String> = Vec::new();
    for stream in &unread {
        stream.set_read_timeout(Some(crate::client::PATIENCE)).unwrap();
        let mut line = String::new();
        BufReader::with_capacity(16, stream).read_line(&mut line).unwrap();
        answers.push(line.trim_end().to_owned());
    }
    let count = |status: &str| answers.iter().filter(|line| line.contains(status)).count();
    assert_eq!((count(" 200 "), count(" 503 ")), (1, 19), "{answers:?}");
    let body = args(&pod("llm", "40Gi"), &["node-0"]).to_string();
    assert_eq!(Client::connect(served.scheduler).post("/scheduler/filter", body).status, 200);
    assert_eq!(Client::connect(served.operators).get("/metrics").status, 200);
    drop(unread);
}
