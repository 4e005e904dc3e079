//! An immutable view of the cluster. A decision reads one snapshot from beginning to end, so it never sees half a change.
//!
//! Snapshots are shared. The ledger changes the latest one in place while nobody reads it and copies it otherwise,
//! so a change of one node costs one node.

use super::node::Node;
use crate::ids::NodeName;
use rustc_hash::FxHashMap;
use serde::{Serialize, Serializer};
use std::sync::Arc;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    generation: u64,
    /// In order of name.
    nodes: Vec<Node>,
    places: Arc<FxHashMap<NodeName, u32>>,
}

impl Snapshot {
    pub fn new(generation: u64, mut nodes: Vec<Node>) -> Self {
        nodes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let places =
            nodes.iter().enumerate().map(|(place, node)| (node.name.clone(), place as u32)).collect();
        Self { generation, nodes, places: Arc::new(places) }
    }

    /// Rises with every change.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn place_of(&self, name: &str) -> Option<usize> {
        self.places.get(name).map(|place| *place as usize)
    }

    pub fn node(&self, name: &str) -> Option<&Node> {
        self.place_of(name).map(|place| &self.nodes[place])
    }

    /// Puts newer views of nodes it already has in their places.
    pub(super) fn update(&mut self, generation: u64, nodes: impl IntoIterator<Item = Node>) {
        self.generation = generation;
        for node in nodes {
            let place = self.place_of(node.name.as_str()).expect("an updated node is in the snapshot");
            self.nodes[place] = node;
        }
    }
}

impl Serialize for Snapshot {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Shape<'a> {
            generation: u64,
            nodes: &'a [Node],
        }
        Shape { generation: self.generation, nodes: &self.nodes }.serialize(serializer)
    }
}
