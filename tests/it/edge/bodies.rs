//! S4: the memory cost of request bodies in progress, measured on the process itself.

use crate::client::{Client, post_head};
use crate::process::{RunningServe, json_dump};
use crate::served::report;
use serde_json::json;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;

const BODIES: usize = 200;

/// A report as large as one may be, give or take what stands around the filler.
fn large(bytes: usize) -> String {
    let mut report = report("node-a", "boot", 1, 2);
    report["unknown"] = json!("x".repeat(bytes - report.to_string().len() - 32));
    report.to_string()
}

/// Sends all of the body but its last byte, and that when all have come so far; says what became of it.
fn send(agents: SocketAddr, body: &str, so_far: &Barrier) -> Option<u16> {
    let mut stream = TcpStream::connect(agents).unwrap();
    stream.set_read_timeout(Some(crate::client::PATIENCE)).unwrap();
    stream.set_write_timeout(Some(std::time::Duration::from_secs(1))).unwrap();
    let head = post_head("/v1/reports", &format!("Content-Length: {}", body.len()));
    let (most, last) = body.as_bytes().split_at(body.len() - 1);
    // A client whose body is not read yet, or is not read at all, cannot send all of it.
    let written = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(most));
    so_far.wait();
    let _ = written.and_then(|()| stream.write_all(last));
    Client::over(stream).read_answer().ok().map(|answer| answer.status)
}

#[test]
fn s4_two_hundred_large_bodies_at_once_do_not_double_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let running = RunningServe::serve_with(&json_dump(&folder), &[]);
    let warm =
        Client::connect(running.agents).post("/v1/reports", report("node-a", "boot", 1, 2).to_string());
    assert_eq!(warm.status, 200);
    let (agents, before) = (running.agents, running.memory("VmRSS"));
    for bytes in [1 << 20, 2 << 20] {
        let (body, so_far) = (large(bytes), Barrier::new(BODIES));
        let answers: Vec<Option<u16>> = std::thread::scope(|scope| {
            let senders: Vec<_> = (0..BODIES).map(|_| scope.spawn(|| send(agents, &body, &so_far))).collect();
            senders.into_iter().map(|sender| sender.join().unwrap()).collect()
        });
        assert!(answers.iter().flatten().all(|status| [200, 413, 429, 503].contains(status)), "{answers:?}");
    }
    let peak = running.memory("VmHWM");
    assert!(peak <= 2 * before, "{before} KiB before, {peak} KiB at most");
    let answer =
        Client::connect(running.agents).post("/v1/reports", report("node-a", "boot", 2, 2).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
}
