//! Retries with back-off. Has no clock: the caller passes the time.

use crate::units::{Millis, Moment};

/// Exponential back-off: the pause after the first failure, doubled with each, and the longest pause.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    pub first: Millis,
    pub longest: Millis,
}

/// The retry state of one action.
#[derive(Debug, Clone, Default)]
pub struct RetryState {
    is_under_way: bool,
    failed: u32,
    again: Moment,
}

impl Backoff {
    /// The pause after this many failures.
    pub fn after(self, failed: u32) -> Millis {
        self.first.times(1 << failed.min(16)).min(self.longest)
    }
}

impl RetryState {
    pub fn is_due(&self, now: Moment) -> bool {
        !self.is_under_way && self.again <= now
    }

    pub fn begin(&mut self) {
        self.is_under_way = true;
    }

    /// Records a success, which shows in the watch by then; if it does not, the action is retried.
    pub fn done(&mut self, shows_by: Moment) {
        self.is_under_way = false;
        self.again = shows_by;
    }

    /// Records a failure. `at_least` is the pause that the API server asks for.
    pub fn failed(&mut self, now: Moment, pauses: Backoff, at_least: Millis) {
        self.is_under_way = false;
        self.again = now + pauses.after(self.failed).max(at_least);
        self.failed = self.failed.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_one_that_is_asked_for_counts() {
        let pauses = Backoff {
            first: Millis(500),
            longest: Millis::seconds(10),
        };
        let millis: Vec<u64> = (0..7).map(|failed| pauses.after(failed).0).collect();
        assert_eq!(millis, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
        assert_eq!(pauses.after(u32::MAX), pauses.longest);
        let (mut attempt, now) = (RetryState::default(), Moment(1_000_000));
        attempt.begin();
        assert!(!attempt.is_due(now), "it is under way");
        attempt.failed(now, pauses, Millis::seconds(30));
        assert!(
            !attempt.is_due(now + Millis::seconds(29)) && attempt.is_due(now + Millis::seconds(30))
        );
    }
}
