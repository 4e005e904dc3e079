//! S4: the memory cost of request bodies in progress, measured on the process itself.

use crate::client::{Client, HttpAnswer, TEST_TIMEOUT, post_head};
use crate::process::{RunningServe, json_dump};
use crate::served::report;
use serde_json::json;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const BODIES: usize = 200;
/// KiB that they may cost, with their connections: four times what is set aside for bodies, and a quarter of the smaller ones.
const MAX_MEMORY_KIB: u64 = 48 << 10;

/// The largest that is taken.
const MAX_BODY_BYTES: usize = 1 << 20;

/// A report as large as one may be, give or take what stands around the filler.
fn large(bytes: usize) -> String {
    let mut report = report("node-a", "boot", 1, 2);
    report["unknown"] = json!("x".repeat(bytes - report.to_string().len() - 32));
    report.to_string()
}

/// Bodies under way.
struct Crowd {
    /// How many have come to their last byte.
    so_far: AtomicUsize,
    all: Barrier,
    /// One has been taken, or none can be.
    is_over: AtomicBool,
}

/// Sends all of the body but its last byte, and that when all have come so far. Then sends it again, as an agent does, until one
/// of any is taken: a busy machine may take longer over all of them than each has. Says what became of each.
fn send(agents: SocketAddr, body: &str, crowd: &Crowd) -> Vec<Option<u16>> {
    let (mut answers, began) = (
        vec![send_last_byte_late(agents, body, crowd)],
        Instant::now(),
    );
    while !crowd.is_over.load(Ordering::SeqCst) && began.elapsed() < TEST_TIMEOUT {
        match answers.last() {
            Some(Some(200)) => crowd.is_over.store(true, Ordering::SeqCst),
            _ => answers.push(status(
                Client::connect(agents).try_post("/v1/reports", body.as_bytes()),
            )),
        }
    }
    answers
}

/// `None` where the connection ended first: who is refused before all was read may not hear why.
fn status(answer: std::io::Result<HttpAnswer>) -> Option<u16> {
    answer.ok().map(|answer| answer.status)
}

fn send_last_byte_late(agents: SocketAddr, body: &str, crowd: &Crowd) -> Option<u16> {
    let mut stream = TcpStream::connect(agents).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream
        .set_write_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    let head = post_head("/v1/reports", &format!("Content-Length: {}", body.len()));
    let (most, last) = body.as_bytes().split_at(body.len() - 1);
    // A client whose body is not read yet, or is not read at all, cannot send all of it.
    let written = stream
        .write_all(head.as_bytes())
        .and_then(|()| stream.write_all(most));
    crowd.so_far.fetch_add(1, Ordering::SeqCst);
    crowd.all.wait();
    let _ = written.and_then(|()| stream.write_all(last));
    status(Client::over(stream).read_answer())
}

/// The memory that the process has allocated, in KiB. Pages of its binary are not in it: when those come and go is the kernel's
/// choice, and more than what is measured here.
fn allocated(running: &RunningServe) -> u64 {
    running.memory("RssAnon") + running.memory("VmSwap")
}

/// The most that is allocated while all bodies are under way, and what became of each.
fn send_all(running: &RunningServe, body: &str) -> (u64, Vec<Option<u16>>) {
    let (agents, crowd) = (
        running.agents,
        Crowd {
            so_far: AtomicUsize::new(0),
            all: Barrier::new(BODIES + 1),
            is_over: AtomicBool::new(body.len() > MAX_BODY_BYTES),
        },
    );
    std::thread::scope(|scope| {
        let sender = |_| scope.spawn(|| send(agents, body, &crowd));
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
        measure_until(&|| crowd.so_far.load(Ordering::SeqCst) == BODIES);
        crowd.all.wait();
        measure_until(&|| senders.iter().all(|sender| sender.is_finished()));
        (
            most,
            senders
                .into_iter()
                .flat_map(|sender| sender.join().unwrap())
                .collect(),
        )
    })
}

#[test]
#[cfg_attr(
    not(feature = "jemalloc"),
    ignore = "measures memory: needs the image's allocator, `--features jemalloc`"
)]
fn two_hundred_large_bodies_at_once_are_not_all_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let running = RunningServe::serve_with(&json_dump(&folder), &[]);
    let warm = Client::connect(running.agents)
        .post("/v1/reports", report("node-a", "boot", 1, 2).to_string());
    assert_eq!(warm.status, 200);
    let before = allocated(&running);
    for bytes in [MAX_BODY_BYTES, 2 * MAX_BODY_BYTES] {
        let (most, answers) = send_all(&running, &large(bytes));
        let is_expected = |status: &u16| [200, 408, 413, 429, 503].contains(status);
        assert!(answers.iter().flatten().all(is_expected), "{answers:?}");
        assert!(
            answers.contains(&Some(200)) || bytes > MAX_BODY_BYTES,
            "one at least is taken: {answers:?}"
        );
        assert!(
            most <= before + MAX_MEMORY_KIB,
            "{before} KiB before, {most} KiB at most"
        );
    }
    let answer = Client::connect(running.agents)
        .post("/v1/reports", report("node-a", "boot", 2, 2).to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
}
