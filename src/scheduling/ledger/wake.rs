//! Who was refused, and would fit now.
//!
//! The scheduler wakes a refused pod when the API server shows a change. What an agent sees is no such change: an engine
//! whose queue has run empty, VRAM that a process gave back, an agent that is heard of again. Whoever would fit then is
//! named here, and nobody else: a pod that is woken in vain costs the scheduler a whole round.

use super::Ledger;
use super::book::used_on;
use super::entry::{Phase, PodEntry, Refused, Waiting};
use super::is_allowed;
use crate::ids::{NodeName, PodKey, PodUid};
use crate::scheduling::device::{Gpu, GpuSet};
use crate::scheduling::fit::shut;
use crate::scheduling::node::Node;
use crate::scheduling::pack;
use crate::scheduling::plugin::{Ask, PluginResource, has_room};
use crate::scheduling::policy::{Limit, TenantId, Usage};
use crate::scheduling::request::Demand;
use crate::scheduling::snapshot::{NodeSet, Snapshot};
use crate::units::Millis;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An API event that made room has woken the pod already: it asks again within this time.
const LEFT_ALONE: Millis = Millis::seconds(1);
/// A pod that is woken, asks, and is refused again (somebody was faster, or a figure hovers about a limit) is woken less
/// and less often, but within this time: no refusal outlives its cause by five seconds.
const LONGEST_PAUSE_IF_IT_ASKS: Millis = Millis::seconds(4);
/// A pod that was woken and did not ask is kept back by something Stowage does not see.
const LONGEST_PAUSE: Millis = Millis::seconds(60);

/// A pod that no node fitted when it last asked.
#[derive(Debug, Clone)]
pub struct Refusal {
    pub uid: PodUid,
    pub key: PodKey,
    pub demand: Demand,
    asked: Arc<NodeSet>,
    /// Room of its own, if it has any, and whether it is open.
    own_room: Option<(NodeName, bool)>,
    /// What its tenant may still take.
    allowance: Limit,
    /// How much its tenant borrows: of two of one priority, whose tenant has less comes first.
    share: u64,
    /// It was woken a moment ago, and has not asked yet: the room it was woken for is not for the next one.
    is_on_its_way: bool,
}

impl Ledger {
    /// The pod was told that none of these nodes fits.
    pub fn note_refused(&mut self, uid: &PodUid, asked: NodeSet) {
        let at = self.now;
        if let Some(Phase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase) {
            waiting.refused = Some(Refused { at, asked: Arc::new(asked), unanswered: 0 });
            self.refused.insert(uid.clone());
        }
    }

    /// Whoever waits may have been refused by someone of whom this ledger knows nothing: the last leader, or this process
    /// before its restart.
    pub fn suppose_all_refused(&mut self) {
        let snapshot = self.snapshot();
        // One that asks a device plugin may be another scheduler's; its own is woken by what the API server shows.
        let waits = |entry: &PodEntry| {
            matches!(&entry.phase, Phase::Waiting(waiting) if waiting.hint.is_none())
                && !entry.demand.asks_plugin()
        };
        let waiting = self.entries().into_iter().filter(|(_, entry)| waits(entry));
        let waiting: Vec<PodUid> = waiting.map(|(uid, _)| uid.clone()).collect();
        for uid in waiting {
            self.note_refused(&uid, snapshot.set_of(0..snapshot.nodes().len()));
        }
    }

    /// The next `limit` pods that were refused and are due for another look, in turn; and all that were woken and are on
    /// their way.
    pub fn refusals(&mut self, limit: usize) -> Vec<Refusal> {
        let entries = &self.entries;
        self.refused.retain(|uid| entries.get(uid).is_some_and(|entry| entry.refused().is_some()));
        let (before, after): (Vec<_>, Vec<_>) =
            self.refused.iter().partition(|uid| self.looked_at.as_ref().is_some_and(|last| *uid <= last));
        let whole = if self.policy.tenants().is_empty() { Usage::default() } else { self.whole() };
        let in_turn = || after.iter().chain(&before).filter_map(|uid| self.refusal(uid, whole));
        let due: Vec<Refusal> = in_turn().filter(|refusal| !refusal.is_on_its_way).take(limit).collect();
        let Some(last) = due.last().map(|refusal| refusal.uid.clone()) else { return Vec::new() };
        let refusals = in_turn().filter(|refusal| refusal.is_on_its_way).chain(due).collect();
        self.looked_at = Some(last);
        refusals
    }

    /// The pod was woken.
    pub fn note_woken(&mut self, uid: &PodUid) {
        let at = self.now;
        if let Some(Phase::Waiting(waiting)) = self.entries.get_mut(uid).map(|entry| &mut entry.phase)
            && let Some(refused) = &mut waiting.refused
        {
            *refused = Refused { at, unanswered: refused.unanswered + 1, asked: refused.asked.clone() };
        }
    }

    /// `None` for a pod that is left alone for now and has no claim.
    fn refusal(&self, uid: &PodUid, whole: Usage) -> Option<Refusal> {
        let entry = self.entries.get(uid)?;
        let Phase::Waiting(Waiting { refused: Some(refused), in_vain, .. }) = &entry.phase else {
            return None;
        };
        let is_due = refused.at + pause(refused.unanswered, *in_vain) <= self.now;
        if !is_due && refused.unanswered == 0 {
            return None;
        }
        Some(Refusal {
            uid: uid.clone(),
            key: entry.key.clone(),
            demand: entry.demand.clone(),
            asked: refused.asked.clone(),
            own_room: self.own_room(uid).map(|(node, verdict)| (node, verdict.is_ok())),
            allowance: self.allowance(uid, &entry.demand),
            share: self.share_of(&entry.demand, whole),
            is_on_its_way: !is_due,
        })
    }
}

/// Those who would find a place now, each beside those before it and those who are on their way: of ten that wait for one
/// GPU, one is woken. Higher priority first, then the tenant with the smaller share of what is borrowed, then by UID.
pub fn whom_to_wake(mut refusals: Vec<Refusal>, snapshot: &Snapshot) -> Vec<Refusal> {
    let order = |refusal: &Refusal| {
        let Refusal { demand, share, uid, .. } = refusal;
        (!refusal.is_on_its_way, Reverse(demand.priority), *share, uid.clone())
    };
    refusals.sort_by_cached_key(order);
    let mut taken = Taken::default();
    refusals.retain(|refusal| {
        let fits = match &refusal.own_room {
            // On a node that the scheduler did not name, nothing that Stowage says helps.
            Some((node, is_open)) => {
                *is_open && snapshot.nodes_in(&refusal.asked).any(|asked| asked.name == *node)
            }
            None => take_a_seat(refusal, snapshot, &mut taken),
        };
        fits && !refusal.is_on_its_way
    });
    refusals
}

/// What those before have taken.
#[derive(Default)]
struct Taken {
    /// What is left of the GPUs of nodes on which somebody took a seat.
    gpus: BTreeMap<NodeName, Vec<Gpu>>,
    /// Of device plugins.
    devices: BTreeMap<(NodeName, PluginResource), u32>,
    /// Of what tenants may still take.
    shares: BTreeMap<TenantId, Usage>,
}

impl Taken {
    /// What those before have left of what the pod's tenant may take.
    fn allowance(&self, refusal: &Refusal) -> Limit {
        let before = refusal.demand.tenant.and_then(|tenant| self.shares.get(&tenant));
        refusal.allowance.left(before.copied().unwrap_or_default())
    }

    fn note_share(&mut self, demand: &Demand, used: Usage) {
        if let Some(tenant) = demand.tenant {
            *self.shares.entry(tenant).or_default() += used;
        }
    }
}

/// Finds the pod a seat on a node it asked about, and takes it there.
fn take_a_seat(refusal: &Refusal, snapshot: &Snapshot, taken: &mut Taken) -> bool {
    let demand = &refusal.demand;
    if let Ask::Plugin { resource, count } = &demand.ask {
        return take_devices(refusal, (resource, *count), snapshot, taken);
    }
    let allowance = taken.allowance(refusal);
    for node in snapshot.nodes_in(&refusal.asked).filter(|node| shut(node, demand).is_ok()) {
        let gpus = taken.gpus.get(&node.name).map_or(&node.gpus[..], Vec::as_slice);
        let seat = pack::choose(gpus, demand, GpuSet::first(gpus.len()));
        if let Some(seat) = seat.filter(|seat| is_allowed(allowance, gpus, demand, *seat)) {
            taken.note_share(demand, used_on(&node.gpus, demand, seat));
            let gpus = taken.gpus.entry(node.name.clone()).or_insert_with(|| node.gpus.to_vec());
            for place in seat.iter() {
                gpus[place].charge(demand.per_gpu, demand.sharing);
                gpus[place].starting |= demand.terms.engine;
                gpus[place].barred = gpus[place].barred.with(demand.terms.bars);
            }
            return true;
        }
    }
    false
}

/// The same of a device plugin.
fn take_devices(
    refusal: &Refusal,
    (resource, count): (&PluginResource, u32),
    snapshot: &Snapshot,
    taken: &mut Taken,
) -> bool {
    let demand = &refusal.demand;
    let allowance = taken.allowance(refusal);
    let fits = |node: &&Node| {
        let before = taken.devices.get(&(node.name.clone(), resource.clone())).copied().unwrap_or(0);
        shut(node, demand).is_ok()
            && has_room(node, resource, count.saturating_add(before), 0).is_ok()
            && is_allowed(allowance, &node.gpus, demand, GpuSet::EMPTY)
    };
    let Some(node) = snapshot.nodes_in(&refusal.asked).find(fits) else { return false };
    taken.note_share(demand, used_on(&node.gpus, demand, GpuSet::EMPTY));
    let sum = taken.devices.entry((node.name.clone(), resource.clone())).or_default();
    *sum = sum.saturating_add(count);
    true
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
