//! `filter` over HTTP, as kube-scheduler sees it, while every node reports once a second: with the same KV caches and queues in
//! every report, and with such as jitter around them. The two take turns, so that other load on the machine affects both.

use crate::cluster::BenchCluster;
use crate::fleet::Fleet;
use crate::node::CacheUsage;
use crate::phase::SteadyScheduler;
use crate::server::ServeProcess;
use std::time::Duration;

pub const NODES: usize = 1000;
const PAIRS: usize = 12;
const PHASE_TIME: Duration = Duration::from_secs(6);
/// Wait until every node has reported figures of the other kind.
const SETTLE_TIME: Duration = Duration::from_millis(1500);
/// Wait until the moving averages have settled: several time constants.
const WARM_UP_TIME: Duration = Duration::from_secs(60);

pub fn print(cluster: &BenchCluster, server: &ServeProcess) {
    let fleet = Fleet::connect(cluster.nodes(), server.addresses[1].clone());
    let mut scheduler = SteadyScheduler::new(cluster, &server.addresses[0]);
    fleet.report(CacheUsage::Jittering);
    scheduler.measure(WARM_UP_TIME, server, &fleet.tally);
    println!(
        "\n| pair | steady, p50 µs | jittering, p50 µs | ratio | reports/s |\n|---|---|---|---|---|"
    );
    let mut ratios = Vec::new();
    for pair in 0..PAIRS {
        let mut measure = |caches| {
            fleet.report(caches);
            scheduler.measure(SETTLE_TIME, server, &fleet.tally);
            scheduler.measure(PHASE_TIME, server, &fleet.tally)
        };
        // Each begins every other pair, so that a machine that gets slower or faster favors neither.
        let (steady, jittering) = if pair % 2 == 0 {
            let steady = measure(CacheUsage::Steady);
            (steady, measure(CacheUsage::Jittering))
        } else {
            let jittering = measure(CacheUsage::Jittering);
            (measure(CacheUsage::Steady), jittering)
        };
        let (without, with) = (
            steady.filter_percentile(50),
            jittering.filter_percentile(50),
        );
        let reports = (steady.reports_per_second() + jittering.reports_per_second()) / 2.0;
        println!(
            "| {} | {without:.0} | {with:.0} | {:.2} | {reports:.0} |",
            pair + 1,
            with / without
        );
        ratios.push(with / without);
    }
    // The server must answer the last reports before it ends.
    fleet.pause();
    scheduler.measure(SETTLE_TIME, server, &fleet.tally);
    ratios.sort_unstable_by(f64::total_cmp);
    let at = |percent: usize| ratios[(ratios.len() - 1) * percent / 100];
    println!(
        "jittering over steady, of {PAIRS} pairs: {:.2} in the middle, {:.2} to {:.2} the middle half, {:.2} to {:.2} all",
        at(50),
        at(25),
        at(75),
        at(0),
        at(100)
    );
}
