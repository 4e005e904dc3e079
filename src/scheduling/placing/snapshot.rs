//! An immutable view of the cluster. A decision reads one snapshot from beginning to end, so it never sees half a change.
//!
//! Snapshots are shared. The ledger changes the latest one in place while it has no reader. Otherwise it changes a copy, which
//! shares all but the changed nodes and their nearest neighbors; so a change of one node costs little, and so does a node that
//! comes or goes.
//!
//! [`NodeNames`] has the names of its nodes and the index of each, side by side: a request about all nodes looks up every one of them.
//! The names stand one behind the other in one text, in order. A hash table, a quarter of it free or more, has the index of
//! each name in the row of the name's hash, or in the next free row after that. Beside the index a row has eight more bits of the
//! hash, so that other names in the way are hardly ever compared.

use super::learned::{NodeSummary, PackingModel};
use super::pack::NodeEvaluation;
use super::start_model::StartModel;
use crate::ids::{ModelId, NodeName};
use crate::sharing::PieceList;
use crate::units::Bytes;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::node::Node;
use rustc_hash::FxBuildHasher;
use serde::{Deserialize, Serialize, Serializer};
use std::hash::BuildHasher;
use std::sync::{Arc, OnceLock};

#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    generation: u64,
    /// Rises when nodes come or go, because that changes their indices.
    node_list_generation: u64,
    /// In order of name.
    nodes: PieceList<Node>,
    /// The generation of each node, side by side: the score cache reads nothing else of a node that did not change.
    generations: Vec<u64>,
    names: Arc<NodeNames>,
    /// The value of free VRAM, as far as it was learned.
    packing_model: Arc<PackingModel>,
    /// How long engines take to start, as far as it was learned.
    start_model: Arc<StartModel>,
    /// Each node summarized by the model, on first use: it follows from the rest.
    node_summaries: PieceList<OnceLock<NodeSummary>>,
}

impl PartialEq for Snapshot {
    fn eq(&self, other: &Self) -> bool {
        let all = |one: &Self| {
            (
                one.generation,
                one.node_list_generation,
                one.packing_model.clone(),
                one.start_model.clone(),
            )
        };
        all(self) == all(other) && self.nodes == other.nodes
    }
}

impl Eq for Snapshot {}

/// Summaries by a model that is not in force any more. To let go of those of a large cluster takes milliseconds: do that beside
/// the lock.
#[derive(Debug)]
pub struct RetiredSummaries {
    _summaries: PieceList<OnceLock<NodeSummary>>,
}

/// A set of nodes of a snapshot: a bit for each, so that five thousand take 600 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSet {
    #[serde(rename = "epoch")]
    node_list_generation: u64,
    words: Box<[u64]>,
}

impl NodeSet {
    /// Whether it can be a set of so many nodes, if none has come or gone since that epoch.
    pub(crate) fn is_valid_for(&self, node_list_generation: u64, nodes: usize) -> bool {
        self.node_list_generation != node_list_generation || self.words.len() == nodes.div_ceil(64)
    }
}

impl Snapshot {
    pub fn new(generation: u64, node_list_generation: u64, mut nodes: Vec<Node>) -> Self {
        nodes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Self {
            generation,
            node_list_generation,
            generations: nodes.iter().map(|node| node.generation).collect(),
            node_summaries: nodes.iter().map(|_| OnceLock::new()).collect(),
            names: Arc::new(NodeNames::from_sorted(
                nodes.iter().map(|node| node.name.as_str()),
            )),
            nodes: nodes.into_iter().collect(),
            packing_model: Arc::default(),
            start_model: Arc::default(),
        }
    }

    /// Sets the packing model.
    pub fn with_packing_model(mut self, packing_model: Arc<PackingModel>) -> Self {
        self.set_packing_model(self.generation, packing_model);
        self
    }

    /// How long engines take to start.
    pub fn start_model(&self) -> &Arc<StartModel> {
        &self.start_model
    }

    /// Sets how long engines take to start. The nodes' summaries do not depend on it.
    pub(crate) fn set_start_model(&mut self, start_model: Arc<StartModel>) {
        self.start_model = start_model;
    }

    /// The summary of the node at this index.
    #[inline]
    pub fn node_summary(&self, index: usize) -> &NodeSummary {
        self.node_summaries[index].get_or_init(|| {
            self.packing_model
                .node_summary(self.nodes[index].node_gpus())
        })
    }

    /// Summarizes every node now, off the request path.
    pub fn summarize_nodes(&self) {
        (0..self.nodes.len()).for_each(|index| {
            self.node_summary(index);
        });
    }

    /// The node at this index, evaluated for this demand.
    #[inline]
    pub fn evaluate<'a>(&'a self, index: usize, demand: &'a Demand) -> NodeEvaluation<'a> {
        NodeEvaluation::by_model(&self.packing_model, self.node_summary(index), demand)
    }

    pub fn packing_model(&self) -> &PackingModel {
        &self.packing_model
    }

    /// Rises when nodes come or go.
    pub fn node_list_generation(&self) -> u64 {
        self.node_list_generation
    }

    /// Rises with every change.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The set of the nodes at these indices.
    pub fn node_set(&self, indices: impl Iterator<Item = usize>) -> NodeSet {
        let mut words = vec![0; self.nodes.len().div_ceil(64)].into_boxed_slice();
        indices.for_each(|index| words[index / 64] |= 1 << (index % 64));
        NodeSet {
            node_list_generation: self.node_list_generation,
            words,
        }
    }

    /// The nodes of a set; all of them if nodes have come or gone since it was made.
    pub(crate) fn nodes_in<'a>(&'a self, set: &'a NodeSet) -> impl Iterator<Item = &'a Node> {
        let is_current = set.node_list_generation == self.node_list_generation;
        let is_in =
            move |index: usize| !is_current || set.words[index / 64] >> (index % 64) & 1 == 1;
        self.nodes
            .iter()
            .enumerate()
            .filter(move |(index, _)| is_in(*index))
            .map(|(_, node)| node)
    }

    /// Whether no node has come or gone since the set was made.
    pub fn is_current(&self, set: &NodeSet) -> bool {
        set.node_list_generation == self.node_list_generation
    }

    /// Whether the node at this index is in a set that is current.
    pub fn contains(&self, set: &NodeSet, index: usize) -> bool {
        set.words[index / 64] >> (index % 64) & 1 == 1
    }

    /// In order of name.
    pub fn nodes(&self) -> &PieceList<Node> {
        &self.nodes
    }

    /// The generation of each node, by its index.
    pub fn generations(&self) -> &[u64] {
        &self.generations
    }

    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.names.index_of(name)
    }

    /// The index of each of these nodes, or [`NO_INDEX`].
    pub fn indices_of<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<u32> {
        self.names.indices_of(names)
    }

    pub fn node(&self, name: &str) -> Option<&Node> {
        self.index_of(name).map(|index| &self.nodes[index])
    }

    /// The most that any node has of a model; `None` if none knows.
    pub(crate) fn largest_holding(&self, model: &ModelId) -> Option<Bytes> {
        let held = self
            .nodes
            .iter()
            .filter_map(|node| node.holding(model))
            .map(|holding| holding.bytes);
        held.max().filter(|bytes| *bytes > Bytes::ZERO)
    }

    pub(crate) fn set_packing_model(&mut self, generation: u64, packing_model: Arc<PackingModel>) {
        (self.generation, self.packing_model) = (generation, packing_model);
        self.node_summaries = self.nodes.iter().map(|_| OnceLock::new()).collect();
    }

    /// Sets a packing model, with the summaries of a copy that has it, as far as the nodes are as they were when it was made.
    /// Returns the summaries that were in force before.
    pub(crate) fn adopt_packing_model(
        &mut self,
        generation: u64,
        packing_model: Arc<PackingModel>,
        summarized: Self,
    ) -> RetiredSummaries {
        (self.generation, self.packing_model) = (generation, packing_model);
        // Otherwise nodes came or went, and indices have changed.
        let mut summaries = match Arc::ptr_eq(&self.names, &summarized.names) {
            true => summarized.node_summaries,
            false => self.nodes.iter().map(|_| OnceLock::new()).collect(),
        };
        let generations = self
            .generations
            .iter()
            .zip(&summarized.generations)
            .enumerate();
        for (index, _) in generations.filter(|(_, (now, then))| now != then) {
            if let Some(summary) = summaries.get_mut(index) {
                *summary = OnceLock::new();
            }
        }
        RetiredSummaries {
            _summaries: std::mem::replace(&mut self.node_summaries, summaries),
        }
    }

    /// Makes the copies of it useless to [`Snapshot::adopt_packing_model`]: another policy changes nodes without changing their
    /// generation.
    pub(crate) fn invalidate_copies(&mut self) {
        self.names = Arc::new(NodeNames::clone(&self.names));
    }

    /// The node summaries of a copy that is not adopted.
    pub(crate) fn into_summaries(self) -> RetiredSummaries {
        RetiredSummaries {
            _summaries: self.node_summaries,
        }
    }

    /// Replaces nodes that it already has by newer views.
    pub(crate) fn update(&mut self, generation: u64, nodes: impl IntoIterator<Item = Node>) {
        self.generation = generation;
        for node in nodes {
            let index = self
                .index_of(node.name.as_str())
                .expect("an updated node is in the snapshot");
            self.replace(index, node);
        }
    }

    /// Applies nodes that changed, came, or went; `None` for those that went.
    pub(crate) fn apply_node_changes<'a>(
        &mut self,
        generation: u64,
        node_list_generation: u64,
        nodes: impl IntoIterator<Item = (&'a NodeName, Option<Node>)>,
    ) {
        (self.generation, self.node_list_generation) = (generation, node_list_generation);
        let mut membership_changed = false;
        for (name, node) in nodes {
            let found = self.nodes.search(|node| node.name.cmp(name));
            membership_changed |= found.is_ok() != node.is_some();
            match (found, node) {
                (Ok(index), Some(node)) => self.replace(index, node),
                (Err(index), Some(node)) => {
                    self.generations.insert(index, node.generation);
                    self.nodes.insert(index, node);
                    self.node_summaries.insert(index, OnceLock::new());
                }
                (Ok(index), None) => {
                    self.generations.remove(index);
                    self.nodes.remove(index);
                    self.node_summaries.remove(index);
                }
                (Err(_), None) => {}
            }
        }
        if membership_changed {
            self.names = Arc::new(NodeNames::from_sorted(
                self.nodes.iter().map(|node| node.name.as_str()),
            ));
        }
    }

    fn replace(&mut self, index: usize, node: Node) {
        self.generations[index] = node.generation;
        *self.nodes.get_mut(index).expect("it has a place") = node;
        *self.node_summaries.get_mut(index).expect("it has a place") = OnceLock::new();
    }
}

impl Serialize for Snapshot {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Shape<'a> {
            generation: u64,
            nodes: &'a PieceList<Node>,
        }
        Shape {
            generation: self.generation,
            nodes: &self.nodes,
        }
        .serialize(serializer)
    }
}

impl Demand {
    /// Replaces a short model name by the one that nodes hold, if that is unambiguous.
    pub fn resolve_model_name(&mut self, snapshot: &Snapshot) {
        let Some(model) = self
            .model
            .as_ref()
            .filter(|model| !model.has_organization())
        else {
            return;
        };
        let marks = model.short_name_bits();
        let named = model.resolve_among(
            snapshot
                .nodes
                .iter()
                .flat_map(|node| node.holdings.may_match(marks)),
        );
        if named != model {
            self.model = Some(named.clone());
        }
    }

    /// Sets the weights of the model of a pod that asks a device plugin, which does not say them, from what nodes hold. Without that
    /// a node that must fetch everything would look as near as one that has it.
    pub(crate) fn resolve_weights(&mut self, snapshot: &Snapshot) {
        if self.is_allocated_externally() {
            self.weights = self
                .model
                .as_ref()
                .and_then(|model| snapshot.largest_holding(model));
        }
    }
}

/// An empty row of the table, and the index of a name that is not there.
pub const NO_INDEX: u32 = u32::MAX;

/// The lower bits of a row that are the index; the others are bits of the name's hash.
const INDEX_BITS: u32 = 24;

/// Names whose rows are read side by side. Rows lie all over a table that is larger than a core's cache; read one after the other,
/// each would be waited for.
const LOOKUP_BATCH: usize = 32;

#[derive(Debug, Clone, Default)]
pub struct NodeNames {
    text: String,
    /// Where each name ends in the text, by its index.
    ends: Vec<u32>,
    /// The rows of the hash table: a power of two, or none at all.
    rows: Vec<u32>,
}

/// The row where the search for a name begins, and the tag that its row has beside the index.
#[derive(Debug, Clone, Copy)]
struct HashSlot {
    row: usize,
    tag: u32,
}

impl NodeNames {
    /// The names must be in order, and each there once.
    pub fn from_sorted<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let (mut text, mut ends) = (String::new(), Vec::new());
        for name in names {
            text.push_str(name);
            ends.push(offset(text.len()));
        }
        assert!(
            ends.len() < 1 << INDEX_BITS,
            "a cluster has less than sixteen million nodes"
        );
        let mut rows = 8;
        while ends.len() > rows / 4 * 3 {
            rows *= 2;
        }
        let mut names = Self {
            text,
            ends,
            rows: vec![NO_INDEX; rows],
        };
        (0..names.ends.len()).for_each(|index| names.insert(index));
        names
    }

    #[inline]
    pub fn index_of(&self, name: &str) -> Option<usize> {
        if self.rows.is_empty() {
            return None;
        }
        let hashed = self.hash(name);
        let index = self.find(name, hashed, self.rows[hashed.row]);
        (index != NO_INDEX).then_some(index as usize)
    }

    /// The index of each of these names, or [`NO_INDEX`].
    pub fn indices_of<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> Vec<u32> {
        if self.rows.is_empty() {
            return names.map(|_| NO_INDEX).collect();
        }
        let mut indices = Vec::with_capacity(names.size_hint().0);
        let mut batch: Vec<(&str, HashSlot)> = Vec::with_capacity(LOOKUP_BATCH);
        let mut first_rows = [NO_INDEX; LOOKUP_BATCH];
        loop {
            batch.clear();
            batch.extend(
                names
                    .by_ref()
                    .take(LOOKUP_BATCH)
                    .map(|name| (name, self.hash(name))),
            );
            for (row, (_, hashed)) in first_rows.iter_mut().zip(&batch) {
                *row = self.rows[hashed.row];
            }
            indices.extend(
                batch
                    .iter()
                    .zip(first_rows)
                    .map(|((name, hashed), row)| self.find(name, *hashed, row)),
            );
            if batch.len() < LOOKUP_BATCH {
                return indices;
            }
        }
    }

    /// The name's index, or [`NO_INDEX`]; `first` is the content of the row where the search begins.
    #[inline]
    fn find(&self, name: &str, hashed: HashSlot, first: u32) -> u32 {
        let (mut at, mut row) = (hashed.row, first);
        while row != NO_INDEX {
            let index = row & ((1 << INDEX_BITS) - 1);
            if row >> INDEX_BITS == hashed.tag && self.name(index as usize) == name {
                return index;
            }
            at = (at + 1) & (self.rows.len() - 1);
            row = self.rows[at];
        }
        NO_INDEX
    }

    #[inline]
    fn name(&self, index: usize) -> &str {
        &self.text[self.start(index) as usize..self.ends[index] as usize]
    }

    #[inline]
    fn start(&self, index: usize) -> u32 {
        index.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    fn insert(&mut self, index: usize) {
        let HashSlot { mut row, tag } = self.hash(self.name(index));
        while self.rows[row] != NO_INDEX {
            row = (row + 1) & (self.rows.len() - 1);
        }
        self.rows[row] = tag << INDEX_BITS | index as u32;
    }

    #[inline]
    fn hash(&self, name: &str) -> HashSlot {
        let hash = FxBuildHasher.hash_one(name);
        HashSlot {
            row: hash as usize & (self.rows.len() - 1),
            tag: (hash >> (64 - 8)) as u32,
        }
    }
}

/// A position in the text of all names: four gigabytes hold sixteen million of the longest names that Kubernetes allows.
fn offset(length: usize) -> u32 {
    u32::try_from(length).expect("the names of all nodes are less than four gigabytes")
}

#[cfg(test)]
mod node_names_tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_name_has_the_place_that_it_has_in_order(
            known in prop::collection::btree_set("[ab]{1,9}", 0..200),
            other in "[ab]{0,9}",
        ) {
            let names = NodeNames::from_sorted(known.iter().map(String::as_str));
            for (place, name) in known.iter().enumerate() {
                prop_assert_eq!(names.index_of(name), Some(place));
            }
            prop_assert_eq!(names.index_of(&other), known.iter().position(|name| *name == other));
            let asked: Vec<&str> = known.iter().map(String::as_str).rev().chain([&*other]).collect();
            let each = asked.iter().map(|name| names.index_of(name).map_or(NO_INDEX, |place| place as u32));
            prop_assert_eq!(names.indices_of(asked.iter().copied()), each.collect::<Vec<_>>());
        }
    }

    #[test]
    fn an_empty_table_finds_no_name() {
        assert_eq!(NodeNames::default().index_of("a"), None);
        assert_eq!(NodeNames::from_sorted([].into_iter()).index_of("a"), None);
        assert_eq!(
            NodeNames::default().indices_of(["a"].into_iter()),
            [NO_INDEX]
        );
    }
}
