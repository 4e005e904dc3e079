//! Tokens per second from an engine's counter of generated tokens.
//!
//! Taken over the last half minute: some engines count a request's tokens when it ends, so that from one second to the next the
//! counter stands still or leaps. A scrape every 30 s, as is usual, then misses nothing.

use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::Instant;

/// What a rate is taken over, once the engine is known for so long.
const RATE_WINDOW: Duration = Duration::from_secs(30);
/// Pages nearer to each other than this count as one, so that a window has few samples however often pages are read.
const MIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(900);

/// The counter's latest values, the oldest first.
#[derive(Debug, Default)]
pub struct TokenRate {
    samples: VecDeque<(Instant, u64)>,
}

impl TokenRate {
    /// Records the counter of a page read at `at`; `None` if the page does not have it.
    pub fn record(&mut self, count: Option<u64>, at: Instant) {
        let Some(count) = count else {
            return self.samples.clear();
        };
        // A counter that falls is that of a new process.
        if self
            .samples
            .back()
            .is_some_and(|(_, before)| count < *before)
        {
            self.samples.clear();
        }
        // The newest sample is replaced as long as it is near to the one before it.
        let mut latest = self.samples.iter().rev();
        let is_near = |one: Option<&(Instant, u64)>| {
            one.is_some_and(|(then, _)| at.duration_since(*then) < MIN_SAMPLE_INTERVAL)
        };
        latest.next();
        if is_near(latest.next()) {
            self.samples.pop_back();
        }
        self.samples.push_back((at, count));
        // One sample from before the window stays, so that the whole of it is covered.
        while self
            .samples
            .get(1)
            .is_some_and(|(then, _)| at.duration_since(*then) >= RATE_WINDOW)
        {
            self.samples.pop_front();
        }
    }

    /// Tokens per second over the window; `None` before there are two samples.
    pub fn per_second(&self) -> Option<f64> {
        let ((from, before), (to, now)) = self.samples.front().zip(self.samples.back())?;
        let seconds = to.duration_since(*from).as_secs_f64();
        (seconds > 0.0).then(|| now.saturating_sub(*before) as f64 / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate_of(samples: &[(u64, Option<u64>)]) -> Option<f64> {
        let (start, mut rate) = (Instant::now(), TokenRate::default());
        for (millis, count) in samples {
            rate.record(*count, start + Duration::from_millis(*millis));
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
}
