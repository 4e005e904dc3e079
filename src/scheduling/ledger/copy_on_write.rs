//! Who is in the books and the books' pages, kept so that a copy of the ledger is made at once: a copy shares what neither side
//! has changed since.
//!
//! A plan works on a copy that is made while everyone else waits for the lock. Of entries, of which there may be a hundred
//! thousand, only shelves are counted then; the first change of an entry afterwards copies its shelf only. What entries and
//! pages mean is not known here.

use super::node_state::NodeState;
use super::pod_state::PodState;
use crate::ids::{NodeName, PodUid};
use rustc_hash::{FxBuildHasher, FxHashMap};
use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::ops::Index;
use std::sync::Arc;

/// So many that a shelf of a large cluster has some hundreds of entries, and few enough to be counted in a microsecond.
const SHARDS: usize = 256;

type PodShard = FxHashMap<PodUid, Arc<PodState>>;

/// All pods, by UID.
#[derive(Debug, Clone)]
pub(super) struct PodStates {
    shards: Box<[Arc<PodShard>]>,
}

/// All nodes' pages, in order of name.
#[derive(Debug, Clone, Default)]
pub(super) struct NodeStates {
    pages: BTreeMap<NodeName, Arc<NodeState>>,
}

impl Default for PodStates {
    fn default() -> Self {
        Self { shards: std::iter::repeat_with(Arc::default).take(SHARDS).collect() }
    }
}

#[cfg(test)]
thread_local! {
    /// How many entries this thread has looked at: what a step costs, whatever the machine.
    pub static PODS_PER_RUN: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn look() {
    #[cfg(test)]
    PODS_PER_RUN.set(PODS_PER_RUN.get() + 1);
}

impl PodStates {
    pub fn get(&self, uid: &PodUid) -> Option<&PodState> {
        look();
        self.shards[shard_of(uid)].get(uid).map(|pod_state| &**pod_state)
    }

    pub fn contains_key(&self, uid: &PodUid) -> bool {
        self.shards[shard_of(uid)].contains_key(uid)
    }

    pub fn get_mut(&mut self, uid: &PodUid) -> Option<&mut PodState> {
        let shelf = &mut self.shards[shard_of(uid)];
        // A pod that is not there needs no copy of its shard.
        if !shelf.contains_key(uid) {
            return None;
        }
        Arc::make_mut(shelf).get_mut(uid).map(Arc::make_mut)
    }

    pub fn get_or_insert(&mut self, uid: PodUid, pod_state: PodState) -> &mut PodState {
        let shelf = Arc::make_mut(&mut self.shards[shard_of(&uid)]);
        Arc::make_mut(shelf.entry(uid).or_insert_with(|| Arc::new(pod_state)))
    }

    pub fn insert(&mut self, uid: PodUid, pod_state: PodState) {
        Arc::make_mut(&mut self.shards[shard_of(&uid)]).insert(uid, Arc::new(pod_state));
    }

    pub fn remove(&mut self, uid: &PodUid) {
        let shelf = &mut self.shards[shard_of(uid)];
        if shelf.contains_key(uid) {
            Arc::make_mut(shelf).remove(uid);
        }
    }

    /// Everyone, in no order: for sums, and for what is put into an order afterwards.
    #[expect(clippy::disallowed_methods, reason = "the name says that there is no order")]
    pub fn in_no_order(&self) -> impl Iterator<Item = (&PodUid, &PodState)> {
        self.shards
            .iter()
            .flat_map(|shelf| shelf.iter())
            .inspect(|_| look())
            .map(|(uid, pod_state)| (uid, &**pod_state))
    }

    /// Changes everyone, each by itself.
    #[expect(
        clippy::disallowed_methods,
        reason = "each is changed by itself, and nothing follows from their order"
    )]
    pub fn change_each(&mut self, mut change: impl FnMut(&mut PodState)) {
        for shelf in &mut self.shards {
            Arc::make_mut(shelf).values_mut().for_each(|pod_state| change(Arc::make_mut(pod_state)));
        }
    }
}

impl Index<&PodUid> for PodStates {
    type Output = PodState;

    fn index(&self, uid: &PodUid) -> &PodState {
        self.get(uid).expect("a pod that is named in the books has an entry")
    }
}

/// By bits of the hash that the shelf itself does not go by.
fn shard_of(uid: &PodUid) -> usize {
    (FxBuildHasher.hash_one(uid) >> 40) as usize % SHARDS
}

impl NodeStates {
    pub fn get(&self, name: &NodeName) -> Option<&NodeState> {
        self.pages.get(name).map(|page| &**page)
    }

    pub fn get_mut(&mut self, name: &NodeName) -> Option<&mut NodeState> {
        self.pages.get_mut(name).map(Arc::make_mut)
    }

    /// The node's page, which is an empty one if it had none.
    pub fn open(&mut self, name: &NodeName) -> &mut NodeState {
        let page = self.pages.entry(name.clone());
        Arc::make_mut(page.or_insert_with(|| Arc::new(NodeState::new(name.clone()))))
    }

    pub fn remove(&mut self, name: &NodeName) {
        self.pages.remove(name);
    }

    pub fn iter(&self) -> impl Iterator<Item = (&NodeName, &NodeState)> {
        self.pages.iter().map(|(name, page)| (name, &**page))
    }

    pub fn values(&self) -> impl Iterator<Item = &NodeState> {
        self.pages.values().map(|page| &**page)
    }

    pub fn keys(&self) -> impl Iterator<Item = &NodeName> {
        self.pages.keys()
    }
}

impl Index<&NodeName> for NodeStates {
    type Output = NodeState;

    fn index(&self, name: &NodeName) -> &NodeState {
        self.get(name).expect("a node that is named in the books has a page")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PodKey;
    use crate::scheduling::ledger::pod_state::{PodPhase, WaitingPod};
    use crate::scheduling::proptests::demand_of;
    use crate::scheduling::vocabulary::demand::Sharing;

    fn uid(n: usize) -> PodUid {
        PodUid::parse(&format!("{n:08x}-0000-4000-8000-000000000000")).unwrap()
    }

    fn pod_state(n: usize) -> PodState {
        let key = PodKey::parse("default", &format!("pod-{n}")).unwrap();
        let demand = demand_of(1 << 30, 1, Sharing::Shared, 0);
        let phase = PodPhase::Waiting(WaitingPod::default());
        PodState { key, demand, disruption_info: Arc::default(), phase, starting: None }
    }

    fn filled(count: usize) -> PodStates {
        let mut pod_states = PodStates::default();
        (0..count).for_each(|n| pod_states.insert(uid(n), pod_state(n)));
        pod_states
    }

    fn tries(pod_states: &PodStates, n: usize) -> u32 {
        match &pod_states[&uid(n)].phase {
            PodPhase::Waiting(waiting) => waiting.tries,
            _ => 0,
        }
    }

    fn try_again(pod_states: &mut PodStates, n: usize) {
        if let Some(PodPhase::Waiting(waiting)) =
            pod_states.get_mut(&uid(n)).map(|pod_state| &mut pod_state.phase)
        {
            waiting.tries += 1;
        }
    }

    #[test]
    fn what_one_side_changes_the_other_does_not_see() {
        let mut pod_states = filled(1000);
        let mut copy = pod_states.clone();
        try_again(&mut pod_states, 7);
        try_again(&mut copy, 8);
        copy.remove(&uid(9));
        pod_states.insert(uid(1000), pod_state(1000));
        assert_eq!([tries(&pod_states, 7), tries(&pod_states, 8)], [1, 0]);
        assert_eq!([tries(&copy, 7), tries(&copy, 8)], [0, 1]);
        assert!(pod_states.get(&uid(9)).is_some() && copy.get(&uid(9)).is_none());
        assert!(pod_states.get(&uid(1000)).is_some() && copy.get(&uid(1000)).is_none());
        assert_eq!((pod_states.in_no_order().count(), copy.in_no_order().count()), (1001, 999));
    }

    #[test]
    fn a_change_copies_one_shelf_and_one_entry_and_what_is_not_there_none() {
        let mut pod_states = filled(1000);
        let copy = pod_states.clone();
        let shared = |pod_states: &PodStates| {
            let shards = pod_states.shards.iter().zip(copy.shards.iter());
            shards.filter(|(a, b)| Arc::ptr_eq(a, b)).count()
        };
        assert!(pod_states.get_mut(&uid(5000)).is_none());
        pod_states.remove(&uid(5000));
        assert_eq!(shared(&pod_states), SHARDS);
        try_again(&mut pod_states, 7);
        assert_eq!(shared(&pod_states), SHARDS - 1);
        let all = || copy.in_no_order().map(|(uid, pod_state)| (uid, std::ptr::from_ref(pod_state)));
        let same =
            all().filter(|(uid, pod_state)| std::ptr::from_ref(&pod_states[*uid]) == *pod_state).count();
        assert_eq!(same, 999);
    }

    #[test]
    fn shelves_fill_evenly() {
        let most = filled(10_000).shards.iter().map(|shelf| shelf.len()).max().unwrap();
        assert!(most < 100, "of 39 on the average one has {most}");
    }
}
