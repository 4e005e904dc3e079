//! Recent evictions by owner. The planner prefers victims whose owner lost no pod recently.
//!
//! Not durable: after a restart all counts begin at zero.

use super::Ledger;
use crate::ids::{OwnerUid, PodUid};
use crate::units::Moment;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Evictions that are remembered at most, over all owners; the oldest are forgotten first. At the usual limit of sixty a minute
/// it is more than a day's.
const REMEMBERED: usize = 100_000;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(
    from = "VecDeque<(Moment, OwnerUid)>",
    into = "VecDeque<(Moment, OwnerUid)>"
)]
pub(super) struct OwnerEvictions {
    /// Oldest first.
    when: VecDeque<(Moment, OwnerUid)>,
    count: BTreeMap<OwnerUid, u64>,
}

impl Ledger {
    /// The pod was evicted, or will be: its controller's other pods are spared for a while. To be called before the pod is
    /// released.
    pub(crate) fn note_evicted(&mut self, uid: &PodUid) {
        let now = self.now;
        self.forget_old_evictions();
        if let Some(owner) = self
            .pod_states
            .get(uid)
            .and_then(|pod_state| pod_state.disruption_info.owner.clone())
        {
            Arc::make_mut(&mut self.owner_evictions).add(now, owner);
        }
    }

    /// How many pods of that controller were evicted recently, as far as it counts.
    pub(crate) fn evictions_of(&self, owner: &OwnerUid) -> u64 {
        if !self.owner_evictions.count.contains_key(owner) {
            return 0;
        }
        let since = self.now.before(self.policy.preemption.costs.again_within);
        let recently = self
            .owner_evictions
            .when
            .iter()
            .rev()
            .take_while(|(when, _)| *when > since);
        recently.filter(|(_, of)| of == owner).count() as u64
    }

    fn forget_old_evictions(&mut self) {
        let since = self.now.before(self.policy.preemption.costs.again_within);
        while self
            .owner_evictions
            .when
            .front()
            .is_some_and(|(when, _)| *when <= since)
        {
            Arc::make_mut(&mut self.owner_evictions).forget_oldest();
        }
    }
}

impl From<OwnerEvictions> for VecDeque<(Moment, OwnerUid)> {
    fn from(evictions: OwnerEvictions) -> Self {
        evictions.when
    }
}

impl From<VecDeque<(Moment, OwnerUid)>> for OwnerEvictions {
    fn from(stored: VecDeque<(Moment, OwnerUid)>) -> Self {
        let mut loaded = Self::default();
        stored
            .into_iter()
            .for_each(|(when, owner)| loaded.add(when, owner));
        loaded
    }
}

impl OwnerEvictions {
    fn add(&mut self, now: Moment, owner: OwnerUid) {
        if self.when.len() >= REMEMBERED {
            self.forget_oldest();
        }
        *self.count.entry(owner.clone()).or_default() += 1;
        self.when.push_back((now, owner));
    }

    fn forget_oldest(&mut self) {
        let Some((_, owner)) = self.when.pop_front() else {
            return;
        };
        match self.count.get_mut(&owner) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(self.count.remove(&owner)),
        }
    }
}
