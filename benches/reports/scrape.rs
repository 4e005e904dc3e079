//! Scrapes of `/metrics` over HTTP: how long one takes and how large it is; then `filter`
//! with a scrape every second and without one, in turn, so that other load on the machine affects both. Two phases without a
//! scrape in each pair show what the machine does to two equal runs.

use crate::cluster::BenchCluster;
use crate::fleet::{Fleet, ReportTally};
use crate::node::CacheUsage;
use crate::phase::{PhaseFigures, SteadyScheduler};
use crate::samples::Samples;
use crate::server::ServeProcess;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Scrapes that are timed one after the other.
const SCRAPES: usize = 20;
const PAIRS: usize = 6;
const PHASE_TIME: Duration = Duration::from_secs(6);
/// Interval of scrapes, shorter than that of a pair of Prometheus servers, which scrape every 15 to 60 s.
const SCRAPE_INTERVAL: Duration = Duration::from_secs(1);
/// Wait until every node has reported twice.
const SETTLE_TIME: Duration = Duration::from_secs(3);

pub fn print(cluster: &BenchCluster, server: &ServeProcess) {
    let fleet = Fleet::connect(cluster.nodes(), server.addresses[1].clone());
    let mut scheduler = SteadyScheduler::new(cluster, &server.addresses[0]);
    fleet.report(CacheUsage::Mixed);
    scheduler.measure(SETTLE_TIME, server, &fleet.tally);
    fleet.pause();
    time_scrapes(cluster.nodes(), &server.addresses[2]);
    beside_filter(server, &mut scheduler, &fleet.tally);
    println!(
        "resident memory of `stowage serve`: {} MiB",
        server.resident_mib()
    );
}

fn time_scrapes(nodes: usize, address: &str) {
    let page = scrape(address);
    let gpus = page
        .lines()
        .filter(|line| line.starts_with("stowage_gpu_vram_allocated_bytes{"))
        .count();
    assert_eq!(gpus, nodes * 8, "a series for each GPU");
    let per_gpu = page
        .lines()
        .filter(|line| line.starts_with("stowage_gpu_") && line.contains("gpu=\""));
    assert!(per_gpu.count() <= 6 * gpus, "at most six");
    let series = page.lines().filter(|line| !line.starts_with('#')).count();
    let mut took = Samples::default();
    for _ in 0..SCRAPES {
        let begun = Instant::now();
        scrape(address);
        took.add(begun.elapsed());
    }
    println!(
        "{SCRAPES} scrapes of {series} series, {:.1} MB: p50 {:.0} ms, longest {:.0} ms",
        page.len() as f64 / 1e6,
        took.percentile(50) / 1e3,
        took.percentile(99) / 1e3
    );
}

fn beside_filter(server: &ServeProcess, scheduler: &mut SteadyScheduler<'_>, tally: &ReportTally) {
    println!(
        "\n| pair | without, p50 µs | p99 | without again, p50 | p99 | with, p50 | p99 | p50, with ÷ without |\n\
         |---|---|---|---|---|---|---|---|"
    );
    let mut ratios = Vec::new();
    for pair in 0..PAIRS {
        let mut without = || scheduler.measure(PHASE_TIME, server, tally);
        let (one, again) = (without(), without());
        let with = beside_scrapes(&server.addresses[2], without);
        let ratio = with.filter_percentile(50)
            / ((one.filter_percentile(50) + again.filter_percentile(50)) / 2.0);
        let cells = [&one, &again, &with].map(|one| {
            format!(
                "{:.0} | {:.0}",
                one.filter_percentile(50),
                one.filter_percentile(99)
            )
        });
        println!("| {} | {} | {ratio:.2} |", pair + 1, cells.join(" | "));
        ratios.push(ratio);
    }
    ratios.sort_unstable_by(f64::total_cmp);
    println!(
        "with a scrape a second over without, of {PAIRS} pairs: {:.2} in the middle, {:.2} to {:.2} all",
        ratios[(PAIRS - 1) / 2],
        ratios[0],
        ratios[PAIRS - 1]
    );
}

fn beside_scrapes(address: &str, measure: impl FnOnce() -> PhaseFigures) -> PhaseFigures {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let due = Instant::now() + SCRAPE_INTERVAL;
                scrape(address);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        });
        let measured = measure();
        is_over.store(true, Ordering::Relaxed);
        measured
    })
}

fn scrape(address: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the operators' address listens");
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nhost: stowage\r\nconnection: close\r\n\r\n")
        .expect("the request is sent");
    let mut page = Vec::new();
    stream.read_to_end(&mut page).expect("the page");
    assert!(
        page.starts_with(b"HTTP/1.1 200") && page.ends_with(b"\r\n0\r\n\r\n"),
        "the whole page"
    );
    dechunked(&page)
}

fn dechunked(answer: &[u8]) -> String {
    let body = memchr::memmem::find(answer, b"\r\n\r\n").expect("a head") + 4;
    let (mut rest, mut page) = (&answer[body..], Vec::new());
    loop {
        let end = memchr::memmem::find(rest, b"\r\n").expect("a chunk's length");
        let length = std::str::from_utf8(&rest[..end])
            .ok()
            .and_then(|hex| usize::from_str_radix(hex, 16).ok());
        let length = length.expect("a length");
        if length == 0 {
            return String::from_utf8(page).expect("text");
        }
        page.extend_from_slice(&rest[end + 2..end + 2 + length]);
        rest = &rest[end + 4 + length..];
    }
}
