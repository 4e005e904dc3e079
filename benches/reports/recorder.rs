//! What the flight recorder adds to reports: `cargo bench --features jemalloc --bench reports -- recorder [NODES]`. Two `stowage serve`
//! on one core, one of which records, get the same reports in the same seconds, so that other load on the machine affects both. Stretches
//! in which every report says what the one before said, and stretches in which its figures change, take turns.

use crate::cores::OneCore;
use crate::fleet::Fleet;
use crate::node::CacheUsage;
use crate::server::ServeProcess;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub const NODES: usize = 1000;
const PHASE_PAIRS: usize = 3;
const PHASE_TIME: Duration = Duration::from_secs(10);
/// Wait until every node has reported figures of the other kind twice.
const SETTLE_TIME: Duration = Duration::from_secs(3);
const RECORDER_THREAD: &str = "flight-recorder";

/// CPU time of both servers in per cent of one core, by phase.
#[derive(Default)]
struct CpuShares {
    without: Vec<f64>,
    with: Vec<f64>,
    thread: Vec<f64>,
    bytes: Vec<f64>,
}

pub fn print(nodes: usize, cores: &OneCore, dump: &Path, without: &ServeProcess) {
    let directory = tempfile::tempdir().expect("a directory to record into");
    let recorded = directory.path().to_str().expect("text");
    let with = crate::start_with(
        cores,
        dump,
        &["--record", recorded, "--record-size", "4096"],
    );
    let servers = [without, &with];
    let fleets = servers.map(|server| Fleet::connect(nodes, server.addresses[1].clone()));
    println!(
        "\n| reports | CPU without, % | CPU with, % | added | of it the recorder's thread | MB/s written |\n|---|---|---|---|---|---|"
    );
    let mut all = [CpuShares::default(), CpuShares::default()];
    for turn in 0..PHASE_PAIRS * 2 {
        let kind = turn % 2;
        let caches = [CacheUsage::Unchanged, CacheUsage::Mixed][kind];
        fleets.iter().for_each(|fleet| fleet.report(caches));
        std::thread::sleep(SETTLE_TIME);
        measure_phase(&mut all[kind], servers, directory.path(), &fleets[1]);
    }
    for (name, shares) in ["unchanged", "changing"].iter().zip(&all) {
        let [without, with, thread, bytes] =
            [&shares.without, &shares.with, &shares.thread, &shares.bytes].map(|of| median(of));
        let added: Vec<f64> = shares
            .with
            .iter()
            .zip(&shares.without)
            .map(|(with, without)| with - without)
            .collect();
        println!(
            "| {name} | {without:.2} | {with:.2} | {:.2} | {thread:.2} | {bytes:.3} |",
            median(&added)
        );
    }
    println!(
        "resident memory, and its peak: {} MiB, {} MiB without; {} MiB, {} MiB with",
        without.resident_mib(),
        without.peak_mib(),
        with.resident_mib(),
        with.peak_mib()
    );
    // The servers must answer the last reports before they end.
    fleets.iter().for_each(Fleet::pause);
    std::thread::sleep(SETTLE_TIME);
}

fn measure_phase(
    shares: &mut CpuShares,
    servers: [&ServeProcess; 2],
    directory: &Path,
    fleet: &Fleet,
) {
    let cpu = || servers.map(|server| server.cpu());
    let (before, thread, bytes) = (
        cpu(),
        servers[1].cpu_of_threads(RECORDER_THREAD),
        size_of(directory),
    );
    let reports = fleet.tally.reports.load(Ordering::Relaxed);
    let started = Instant::now();
    std::thread::sleep(PHASE_TIME);
    let took = started.elapsed().as_secs_f64();
    let after = cpu();
    let percent = |time: Duration| 100.0 * time.as_secs_f64() / took;
    shares.without.push(percent(after[0] - before[0]));
    shares.with.push(percent(after[1] - before[1]));
    shares
        .thread
        .push(percent(servers[1].cpu_of_threads(RECORDER_THREAD) - thread));
    shares
        .bytes
        .push((size_of(directory) - bytes) as f64 / took / 1e6);
    let came = fleet.tally.reports.load(Ordering::Relaxed) - reports;
    eprintln!(
        "  {:.0} reports/s, {:?}",
        came as f64 / took,
        shares.with.last()
    );
}

fn size_of(directory: &Path) -> u64 {
    let files = std::fs::read_dir(directory)
        .expect("the directory is there")
        .flatten();
    files
        .filter_map(|file| file.metadata().ok())
        .map(|metadata| metadata.len())
        .sum()
}

fn median(of: &[f64]) -> f64 {
    let mut sorted = of.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() % 2 {
        0 => (sorted[half - 1] + sorted[half]) / 2.0,
        _ => sorted[half],
    }
}
