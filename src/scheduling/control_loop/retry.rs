//! Retries with back-off. Has no clock: the caller passes the time.

use crate::units::{Millis, Moment};

/// Exponential back-off: the pause after the first failure, doubled with each, and the longest pause.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    pub min: Millis,
    pub max: Millis,
}

/// The retry state of one action.
#[derive(Debug, Clone, Default)]
pub struct RetryState {
    is_in_progress: bool,
    failures: u32,
    due_at: Moment,
}

impl Backoff {
    /// The pause after this many failures.
    pub fn pause_after(self, failures: u32) -> Millis {
        self.min.times(1 << failures.min(16)).min(self.max)
    }
}

impl RetryState {
    pub fn is_due(&self, now: Moment) -> bool {
        !self.is_in_progress && self.due_at <= now
    }

    pub fn begin(&mut self) {
        self.is_in_progress = true;
    }

    /// Records a success, which shows in the watch by then; if it does not, the action is retried.
    pub fn record_success(&mut self, visible_by: Moment) {
        self.is_in_progress = false;
        self.due_at = visible_by;
    }

    /// Records a failure. `at_least` is the pause that the API server asks for.
    pub fn record_failure(&mut self, now: Moment, backoff: Backoff, at_least: Millis) {
        self.is_in_progress = false;
        self.due_at = now + backoff.pause_after(self.failures).max(at_least);
        self.failures = self.failures.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_one_that_is_asked_for_counts() {
        let pauses = Backoff {
            min: Millis(500),
            max: Millis::seconds(10),
        };
        let millis: Vec<u64> = (0..7).map(|failed| pauses.pause_after(failed).0).collect();
        assert_eq!(millis, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
        assert_eq!(pauses.pause_after(u32::MAX), pauses.max);
        let (mut attempt, now) = (RetryState::default(), Moment(1_000_000));
        attempt.begin();
        assert!(!attempt.is_due(now), "it is under way");
        attempt.record_failure(now, pauses, Millis::seconds(30));
        assert!(
            !attempt.is_due(now + Millis::seconds(29)) && attempt.is_due(now + Millis::seconds(30))
        );
    }
}
