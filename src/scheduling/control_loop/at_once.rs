//! A loop in a world where each write lands at once and runs take no time: replays and simulators.

use super::{
    ClusterAccess, ControlLoop, EvictionOutcome, LoopAction, PodWrite, RunEnd, WriteOutcome,
};
use crate::units::Moment;

impl<B: ClusterAccess> ControlLoop<B> {
    /// Carries out all actions up to the next write. The caller makes that write, and answers with [`Self::complete_write`].
    pub fn next_write(&mut self, now: Moment) -> Option<PodWrite> {
        while let Some(act) = self.next_action() {
            match act {
                LoopAction::Write(write) => {
                    let begun = write
                        .clone()
                        .revalidate(self.cluster_access.lock().ledger());
                    if begun.is_some() {
                        return begun;
                    }
                    self.handle_write_outcome(WriteOutcome::Dropped(write), now);
                }
                LoopAction::Plan(job) => {
                    self.handle_run_end(RunEnd::Planned(job.run(&|| false)), true, now)
                }
                LoopAction::CheckPressure(job) => self.handle_pressure(Some(job.run())),
                LoopAction::Event(_) | LoopAction::Record(_) | LoopAction::StopPlanning => {}
            }
        }
        None
    }

    pub fn complete_write(&mut self, write: PodWrite, now: Moment) {
        self.handle_write_outcome(write.into_outcome(Ok(()), EvictionOutcome::Evicted), now);
    }
}
