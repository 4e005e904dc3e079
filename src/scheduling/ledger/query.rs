//! What the books can be asked. Nothing here changes them.

use super::Ledger;
use super::book::Book;
use super::entry::{Phase, PodEntry};
use super::tenancy::Tenancy;
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::scheduling::node::{Node, NodeKind};
use crate::scheduling::policy::{Eviction, EvictionCosts, Policy};
use crate::scheduling::preempt::{Resident, Room, Standing};
use crate::scheduling::reading::Reading;
use crate::scheduling::request::{Demand, Sharing};
use crate::units::{Bytes, Millis};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Sums over the cluster, for gauges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    pub waiting: u64,
    pub assumed: u64,
    pub bound: u64,
    pub unplaced: u64,
    pub holds: u64,
    pub hints: u64,
    pub nodes: u64,
    pub gpus: u64,
    pub capacity: Bytes,
    pub charged: Bytes,
}

impl Ledger {
    pub fn entry(&self, uid: &PodUid) -> Option<&PodEntry> {
        self.entries.get(uid)
    }

    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// All pods, in order of UID.
    pub fn entries(&self) -> BTreeMap<&PodUid, &PodEntry> {
        #[expect(clippy::disallowed_methods, reason = "collected into an order")]
        self.entries.iter().collect()
    }

    /// Whether a Node object of this name exists.
    pub fn has_node(&self, name: &NodeName) -> bool {
        self.books.get(name).is_some_and(|book| book.exists)
    }

    /// A node's devices and its share of the books.
    pub fn node(&self, name: &NodeName) -> Option<&Node> {
        self.books.get(name).map(|book| &book.view)
    }

    /// The latest that was measured on a node, if anything was.
    pub fn reading(&self, name: &NodeName) -> Option<&Reading> {
        self.books.get(name)?.reading.as_ref()
    }

    /// The node with everyone on it who may be evicted for the pod of `uid`; `None` if it may not be placed there at all.
    pub fn room_for(&self, uid: &PodUid, node: &NodeName, tenancy: &Tenancy) -> Option<Room> {
        self.room_for_demand(uid, &self.entries.get(uid)?.demand, node, tenancy)
    }

    /// The same, if the pod asked for this instead.
    pub fn room_for_demand(
        &self,
        uid: &PodUid,
        preemptor: &Demand,
        node: &NodeName,
        tenancy: &Tenancy,
    ) -> Option<Room> {
        if preemptor.asks_plugin() {
            return None;
        }
        let takes = |book: &Book| {
            let Node { kind, closed, miscut, classes, .. } = &book.view;
            let is_open = *kind == NodeKind::Stowage && !closed && !miscut;
            book.exists && is_open && classes.contains(preemptor.class)
        };
        let book = self.books.get(node).filter(|book| takes(book))?;
        let leaving = self.victims_of_holds(book);
        let residents = book.pods.iter().map(|uid| (uid, &self.entries[uid]));
        let candidates = residents
            .filter(|(uid, _)| !leaving.contains(uid))
            .filter(|(uid, entry)| self.gives_way(uid, entry, preemptor, book, tenancy))
            .filter_map(|(uid, entry)| {
                let standing = tenancy.standing(uid, entry);
                Some(Resident { standing, ..self.resident(uid, entry, book)? })
            })
            .collect();
        let gpus = book.gpus_without(uid, &self.entries, &self.policy);
        let bars = book.bars(uid, &self.entries);
        Some(Room { node: node.clone(), gpus, candidates, bars })
    }

    /// Whether a pod of a node may be evicted for one that would come there.
    pub(super) fn gives_way(
        &self,
        victim: &PodUid,
        entry: &PodEntry,
        preemptor: &Demand,
        book: &Book,
        tenancy: &Tenancy,
    ) -> bool {
        self.may_leave(entry, preemptor) && tenancy.lets_go(victim, entry, book.most_used_by(preemptor))
    }

    /// Whether the policy lets a pod of that priority evict this one now.
    pub(super) fn may_leave(&self, victim: &PodEntry, preemptor: &Demand) -> bool {
        let class = self.policy.class(victim.demand.class);
        let Phase::Bound(bound) = &victim.phase else { return false };
        victim.demand.priority < preemptor.priority
            && class.eviction == Eviction::ForHigherPriority
            && self.now.since(bound.started) >= class.min_runtime
    }

    /// Bound pods that are known to be on this GPU, in order of UID.
    pub fn pods_on(&self, node: &NodeName, gpu: &GpuUuid) -> Vec<PodUid> {
        let Some(book) = self.books.get(node) else { return Vec::new() };
        let Some(place) = book.devices.iter().position(|device| device.uuid == *gpu) else { return Vec::new() };
        let is_there = |uid: &&PodUid| {
            let entry = &self.entries[*uid];
            let charge = book.charge_of(entry).filter(|charge| charge.placed && charge.gpus.contains(place));
            charge.is_some() && matches!(entry.phase, Phase::Bound(_))
        };
        book.pods.iter().filter(is_there).cloned().collect()
    }

    /// Whether the pod is being deleted.
    pub fn is_leaving(&self, uid: &PodUid) -> bool {
        let phase = self.entries.get(uid).map(|entry| &entry.phase);
        matches!(phase, Some(Phase::Bound(bound)) if bound.leaving.is_some())
    }

    /// A pod as part of what its node holds, if it is placed there.
    pub fn resident_on(&self, uid: &PodUid, node: &NodeName) -> Option<Resident> {
        self.resident(uid, self.entries.get(uid)?, self.books.get(node)?)
    }

    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        #[expect(clippy::disallowed_methods, reason = "sums need no order")]
        for entry in self.entries.values() {
            match &entry.phase {
                Phase::Waiting(_) => totals.waiting += 1,
                Phase::Assumed(_) => totals.assumed += 1,
                Phase::Bound(_) if self.is_placed(entry) => totals.bound += 1,
                Phase::Bound(_) => totals.unplaced += 1,
            }
            totals.holds += u64::from(entry.hold().is_some());
            totals.hints += u64::from(entry.hint().is_some());
        }
        for book in self.books.values().filter(|book| book.exists) {
            totals.nodes += 1;
            totals.gpus += book.devices.len() as u64;
            totals.capacity += book.view.capacity();
            totals.charged += book.view.charged();
        }
        totals
    }

    /// Whether the books know on which GPUs a pod is.
    pub fn is_placed(&self, entry: &PodEntry) -> bool {
        let charge = || self.books.get(entry.node()?)?.charge_of(entry);
        charge().is_some_and(|charge| charge.placed)
    }

    /// What the node's sum has left, as the scheduler counts it: by what pods ask for, and with the pods that are to come.
    pub fn sum_left_on(&self, name: &NodeName) -> Bytes {
        let Some(book) = self.books.get(name) else { return Bytes::ZERO };
        let holders = book.pods.iter().map(|uid| &self.entries[uid]);
        let held = holders
            .filter(|e| e.hold().is_some_and(|hold| hold.node == *name))
            .map(|e| e.demand.vram())
            .sum();
        book.view.capacity().minus(self.promised_on(name)).minus(held)
    }

    /// What is bound or promised on a node, as the node's sum would show it.
    pub fn promised_on(&self, name: &NodeName) -> Bytes {
        let Some(book) = self.books.get(name) else { return Bytes::ZERO };
        book.pods
            .iter()
            .map(|uid| &self.entries[uid])
            .filter(|e| e.node() == Some(name))
            .map(|e| e.demand.vram())
            .sum()
    }

    pub(in crate::scheduling) fn books(&self) -> impl Iterator<Item = (&NodeName, &Node)> {
        self.books.iter().map(|(name, book)| (name, &book.view))
    }

    pub(super) fn resident(&self, uid: &PodUid, entry: &PodEntry, book: &Book) -> Option<Resident> {
        let charge = book.charge_of(entry).filter(|charge| charge.placed)?;
        Some(Resident {
            uid: uid.clone(),
            gpus: charge.gpus,
            per_gpu: entry.demand.per_gpu,
            // A pod that has its GPUs to itself has all of them: nothing of theirs is beyond it.
            beyond: match entry.demand.sharing {
                Sharing::Shared => book.beyond(uid, entry.demand.per_gpu, charge.gpus),
                Sharing::Exclusive => Bytes::ZERO,
            },
            sharing: entry.demand.sharing,
            priority: entry.demand.priority,
            class: entry.demand.class,
            companion: entry.demand.companion,
            grace: entry.demand.grace + self.policy.class(entry.demand.class).drain_time,
            cost: self.cost_of(entry, book),
            standing: Standing::Borrowed { spared: 0 },
        })
    }

    /// What the eviction of a pod costs: coming and going, and the work it loses on its part of its GPUs. In thousandths of a
    /// GPU for a second; whole seconds, so that pods that began together cost the same.
    fn cost_of(&self, entry: &PodEntry, book: &Book) -> u64 {
        let EvictionCosts { per_pod, work_at_most } = self.policy.eviction_costs;
        let ran = match &entry.phase {
            Phase::Bound(bound) => self.now.since(bound.started),
            _ => Millis::default(),
        };
        let lost = ran.min(work_at_most).0 / 1000;
        let part = book.use_of(entry).unwrap_or_default().milli_gpus;
        per_pod.0.saturating_add(part.saturating_mul(lost))
    }

    pub(super) fn victims_of_holds(&self, book: &Book) -> BTreeSet<&PodUid> {
        let holds = book.pods.iter().filter_map(|uid| self.entries[uid].hold());
        holds.filter(|hold| hold.node == book.view.name).flat_map(|hold| hold.victims.iter()).collect()
    }
}
