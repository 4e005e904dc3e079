//! Who waits for a place and is due for a look: pods behind the planner's gate, and pods that were refused and may fit by now.
//!
//! The scheduler wakes a refused pod when the API server shows a change. What an agent sees is no such change: an engine
//! whose queue has run empty, VRAM that a process gave back, an agent that is heard of again. Nobody but the planner looks at
//! a gated pod at all.

use super::Ledger;
use super::entry::{Gate, Phase, PodEntry, Refused, Sought, Waiting};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::scheduling::policy::Usage;
use crate::scheduling::request::Demand;
use crate::scheduling::snapshot::NodeSet;
use crate::scheduling::stake::GroupKey;
use crate::units::{Millis, Moment};
use std::cmp::Reverse;
use std::sync::Arc;

/// An API event that made room has woken the pod already: it asks again within this time. So has a refusal that the
/// scheduler follows with a preemption of its own.
const LEFT_ALONE: Millis = Millis::seconds(1);
/// A pod that is woken, asks, and is refused again (somebody was faster, or a figure hovers about a limit) is woken less
/// and less often, but within this time: no refusal outlives its cause by five seconds.
const LONGEST_PAUSE_IF_IT_ASKS: Millis = Millis::seconds(4);
/// A pod that was woken and did not ask is kept back by something Stowage does not see.
const LONGEST_PAUSE: Millis = Millis::seconds(60);
/// A gated pod for which there was no place is looked at again after this time at first.
const SOUGHT_AGAIN: Millis = Millis(250);
/// However often it was looked at in vain, it is looked at again this soon after anything has changed.
const SOUGHT_AFTER_A_CHANGE: Millis = Millis::seconds(1);
const SOUGHT_AT_LEAST: Millis = Millis::seconds(4);
/// Others left for it in vain: something that Stowage does not see keeps it from being bound. Before anyone leaves for it again
/// it waits so long at first, and twice as long each time.
const LEFT_IN_VAIN: Millis = Millis::seconds(60);
const LEFT_IN_VAIN_AT_MOST: Millis = Millis::seconds(1800);

/// A pod that waits, and what is known of where it may go.
#[derive(Debug, Clone)]
pub struct Pending {
    pub uid: PodUid,
    pub key: PodKey,
    pub demand: Demand,
    pub way: Way,
    /// Since when it waits.
    pub since: Moment,
    /// How much its tenant borrows: of two of one priority, whose tenant has less comes first.
    pub share: u64,
}

/// How a pod waits.
#[derive(Debug, Clone)]
pub enum Way {
    /// Behind the planner's gate: the scheduler has not seen it.
    Gated,
    /// The scheduler asked about these nodes, and none fitted; `None` if nobody knows which they were.
    Refused { asked: Option<Arc<NodeSet>> },
    /// It was woken a moment ago and has not asked yet: what it was woken for is not for the next one.
    OnItsWay { asked: Option<Arc<NodeSet>> },
}

/// The pods of a group, as far as they are there.
#[derive(Debug, Clone, Default)]
pub struct Group {
    /// Behind the planner's gate, without room.
    pub gated: Vec<Pending>,
    /// Bound, on their way, or with room of their own.
    pub placed: u32,
    /// How many it takes, if any of them says.
    pub size: Option<u32>,
}

impl Ledger {
    /// The pod was told that none of these nodes fits; `None` if it was not said which.
    pub fn note_refused(&mut self, uid: &PodUid, asked: Option<NodeSet>) {
        let at = self.now;
        if let Some(Phase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase) {
            waiting.refused = Some(Refused { at, asked: asked.map(Arc::new), unanswered: 0 });
            self.refused.insert(uid.clone());
        }
    }

    /// Whoever waits may have been refused by someone of whom this ledger knows nothing: the last leader, or this process
    /// before its restart.
    pub fn suppose_all_refused(&mut self) {
        // One that asks a device plugin may be another scheduler's; its own is woken by what the API server shows.
        let waits = |entry: &PodEntry| {
            matches!(&entry.phase, Phase::Waiting(Waiting { hint: None, gate: Gate::Open, .. }))
                && !entry.demand.asks_plugin()
        };
        let waiting = self.entries().into_iter().filter(|(_, entry)| waits(entry));
        let waiting: Vec<PodUid> = waiting.map(|(uid, _)| uid.clone()).collect();
        waiting.iter().for_each(|uid| self.note_refused(uid, None));
    }

    /// Pods that are due for a look, in the order in which they are to be placed: who is on its way already, then by priority,
    /// class, their tenants' shares of what is borrowed, and time. Of the refused at most `limit`, in turn; of the gated the
    /// first `limit` in that order.
    pub fn pending(&mut self, limit: usize) -> Vec<Pending> {
        let whole = if self.policy.tenants().is_empty() { Usage::default() } else { self.whole() };
        let mut pending = self.refused_in_turn(limit, whole);
        let mut gated: Vec<Pending> =
            self.gated.iter().filter_map(|uid| self.gated_one(uid, whole)).collect();
        gated.sort_by_cached_key(Pending::order);
        gated.truncate(limit);
        pending.append(&mut gated);
        pending.sort_by_cached_key(Pending::order);
        pending
    }

    /// A group's pods; the gated ones in the order in which they are to be placed.
    pub fn group(&self, key: &GroupKey) -> Group {
        let mut group = Group::default();
        for (uid, entry) in self.members(key) {
            group.size = group.size.max(entry.stake.group_size);
            match &entry.phase {
                Phase::Waiting(Waiting { hold: None, gate: Gate::Planned, since, .. }) => {
                    let pod = self.pending_one(uid, entry, Way::Gated, *since, Usage::default());
                    group.gated.push(pod);
                }
                Phase::Waiting(Waiting { hold: None, .. }) => {}
                Phase::Waiting(_) | Phase::Assumed(_) | Phase::Bound(_) => group.placed += 1,
            }
        }
        group.gated.sort_by_cached_key(Pending::order);
        group
    }

    /// Pods that are to come to a node and are not bound yet: assumed, or with room held there.
    pub fn coming_to(&self, node: &NodeName) -> &[PodUid] {
        self.books.get(node).map_or(&[], |book| &book.coming)
    }

    /// All pods of a group.
    pub fn members<'a>(&'a self, key: &GroupKey) -> impl Iterator<Item = (&'a PodUid, &'a PodEntry)> {
        self.members_of(key).filter_map(|uid| Some((uid, self.entries.get(uid)?)))
    }

    /// The pod was woken.
    pub fn note_woken(&mut self, uid: &PodUid) {
        let at = self.now;
        if let Some(refused) = self.waiting_mut(uid).and_then(|waiting| waiting.refused.as_mut()) {
            *refused = Refused { at, unanswered: refused.unanswered + 1, asked: refused.asked.clone() };
        }
    }

    /// There was no place for the pod in the books of that generation.
    pub fn note_sought(&mut self, uid: &PodUid, generation: u64) {
        let at = self.now;
        if let Some(waiting) = self.waiting_mut(uid) {
            let in_vain = waiting.sought.map_or(0, |sought| sought.in_vain).saturating_add(1);
            waiting.sought = Some(Sought { at, in_vain, generation });
        }
    }

    /// Room that others have left for the pod was not taken in time.
    pub fn note_left_in_vain(&mut self, uid: &PodUid) {
        let (at, generation) = (self.now, self.generation);
        if let Some(waiting) = self.waiting_mut(uid) {
            let in_vain = waiting.left_in_vain.map_or(0, |before| before.in_vain).saturating_add(1);
            waiting.left_in_vain = Some(Sought { at, in_vain, generation });
        }
    }

    /// Whether others may be evicted for the pod (again).
    pub fn may_evict_for(&self, uid: &PodUid) -> bool {
        let Some(Phase::Waiting(waiting)) = self.entries.get(uid).map(|entry| &entry.phase) else {
            return false;
        };
        let pause = |times: u32| LEFT_IN_VAIN.times(1 << (times - 1).min(8)).min(LEFT_IN_VAIN_AT_MOST);
        waiting.left_in_vain.is_none_or(|vain| vain.at + pause(vain.in_vain) <= self.now)
    }

    fn waiting_mut(&mut self, uid: &PodUid) -> Option<&mut Waiting> {
        match &mut self.entries.get_mut(uid)?.phase {
            Phase::Waiting(waiting) => Some(waiting),
            _ => None,
        }
    }

    /// The next of the refused, after the last that was looked at.
    fn refused_in_turn(&mut self, limit: usize, whole: Usage) -> Vec<Pending> {
        let entries = &self.entries;
        self.refused.retain(|uid| entries.get(uid).is_some_and(|entry| entry.refused().is_some()));
        let (before, after): (Vec<_>, Vec<_>) =
            self.refused.iter().partition(|uid| self.looked_at.as_ref().is_some_and(|last| *uid <= last));
        let in_turn = || after.iter().chain(&before).filter_map(|uid| self.refused_one(uid, whole));
        let due: Vec<Pending> = in_turn().filter(|pod| !pod.is_on_its_way()).take(limit).collect();
        let Some(last) = due.last().map(|pod| pod.uid.clone()) else { return Vec::new() };
        let pending = in_turn().filter(Pending::is_on_its_way).chain(due).collect();
        self.looked_at = Some(last);
        pending
    }

    /// `None` for a pod that is left alone for now and has no claim, and for one that has room already.
    fn refused_one(&self, uid: &PodUid, whole: Usage) -> Option<Pending> {
        let entry = self.entries.get(uid)?;
        let Phase::Waiting(Waiting {
            refused: Some(refused),
            in_vain,
            hold: None,
            gate: Gate::Open,
            sought,
            ..
        }) = &entry.phase
        else {
            return None;
        };
        let is_due = refused.at + pause(refused.unanswered, *in_vain) <= self.now && self.is_due(*sought);
        let asked = refused.asked.clone();
        let way = match (is_due, refused.unanswered) {
            (true, _) => Way::Refused { asked },
            (false, 0) => return None,
            (false, _) => Way::OnItsWay { asked },
        };
        Some(self.pending_one(uid, entry, way, refused.at, whole))
    }

    fn gated_one(&self, uid: &PodUid, whole: Usage) -> Option<Pending> {
        let entry = self.entries.get(uid)?;
        let Phase::Waiting(Waiting { gate: Gate::Planned, hold: None, sought, since, .. }) = &entry.phase
        else {
            return None;
        };
        self.is_due(*sought).then(|| self.pending_one(uid, entry, Way::Gated, *since, whole))
    }

    fn is_due(&self, sought: Option<Sought>) -> bool {
        let longest = |sought: Sought| match sought.generation == self.generation {
            true => SOUGHT_AT_LEAST,
            false => SOUGHT_AFTER_A_CHANGE,
        };
        let pause = |sought: Sought| SOUGHT_AGAIN.times(1 << sought.in_vain.min(8)).min(longest(sought));
        sought.is_none_or(|sought| sought.at + pause(sought) <= self.now)
    }

    fn pending_one(&self, uid: &PodUid, entry: &PodEntry, way: Way, since: Moment, whole: Usage) -> Pending {
        let (key, demand) = (entry.key.clone(), entry.demand.clone());
        let share = self.share_of(&demand, whole);
        Pending { uid: uid.clone(), key, demand, way, since, share }
    }
}

impl Pending {
    fn is_on_its_way(&self) -> bool {
        matches!(self.way, Way::OnItsWay { .. })
    }

    fn order(&self) -> impl Ord + use<> {
        let Demand { priority, class, .. } = self.demand;
        (!self.is_on_its_way(), Reverse(priority), class, self.share, self.since, self.uid.clone())
    }
}

/// How long a pod is left alone that was woken so often without asking, or asked so often in vain.
fn pause(unanswered: u32, in_vain: u32) -> Millis {
    match unanswered {
        0 => LEFT_ALONE.times(1 << in_vain.min(8)).min(LONGEST_PAUSE_IF_IT_ASKS),
        _ => LEFT_ALONE.times(1 << unanswered.min(8)).min(LONGEST_PAUSE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_woken_in_vain_is_left_alone_for_longer_each_time() {
        let seconds = |pauses: [Millis; 8]| pauses.map(|pause| pause.0 / 1000);
        assert_eq!(seconds(std::array::from_fn(|n| pause(n as u32 + 1, 0))), [2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(seconds(std::array::from_fn(|n| pause(0, n as u32))), [1, 2, 4, 4, 4, 4, 4, 4]);
        assert_eq!(pause(u32::MAX, u32::MAX), LONGEST_PAUSE);
    }
}
