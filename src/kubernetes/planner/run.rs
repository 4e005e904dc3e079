//! The planning run that is under way beside the ticks: one at a time, on a thread of its own.
//!
//! While it thinks, hints run out, readings age and writes come back as ever. What it says is of the moment when it began;
//! whoever puts it into force checks it again. A run whose plan is not wanted any more is stopped: the process does not end before
//! its threads do.

use crate::scheduling::planning::Plan;
use crate::units::{Millis, Moment};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::task::JoinSet;

/// Runs shorter than this follow each other as they may. Longer ones leave the processor to others for as long as they took.
const SHORT: Millis = Millis(200);
/// A pod that has just come does not wait longer than this for a run to begin.
const LONGEST_REST: Millis = Millis::seconds(1);

#[derive(Debug, Default)]
pub struct PlanningRun {
    /// At most one.
    task: JoinSet<Plan>,
    begun: PlanBasis,
    is_void: bool,
    /// Raised, the run under way ends at the next node that it looks at.
    stop: Arc<AtomicBool>,
    rests_until: Moment,
}

/// The books that a run goes by.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlanBasis {
    pub at: Moment,
    pub generation: u64,
}

/// What a run came to, and when it began.
#[derive(Debug)]
pub struct FinishedPlan {
    pub plan: Plan,
    pub began: PlanBasis,
}

impl PlanningRun {
    pub fn may_begin(&self, now: Moment) -> bool {
        self.task.is_empty() && self.rests_until <= now
    }

    /// `plan` is told how to ask whether it is to stop.
    pub fn begin(&mut self, began: PlanBasis, plan: impl FnOnce(&dyn Fn() -> bool) -> Plan + Send + 'static) {
        self.begun = began;
        self.is_void = false;
        self.stop = Arc::default();
        let stop = self.stop.clone();
        // The threads that answer filter are not for this.
        self.task.spawn_blocking(move || plan(&|| stop.load(Ordering::Relaxed)));
    }

    /// Whatever it says is not wanted any more.
    pub fn give_up(&mut self) {
        self.is_void = true;
        self.stop.store(true, Ordering::Relaxed);
    }

    /// What came of it; `None` if it was given up. Never ends while none is under way.
    pub async fn end(&mut self) -> Option<FinishedPlan> {
        let Some(done) = self.task.join_next().await else { return std::future::pending().await };
        let plan = done.ok().filter(|_| !self.is_void)?;
        Some(FinishedPlan { plan, began: self.begun })
    }

    /// It ended now. Answers how long it took.
    pub fn rest(&mut self, now: Moment) -> Millis {
        let took = now.since(self.begun.at);
        if took > SHORT {
            self.rests_until = now + took.min(LONGEST_REST);
        }
        took
    }

    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.task.is_empty()
    }
}

impl Drop for PlanningRun {
    fn drop(&mut self) {
        self.give_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    /// Says that it has begun, goes on until it is stopped, and says that it has ended.
    fn endless(says: mpsc::Sender<&'static str>) -> impl FnOnce(&dyn Fn() -> bool) -> Plan + Send + 'static {
        move |is_stopped| {
            let _ = says.send("begun");
            while !is_stopped() {
                std::thread::yield_now();
            }
            let _ = says.send("ended");
            Plan::default()
        }
    }

    #[tokio::test]
    async fn b2_a_run_that_is_given_up_or_dropped_is_stopped() {
        let (says, said) = mpsc::channel();
        let hears = |what: &str| assert_eq!(said.recv_timeout(Duration::from_secs(60)), Ok(what));
        let mut run = PlanningRun::default();
        run.begin(PlanBasis::default(), endless(says.clone()));
        hears("begun");
        run.give_up();
        assert!(run.end().await.is_none());
        hears("ended");
        run.begin(PlanBasis::default(), endless(says));
        hears("begun");
        drop(run);
        hears("ended");
    }

    #[tokio::test]
    async fn one_runs_at_a_time_and_a_long_one_leaves_time_to_others() {
        let mut run = PlanningRun::default();
        let at = Moment(1_000_000);
        run.begin(PlanBasis { at, generation: 7 }, |_| Plan::default());
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
        let mut run = PlanningRun::default();
        run.begin(PlanBasis::default(), |_| Plan::default());
        run.give_up();
        assert!(run.end().await.is_none());
        run.begin(PlanBasis::default(), |_| Plan::default());
        assert!(run.end().await.is_some());
    }
}
