//! What the tests of a driver see and do inside a loop.

use super::{ClusterAccess, ControlLoop, PodWrite};
use crate::ids::PodUid;

impl<B: ClusterAccess> ControlLoop<B> {
    /// Whether nothing that was begun is still to be answered.
    pub fn is_idle(&self) -> bool {
        !self.is_writing() && !self.is_planning() && !self.is_checking_pressure()
    }

    pub fn is_planning(&self) -> bool {
        !self.run.is_idle()
    }

    /// Whether a check for pressure is in progress.
    pub fn is_checking_pressure(&self) -> bool {
        self.pressure.is_none()
    }

    /// Whether a write waits or is in progress.
    pub fn is_writing(&self) -> bool {
        !self.writes.is_empty()
    }

    pub fn add_write(&mut self, write: PodWrite) {
        self.writes.add(write);
    }

    /// Begins an eviction whose answer is still to come.
    pub fn begin_eviction(&mut self, preemptor: &PodUid, victim: &PodUid) {
        let progress = self.reservation_progress.get_mut(preemptor);
        progress
            .into_iter()
            .for_each(|progress| progress.eviction_attempt(victim).begin());
    }

    /// How many pods' lifted gates are remembered.
    pub fn released_count(&self) -> usize {
        self.released_pods.len()
    }
}
