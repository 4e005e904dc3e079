//! The maps of pods and nodes, kept so that a copy of the ledger is made at once: a copy shares what neither side has changed
//! since.
//!
//! A plan works on a copy that is made while everything else waits for the lock. Of pods, of which there may be a hundred
//! thousand, only shards are counted then; the first change of a pod afterwards copies its shard only. What the states mean is
//! not known here.

use super::node_state::NodeState;
use super::pod_state::PodState;
use crate::ids::{NodeName, PodUid};
use rustc_hash::{FxBuildHasher, FxHashMap};
use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::sync::Arc;

/// So many that a shard of a large cluster has some hundreds of pods, and few enough to be counted in a microsecond.
const SHARDS: usize = 256;

type PodShard = FxHashMap<PodUid, Arc<PodState>>;

/// All pods, by UID.
#[derive(Debug, Clone)]
pub(super) struct PodMap {
    shards: Box<[Arc<PodShard>]>,
}

/// All nodes, in order of name.
#[derive(Debug, Clone, Default)]
pub(super) struct NodeMap {
    nodes: BTreeMap<NodeName, Arc<NodeState>>,
}

impl Default for PodMap {
    fn default() -> Self {
        Self { shards: std::iter::repeat_with(Arc::default).take(SHARDS).collect() }
    }
}

#[cfg(test)]
thread_local! {
    /// How many pods this thread has looked at: what a step costs, whatever the machine.
    pub static PODS_LOOKED_AT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn look() {
    #[cfg(test)]
    PODS_LOOKED_AT.set(PODS_LOOKED_AT.get() + 1);
}

impl PodMap {
    pub(super) fn get(&self, uid: &PodUid) -> Option<&PodState> {
        look();
        self.shards[shard_of(uid)].get(uid).map(|pod_state| &**pod_state)
    }

    pub(super) fn contains_key(&self, uid: &PodUid) -> bool {
        self.shards[shard_of(uid)].contains_key(uid)
    }

    pub(super) fn get_mut(&mut self, uid: &PodUid) -> Option<&mut PodState> {
        let shard = &mut self.shards[shard_of(uid)];
        // A pod that is not there needs no copy of its shard.
        if !shard.contains_key(uid) {
            return None;
        }
        Arc::make_mut(shard).get_mut(uid).map(Arc::make_mut)
    }

    pub(super) fn get_or_insert(&mut self, uid: PodUid, pod_state: PodState) -> &mut PodState {
        let shard = Arc::make_mut(&mut self.shards[shard_of(&uid)]);
        Arc::make_mut(shard.entry(uid).or_insert_with(|| Arc::new(pod_state)))
    }

    pub(super) fn insert(&mut self, uid: PodUid, pod_state: PodState) {
        Arc::make_mut(&mut self.shards[shard_of(&uid)]).insert(uid, Arc::new(pod_state));
    }

    pub(super) fn remove(&mut self, uid: &PodUid) {
        let shard = &mut self.shards[shard_of(uid)];
        if shard.contains_key(uid) {
            Arc::make_mut(shard).remove(uid);
        }
    }

    /// The pods themselves, shared with this map, in order of UID.
    #[expect(clippy::disallowed_methods, reason = "they are put into an order")]
    pub(super) fn shared(&self) -> BTreeMap<PodUid, Arc<PodState>> {
        self.shards
            .iter()
            .flat_map(|shard| shard.iter())
            .map(|(uid, pod)| (uid.clone(), pod.clone()))
            .collect()
    }

    pub(super) fn insert_shared(&mut self, uid: PodUid, pod_state: Arc<PodState>) {
        Arc::make_mut(&mut self.shards[shard_of(&uid)]).insert(uid, pod_state);
    }

    /// All pods, in no order: for sums, and for what is put into an order afterwards.
    #[expect(clippy::disallowed_methods, reason = "the name says that there is no order")]
    pub(super) fn in_no_order(&self) -> impl Iterator<Item = (&PodUid, &PodState)> {
        self.shards
            .iter()
            .flat_map(|shard| shard.iter())
            .inspect(|_| look())
            .map(|(uid, pod_state)| (uid, &**pod_state))
    }

    /// Changes all pods, each by itself.
    #[expect(
        clippy::disallowed_methods,
        reason = "each is changed by itself, and nothing follows from their order"
    )]
    pub(super) fn change_each(&mut self, mut change: impl FnMut(&mut PodState)) {
        for shard in &mut self.shards {
            Arc::make_mut(shard).values_mut().for_each(|pod_state| change(Arc::make_mut(pod_state)));
        }
    }
}

/// By bits of the hash that the shard itself does not go by.
fn shard_of(uid: &PodUid) -> usize {
    (FxBuildHasher.hash_one(uid) >> 40) as usize % SHARDS
}

impl NodeMap {
    pub(super) fn get(&self, name: &NodeName) -> Option<&NodeState> {
        self.nodes.get(name).map(|node_state| &**node_state)
    }

    pub(super) fn get_mut(&mut self, name: &NodeName) -> Option<&mut NodeState> {
        self.nodes.get_mut(name).map(Arc::make_mut)
    }

    /// The node, of which nothing but its name is known if it is new.
    pub(super) fn open(&mut self, name: &NodeName) -> &mut NodeState {
        let node = self.nodes.entry(name.clone());
        Arc::make_mut(node.or_insert_with(|| Arc::new(NodeState::new(name.clone()))))
    }

    pub(super) fn remove(&mut self, name: &NodeName) {
        self.nodes.remove(name);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&NodeName, &NodeState)> {
        self.nodes.iter().map(|(name, node_state)| (name, &**node_state))
    }

    /// The nodes themselves, shared with this map, in order of name.
    pub(super) fn shared(&self) -> Vec<Arc<NodeState>> {
        self.nodes.values().cloned().collect()
    }

    pub(super) fn insert_shared(&mut self, node_state: Arc<NodeState>) {
        self.nodes.insert(node_state.view().name.clone(), node_state);
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.values().map(|node_state| &**node_state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduling::ledger::pod_state::{PodPhase, WaitingPod};
    use crate::scheduling::testkit::{demand_of, key};
    use crate::scheduling::vocabulary::demand::Sharing;

    fn uid(n: usize) -> PodUid {
        PodUid::parse(&format!("{n:08x}-0000-4000-8000-000000000000")).unwrap()
    }

    fn pod_state(n: usize) -> PodState {
        let key = key(&format!("pod-{n}"));
        let demand = demand_of(1 << 30, 1, Sharing::Shared, 0);
        let phase = PodPhase::Waiting(WaitingPod::default());
        PodState { key, demand, disruption_info: Arc::default(), phase, starting: None, start: None }
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
        if let Some(PodPhase::Waiting(waiting)) = pods.get_mut(&uid(n)).map(|pod_state| &mut pod_state.phase)
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
        assert_eq!((pods.in_no_order().count(), copy.in_no_order().count()), (1001, 999));
    }

    #[test]
    fn a_change_copies_one_shard_and_one_pod_and_what_is_not_there_none() {
        let mut pods = filled(1000);
        let copy = pods.clone();
        let shared = |pods: &PodMap| {
            let shards = pods.shards.iter().zip(copy.shards.iter());
            shards.filter(|(a, b)| Arc::ptr_eq(a, b)).count()
        };
        assert!(pods.get_mut(&uid(5000)).is_none());
        pods.remove(&uid(5000));
        assert_eq!(shared(&pods), SHARDS);
        try_again(&mut pods, 7);
        assert_eq!(shared(&pods), SHARDS - 1);
        let all = || copy.in_no_order().map(|(uid, pod_state)| (uid, std::ptr::from_ref(pod_state)));
        let same =
            all().filter(|(uid, pod_state)| std::ptr::from_ref(pods.get(uid).unwrap()) == *pod_state).count();
        assert_eq!(same, 999);
    }

    #[test]
    fn shelves_fill_evenly() {
        let most = filled(10_000).shards.iter().map(|shard| shard.len()).max().unwrap();
        assert!(most < 100, "of 39 on the average one has {most}");
    }
}
