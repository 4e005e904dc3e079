//! The planning run that is under way beside the ticks: one at a time, on a thread of its own.
//!
//! While it thinks, hints run out, readings age and writes come back as ever. What it says is of the moment when it began;
//! whoever puts it into force checks it again.

use crate::scheduling::plan::Step;
use crate::units::{Millis, Moment};
use tokio::task::JoinSet;

/// Runs shorter than this follow each other as they may. Longer ones leave the processor to others for as long as they took.
const SHORT: Millis = Millis(200);
/// A pod that has just come does not wait longer than this for a run to begin.
const LONGEST_REST: Millis = Millis::seconds(1);

#[derive(Debug, Default)]
pub struct Run {
    /// At most one.
    task: JoinSet<Vec<Step>>,
    begun: Began,
    is_void: bool,
    rests_until: Moment,
}

/// The books that a run goes by.
#[derive(Debug, Clone, Copy, Default)]
pub struct Began {
    pub at: Moment,
    pub generation: u64,
}

/// What a run came to, and when it began.
#[derive(Debug)]
pub struct Planned {
    pub steps: Vec<Step>,
    pub began: Began,
}

impl Run {
    pub fn may_begin(&self, now: Moment) -> bool {
        self.task.is_empty() && self.rests_until <= now
    }

    pub fn begin(&mut self, began: Began, plan: impl FnOnce() -> Vec<Step> + Send + 'static) {
        self.begun = began;
        self.is_void = false;
        // The threads that answer filter are not for this.
        self.task.spawn_blocking(plan);
    }

    /// Whatever it says is not wanted any more.
    pub fn give_up(&mut self) {
        self.is_void = true;
    }

    /// What came of it; `None` if it was given up. Never ends while none is under way.
    pub async fn end(&mut self) -> Option<Planned> {
        let Some(done) = self.task.join_next().await else { return std::future::pending().await };
        let steps = done.ok().filter(|_| !self.is_void)?;
        Some(Planned { steps, began: self.begun })
    }

    /// It ended now.
    pub fn rest(&mut self, now: Moment) {
        let took = now.since(self.begun.at);
        if took > SHORT {
            self.rests_until = now + took.min(LONGEST_REST);
        }
    }

    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.task.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_runs_at_a_time_and_a_long_one_leaves_time_to_others() {
        let mut run = Run::default();
        let at = Moment(1_000_000);
        run.begin(Began { at, generation: 7 }, Vec::new);
        assert!(!run.may_begin(at));
        assert_eq!(run.end().await.unwrap().began.generation, 7);
        run.rest(at + Millis(100));
        assert!(run.may_begin(at + Millis(100)));
        run.rest(at + Millis(500));
        assert!(!run.may_begin(at + Millis(999)) && run.may_begin(at + Millis(1000)));
        run.rest(at + Millis::seconds(60));
        assert!(run.may_begin(at + Millis::seconds(61)));
    }

    #[tokio::test]
    async fn what_was_given_up_comes_to_nothing_and_the_next_one_counts() {
        let mut run = Run::default();
        run.begin(Began::default(), Vec::new);
        run.give_up();
        assert!(run.end().await.is_none());
        run.begin(Began::default(), Vec::new);
        assert!(run.end().await.is_some());
    }
}
