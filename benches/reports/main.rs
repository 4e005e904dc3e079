//! Agents' reports in, beside the scheduler's filters: `cargo bench --features jemalloc --bench reports [-- NODES]`; or filters beside
//! reports whose KV caches jitter and beside such as do not: `cargo bench --features jemalloc --bench reports -- jitter [NODES]`; or
//! scrapes of the metrics, alone and beside filters: `cargo bench --features jemalloc --bench reports -- scrape [NODES]`; or with the
//! flight recorder and without: `cargo bench
//! --bench reports -- recorder [NODES]`.
//!
//! One `stowage serve` on one core. Phases without reports and phases with a report a second from every node take turns in
//! one run, so that other load on the machine affects both; filter requests come at a steady pace all the while, in turn about
//! some of the nodes and about all. The ratio is comparable between machines.

mod alone;
#[path = "../common/cluster.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod cluster;
#[path = "../common/connection.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod connection;
#[path = "../common/cores.rs"]
mod cores;
mod fleet;
mod jitter;
mod node;
mod phase;
mod recorder;
#[path = "../common/samples.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod samples;
mod scrape;
#[path = "../common/server.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod server;

use cluster::BenchCluster;
use connection::KeepAliveConnection;
use cores::OneCore;
use fleet::Fleet;
use node::{CacheUsage, ReportingNode};
use phase::{PhaseFigures, SteadyScheduler};
use server::ServeProcess;
use std::path::Path;
use std::time::Duration;

/// Number of times that reports begin and cease.
const PHASE_PAIRS: usize = 3;
const PHASE_TIME: Duration = Duration::from_secs(10);
/// Wait until the reports of all nodes have come in twice.
const SETTLE_TIME: Duration = Duration::from_secs(2);
/// Wait until the last reports are stale everywhere, which is recorded node by node, and none has expired.
const STALE_TIME: Duration = Duration::from_secs(7);

fn main() {
    let is_asked_for = |mode: &str| std::env::args().any(|arg| arg == mode);
    let (is_jitter, is_scrape) = (is_asked_for("jitter"), is_asked_for("scrape"));
    let nodes = std::env::args().skip(1).find_map(|arg| arg.parse().ok());
    let is_recorder = is_asked_for("recorder");
    let nodes = nodes.unwrap_or(match () {
        () if is_jitter => jitter::NODES,
        () if is_recorder => recorder::NODES,
        () => 5000,
    });
    let cluster = BenchCluster::new(nodes, 0);
    let folder = tempfile::tempdir().expect("a folder for the dump");
    let dump = folder.path().join("cluster.json");
    std::fs::write(&dump, cluster.dump()).expect("the dump is written");
    let cores = OneCore::reserve();
    println!(
        "{nodes} agents × 8 GPUs, 16 processes, 8 engines, 6 models; {}",
        cores.describe()
    );
    let server = start(&cores, &dump);
    if is_jitter {
        return jitter::print(&cluster, &server);
    }
    if is_recorder {
        return recorder::print(nodes, &cores, &dump, &server);
    }
    if is_scrape {
        return scrape::print(&cluster, &server);
    }
    alone::print(&cluster);
    assert_reports_take_effect(&cluster, &server);

    let fleet = Fleet::connect(nodes, server.addresses[1].clone());
    let mut scheduler = SteadyScheduler::new(&cluster, &server.addresses[0]);
    phase::print_header(&scheduler);
    let (mut without, mut with) = (PhaseFigures::default(), PhaseFigures::default());
    scheduler.measure(SETTLE_TIME, &server, &fleet.tally);
    without.add(
        scheduler.measure(PHASE_TIME, &server, &fleet.tally),
        "without",
    );
    for _ in 0..PHASE_PAIRS {
        fleet.report(CacheUsage::Mixed);
        scheduler.measure(SETTLE_TIME, &server, &fleet.tally);
        with.add(scheduler.measure(PHASE_TIME, &server, &fleet.tally), "with");
        fleet.pause();
        scheduler.measure(STALE_TIME, &server, &fleet.tally);
        without.add(
            scheduler.measure(PHASE_TIME, &server, &fleet.tally),
            "without",
        );
    }
    phase::print_summary(&without, &with);
    println!(
        "resident memory of `stowage serve`: {} MiB",
        server.resident_mib()
    );
}

fn start(cores: &OneCore, dump: &Path) -> ServeProcess {
    start_with(cores, dump, &[])
}

fn start_with(cores: &OneCore, dump: &Path, options: &[&str]) -> ServeProcess {
    ServeProcess::start(
        cores
            .command(env!("CARGO_BIN_EXE_stowage"))
            .args([
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--agents",
                "127.0.0.1:0",
                "--admin",
                "127.0.0.1:0",
            ])
            .args(["--connections-per-source", "16384"])
            .args(options)
            .arg("--cluster")
            .arg(dump)
            .env("RUST_LOG", "stowage_server::serve=info,warn"),
        &[
            "the scheduler: http://",
            "agents: http://",
            "operators: http://",
        ],
    )
}

/// A node whose caches are full is refused, and accepted again when they are not: the timed reports take effect.
fn assert_reports_take_effect(cluster: &BenchCluster, server: &ServeProcess) {
    let mut scheduler = KeepAliveConnection::connect(&server.addresses[0]);
    let mut agent = KeepAliveConnection::connect(&server.addresses[1]);
    let mut node = ReportingNode::new(0, 0);
    let mut report_and_ask = |caches| {
        // One reading far from the average does not count; three in a row do.
        (0..3).for_each(|_| drop(agent.post("/v1/reports", &node.next(caches), None)));
        let answer = scheduler.post(
            "/scheduler/filter",
            &cluster.filter_body_for_node(0, 0),
            None,
        );
        String::from_utf8(answer).expect("text")
    };
    let busy = report_and_ask(CacheUsage::Full);
    assert!(
        busy.contains(r#""FailedAndUnresolvableNodes":{"gpu-node-00000":"#),
        "{busy}"
    );
    let calm = report_and_ask(CacheUsage::Mixed);
    assert!(calm.contains(r#""NodeNames":["gpu-node-00000"]"#), "{calm}");
}
