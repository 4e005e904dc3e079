//! Lets through who came behind the planner's gate and is nobody that it places.

use super::Planner;
use crate::ids::{PodKey, PodUid};
use crate::scheduling::planning::WaitReason;
use crate::units::{Millis, Moment};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// A pod that was let through shows without its gate soon; if not, it is let through again.
const SHOWS_WITHIN: Millis = Millis::seconds(10);
/// Looked at in one tick, however many there are.
pub const UNPLANNABLE_AT_ONCE: usize = 256;

/// Since when each was let through, and the last that was looked at: the next tick goes on after it.
#[derive(Debug, Default)]
pub struct ReleasedPods {
    at: BTreeMap<PodUid, Moment>,
    after: Option<PodUid>,
}

#[cfg(test)]
impl ReleasedPods {
    pub fn known(&self) -> usize {
        self.at.len()
    }
}

impl Planner {
    /// After whom the next strays to look at come.
    pub fn unplannable_pods_after(&self) -> Option<&PodUid> {
        self.released.after.as_ref()
    }

    /// `unplannable_pods` are the next [`UNPLANNABLE_AT_ONCE`] there are; fewer, if there are no more.
    pub fn released(&mut self, unplannable_pods: Vec<(PodUid, PodKey, WaitReason)>) {
        let now = self.now();
        let last = unplannable_pods
            .last()
            .filter(|_| unplannable_pods.len() >= UNPLANNABLE_AT_ONCE)
            .map(|(uid, ..)| uid.clone());
        self.forget_let_through(&unplannable_pods, last.as_ref());
        for (uid, key, why) in unplannable_pods {
            let is_due = self.released.at.get(&uid).is_none_or(|at| *at + SHOWS_WITHIN <= now);
            if is_due && self.release(uid.clone(), key, why) {
                self.released.at.insert(uid, now);
            }
        }
        self.released.after = last;
    }

    /// Of those between the strays of the last tick and `last` who are none any more nothing is to be remembered.
    fn forget_let_through(
        &mut self,
        unplannable_pods: &[(PodUid, PodKey, WaitReason)],
        last: Option<&PodUid>,
    ) {
        let ReleasedPods { at, after } = &mut self.released;
        let known: BTreeSet<&PodUid> = unplannable_pods.iter().map(|(uid, ..)| uid).collect();
        let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let until = last.map_or(Bound::Unbounded, Bound::Included);
        let gone =
            at.range::<PodUid, _>((from, until)).map(|(uid, _)| uid).filter(|uid| !known.contains(uid));
        let gone: Vec<PodUid> = gone.cloned().collect();
        for uid in &gone {
            at.remove(uid);
        }
    }
}
