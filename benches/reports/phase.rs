//! The scheduler's filters at a steady pace, and what a stretch of them measured.

use crate::cluster::{self, BenchCluster};
use crate::connection::KeepAliveConnection;
use crate::fleet::ReportTally;
use crate::samples::Samples;
use crate::server::ServeProcess;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use stowage_scheduling::testkit::random::Random;

/// Mean interval of filters in microseconds: somewhat shorter than the time kube-scheduler needed for a pod at 1,000 nodes.
const MEAN_REQUEST_INTERVAL_MICROS: u64 = 10_000;
/// The smaller of the two requests: as many names as pass the scheduler's own filters where it asks about some only.
const SMALLER_NODE_COUNT: usize = 1000;

pub struct SteadyScheduler<'a> {
    cluster: &'a BenchCluster,
    connection: KeepAliveConnection,
    round: usize,
    pauses: Random,
}

/// Times of filters about some of the nodes, and about all.
#[derive(Default)]
struct FilterSamples {
    some: Samples,
    all: Samples,
}

/// Figures of one phase, or the sum of several.
#[derive(Default)]
pub struct PhaseFigures {
    filters: FilterSamples,
    took: Duration,
    cpu: Duration,
    reports: u64,
    bytes: u64,
    micros: u64,
}

impl<'a> SteadyScheduler<'a> {
    pub fn new(cluster: &'a BenchCluster, address: &str) -> Self {
        Self {
            cluster,
            connection: KeepAliveConnection::connect(address),
            round: 1,
            pauses: Random::seeded(7, 0),
        }
    }

    /// Sends filters for this long.
    pub fn measure(
        &mut self,
        time: Duration,
        server: &ServeProcess,
        tally: &ReportTally,
    ) -> PhaseFigures {
        let (cpu, reports, bytes, micros) =
            (server.cpu(), &tally.reports, &tally.bytes, &tally.micros);
        let [reports_before, bytes_before, micros_before] =
            [reports, bytes, micros].map(|count| count.load(Ordering::Relaxed));
        let started = Instant::now();
        let mut filters = FilterSamples::default();
        let mut due = started;
        while started.elapsed() < time {
            due += Duration::from_micros(
                self.pauses.below(2 * MEAN_REQUEST_INTERVAL_MICROS as usize) as u64,
            );
            let (asked, samples) = match self.round % 2 {
                0 => (
                    SMALLER_NODE_COUNT.min(self.cluster.nodes()),
                    &mut filters.some,
                ),
                _ => (self.cluster.nodes(), &mut filters.all),
            };
            let body = self.cluster.filter_body_for_nodes(self.round, asked);
            self.round += 1;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let sent = Instant::now();
            let answer = self.connection.post("/scheduler/filter", &body, None);
            samples.add(sent.elapsed());
            cluster::passed_names(&answer);
        }
        PhaseFigures {
            filters,
            took: started.elapsed(),
            cpu: server.cpu() - cpu,
            reports: reports.load(Ordering::Relaxed) - reports_before,
            bytes: bytes.load(Ordering::Relaxed) - bytes_before,
            micros: micros.load(Ordering::Relaxed) - micros_before,
        }
    }
}

impl PhaseFigures {
    /// Prints the figures of a phase and adds them to these.
    pub fn add(&mut self, other: Self, name: &str) {
        other.print(name);
        self.filters.some.append(other.filters.some);
        self.filters.all.append(other.filters.all);
        self.took += other.took;
        self.cpu += other.cpu;
        self.reports += other.reports;
        self.bytes += other.bytes;
        self.micros += other.micros;
    }

    /// Percentile over all filters, in microseconds.
    pub fn filter_percentile(&self, percent: usize) -> f64 {
        Samples::merged(&self.filters.some, &self.filters.all).percentile(percent)
    }

    pub fn reports_per_second(&self) -> f64 {
        self.reports as f64 / self.took.as_secs_f64()
    }

    fn print(&self, name: &str) {
        let seconds = self.took.as_secs_f64();
        println!(
            "{name:<10}{:>11.0}{:>9.1}{:>11.0}{:>8.1}{:>11.0}{:>9.0}{:>11.0}{:>9.0}",
            self.reports_per_second(),
            self.bytes as f64 / seconds / 1e6,
            self.micros as f64 / self.reports as f64,
            100.0 * self.cpu.as_secs_f64() / seconds,
            self.filters.some.percentile(50),
            self.filters.some.percentile(99),
            self.filters.all.percentile(50),
            self.filters.all.percentile(99),
        );
    }
}

pub fn print_header(scheduler: &SteadyScheduler<'_>) {
    let nodes = scheduler.cluster.nodes();
    let (some, all) = (
        format!("filter {}:", SMALLER_NODE_COUNT.min(nodes)),
        format!("filter {nodes}:"),
    );
    println!(
        "{:<10}{:>11}{:>9}{:>11}{:>8}{some:>20}{all:>20}",
        "", "", "", "answered", "one"
    );
    println!(
        "{:<10}{:>11}{:>9}{:>11}{:>8}{:>11}{:>9}{:>11}{:>9}",
        "reports", "reports/s", "MB/s", "in, µs", "core, %", "p50 µs", "p99 µs", "p50 µs", "p99 µs"
    );
}

/// Prints the sums of both kinds of phases, and their ratio.
pub fn print_summary(without: &PhaseFigures, with: &PhaseFigures) {
    println!("all together");
    without.print("without");
    with.print("with");
    let ratio = |of: fn(&PhaseFigures) -> &Samples, percent| {
        of(with).percentile(percent) / of(without).percentile(percent)
    };
    println!(
        "{:<49}{:>11.2}{:>9.2}{:>11.2}{:>9.2}",
        "ratio",
        ratio(|m| &m.filters.some, 50),
        ratio(|m| &m.filters.some, 99),
        ratio(|m| &m.filters.all, 50),
        ratio(|m| &m.filters.all, 99)
    );
    let share = |m: &PhaseFigures| m.cpu.as_secs_f64() / m.took.as_secs_f64();
    println!(
        "CPU a report: {:.1} µs",
        (share(with) - share(without)) / with.reports_per_second() * 1e6
    );
}
