//! The snapshot that was handed out last, and which nodes have changed since.
//!
//! A snapshot is shared by all that read it. As long as none does, changes go into it at once; otherwise they are noted, and go
//! into a copy of it once they are many or the next one is asked for. So no reader waits for thousands of them, and no copy of the
//! ledger lists them. After a node has come or gone, the next reader brings it all in: the index of names is made again then.

use super::copy_on_write::NodeMap;
use super::node_state::NodeState;
use crate::ids::NodeName;
use crate::placing::learned::PackingModel;
use crate::placing::snapshot::{RetiredSummaries, Snapshot};
use crate::placing::start_model::StartModel;
use crate::vocabulary::node::Node;
use std::collections::BTreeSet;
use std::sync::Arc;

/// If nodes came or went more often, a snapshot is made again: to make room for one after the other would take longer.
const MOST_CAME_OR_WENT: u64 = 512;
/// The same if more nodes have changed, and more than a quarter of all: to look for one after the other would take longer.
const MOST_CHANGED: usize = 512;
/// More that are noted go into a copy at once. Fewer in tests, whose clusters are small.
const MOST_NOTED: usize = if cfg!(test) { 1 } else { 128 };

#[derive(Debug, Clone, Default)]
pub(super) struct Publication {
    /// Rises with every change of what a pod could be allocated.
    generation: u64,
    /// How often nodes came or went.
    epoch: u64,
    published: Arc<Snapshot>,
    /// Nodes that came, went or changed since.
    changed: BTreeSet<NodeName>,
    /// The snapshot has nothing of what is known.
    is_outdated: bool,
}

impl Publication {
    /// With nothing handed out yet. A recording may say any number: there is always a next one.
    pub(super) fn at(generation: u64, epoch: u64) -> Self {
        let (generation, epoch) = (generation.min(u64::MAX / 2), epoch.min(u64::MAX / 2));
        Self {
            generation,
            epoch,
            is_outdated: true,
            ..Self::default()
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The generation of a change that is made now.
    pub(super) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// A node came or went.
    pub(super) fn note_came_or_went(&mut self, name: &NodeName) {
        self.changed.insert(name.clone());
        self.epoch += 1;
    }

    /// Goes on from another one, as one change more: nodes that came, went or changed there since this one was made.
    pub(super) fn follow(&mut self, other: &Self, changed: &BTreeSet<NodeName>) {
        (self.generation, self.epoch) = (other.generation + 1, other.epoch);
        self.changed.extend(changed.iter().cloned());
    }

    /// What readers have made of the snapshot so far counts no more.
    pub(super) fn part_from_readers(&mut self) {
        Arc::make_mut(&mut self.published).part_from_copies();
    }

    /// Brings a changed node to the next reader.
    pub(super) fn publish(&mut self, node: &Node) {
        match Arc::get_mut(&mut self.published) {
            Some(published)
                if !self.is_outdated && published.node(node.name.as_str()).is_some() =>
            {
                published.update(self.generation, [node.clone()]);
            }
            _ => {
                self.changed.insert(node.name.clone());
            }
        }
    }

    /// Whether so many changes are noted that they should not wait for the next reader.
    pub(super) fn has_noted_many(&self) -> bool {
        !self.is_outdated && self.changed.len() > MOST_NOTED && self.epoch == self.published.epoch()
    }

    /// Brings what is noted into a copy, if the snapshot is in use.
    pub(super) fn catch_up(&mut self, nodes: &NodeMap) {
        let changed = self
            .changed
            .iter()
            .map(|name| (name, nodes.get(name).and_then(view_of_existing)));
        Arc::make_mut(&mut self.published).bring_to(self.generation, self.epoch, changed);
        self.changed.clear();
    }

    pub(super) fn set_packing_model(&mut self, packing_model: Arc<PackingModel>) {
        let generation = self.next_generation();
        Arc::make_mut(&mut self.published).set_packing_model(generation, packing_model);
    }

    /// The same of a model by which a copy of the snapshot is summarized.
    pub(super) fn take_packing_model(
        &mut self,
        packing_model: Arc<PackingModel>,
        summarized: Snapshot,
    ) -> RetiredSummaries {
        let generation = self.next_generation();
        Arc::make_mut(&mut self.published).take_packing_model(generation, packing_model, summarized)
    }

    pub(super) fn snapshot(
        &mut self,
        nodes: &NodeMap,
        packing_model: &Arc<PackingModel>,
        start_model: &Arc<StartModel>,
    ) -> Arc<Snapshot> {
        let most_changed = MOST_CHANGED.max(self.published.nodes().len() / 4);
        if self.is_outdated
            || self.epoch.abs_diff(self.published.epoch()) > MOST_CAME_OR_WENT
            || self.changed.len() > most_changed
        {
            let snapshot = Snapshot::new(
                self.generation,
                self.epoch,
                nodes.values().filter_map(view_of_existing).collect(),
            );
            self.published = Arc::new(snapshot.with_packing_model(packing_model.clone()));
        } else if self.published.generation() != self.generation || !self.changed.is_empty() {
            self.catch_up(nodes);
        }
        if self.published.packing_model() != &**packing_model {
            Arc::make_mut(&mut self.published)
                .set_packing_model(self.generation, packing_model.clone());
        }
        if !Arc::ptr_eq(self.published.start_model(), start_model) {
            Arc::make_mut(&mut self.published).set_start_model(start_model.clone());
        }
        self.is_outdated = false;
        self.changed.clear();
        self.published.clone()
    }
}

fn view_of_existing(node_state: &NodeState) -> Option<Node> {
    node_state.exists().then(|| node_state.view().clone())
}
