//! The snapshot that was handed out last, and which nodes have changed since.
//!
//! A snapshot is shared by all that read it. As long as none does, changes go into it at once, so that no reader waits
//! for thousands of them; otherwise they are noted and copied in when the next one is asked for.

use super::copy_on_write::NodeMap;
use crate::ids::NodeName;
use crate::scheduling::placing::learned::PackingModel;
use crate::scheduling::placing::snapshot::Snapshot;
use crate::scheduling::placing::start_model::StartModel;
use crate::scheduling::vocabulary::node::Node;
use std::collections::BTreeSet;
use std::sync::Arc;

#[derive(Debug, Clone, Default)]
pub(super) struct Publication {
    /// Rises with every change of what a pod could be allocated.
    generation: u64,
    /// How often nodes came or went.
    epoch: u64,
    published: Arc<Snapshot>,
    changed: BTreeSet<NodeName>,
    /// A node came or went since.
    is_outdated: bool,
}

impl Publication {
    /// With nothing handed out yet.
    pub(super) fn at(generation: u64, epoch: u64) -> Self {
        Self { generation, epoch, is_outdated: true, ..Self::default() }
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
    pub(super) fn note_nodes_changed(&mut self) {
        self.is_outdated = true;
        self.epoch += 1;
    }

    /// Brings a changed node to the next reader.
    pub(super) fn publish(&mut self, node: &Node) {
        match Arc::get_mut(&mut self.published) {
            Some(published) if !self.is_outdated && published.node(node.name.as_str()).is_some() => {
                published.update(self.generation, [node.clone()]);
            }
            _ => {
                self.changed.insert(node.name.clone());
            }
        }
    }

    pub(super) fn set_packing_model(&mut self, packing_model: Arc<PackingModel>) {
        let generation = self.next_generation();
        Arc::make_mut(&mut self.published).set_packing_model(generation, packing_model);
    }

    /// Nothing is known of the node any more.
    pub(super) fn forget(&mut self, name: &NodeName) {
        self.changed.remove(name);
    }

    pub(super) fn snapshot(
        &mut self,
        nodes: &NodeMap,
        packing_model: &Arc<PackingModel>,
        start_model: &Arc<StartModel>,
    ) -> Arc<Snapshot> {
        if self.is_outdated {
            let nodes =
                nodes.values().filter(|node_state| node_state.exists()).map(|node_state| node_state.view());
            let snapshot = Snapshot::new(self.generation, self.epoch, nodes.cloned().collect());
            self.published = Arc::new(snapshot.with_packing_model(packing_model.clone()));
        } else if self.published.generation() != self.generation || !self.changed.is_empty() {
            let changed = self.changed.iter().filter_map(|name| nodes.get(name));
            let changed =
                changed.filter(|node_state| node_state.exists()).map(|node_state| node_state.view().clone());
            Arc::make_mut(&mut self.published).update(self.generation, changed);
        }
        if !Arc::ptr_eq(self.published.start_model(), start_model) {
            Arc::make_mut(&mut self.published).set_start_model(start_model.clone());
        }
        self.is_outdated = false;
        self.changed.clear();
        self.published.clone()
    }
}
