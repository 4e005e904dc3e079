//! Evictions that came to nothing because of the victim: an admission webhook denies them, or the pod came under protection. Each is
//! a fact about that pod, which is no victim for a while, so that a search goes round it.
//!
//! Not durable: a new leader tries each such pod once more.

use super::Ledger;
use super::pod_state::PodPhase;
use crate::ids::PodUid;
use crate::units::{Millis, Moment};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// How long the first refusal counts; each further one counts twice as long.
const FIRST: Millis = Millis::seconds(30);
const LONGEST: Millis = Millis::seconds(600);

/// Why a pod could not be evicted, and how long that counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionRefusal {
    pub why: Arc<str>,
    at: Moment,
    times: u32,
    pub until: Moment,
}

impl EvictionRefusal {
    fn new(why: &str, at: Moment, times: u32) -> Self {
        Self {
            why: why.into(),
            at,
            times,
            until: at + FIRST.times(1 << (times - 1).min(16)).min(LONGEST),
        }
    }

    /// The pod has changed, and may go by now. A pod that changes all the time is not tried all the time: were many such pods the
    /// cheapest, a search would never come to the others.
    pub(super) fn note_change(&mut self) {
        self.until = self.until.min(self.at + FIRST.times(self.times.into()));
    }
}

impl Ledger {
    /// The pod was to be evicted, and stays. While a refusal counts, whoever meets another one meets the same.
    pub(crate) fn note_eviction_refused(&mut self, uid: &PodUid, why: &str) {
        let now = self.now;
        self.pod_states.note(uid, |pod_state| {
            if let PodPhase::Bound(bound) = &mut pod_state.phase
                && bound
                    .eviction_refusal
                    .as_ref()
                    .is_none_or(|refusal| refusal.until <= now)
            {
                let times = bound
                    .eviction_refusal
                    .as_ref()
                    .map_or(0, |refusal| refusal.times);
                let refusal = EvictionRefusal::new(why, now, times.saturating_add(1));
                bound.eviction_refusal = Some(Box::new(refusal));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_counts_twice_as_long_and_a_change_makes_that_shorter_but_never_nothing() {
        let at = Moment(1_000_000);
        let seconds = |times: u32, changes: bool| {
            let mut refusal = EvictionRefusal::new("no", at, times);
            if changes {
                refusal.note_change();
            }
            refusal.until.since(at).0 / 1000
        };
        assert_eq!(
            [1, 2, 3, 4, 5, 6, u32::MAX].map(|n| seconds(n, false)),
            [30, 60, 120, 240, 480, 600, 600]
        );
        assert_eq!(
            [1, 2, 3, 4, 5, 20, 21].map(|n| seconds(n, true)),
            [30, 60, 90, 120, 150, 600, 600]
        );
    }
}
