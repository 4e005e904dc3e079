//! Who was refused, and would fit now.
//!
//! The scheduler wakes a refused pod when the API server shows a change. What an agent sees is no such change: an engine
//! whose queue has run empty, VRAM that a process gave back, an agent that is heard of again. Whoever would fit then is
//! named here, and nobody else: a pod that is woken in vain costs the scheduler a whole round.

use super::Ledger;
use super::entry::{Phase, Refused};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::scheduling::device::{Gpu, GpuSet};
use crate::scheduling::node::NodeKind;
use crate::scheduling::pack;
use crate::scheduling::request::Demand;
use crate::scheduling::snapshot::{NodeSet, Snapshot};
use crate::units::Millis;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An API event that made room has woken the pod already: it asks again within this time.
const LEFT_ALONE: Millis = Millis::seconds(1);
/// A pod that was woken and did not ask was kept back by something Stowage does not see. It is woken again after twice
/// the time, up to this.
const LONGEST_PAUSE: Millis = Millis::seconds(60);

/// A pod that no node fitted when it last asked.
#[derive(Debug, Clone)]
pub struct Refusal {
    pub uid: PodUid,
    pub key: PodKey,
    pub demand: Demand,
    asked: Arc<NodeSet>,
    /// Whether room of its own is open to it, if it has any.
    own_room: Option<bool>,
}

impl Ledger {
    /// The pod was told that none of these nodes fits.
    pub fn note_refused(&mut self, uid: &PodUid, asked: NodeSet) {
        let at = self.now;
        if let Some(Phase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase) {
            waiting.refused = Some(Refused { at, asked: Arc::new(asked), wakes: 0 });
            self.refused.insert(uid.clone());
        }
    }

    /// The next `limit` pods that were refused and are due for another look, in turn.
    pub fn refusals(&mut self, limit: usize) -> Vec<Refusal> {
        let entries = &self.entries;
        self.refused.retain(|uid| entries.get(uid).is_some_and(|entry| entry.refused().is_some()));
        let (before, after): (Vec<_>, Vec<_>) =
            self.refused.iter().partition(|uid| self.looked_at.as_ref().is_some_and(|last| *uid <= last));
        let due: Vec<Refusal> =
            after.into_iter().chain(before).filter_map(|uid| self.due_refusal(uid)).take(limit).collect();
        self.looked_at = due.last().map(|refusal| refusal.uid.clone());
        due
    }

    /// The pod was woken.
    pub fn note_woken(&mut self, uid: &PodUid) {
        let at = self.now;
        if let Some(Phase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase)
            && let Some(refused) = &mut waiting.refused
        {
            *refused = Refused { at, wakes: refused.wakes + 1, asked: refused.asked.clone() };
        }
    }

    fn due_refusal(&self, uid: &PodUid) -> Option<Refusal> {
        let entry = self.entries.get(uid)?;
        let refused = entry.refused().filter(|refused| refused.at + pause(refused.wakes) <= self.now)?;
        Some(Refusal {
            uid: uid.clone(),
            key: entry.key.clone(),
            demand: entry.demand.clone(),
            asked: refused.asked.clone(),
            own_room: self.own_room(uid).map(|(_, verdict)| verdict.is_ok()),
        })
    }
}

/// Those who would find a place now, each beside those before it: of ten that wait for one GPU, one is woken. Higher
/// priority first, then by UID.
pub fn whom_to_wake(mut refusals: Vec<Refusal>, snapshot: &Snapshot) -> Vec<Refusal> {
    refusals.sort_by(|a, b| (Reverse(a.demand.priority), &a.uid).cmp(&(Reverse(b.demand.priority), &b.uid)));
    let mut taken: BTreeMap<NodeName, Vec<Gpu>> = BTreeMap::new();
    refusals.retain(|refusal| refusal.own_room.unwrap_or_else(|| take_a_seat(refusal, snapshot, &mut taken)));
    refusals
}

/// Finds the pod a seat on a node it asked about, and takes it there.
fn take_a_seat(refusal: &Refusal, snapshot: &Snapshot, taken: &mut BTreeMap<NodeName, Vec<Gpu>>) -> bool {
    let demand = &refusal.demand;
    let open = |kind, closed: bool| kind == NodeKind::Stowage && !closed;
    for node in snapshot.nodes_in(&refusal.asked).filter(|node| open(node.kind, node.closed)) {
        let gpus = taken.get(&node.name).map_or(&node.gpus[..], Vec::as_slice);
        if let Some(seat) = pack::choose(gpus, demand, GpuSet::first(gpus.len())) {
            let gpus = taken.entry(node.name.clone()).or_insert_with(|| node.gpus.to_vec());
            for place in seat.iter() {
                gpus[place].charge(demand.per_gpu, demand.sharing);
                gpus[place].starting |= demand.terms.engine;
            }
            return true;
        }
    }
    false
}

fn pause(wakes: u32) -> Millis {
    LEFT_ALONE.times(1 << wakes.min(8)).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_woken_in_vain_is_left_alone_for_longer_each_time() {
        let pauses: Vec<u64> = (0..8).map(|wakes| pause(wakes).0 / 1000).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }
}
