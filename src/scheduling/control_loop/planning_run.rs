//! The planning run in progress beside the ticks: one at a time.
//!
//! Meanwhile soft reservations expire, readings age and writes are answered as usual. A plan describes the moment at which its
//! run began; the caller checks each step again before it takes effect. A run whose plan is not needed any more is stopped.
//!
//! A run that panics has no plan: [`super::failing_pods`] says what becomes of its pods.

use crate::kube_filters::FilterSnapshot;
use crate::ledger::{Ledger, PendingPod};
use crate::planning::{Plan, PlanBounds, plan_within, steps_of_run};
use crate::units::{Millis, Moment};

/// Runs shorter than this follow each other without pause. Longer ones pause for as long as they took, or for
/// [`MAX_PAUSE`], to leave the processor to others.
const SHORT_RUN: Millis = Millis(200);
/// A pod that has just arrived waits no longer than this for a run to begin.
const MAX_PAUSE: Millis = Millis::seconds(1);
/// Maximum pods placed in one run: all of them take effect at once.
const MAX_PLACEMENTS_PER_RUN: usize = 256;

/// A plan to be made, with all that it is made from.
#[derive(Debug)]
pub struct PlanningJob {
    pub(super) scratch: Ledger,
    pub(super) kube_filters: FilterSnapshot,
    pub(super) pending: Vec<PendingPod>,
}

impl PlanningJob {
    /// Makes the plan. Ends at the next node once `is_stopped`.
    pub fn run(mut self, is_stopped: &dyn Fn() -> bool) -> Plan {
        let steps = steps_of_run(self.scratch.snapshot().nodes().len());
        let bounds = PlanBounds {
            free_steps: steps,
            eviction_steps: steps,
            max_placements: MAX_PLACEMENTS_PER_RUN,
            is_stopped,
        };
        plan_within(self.scratch, &self.kube_filters, &self.pending, bounds)
    }

    /// The pods that are planned.
    #[cfg(any(test, feature = "testkit"))]
    pub fn pods(&self) -> &[PendingPod] {
        &self.pending
    }
}

/// How a run ended.
#[derive(Debug)]
pub enum RunEnd {
    Planned(Plan),
    /// It panicked.
    Failed,
}

#[derive(Debug, Default)]
pub(super) struct PlanningRun {
    in_progress: Option<PlanBasis>,
    is_stopped: bool,
    paused_until: Moment,
}

/// The ledger state that a run is based on.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PlanBasis {
    pub began_at: Moment,
    pub generation: u64,
}

impl PlanningRun {
    pub fn may_begin(&self, now: Moment) -> bool {
        self.in_progress.is_none() && self.paused_until <= now
    }

    pub fn begin(&mut self, basis: PlanBasis) {
        (self.in_progress, self.is_stopped) = (Some(basis), false);
    }

    /// Its result is not needed any more. Returns whether a run is to be stopped.
    pub fn stop(&mut self) -> bool {
        self.in_progress.is_some() && !std::mem::replace(&mut self.is_stopped, true)
    }

    /// The run ended now. Answers what it was based on, and whether its result is needed; `None` if there was none.
    pub fn end(&mut self, has_failed: bool, now: Moment) -> Option<(PlanBasis, bool)> {
        let basis = self.in_progress.take()?;
        let took = now.since(basis.began_at);
        if has_failed && !self.is_stopped {
            self.paused_until = now + MAX_PAUSE;
        } else if took > SHORT_RUN {
            self.paused_until = now + took.min(MAX_PAUSE);
        }
        Some((basis, !self.is_stopped))
    }

    #[cfg(any(test, feature = "testkit"))]
    pub fn is_idle(&self) -> bool {
        self.in_progress.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn basis(at: Moment) -> PlanBasis {
        PlanBasis {
            began_at: at,
            generation: 7,
        }
    }

    #[test]
    fn one_planning_run_is_in_progress_at_a_time_and_a_long_one_is_followed_by_a_pause() {
        let (mut run, at) = (PlanningRun::default(), Moment(1_000_000));
        run.begin(basis(at));
        assert!(!run.may_begin(at));
        let short = at + Millis(100);
        assert!(matches!(
            run.end(false, short),
            Some((PlanBasis { generation: 7, .. }, true))
        ));
        assert!(run.may_begin(short));
        run.begin(basis(at));
        run.end(false, at + Millis(500));
        assert!(!run.may_begin(at + Millis(999)) && run.may_begin(at + Millis(1000)));
        run.begin(basis(at));
        run.end(false, at + Millis::seconds(60));
        assert!(run.may_begin(at + Millis::seconds(61)));
    }

    #[test]
    fn a_stopped_run_is_stopped_once_and_its_result_is_not_needed_and_the_next_ones_is() {
        let (mut run, at) = (PlanningRun::default(), Moment(1_000_000));
        assert!(!run.stop(), "none is in progress");
        run.begin(basis(at));
        assert!(run.stop() && !run.stop());
        assert!(!run.may_begin(at), "it has not ended yet");
        assert!(matches!(run.end(false, at), Some((_, false))));
        run.begin(basis(at));
        assert!(matches!(run.end(false, at), Some((_, true))));
        assert!(run.end(false, at).is_none());
    }

    #[test]
    fn a_run_that_fails_is_followed_by_a_pause_unless_it_was_stopped() {
        let (mut run, at) = (PlanningRun::default(), Moment(1_000_000));
        run.begin(basis(at));
        run.end(true, at);
        assert!(!run.may_begin(at + Millis(999)) && run.may_begin(at + MAX_PAUSE));
        let at = at + MAX_PAUSE;
        run.begin(basis(at));
        run.stop();
        run.end(true, at);
        assert!(run.may_begin(at));
    }
}
