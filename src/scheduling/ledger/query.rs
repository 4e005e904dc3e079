//! What the books can be asked. Nothing here changes them.

use super::Ledger;
use super::entry::{PodPhase, PodState};
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::scheduling::node::Node;
use crate::scheduling::policy::Policy;
use crate::scheduling::reading::NodeReading;
use crate::units::Bytes;
use std::collections::BTreeMap;
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
    pub fn entry(&self, uid: &PodUid) -> Option<&PodState> {
        self.entries.get(uid)
    }

    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// All pods, in order of UID.
    pub fn entries(&self) -> BTreeMap<&PodUid, &PodState> {
        self.entries.in_no_order().collect()
    }

    /// The pods that are bound or assumed on a node, in order of UID. Only these are looked at.
    pub fn pods_of(&self, node: &NodeName) -> impl Iterator<Item = (&PodUid, &PodState)> {
        let here = self.books.get(node).into_iter().flat_map(|book| &book.pods);
        here.map(|uid| (uid, &self.entries[uid])).filter(move |(_, entry)| entry.node() == Some(node))
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
    pub fn reading(&self, name: &NodeName) -> Option<&NodeReading> {
        self.books.get(name)?.reading.as_ref()
    }

    /// Bound pods that are known to be on this GPU, in order of UID.
    pub fn pods_on(&self, node: &NodeName, gpu: &GpuUuid) -> Vec<PodUid> {
        let Some(book) = self.books.get(node) else { return Vec::new() };
        let Some(place) = book.devices.iter().position(|device| device.uuid == *gpu) else {
            return Vec::new();
        };
        let is_there = |uid: &&PodUid| {
            let entry = &self.entries[*uid];
            let charge = book.charge_of(entry).filter(|charge| charge.placed && charge.gpus.contains(place));
            charge.is_some() && matches!(entry.phase, PodPhase::Bound(_))
        };
        book.pods.iter().filter(is_there).cloned().collect()
    }

    /// Whether the pod is being deleted.
    pub fn is_leaving(&self, uid: &PodUid) -> bool {
        let phase = self.entries.get(uid).map(|entry| &entry.phase);
        matches!(phase, Some(PodPhase::Bound(bound)) if bound.leaving.is_some())
    }

    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for (_, entry) in self.entries.in_no_order() {
            match &entry.phase {
                PodPhase::Waiting(_) => totals.waiting += 1,
                PodPhase::Assumed(_) => totals.assumed += 1,
                PodPhase::Bound(_) if self.is_placed(entry) => totals.bound += 1,
                PodPhase::Bound(_) => totals.unplaced += 1,
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
    pub fn is_placed(&self, entry: &PodState) -> bool {
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
        book.view.capacity().minus(self.reserved_sum_on(name)).minus(held)
    }

    /// What is bound or promised on a node, as the node's sum would show it.
    pub fn reserved_sum_on(&self, name: &NodeName) -> Bytes {
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
}
