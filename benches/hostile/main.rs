//! The scheduler beside hostile peers: `cargo bench --features jemalloc --bench hostile [-- --seconds N] [--connections N]`.
//!
//! One `stowage serve` on loopback gets filter requests, first without other clients, then while so many connections to each of
//! its three addresses send nothing, send half of a request, or request and never read; each that is closed is reopened. Quiet
//! and attacked phases are parts of one run, and the ratio of their p99 is comparable between machines. Memory is read before, at
//! its peak and afterwards, and the number of the attackers' closed connections is compared with the number that the service
//! reports as dropped.

#[path = "../common/cluster.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod cluster;
#[path = "../common/connection.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod connection;
mod peers;
#[path = "../common/samples.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod samples;
#[path = "../common/server.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod server;

use cluster::BenchCluster;
use connection::KeepAliveConnection;
use peers::{Attack, PeerTally};
use samples::Samples;
use server::ServeProcess;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const NODES: usize = 1000;
/// Interval of filter requests: that of a busy kube-scheduler.
const REQUEST_INTERVAL: Duration = Duration::from_millis(5);
/// One request in so many uses a new connection.
const REQUESTS_PER_NEW_CONNECTION: usize = 20;
/// Wait after the attack until its connections have run into their timeouts.
const RECOVERY_TIME: Duration = Duration::from_secs(60);

fn main() {
    let (seconds, connections) = (
        number_of_flag("--seconds", 20),
        number_of_flag("--connections", 2000) as usize,
    );
    let phase = Duration::from_secs(seconds);
    let folder = tempfile::tempdir().expect("a folder for the dump");
    let (cluster, dump) = (
        BenchCluster::new(NODES, 64),
        folder.path().join("cluster.json"),
    );
    std::fs::write(&dump, cluster.dump()).expect("the dump is written");
    let stowage = ServeProcess::start(
        Command::new(env!("CARGO_BIN_EXE_stowage"))
            .args([
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--agents",
                "127.0.0.1:0",
            ])
            .args(["--admin", "127.0.0.1:0", "--cluster"])
            .arg(&dump)
            .env("RUST_LOG", "stowage_server::serve=info,error"),
        &[
            "the scheduler: http://",
            "agents: http://",
            "operators: http://",
        ],
    );
    println!(
        "{NODES} nodes, {connections} hostile connections to each address, {seconds} s each part"
    );
    filter_steadily(&stowage, &cluster, Duration::from_secs(2));
    let memory_before = stowage.resident_mib();
    let before = filter_steadily(&stowage, &cluster, phase);
    let dropped_before = dropped(&stowage);
    let (attacked, tally, most) = under_attack(&stowage, &cluster, connections, phase);
    let after = filter_steadily(&stowage, &cluster, phase);
    std::thread::sleep(RECOVERY_TIME);
    let memory_after = stowage.resident_mib();
    let dropped = dropped(&stowage) - dropped_before;

    println!("| filter | requests | p50 µs | p99 µs |\n|---|---|---|---|");
    for (name, samples) in [
        ("quiet, before", &before),
        ("attacked", &attacked),
        ("quiet, after", &after),
    ] {
        let (p50, p99) = (samples.1.percentile(50), samples.1.percentile(99));
        println!("| {name} | {} | {p50:.0} | {p99:.0} |", samples.0);
    }
    let quiet = before.1.percentile(99).max(after.1.percentile(99));
    println!(
        "p99 attacked ÷ quiet: {:.2}",
        attacked.1.percentile(99) / quiet
    );
    println!(
        "memory: {memory_before} MiB before, {most} MiB at most, {memory_after} MiB a minute after"
    );
    println!(
        "hostile connections: {} opened, {} closed on them; the service counts {dropped} dropped",
        tally.opened, tally.closed
    );
}

/// Number after a flag of the command line.
fn number_of_flag(flag: &str, default: u64) -> u64 {
    let mut arguments = std::env::args()
        .skip_while(|argument| argument != flag)
        .skip(1);
    arguments.next().map_or(default, |text| {
        text.parse().expect("a number behind the flag")
    })
}

/// Number of requests, and their times.
type RequestSamples = (usize, Samples);

/// Filters at a steady pace, mostly over one connection, as the scheduler does; every answer is checked.
fn filter_steadily(
    stowage: &ServeProcess,
    cluster: &BenchCluster,
    phase: Duration,
) -> RequestSamples {
    let (mut samples, started) = (Samples::default(), Instant::now());
    let (mut asked, mut kept) = (0, KeepAliveConnection::connect(&stowage.addresses[0]));
    for round in 0.. {
        if started.elapsed() >= phase {
            break;
        }
        let body = cluster.filter_body(round % 64);
        let begun = Instant::now();
        if round % REQUESTS_PER_NEW_CONNECTION == 0 {
            kept = KeepAliveConnection::connect(&stowage.addresses[0]);
        }
        let answer = kept.post("/scheduler/filter", &body, None);
        samples.add(begun.elapsed());
        asked += 1;
        cluster::passed_names(&answer);
        std::thread::sleep(REQUEST_INTERVAL.saturating_sub(begun.elapsed()));
    }
    (asked, samples)
}

fn under_attack(
    stowage: &ServeProcess,
    cluster: &BenchCluster,
    connections: usize,
    phase: Duration,
) -> (RequestSamples, PeerTally, u64) {
    let (is_over, most) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let attackers: Vec<_> = stowage
            .addresses
            .iter()
            .zip([
                peers::SCHEDULER_REQUEST,
                peers::AGENTS_REQUEST,
                peers::OPERATORS_REQUEST,
            ])
            .map(|(address, asks)| {
                Attack::new(address.parse().expect("an address"), asks, connections)
            })
            .map(|attack| scope.spawn(|| attack.run(&is_over)))
            .collect();
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                most.fetch_max(stowage.resident_mib(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let samples = filter_steadily(stowage, cluster, phase);
        is_over.store(true, Ordering::Relaxed);
        let tallies = attackers
            .into_iter()
            .map(|attacker| attacker.join().expect("an attacker ends"));
        let tally = tallies.fold(PeerTally::default(), PeerTally::plus);
        (samples, tally, most.load(Ordering::Relaxed))
    })
}

/// The number of connections that the service reports as dropped, over all addresses and reasons but one: an idle connection is
/// not refused.
fn dropped(stowage: &ServeProcess) -> u64 {
    let page = peers::get_page(&stowage.addresses[2], "/metrics");
    let lines = page
        .lines()
        .filter(|line| line.starts_with("stowage_connections_dropped_total{"));
    lines
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum()
}
