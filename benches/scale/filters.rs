//! Filters about one node, two hundred a second, while something else happens: how long the longest waits for its answer.

use crate::cluster::BenchCluster;
use crate::connection::KeepAliveConnection;
use crate::samples::Samples;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Interval of filters: half of what kube-scheduler needs for a pod on thousands of nodes. Each is about another pod.
const REQUEST_INTERVAL: Duration = Duration::from_millis(5);
/// Longest time for which a page may delay a filter.
const MAX_DELAY: Duration = Duration::from_millis(10);

pub const HEADING: &str = "| what happens | for | filter p50 | p99 | longest, above 10 ms | the same beside nothing |\n|---|---|---|---|---|---|";

pub struct FilterLoad<'a> {
    pub cluster: &'a BenchCluster,
    pub address: &'a str,
    requests: AtomicUsize,
}

impl<'a> FilterLoad<'a> {
    pub fn new(cluster: &'a BenchCluster, address: &'a str) -> Self {
        Self {
            cluster,
            address,
            requests: AtomicUsize::default(),
        }
    }

    /// Runs an action, and returns its result and the times of filters meanwhile.
    pub fn during<R>(&self, happens: impl FnOnce() -> R) -> (R, Samples) {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let asking = threads.spawn(|| self.filter_until(&is_over));
            let result = happens();
            is_over.store(true, Ordering::Relaxed);
            (result, asking.join().expect("every filter is answered"))
        })
    }

    fn filter_until(&self, is_over: &AtomicBool) -> Samples {
        let (mut samples, mut connection) = (
            Samples::default(),
            KeepAliveConnection::connect(self.address),
        );
        while !is_over.load(Ordering::Relaxed) {
            let body = self
                .cluster
                .filter_body_of_new_pod(self.requests.fetch_add(1, Ordering::Relaxed));
            let started = Instant::now();
            connection.post("/scheduler/filter", &body, None);
            samples.add(started.elapsed());
            std::thread::sleep(REQUEST_INTERVAL.saturating_sub(started.elapsed()));
        }
        samples
    }

    /// Prints a row: what happens, what it took, and what filters took meanwhile and while nothing happened for as long after it.
    pub fn row<R>(&self, what: &str, happens: impl FnOnce() -> R) -> R {
        let started = Instant::now();
        let (result, samples) = self.during(happens);
        let took = started.elapsed();
        let ((), beside_nothing) = self.during(|| std::thread::sleep(took));
        println!(
            "| {what} | {:.1} s | {:.2} ms | {:.2} ms | {} | {} |",
            took.as_secs_f64(),
            samples.percentile(50) / 1e3,
            samples.percentile(99) / 1e3,
            slowest(&samples),
            slowest(&beside_nothing),
        );
        result
    }
}

/// Longest filter, and the number of filters longer than [`MAX_DELAY`].
fn slowest(samples: &Samples) -> String {
    let held_up = samples.longer_than(MAX_DELAY);
    format!(
        "{:.1} ms, {held_up} of {}",
        samples.longest() / 1e3,
        samples.count()
    )
}
