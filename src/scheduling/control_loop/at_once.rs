//! A loop in a world where each write lands at once and runs take no time: replays and simulators.

use super::{Act, Books, ControlLoop, EvictionOutcome, PodWrite, RunEnd, WriteOutcome};
use crate::units::Moment;

impl<B: Books> ControlLoop<B> {
    /// Carries out all actions up to the next write. The caller makes that write, and answers with [`Self::complete_write`].
    pub fn next_write(&mut self, now: Moment) -> Option<PodWrite> {
        while let Some(act) = self.next_act() {
            match act {
                Act::Write(write) => {
                    let begun = write.clone().begin(self.books.lock().ledger());
                    if begun.is_some() {
                        return begun;
                    }
                    self.written(WriteOutcome::Dropped(write), now);
                }
                Act::Plan(job) => self.planned(RunEnd::Planned(job.run(&|| false)), true, now),
                Act::LookForPressure(job) => self.found_pressure(Some(job.run())),
                Act::Event(_) | Act::Note(_) | Act::StopPlanning => {}
            }
        }
        None
    }

    pub fn landed(&mut self, write: PodWrite, now: Moment) {
        self.written(write.answered(Ok(()), EvictionOutcome::Evicted), now);
    }
}
