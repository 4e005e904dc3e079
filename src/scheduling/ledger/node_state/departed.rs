//! Pods that have ended on a node, whose memory may be there still: the driver gives it back later than the API server forgets
//! the pod.

use super::NodeState;
use crate::ids::PodUid;
use crate::scheduling::vocabulary::node_reading::{Freshness, NodeReading};
use crate::units::{Millis, Moment};

/// Pods of a node that may end between two reports.
const MAX_DEPARTED: usize = 256;

/// Agents report every second: one that has not by then is not there.
const FIRST_REPORT_WITHIN: Millis = Millis::seconds(10);

impl NodeState {
    /// A pod has ended here. Where no agent has ever reported, none will say that its memory is free: then its end has to do.
    pub(in crate::scheduling::ledger) fn note_departed(&mut self, uid: &PodUid, at: Moment) {
        if self.freshness != Freshness::Unreported {
            self.add_departed(uid, at);
        }
    }

    /// A pod had ended here before this ledger began. If there is an agent, it will report soon.
    pub(in crate::scheduling::ledger) fn note_missed(&mut self, uid: &PodUid, at: Moment) {
        self.add_departed(uid, at);
    }

    fn add_departed(&mut self, uid: &PodUid, at: Moment) {
        self.departed.truncate(MAX_DEPARTED - 1);
        self.departed.insert(0, (uid.clone(), at));
    }

    /// Forgets pods that a reading shows to be gone.
    pub(super) fn look_after_departed(&mut self, reading: &NodeReading) {
        self.departed.retain(|(uid, at)| reading.sampled < *at || reading.shows(uid));
    }

    /// Whether a pod that has ended here may still have memory: nothing that was sampled since says otherwise, or it is seen
    /// there still.
    pub(in crate::scheduling::ledger) fn may_have_memory(&self, uid: &PodUid, now: Moment) -> bool {
        let is_seen = || self.believed_reading().is_some_and(|reading| reading.shows(uid));
        let awaits_a_reading =
            |at: Moment| self.freshness != Freshness::Unreported || now < at + FIRST_REPORT_WITHIN;
        let departed = self.departed.iter().find(|(departed, _)| departed == uid);
        departed.is_some_and(|(_, at)| awaits_a_reading(*at)) || is_seen()
    }
}
