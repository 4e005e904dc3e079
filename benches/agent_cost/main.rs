//! The cost of a node agent to its node: `cargo bench --features jemalloc --bench agent_cost`.
//!
//! The real `stowage agent`, once a second, on one core: NVML is a library that plays a script, the API server is the demo's,
//! `/proc` and the model cache are folders, and each engine prints what a large vLLM prints. All of these are in this process;
//! measured are the agent's own CPU time and memory. An agent whose report is incomplete is not timed.

#[path = "../common/cores.rs"]
mod cores;
#[path = "../common/page.rs"]
mod page;
#[path = "../common/server.rs"]
#[allow(dead_code, reason = "each bench asks its part")]
mod server;
mod sink;
mod world;

use cores::OneCore;
use server::ServeProcess;
use sink::ReportSink;
use std::time::{Duration, Instant};
use stowage_report::NodeReport;
use stowage_scheduling::units::Bytes;
use world::{AgentHost, ENGINES};

/// Reports that are not measured: meanwhile the agent lists its pods, finds the engines and scans for models.
const WARM_UP: usize = 5;
const ROUNDS: usize = 30;
/// The thread that waits for the driver's events. A driver lets it sleep; the library that plays a script reads the file again
/// and again, which is no cost of the agent.
const EVENTS: &str = "nvml-events";

fn main() {
    let cores = OneCore::reserve();
    let folder = tempfile::tempdir().expect("a folder for the node");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (world, mut sink) = runtime.block_on(async {
        let world = AgentHost::new(folder.path()).await;
        (world, ReportSink::start().await)
    });
    let agent = ServeProcess::start(
        cores
            .command(env!("CARGO_BIN_EXE_stowage"))
            .args(world.arguments())
            .args(["--extender", &sink.url]),
        &["reporting every "],
    );
    sink.wait_for_report(is_whole);
    sink.nth_report(WARM_UP);
    let (cpu, waiting, started) = (agent.cpu(), agent.cpu_of_threads(EVENTS), Instant::now());
    let last = sink.nth_report(ROUNDS);
    let took = started.elapsed();
    let (cpu, waiting) = (agent.cpu() - cpu, agent.cpu_of_threads(EVENTS) - waiting);
    assert!(is_whole(&last), "{last:?}");

    println!(
        "an agent of {ENGINES} engines with {} lines each; {}",
        page::METRICS_PAGE_LINES,
        cores.describe()
    );
    let own = cpu.saturating_sub(waiting);
    let share = |cpu: Duration| 100.0 * cpu.as_secs_f64() / took.as_secs_f64();
    println!("{:<36}{:>8.2} %", "CPU, of one core", share(own));
    println!(
        "{:<36}{:>8.1} ms",
        "CPU a round",
        own.as_secs_f64() * 1e3 / ROUNDS as f64
    );
    println!(
        "{:<36}{:>8.2} %",
        "the library's wait for events, apart",
        share(waiting)
    );
    println!(
        "{:<36}{:>8.2}",
        "rounds a second",
        ROUNDS as f64 / took.as_secs_f64()
    );
    println!("{:<36}{:>8} MiB", "resident memory", agent.resident_mib());
}

/// Whether a report contains everything that is on the node.
fn is_whole(report: &NodeReport) -> bool {
    let gpus = report.gpus.as_deref().unwrap_or_default();
    let processes = gpus.iter().flat_map(|gpu| gpu.processes.iter().flatten());
    let owned =
        processes.filter(|process| process.pod.is_some() && process.used_bytes > Some(Bytes::ZERO));
    let read = report.engines.iter().filter(|engine| {
        engine.kv_cache_usage == Some(0.75) && engine.waiting == Some(5) && engine.gpus.len() == 1
    });
    gpus.len() == world::GPUS
        && owned.count() == 2 * world::GPUS
        && read.count() == ENGINES
        && report
            .models
            .iter()
            .filter(|model| model.source == "huggingface")
            .count()
            == world::MODELS
        && report.missing.is_empty()
}
