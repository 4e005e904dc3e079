//! A streak of failures that is logged when it begins, at longer and longer intervals, and when it ends.

use stowage_scheduling::units::{Millis, Moment};

/// How long after its begin a streak is logged again; doubled each time.
const FIRST_REPEAT: Millis = Millis::seconds(60);

/// The start of the streak, if there is one, and when it is to be logged next.
#[derive(Debug, Default)]
pub(crate) struct FailureStreak(Option<(Moment, Moment)>);

impl FailureStreak {
    /// Records a failure. Returns whether it is to be logged.
    pub fn record_failure(&mut self, now: Moment) -> bool {
        let (since, next) = *self.0.get_or_insert((now, now));
        if now < next {
            return false;
        }
        let lasted = now.since(since).max(Millis(FIRST_REPEAT.0 / 2));
        self.0 = Some((since, since + lasted + lasted));
        true
    }

    /// Records a success. Returns how long the streak lasted, if there was one.
    pub fn end(&mut self, now: Moment) -> Option<Millis> {
        self.0.take().map(|(since, _)| now.since(since))
    }
}
