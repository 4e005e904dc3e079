//! Lifts the planner's gate from pods that the planner never places.

use super::{ClusterAccess, ControlLoop};
use crate::ids::{PodKey, PodUid};
use crate::planning::WaitReason;
use crate::units::{Millis, Moment};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// Time in which the watch shows the pod without its gate; if it does not, the gate is lifted again.
const RELEASE_VISIBLE_WITHIN: Millis = Millis::seconds(10);
/// Maximum pods handled in one tick.
pub const UNPLANNABLE_PER_TICK: usize = 256;

/// When each pod's gate was lifted, and the last pod handled: the next tick continues after it.
#[derive(Debug, Default)]
pub(crate) struct ReleasedPods {
    released_at: BTreeMap<PodUid, Moment>,
    last_handled: Option<PodUid>,
}

#[cfg(any(test, feature = "testkit"))]
impl ReleasedPods {
    pub fn len(&self) -> usize {
        self.released_at.len()
    }
}

impl<B: ClusterAccess> ControlLoop<B> {
    /// The UID after which the next unplannable pods begin.
    pub fn unplannable_pods_after(&self) -> Option<&PodUid> {
        self.released_pods.last_handled.as_ref()
    }

    /// `unplannable_pods` are the next [`UNPLANNABLE_PER_TICK`]; fewer if there are no more.
    pub(super) fn release_unplannable(
        &mut self,
        unplannable_pods: Vec<(PodUid, PodKey, WaitReason)>,
        now: Moment,
    ) {
        let last = unplannable_pods
            .last()
            .filter(|_| unplannable_pods.len() >= UNPLANNABLE_PER_TICK)
            .map(|(uid, ..)| uid.clone());
        self.forget_plannable(&unplannable_pods, last.as_ref());
        for (uid, key, why) in unplannable_pods {
            let is_due = self
                .released_pods
                .released_at
                .get(&uid)
                .is_none_or(|at| *at + RELEASE_VISIBLE_WITHIN <= now);
            if is_due && self.release_from_gate(uid.clone(), key, why) {
                self.released_pods.released_at.insert(uid, now);
            }
        }
        self.released_pods.last_handled = last;
    }

    /// Forgets the pods between the last tick's unplannable pods and `last` that are not unplannable any more.
    fn forget_plannable(
        &mut self,
        unplannable_pods: &[(PodUid, PodKey, WaitReason)],
        last: Option<&PodUid>,
    ) {
        let ReleasedPods {
            released_at: at,
            last_handled: after,
        } = &mut self.released_pods;
        let unplannable: BTreeSet<&PodUid> = unplannable_pods.iter().map(|(uid, ..)| uid).collect();
        let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let until = last.map_or(Bound::Unbounded, Bound::Included);
        let gone = at
            .range::<PodUid, _>((from, until))
            .map(|(uid, _)| uid)
            .filter(|uid| !unplannable.contains(uid));
        let gone: Vec<PodUid> = gone.cloned().collect();
        for uid in &gone {
            at.remove(uid);
        }
    }
}
