//! The planning run in progress beside the ticks: one at a time, on a thread of its own.
//!
//! Meanwhile soft reservations expire, readings age and writes are answered as usual. A plan describes the moment at which its
//! run began; the caller checks each step again before it takes effect. A run whose plan is not needed any more is stopped: the
//! process does not end before its threads do.
//!
//! A run that panics has no plan: [`super::failing_pods`] says what becomes of its pods.

use crate::service::{HeavyWork, WorkKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use stowage_scheduling::planning::Plan;
use stowage_scheduling::units::{Millis, Moment};
use tokio::task::JoinHandle;

/// Runs shorter than this follow each other without pause. Longer ones pause for as long as they took, or for
/// [`LONGEST_REST`], to leave the processor to others.
const SHORT: Millis = Millis(200);
/// A pod that has just arrived waits no longer than this for a run to begin.
const LONGEST_REST: Millis = Millis::seconds(1);

#[derive(Debug)]
pub(crate) struct PlanningRun {
    work: HeavyWork,
    task: Option<JoinHandle<Plan>>,
    begun: PlanBasis,
    is_void: bool,
    /// When set, the run ends at the next node that it considers.
    stop: Arc<AtomicBool>,
    rests_until: Moment,
}

/// The ledger state that a run is based on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PlanBasis {
    pub at: Moment,
    pub generation: u64,
}

/// The result of a run, and when it began.
#[derive(Debug)]
pub(crate) struct FinishedPlan {
    pub plan: Plan,
    pub began: PlanBasis,
}

/// How a run ended.
#[derive(Debug)]
pub(crate) enum RunEnd {
    Planned(FinishedPlan),
    /// It was stopped.
    Stopped,
    /// It panicked.
    Failed,
}

impl PlanningRun {
    pub fn new(work: HeavyWork) -> Self {
        let (begun, rests_until) = (PlanBasis::default(), Moment::default());
        Self {
            work,
            task: None,
            begun,
            is_void: false,
            stop: Arc::default(),
            rests_until,
        }
    }

    pub fn may_begin(&self, now: Moment) -> bool {
        self.task.is_none() && self.rests_until <= now
    }

    /// `plan` gets a function that says whether to stop.
    pub fn begin(
        &mut self,
        began: PlanBasis,
        plan: impl FnOnce(&dyn Fn() -> bool) -> Plan + Send + 'static,
    ) {
        self.begun = began;
        self.is_void = false;
        self.stop = Arc::default();
        let stop = self.stop.clone();
        // Planning does not run on the threads that answer filter.
        let plan = move || plan(&|| stop.load(Ordering::Relaxed));
        self.task = Some(
            self.work
                .begin_until(WorkKind::Plan, self.stop.clone(), plan),
        );
    }

    /// Stops the run; its result is not needed any more.
    pub fn give_up(&mut self) {
        self.is_void = true;
        self.stop.store(true, Ordering::Relaxed);
    }

    /// The result. Never ends while no run is in progress.
    pub async fn end(&mut self) -> RunEnd {
        let Some(task) = &mut self.task else {
            return std::future::pending().await;
        };
        let done = task.await;
        self.task = None;
        match done {
            _ if self.is_void => RunEnd::Stopped,
            Ok(plan) => RunEnd::Planned(FinishedPlan {
                plan,
                began: self.begun,
            }),
            Err(_) => RunEnd::Failed,
        }
    }

    /// Records that it ended now. Returns how long it took.
    pub fn rest(&mut self, ended: &RunEnd, now: Moment) -> Millis {
        let took = now.since(self.begun.at);
        if matches!(ended, RunEnd::Failed) {
            self.rests_until = now + LONGEST_REST;
        } else if took > SHORT {
            self.rests_until = now + took.min(LONGEST_REST);
        }
        took
    }

    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.task.is_none()
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
    use crate::service::WorkPlace;
    use std::sync::mpsc;
    use std::time::Duration;
    use stowage_telemetry::Metrics;

    fn idle() -> PlanningRun {
        PlanningRun::new(HeavyWork::new(WorkPlace::OnThreads, Metrics::new().panics))
    }

    /// Signals that it has begun, runs until it is stopped, and signals that it has ended.
    fn endless(
        says: mpsc::Sender<&'static str>,
    ) -> impl FnOnce(&dyn Fn() -> bool) -> Plan + Send + 'static {
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
        let mut run = idle();
        run.begin(PlanBasis::default(), endless(says.clone()));
        hears("begun");
        run.give_up();
        assert!(matches!(run.end().await, RunEnd::Stopped));
        hears("ended");
        run.begin(PlanBasis::default(), endless(says));
        hears("begun");
        drop(run);
        hears("ended");
    }

    #[tokio::test]
    async fn one_planning_run_is_in_progress_at_a_time_and_a_long_one_is_followed_by_a_pause() {
        let mut run = idle();
        let at = Moment(1_000_000);
        run.begin(PlanBasis { at, generation: 7 }, |_| Plan::default());
        assert!(!run.may_begin(at));
        let ended = run.end().await;
        assert!(matches!(&ended, RunEnd::Planned(planned) if planned.began.generation == 7));
        run.rest(&ended, at + Millis(100));
        assert!(run.may_begin(at + Millis(100)));
        run.rest(&ended, at + Millis(500));
        assert!(!run.may_begin(at + Millis(999)) && run.may_begin(at + Millis(1000)));
        run.rest(&ended, at + Millis::seconds(60));
        assert!(run.may_begin(at + Millis::seconds(61)));
    }

    #[tokio::test]
    async fn a_stopped_planning_run_has_no_result_and_the_next_one_has() {
        let mut run = idle();
        run.begin(PlanBasis::default(), |_| Plan::default());
        run.give_up();
        assert!(matches!(run.end().await, RunEnd::Stopped));
        run.begin(PlanBasis::default(), |_| Plan::default());
        assert!(matches!(run.end().await, RunEnd::Planned(_)));
    }

    #[tokio::test]
    async fn a_run_that_panics_has_failed_and_is_followed_by_a_pause_unless_it_was_stopped() {
        let (mut run, at) = (idle(), Moment(1_000_000));
        run.begin(PlanBasis { at, generation: 1 }, |_| panic!("planted"));
        let ended = run.end().await;
        assert!(matches!(ended, RunEnd::Failed));
        run.rest(&ended, at);
        assert!(!run.may_begin(at + Millis(999)) && run.may_begin(at + LONGEST_REST));
        run.begin(PlanBasis { at, generation: 1 }, |_| panic!("planted"));
        run.give_up();
        assert!(matches!(run.end().await, RunEnd::Stopped));
    }
}
