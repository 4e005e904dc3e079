//! Lifts the planner's gate from pods that the planner never places.

use super::{Books, ControlLoop};
use crate::ids::{PodKey, PodUid};
use crate::planning::WaitReason;
use crate::units::{Millis, Moment};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Time in which the watch shows the pod without its gate; if it does not, the gate is lifted again.
const SHOWS_WITHIN: Millis = Millis::seconds(10);
/// Maximum pods handled in one tick.
pub const UNPLANNABLE_AT_ONCE: usize = 256;

/// When each pod's gate was lifted, and the last pod handled: the next tick continues after it.
#[derive(Debug, Default)]
pub(crate) struct ReleasedPods {
    at: BTreeMap<PodUid, Moment>,
    after: Option<PodUid>,
}

#[cfg(any(test, feature = "testkit"))]
impl ReleasedPods {
    pub fn known(&self) -> usize {
        self.at.len()
    }
}

impl<B: Books> ControlLoop<B> {
    /// The UID after which the next unplannable pods begin.
    pub fn unplannable_pods_after(&self) -> Option<&PodUid> {
        self.released.after.as_ref()
    }

    /// `unplannable_pods` are the next [`UNPLANNABLE_PER_TICK`]; fewer if there are no more.
    pub(super) fn released(
        &mut self,
        unplannable_pods: Vec<(PodUid, PodKey, WaitReason)>,
        now: Moment,
    ) {
        let last = unplannable_pods
            .last()
            .filter(|_| unplannable_pods.len() >= UNPLANNABLE_AT_ONCE)
            .map(|(uid, ..)| uid.clone());
        self.forget_let_through(&unplannable_pods, last.as_ref());
        for (uid, key, why) in unplannable_pods {
            let is_due = self
                .released
                .at
                .get(&uid)
                .is_none_or(|at| *at + SHOWS_WITHIN <= now);
            if is_due && self.release(uid.clone(), key, why) {
                self.released.at.insert(uid, now);
            }
        }
        self.released.after = last;
    }

    /// Forgets the pods between the last tick's unplannable pods and `last` that are not unplannable any more.
    fn forget_let_through(
        &mut self,
        unplannable_pods: &[(PodUid, PodKey, WaitReason)],
        last: Option<&PodUid>,
    ) {
        let ReleasedPods { at, after } = &mut self.released;
        let known: BTreeSet<&PodUid> = unplannable_pods.iter().map(|(uid, ..)| uid).collect();
        let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let until = last.map_or(Bound::Unbounded, Bound::Included);
        let gone = at
            .range::<PodUid, _>((from, until))
            .map(|(uid, _)| uid)
            .filter(|uid| !known.contains(uid));
        let gone: Vec<PodUid> = gone.cloned().collect();
        for uid in &gone {
            at.remove(uid);
        }
    }
}
