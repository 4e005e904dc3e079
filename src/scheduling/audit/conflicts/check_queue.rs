//! The nodes that wait to be checked: those that changed, first come first served, and those of which time changes something.
//! At most one place each, so it never holds more than there are nodes.

use crate::ids::NodeName;
use crate::units::Moment;
use rustc_hash::FxHashSet;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

#[derive(Debug, Default)]
pub(super) struct CheckQueue {
    changed: VecDeque<NodeName>,
    /// The same, to be looked up.
    queued: FxHashSet<NodeName>,
    later: BTreeSet<(Moment, NodeName)>,
    later_of: BTreeMap<NodeName, Moment>,
}

impl CheckQueue {
    pub fn add(&mut self, node: &NodeName) {
        if self.queued.insert(node.clone()) {
            self.changed.push_back(node.clone());
        }
    }

    /// The node is to be checked at that time, and at no other time of before.
    pub fn add_at(&mut self, node: &NodeName, at: Moment) {
        self.drop_later(node);
        self.later.insert((at, node.clone()));
        self.later_of.insert(node.clone(), at);
    }

    pub fn drop_later(&mut self, node: &NodeName) {
        if let Some(at) = self.later_of.remove(node) {
            self.later.remove(&(at, node.clone()));
        }
    }

    /// Those that are due, at most so many.
    pub fn take(&mut self, now: Moment, most: usize) -> Vec<NodeName> {
        while let Some((at, node)) = self.later.first().cloned().filter(|(at, _)| *at <= now) {
            self.later.remove(&(at, node.clone()));
            self.later_of.remove(&node);
            self.add(&node);
        }
        let count = most.min(self.changed.len());
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
