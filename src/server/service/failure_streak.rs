//! A streak of failures that is logged when it begins and when it ends, not at each attempt between.

use stowage_scheduling::units::{Millis, Moment};

/// The start of the streak, if there is one.
#[derive(Debug, Default)]
pub(crate) struct FailureStreak(Option<Moment>);

impl FailureStreak {
    /// Records a failure. Returns whether the streak begins with it.
    pub fn begin(&mut self, now: Moment) -> bool {
        let begins = self.0.is_none();
        self.0.get_or_insert(now);
        begins
    }

    /// Records a success. Returns how long the streak lasted, if there was one.
    pub fn end(&mut self, now: Moment) -> Option<Millis> {
        self.0.take().map(|since| now.since(since))
    }
}
