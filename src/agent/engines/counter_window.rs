//! What an engine's counters gained within a window, by default the last half minute: tokens per second, and the latencies of its requests.
//!
//! Over half a minute because some engines count a request's tokens when it ends, so that from one second to the next the
//! counter stands still or leaps. A scrape every 30 s, as is usual, then misses nothing.

use std::collections::VecDeque;
use std::time::Duration;
use stowage_report::engine_metrics::Histogram;
use stowage_scheduling::vocabulary::latency::Latency;
use tokio::time::Instant;

/// What is gained is taken over this time, once the engine is known for so long.
pub const RATE_WINDOW: Duration = Duration::from_secs(30);
/// Pages nearer to each other than this count as one, so that a window has few samples however often pages are read.
const MIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(900);

/// What only rises while its process lives.
pub trait Cumulative {
    /// Whether this may be of the same process, and later.
    fn may_follow(&self, earlier: &Self) -> bool;
}

impl Cumulative for u64 {
    fn may_follow(&self, earlier: &Self) -> bool {
        self >= earlier
    }
}

impl Cumulative for Histogram {
    fn may_follow(&self, earlier: &Self) -> bool {
        self.may_follow(earlier)
    }
}

/// A counter's latest values, the oldest first.
#[derive(Debug)]
pub struct CounterWindow<C> {
    samples: VecDeque<(Instant, C)>,
}

impl<C> Default for CounterWindow<C> {
    fn default() -> Self {
        Self {
            samples: VecDeque::new(),
        }
    }
}

impl<C: Cumulative> CounterWindow<C> {
    /// Records the counter of a page read at `at`; `None` if the page does not have it. Keeps what the window needs.
    pub fn record(&mut self, counter: Option<C>, at: Instant, window: Duration) {
        let Some(counter) = counter else {
            return self.samples.clear();
        };
        // A counter that falls is that of a new process.
        if self
            .samples
            .back()
            .is_some_and(|(_, before)| !counter.may_follow(before))
        {
            self.samples.clear();
        }
        // The newest sample is replaced as long as it is near to the one before it.
        let mut latest = self.samples.iter().rev();
        let is_near = |one: Option<&(Instant, C)>| {
            one.is_some_and(|(then, _)| at.duration_since(*then) < MIN_SAMPLE_INTERVAL)
        };
        latest.next();
        if is_near(latest.next()) {
            self.samples.pop_back();
        }
        self.samples.push_back((at, counter));
        // One sample from before the window stays, so that the whole of it is covered.
        while self
            .samples
            .get(1)
            .is_some_and(|(then, _)| at.duration_since(*then) >= window)
        {
            self.samples.pop_front();
        }
    }
}

/// How many pages an engine had, on how many of them it worked on requests, and on how many requests over all of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct PageCounts {
    pages: u64,
    busy: u64,
    running: u64,
}

impl PageCounts {
    pub fn with_page(self, running: u64) -> Self {
        Self {
            pages: self.pages + 1,
            busy: self.busy + u64::from(running > 0),
            running: self.running.saturating_add(running),
        }
    }
}

impl Cumulative for PageCounts {
    fn may_follow(&self, earlier: &Self) -> bool {
        self.pages >= earlier.pages
    }
}

impl CounterWindow<PageCounts> {
    /// The counts so far.
    pub fn latest(&self) -> Option<PageCounts> {
        self.samples.back().map(|(_, counts)| *counts)
    }

    /// The share of the window's pages on which it worked on requests, and on how many on average; `None` before there are two pages.
    pub fn busy_and_running(&self) -> Option<(f64, f64)> {
        let ((_, before), (_, now)) = self.samples.front().zip(self.samples.back())?;
        let pages = (now.pages - before.pages) as f64;
        let per_page = |now: u64, before: u64| now.saturating_sub(before) as f64 / pages;
        (pages > 0.0).then(|| {
            (
                per_page(now.busy, before.busy),
                per_page(now.running, before.running),
            )
        })
    }
}

impl CounterWindow<u64> {
    /// Its gain a second over the window; `None` before there are two samples.
    pub fn per_second(&self) -> Option<f64> {
        let ((from, before), (to, now)) = self.samples.front().zip(self.samples.back())?;
        let seconds = to.duration_since(*from).as_secs_f64();
        (seconds > 0.0).then(|| now.saturating_sub(*before) as f64 / seconds)
    }
}

impl CounterWindow<Histogram> {
    /// What was observed within the window; `None` if nothing was.
    pub fn latency(&self) -> Option<Latency> {
        let ((_, before), (_, now)) = self.samples.front().zip(self.samples.back())?;
        now.since(before)
    }

    /// How many seconds were observed in a second: as many requests were in what the histogram measures, on average.
    pub fn seconds_per_second(&self) -> Option<f64> {
        let ((from, before), (to, now)) = self.samples.front().zip(self.samples.back())?;
        let seconds = to.duration_since(*from).as_secs_f64();
        (seconds > 0.0).then(|| (now.sum - before.sum) / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate_of(samples: &[(u64, Option<u64>)]) -> Option<f64> {
        let (start, mut rate) = (Instant::now(), CounterWindow::default());
        for (millis, count) in samples {
            rate.record(*count, start + Duration::from_millis(*millis), RATE_WINDOW);
        }
        assert!(rate.samples.len() <= 40, "{}", rate.samples.len());
        rate.per_second()
    }

    #[test]
    fn one_page_has_no_rate_and_two_have() {
        assert_eq!(rate_of(&[]), None);
        assert_eq!(rate_of(&[(0, Some(500))]), None);
        assert_eq!(rate_of(&[(0, Some(500)), (2000, Some(600))]), Some(50.0));
        assert_eq!(rate_of(&[(0, Some(500)), (2000, Some(500))]), Some(0.0));
    }

    #[test]
    fn a_restart_and_a_page_without_the_counter_begin_anew() {
        assert_eq!(rate_of(&[(0, Some(500)), (1000, Some(20))]), None);
        assert_eq!(
            rate_of(&[(0, Some(500)), (1000, Some(20)), (2000, Some(50))]),
            Some(30.0)
        );
        assert_eq!(
            rate_of(&[(0, Some(500)), (1000, Some(600)), (2000, None)]),
            None
        );
    }

    #[test]
    fn bursts_even_out_over_half_a_minute() {
        // 300 tokens when a request ends, every ten seconds.
        let pages: Vec<_> = (0..=100)
            .map(|second| (second * 1000, Some(second / 10 * 300)))
            .collect();
        assert_eq!(rate_of(&pages), Some(30.0));
    }

    #[test]
    fn pages_that_are_read_often_make_no_more_samples() {
        let pages: Vec<_> = (0..=1000).map(|n| (n * 100, Some(n))).collect();
        let rate = rate_of(&pages).unwrap();
        assert!((9.9..10.1).contains(&rate), "{rate}");
    }

    #[test]
    fn a_latency_is_that_of_the_last_half_minute_and_unknown_without_requests() {
        let (start, mut window) = (Instant::now(), CounterWindow::default());
        let mut mean_at = |second: u64, sum: f64, count: f64| {
            let histogram = Histogram {
                sum,
                count,
                buckets: Vec::new(),
            };
            window.record(
                Some(histogram),
                start + Duration::from_secs(second),
                RATE_WINDOW,
            );
            window.latency().map(|latency| latency.mean.0)
        };
        assert_eq!(mean_at(0, 900.0, 100.0), None, "it may be long ago");
        assert_eq!(mean_at(10, 901.0, 110.0), Some(100_000));
        assert_eq!(mean_at(30, 901.0, 110.0), Some(100_000));
        assert_eq!(
            mean_at(60, 901.0, 110.0),
            None,
            "no request, and not a fast one"
        );
        assert_eq!(mean_at(70, 0.5, 10.0), None, "another process");
        assert_eq!(mean_at(71, 1.0, 20.0), Some(50_000));
    }
}
