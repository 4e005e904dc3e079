//! Pods and nodes of which a device plugin hands out the GPUs: what is in use there, and whom the scheduler may evict there.
//!
//! The books count whole devices per node. Nothing of a single GPU is promised to such a pod, so it is charged on none, holds
//! none and is hinted none.

use super::Ledger;
use super::book::NodeState;
use super::claim::Preemptor;
use super::entry::{PodPhase, PodState};
use super::shared::PodStates;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::fit::shut;
use crate::scheduling::plugin::{Ask, PluginDevices, PluginShare, has_room};
use crate::scheduling::policy::{Mode, TenantUsage};
use crate::scheduling::preempt::{EvictionCost, PotentialVictim};
use crate::scheduling::request::Demand;

impl Ledger {
    /// What device plugins offer on a node that exists.
    pub fn set_plugin_devices(&mut self, name: &NodeName, offered: PluginDevices) {
        let Some(book) = self.books.get_mut(name).filter(|book| book.offered != offered) else { return };
        book.offered = offered;
        self.refresh(name);
    }

    /// What it costs if exactly these pods leave `node`, so that the pod whose claim it is, which asks a device plugin, goes there.
    /// `None` if one of them may not be evicted for it, or if it would not fit afterwards.
    pub fn eviction_cost_of(
        &self,
        claim: &Preemptor,
        node: &NodeName,
        victims: &[PodUid],
    ) -> Option<EvictionCost> {
        let uid = claim.uid.as_ref()?;
        let preemptor = &self.entries.get(uid)?.demand;
        let book = self.books.get(node).filter(|book| book.exists)?;
        let mut price = EvictionCost::default();
        let mut leaving = Vec::new();
        for victim in victims {
            match self.leaver(victim, preemptor, book, claim) {
                ProposedVictim::Stays => return None,
                ProposedVictim::Unknown => {}
                ProposedVictim::Goes(entry, resident) => {
                    if self.would_break(entry, victims) {
                        return None;
                    }
                    price = price.plus(&resident);
                    leaving.push(entry);
                }
            }
        }
        self.fits_without(uid, preemptor, book, &leaving).then_some(price)
    }

    fn leaver(
        &self,
        victim: &PodUid,
        preemptor: &Demand,
        book: &NodeState,
        claim: &Preemptor,
    ) -> ProposedVictim<'_> {
        // One that asks for no GPU is the scheduler's own affair: it needs its CPU or memory.
        let Some(entry) = self.entries.get(victim) else { return ProposedVictim::Unknown };
        let stays = self.stays(victim, entry, preemptor, book.most_used_by(preemptor), claim);
        let resident = || self.with_eviction_cost(victim, entry, book, preemptor, claim);
        match stays.is_none().then(resident).flatten() {
            Some(resident) => ProposedVictim::Goes(entry, Box::new(resident)),
            None => ProposedVictim::Stays,
        }
    }

    /// Whether a member of its group would stay behind.
    pub(super) fn would_break(&self, leaver: &PodState, leavers: &[PodUid]) -> bool {
        let Some(group) = &leaver.stake.group else { return false };
        let stays = |uid: &&PodUid| {
            let entry = &self.entries[*uid];
            let is_there = !matches!(entry.phase, PodPhase::Waiting(_)) && self.departure_of(entry).is_none();
            is_there && !leavers.contains(uid)
        };
        self.members_of(group).any(|uid| stays(&uid))
    }

    fn fits_without(&self, uid: &PodUid, demand: &Demand, book: &NodeState, leaving: &[&PodState]) -> bool {
        let Ask::Plugin { resource, count } = &demand.ask else { return false };
        let freed = leaving.iter().map(|entry| match &entry.demand.ask {
            Ask::Plugin { resource: other, count } if other == resource => *count,
            _ => 0,
        });
        let own = leaving.iter().filter(|entry| entry.demand.tenant == demand.tenant);
        let given_back: TenantUsage = own.filter_map(|entry| book.use_of(entry)).sum();
        let wanted = TenantUsage { vram: demand.vram(), milli_gpus: u64::from(*count) * 1000 };
        shut(&book.view, demand).is_ok()
            && has_room(&book.view, resource, *count, freed.fold(0, u32::saturating_add)).is_ok()
            && self.allowance_beside(uid, demand, given_back).allows(wanted)
    }

    /// Whether the scheduler's choice stands for such a pod, whatever the books say.
    pub(super) fn passes_through(&self, demand: &Demand) -> bool {
        self.policy.mode == Mode::Shadow && demand.asks_plugin()
    }
}

/// A pod the scheduler would evict.
enum ProposedVictim<'a> {
    /// The policy or its tenant keeps it, or it is not there.
    Stays,
    /// The scheduler knows why it should go, and Stowage nothing.
    Unknown,
    Goes(&'a PodState, Box<PotentialVictim>),
}

impl NodeState {
    /// What device plugins offer here, beside what pods that are here or on their way use.
    pub(super) fn plugin_shares(&self, entries: &PodStates) -> Vec<PluginShare> {
        let mut used = PluginDevices::new();
        for entry in self.pods.iter().map(|uid| &entries[uid]) {
            if let (Ask::Plugin { resource, count }, Some(_)) = (&entry.demand.ask, self.charge_of(entry)) {
                let sum = used.entry(resource.clone()).or_default();
                *sum = sum.saturating_add(*count);
            }
        }
        PluginShare::all(&self.offered, &used)
    }
}
