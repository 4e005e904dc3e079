//! Copy-on-write maps that make a copy of the ledger and a view of the cluster almost free. Nothing here knows what states mean.
//!
//! [`PodMap`] and [`NodeMap`]: a copy shares what neither side has changed since. A plan works on a copy that is made while everything
//! else waits for the lock. Of pods, of which there may be a million, only groups of shards are counted then, and of nodes pieces; the
//! first change of one afterwards copies its shard or its piece only.
//!
//! [`Publication`]: the snapshot that was handed out last, and which nodes have changed since. A snapshot is shared by all that read
//! it. As long as none does, changes go into it at once; otherwise they are noted, and go into a copy of it once they are many or the
//! next one is asked for. So no reader waits for thousands of them, and no copy of the ledger lists them. After a node has come or
//! gone, the next reader brings it all in: the index of names is made again then.

use super::node_state::NodeState;
use super::pod_state::PodState;
use crate::ids::{NodeName, PodUid};
use crate::placing::learned::PackingModel;
use crate::placing::snapshot::{RetiredSummaries, Snapshot};
use crate::placing::start_model::StartModel;
use crate::sharing::{PieceList, ShardedMap};
use crate::vocabulary::node::Node;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// All pods, by UID.
#[derive(Debug, Clone, Default)]
pub(super) struct PodMap {
    pods: ShardedMap<PodUid, Arc<PodState>>,
}

/// All nodes, in order of name.
#[derive(Debug, Clone, Default)]
pub(super) struct NodeMap {
    nodes: PieceList<Arc<NodeState>>,
}

#[cfg(any(test, feature = "testkit"))]
thread_local! {
    /// How many pods this thread has looked at: what a step costs, whatever the machine.
    pub static PODS_LOOKED_AT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn count_pod_read() {
    #[cfg(all(debug_assertions, any(test, feature = "testkit")))]
    PODS_LOOKED_AT.set(PODS_LOOKED_AT.get() + 1);
}

impl PodMap {
    pub(super) fn get(&self, uid: &PodUid) -> Option<&PodState> {
        count_pod_read();
        self.pods.get(uid).map(|pod_state| &**pod_state)
    }

    pub(super) fn contains_key(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    pub(super) fn get_mut(&mut self, uid: &PodUid) -> Option<&mut PodState> {
        self.pods.get_mut(uid).map(Arc::make_mut)
    }

    pub(super) fn get_or_insert(&mut self, uid: PodUid, pod_state: PodState) -> &mut PodState {
        Arc::make_mut(self.pods.get_or_insert_with(uid, || Arc::new(pod_state)))
    }

    pub(super) fn insert(&mut self, uid: PodUid, pod_state: PodState) {
        self.insert_shared(uid, Arc::new(pod_state));
    }

    pub(super) fn remove(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
    }

    /// The pods themselves, shared with this map, in order of UID.
    pub(super) fn shared(&self) -> BTreeMap<PodUid, Arc<PodState>> {
        self.pods
            .iter_unordered()
            .map(|(uid, pod)| (uid.clone(), pod.clone()))
            .collect()
    }

    pub(super) fn insert_shared(&mut self, uid: PodUid, pod_state: Arc<PodState>) {
        self.pods.insert(uid, pod_state);
    }

    /// All pods, in no order: for sums, and for what is put into an order afterwards.
    pub(super) fn in_no_order(&self) -> impl Iterator<Item = (&PodUid, &PodState)> {
        self.pods
            .iter_unordered()
            .inspect(|_| count_pod_read())
            .map(|(uid, pod_state)| (uid, &**pod_state))
    }

    /// Pods that are others, or are not there, in a copy that was made earlier; in no order.
    pub(super) fn changed_since<'a>(
        &'a self,
        earlier: &'a Self,
    ) -> impl Iterator<Item = (&'a PodUid, &'a Arc<PodState>)> {
        let unshared = self.pods.unshared_with(&earlier.pods);
        unshared.filter(|(uid, pod)| {
            !earlier
                .pods
                .get(*uid)
                .is_some_and(|earlier_state| Arc::ptr_eq(earlier_state, pod))
        })
    }

    /// Changes all pods, each by itself.
    pub(super) fn change_each(&mut self, mut change: impl FnMut(&mut PodState)) {
        self.pods
            .change_each(|pod_state| change(Arc::make_mut(pod_state)));
    }
}

impl NodeMap {
    pub(super) fn get(&self, name: &NodeName) -> Option<&NodeState> {
        let index = self.index_of(name).ok()?;
        Some(&self.nodes[index])
    }

    pub(super) fn get_mut(&mut self, name: &NodeName) -> Option<&mut NodeState> {
        let index = self.index_of(name).ok()?;
        self.nodes.get_mut(index).map(Arc::make_mut)
    }

    /// The node, of which nothing but its name is known if it is new.
    pub(super) fn get_or_create(&mut self, name: &NodeName) -> &mut NodeState {
        let index = self.index_of(name).unwrap_or_else(|insertion_index| {
            self.nodes
                .insert(insertion_index, Arc::new(NodeState::new(name.clone())));
            insertion_index
        });
        self.nodes
            .get_mut(index)
            .map(Arc::make_mut)
            .expect("it was there or was just inserted")
    }

    pub(super) fn remove(&mut self, name: &NodeName) {
        if let Ok(index) = self.index_of(name) {
            self.nodes.remove(index);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&NodeName, &NodeState)> {
        self.values()
            .map(|node_state| (&node_state.view().name, node_state))
    }

    /// The nodes themselves, shared with this map, in order of name.
    pub(super) fn shared(&self) -> Vec<Arc<NodeState>> {
        self.nodes.iter().cloned().collect()
    }

    pub(super) fn insert_shared(&mut self, node_state: Arc<NodeState>) {
        match self.index_of(&node_state.view().name) {
            Ok(index) => *self.nodes.get_mut(index).expect("it was just found") = node_state,
            Err(index) => self.nodes.insert(index, node_state),
        }
    }

    /// The node itself, shared with this map.
    pub(super) fn get_shared(&self, name: &NodeName) -> Option<&Arc<NodeState>> {
        let index = self.index_of(name).ok()?;
        self.nodes.get(index)
    }

    /// Nodes that are others, or are not there, in a copy that was made earlier.
    pub(super) fn changed_since<'a>(
        &'a self,
        earlier: &'a Self,
    ) -> impl Iterator<Item = &'a NodeName> {
        // Most often a node has the same place in both, and no name is compared.
        let is_same = |index: usize, node_state: &Arc<NodeState>| {
            let is_same_state =
                |earlier_state: &Arc<NodeState>| Arc::ptr_eq(earlier_state, node_state);
            earlier.nodes.get(index).is_some_and(is_same_state)
                || earlier
                    .get_shared(&node_state.view().name)
                    .is_some_and(is_same_state)
        };
        let unshared = self.nodes.unshared_with(&earlier.nodes);
        let changed = unshared.filter(move |(index, node_state)| !is_same(*index, node_state));
        changed.map(|(_, node_state)| &node_state.view().name)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.iter().map(|node_state| &**node_state)
    }

    /// The index of a node, or the one where it would be inserted.
    fn index_of(&self, name: &NodeName) -> Result<usize, usize> {
        self.nodes
            .search(|node_state| node_state.view().name.cmp(name))
    }
}

/// If more nodes came or went, the snapshot is built anew: inserting and removing them one by one would take longer.
const MAX_NODE_SET_CHANGES: u64 = 512;
/// If more nodes changed, and more than a quarter of all, the snapshot is built anew: finding them one by one would take longer.
const MAX_CHANGED_NODES: usize = 512;
/// If more changes are pending, they go into a copy at once. Fewer in tests, whose clusters are small.
const MAX_PENDING_CHANGES: usize = if cfg!(test) { 1 } else { 128 };

#[derive(Debug, Clone, Default)]
pub(super) struct Publication {
    /// Rises with every change of what a pod could be allocated.
    generation: u64,
    /// How often nodes came or went.
    node_list_generation: u64,
    published: Arc<Snapshot>,
    /// Nodes that came, went or changed since.
    changed: BTreeSet<NodeName>,
    /// The snapshot was never built from these nodes.
    is_outdated: bool,
}

impl Publication {
    /// With nothing handed out yet. A recording may say any number: there is always a next one.
    pub(super) fn from_generations(generation: u64, node_list_generation: u64) -> Self {
        let (generation, node_list_generation) = (
            generation.min(u64::MAX / 2),
            node_list_generation.min(u64::MAX / 2),
        );
        Self {
            generation,
            node_list_generation,
            is_outdated: true,
            ..Self::default()
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn node_list_generation(&self) -> u64 {
        self.node_list_generation
    }

    /// The generation of a change that is made now.
    pub(super) fn next_generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }

    /// A node came or went.
    pub(super) fn record_node_set_change(&mut self, name: &NodeName) {
        self.changed.insert(name.clone());
        self.node_list_generation += 1;
    }

    /// Continues from another publication, as one more change, with the nodes that came, went or changed there since.
    pub(super) fn continue_from(&mut self, other: &Self, changed: &BTreeSet<NodeName>) {
        (self.generation, self.node_list_generation) =
            (other.generation + 1, other.node_list_generation);
        self.changed.extend(changed.iter().cloned());
    }

    /// What readers have made of the snapshot so far counts no more.
    pub(super) fn unshare_from_readers(&mut self) {
        Arc::make_mut(&mut self.published).invalidate_copies();
    }

    /// Updates a changed node in the snapshot, or notes it for the next reader.
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
    pub(super) fn has_many_pending_changes(&self) -> bool {
        !self.is_outdated
            && self.changed.len() > MAX_PENDING_CHANGES
            && self.node_list_generation == self.published.node_list_generation()
    }

    /// Updates the snapshot by all pending changes, in a copy if it is in use.
    pub(super) fn catch_up(&mut self, nodes: &NodeMap) {
        let changed = self
            .changed
            .iter()
            .map(|name| (name, nodes.get(name).and_then(view_of_existing)));
        Arc::make_mut(&mut self.published).apply_node_changes(
            self.generation,
            self.node_list_generation,
            changed,
        );
        self.changed.clear();
    }

    pub(super) fn set_packing_model(&mut self, packing_model: Arc<PackingModel>) {
        let generation = self.next_generation();
        Arc::make_mut(&mut self.published).set_packing_model(generation, packing_model);
    }

    /// Installs a packing model with the summaries of nodes that a copy of the snapshot has made by it.
    pub(super) fn install_packing_model(
        &mut self,
        packing_model: Arc<PackingModel>,
        summarized: Snapshot,
    ) -> RetiredSummaries {
        let generation = self.next_generation();
        Arc::make_mut(&mut self.published).adopt_packing_model(
            generation,
            packing_model,
            summarized,
        )
    }

    pub(super) fn snapshot(
        &mut self,
        nodes: &NodeMap,
        packing_model: &Arc<PackingModel>,
        start_model: &Arc<StartModel>,
    ) -> Arc<Snapshot> {
        let most_changed = MAX_CHANGED_NODES.max(self.published.nodes().len() / 4);
        if self.is_outdated
            || self
                .node_list_generation
                .abs_diff(self.published.node_list_generation())
                > MAX_NODE_SET_CHANGES
            || self.changed.len() > most_changed
        {
            let snapshot = Snapshot::new(
                self.generation,
                self.node_list_generation,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::pod_state::PodPhase;
    use crate::testkit::{demand_of, key};
    use crate::vocabulary::demand::Sharing;

    fn uid(n: usize) -> PodUid {
        PodUid::parse(&format!("{n:08x}-0000-4000-8000-000000000000")).unwrap()
    }

    fn pod_state(n: usize) -> PodState {
        let key = key(&format!("pod-{n}"));
        let demand = demand_of(1 << 30, 1, Sharing::Shared, 0);
        let phase = PodPhase::Waiting(Box::default());
        let disruption_info = Arc::default();
        PodState {
            key,
            demand,
            disruption_info,
            is_unwatched: false,
            phase,
            starting: None,
            start: None,
        }
    }

    fn filled(count: usize) -> PodMap {
        let mut pods = PodMap::default();
        (0..count).for_each(|n| pods.insert(uid(n), pod_state(n)));
        pods
    }

    fn tries(pods: &PodMap, n: usize) -> u32 {
        match &pods.get(&uid(n)).unwrap().phase {
            PodPhase::Waiting(waiting) => waiting.tries,
            _ => 0,
        }
    }

    fn try_again(pods: &mut PodMap, n: usize) {
        if let Some(PodPhase::Waiting(waiting)) =
            pods.get_mut(&uid(n)).map(|pod_state| &mut pod_state.phase)
        {
            waiting.tries += 1;
        }
    }

    #[test]
    fn what_one_side_changes_the_other_does_not_see() {
        let mut pods = filled(1000);
        let mut copy = pods.clone();
        try_again(&mut pods, 7);
        try_again(&mut copy, 8);
        copy.remove(&uid(9));
        pods.insert(uid(1000), pod_state(1000));
        assert_eq!([tries(&pods, 7), tries(&pods, 8)], [1, 0]);
        assert_eq!([tries(&copy, 7), tries(&copy, 8)], [0, 1]);
        assert!(pods.get(&uid(9)).is_some() && copy.get(&uid(9)).is_none());
        assert!(pods.get(&uid(1000)).is_some() && copy.get(&uid(1000)).is_none());
        assert_eq!(
            (pods.in_no_order().count(), copy.in_no_order().count()),
            (1001, 999)
        );
    }

    #[test]
    fn a_change_copies_one_pod() {
        let mut pods = filled(1000);
        let copy = pods.clone();
        try_again(&mut pods, 7);
        let all = || {
            copy.in_no_order()
                .map(|(uid, pod_state)| (uid, std::ptr::from_ref(pod_state)))
        };
        let same = all()
            .filter(|(uid, pod_state)| std::ptr::from_ref(pods.get(uid).unwrap()) == *pod_state)
            .count();
        assert_eq!(same, 999);
    }

    #[test]
    fn nodes_are_in_order_of_name_and_a_copy_does_not_see_what_changes() {
        let name = |n: usize| NodeName::parse(&format!("n-{n:03}")).unwrap();
        let mut nodes = NodeMap::default();
        (0..300).for_each(|n| nodes.get_or_create(&name(n * 7 % 300)).add_pod(&uid(n)));
        let copy = nodes.clone();
        nodes.remove(&name(5));
        nodes.remove(&name(5));
        nodes.get_or_create(&name(6)).add_pod(&uid(400));
        assert!(
            nodes
                .values()
                .map(|node_state| &node_state.view().name)
                .is_sorted()
        );
        let pods = |nodes: &NodeMap, n| {
            nodes
                .get(&name(n))
                .map(|node_state| node_state.pods().len())
        };
        assert_eq!(
            [pods(&nodes, 5), pods(&nodes, 6), pods(&nodes, 7)],
            [None, Some(2), Some(1)]
        );
        assert_eq!([pods(&copy, 5), pods(&copy, 6)], [Some(1), Some(1)]);
        assert_eq!((nodes.iter().count(), copy.iter().count()), (299, 300));
    }

    #[test]
    fn changed_nodes_are_found_although_others_were_inserted_before_them() {
        let name = |n: u32| NodeName::parse(&format!("n{n:03}")).unwrap();
        let mut nodes = NodeMap::default();
        (10..400).for_each(|n| _ = nodes.get_or_create(&name(n)));
        let earlier = nodes.clone();
        assert_eq!(nodes.changed_since(&earlier).count(), 0);
        nodes.get_or_create(&name(0));
        nodes.get_mut(&name(50)).unwrap();
        nodes.remove(&name(51));
        nodes.get_mut(&name(399)).unwrap();
        let changed: Vec<_> = nodes.changed_since(&earlier).cloned().collect();
        assert_eq!(changed, [name(0), name(50), name(399)]);
    }
}
