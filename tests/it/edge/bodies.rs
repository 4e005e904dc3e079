//! S4: the memory cost of request bodies in progress, measured on the process itself.

use crate::client::{Client, post_head};
use crate::process::{RunningServe, json_dump};
use crate::served::report;
use serde_json::json;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const BODIES: usize = 200;
/// KiB that they may cost, with their connections: four times what is set aside for bodies, and a quarter of the smaller ones.
const MOST: u64 = 48 << 10;

/// A report as large as one may be, give or take what stands around the filler.
fn large(bytes: usize) -> String {
    let mut report = report("node-a", "boot", 1, 2);
    report["unknown"] = json!("x".repeat(bytes - report.to_string().len() - 32));
    report.to_string()
}

/// Sends all of the body but its last byte, and that when all have come so far; says what became of it.
fn send(agents: SocketAddr, body: &str, so_far: &AtomicUsize, all: &Barrier) -> Option<u16> {
    let mut stream = TcpStream::connect(agents).unwrap();
    stream.set_read_timeout(Some(crate::client::PATIENCE)).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let head = post_head("/v1/reports", &format!("Content-Length: {}", body.len()));
    let (most, last) = body.as_bytes().split_at(body.len() - 1);
    // A client whose body is not read yet, or is not read at all, cannot send all of it.
    let written = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(most));
    so_far.fetch_add(1, Ordering::SeqCst);
    all.wait();
    let _ = written.and_then(|()| stream.write_all(last));
    Client::over(stream).read_answer().ok().map(|answer| answer.status)
}

/// The memory that the process has allocated, in KiB. Pages of its binary are not in it: when those come and go is the kernel's
/// choice, and more than what is measured here.
fn allocated(running: &RunningServe) -> u64 {
    running.memory("RssAnon") + running.memory("VmSwap")
}

/// The most that is allocated while all bodies are under way, and what became of each.
fn send_all(running: &RunningServe, body: &str) -> (u64, Vec<Option<u16>>) {
    let (agents, so_far, all) = (running.agents, AtomicUsize::new(0), Barrier::new(BODIES + 1));
    std::thread::scope(|scope| {
        let sender = |_| scope.spawn(|| send(agents, body, &so_far, &all));
        let senders: Vec<_> = (0..BODIES).map(sender).collect();
        let mut most = 0;
        let mut measure_until = |is_reached: &dyn Fn() -> bool| {
            loop {
                let is_over = is_reached();
                most = most.max(allocated(running));
                if is_over {
                    return;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        measure_until(&|| so_far.load(Ordering::SeqCst) == BODIES);
        all.wait();
        measure_until(&|| senders.iter().all(|sender| sender.is_finished()));
        (most, senders.into_iter().map(|sender| sender.join().unwrap()).collect())
    })
}

#[test]
fn s4_two_hundred_large_bodies_at_once_are_not_all_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let running = RunningServe::serve_with(&json_dump(&folder), &[]);
    let warm =
        Client::connect(running.agents).post("/v1/reports", report("node-a", "boot", 1, 2).to_string());
    assert_eq!(warm.status, 200);
    let before = allocated(&running);
    for bytes in [1 << 20, 2 << 20] {
        let (most, answers) = send_all(&running, &large(bytes));
        // A busy machine may take longer over all of them than one body has.
        let is_expected = |status: &u16| [200, 408, 413, 429, 503].contains(status);
        assert!(answers.iter().flatten().all(is_expected), "{answers:?}");
        assert!(answers.contains(&Some(200)) || bytes > 1 << 20, "one at least is taken: {answers:?}");
        assert!(most <= before + MOST, "{before} KiB before, {most} KiB at most");
    }
    let answer =
        Client::connect(running.agents).post("/v1/reports", report("node-a", "boot", 2, 2).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
}
