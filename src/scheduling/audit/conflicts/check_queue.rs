//! The queue of nodes to check: changed nodes, first come first served, and nodes with a check due at a later time. Each node has
//! at most one place, so the queue never has more places than there are nodes.

use crate::ids::NodeName;
use crate::units::Moment;
use rustc_hash::FxHashSet;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Debug, Default)]
pub(super) struct CheckQueue {
    changed: VecDeque<NodeName>,
    /// The nodes in `changed`, for lookup.
    queued: FxHashSet<NodeName>,
    scheduled: BTreeSet<(Moment, NodeName)>,
    scheduled_at: BTreeMap<NodeName, Moment>,
}

impl CheckQueue {
    pub fn add(&mut self, node: &NodeName) {
        if self.queued.insert(node.clone()) {
            self.changed.push_back(node.clone());
        }
    }

    /// Schedules a check of the node at that time, and cancels earlier ones.
    pub(crate) fn schedule(&mut self, node: &NodeName, at: Moment) {
        self.cancel_scheduled(node);
        self.scheduled.insert((at, node.clone()));
        self.scheduled_at.insert(node.clone(), at);
    }

    pub(crate) fn cancel_scheduled(&mut self, node: &NodeName) {
        if let Some(at) = self.scheduled_at.remove(node) {
            self.scheduled.remove(&(at, node.clone()));
        }
    }

    /// The nodes that are due, at most `limit` of them.
    pub fn take(&mut self, now: Moment, limit: usize) -> Vec<NodeName> {
        while let Some((at, node)) = self.scheduled.first().cloned().filter(|(at, _)| *at <= now) {
            self.scheduled.remove(&(at, node.clone()));
            self.scheduled_at.remove(&node);
            self.add(&node);
        }
        let count = limit.min(self.changed.len());
        let taken: Vec<NodeName> = self.changed.drain(..count).collect();
        taken.iter().for_each(|node| {
            self.queued.remove(node);
        });
        taken
    }

    pub fn len(&self) -> usize {
        self.changed.len()
    }
}
