//! A hash map in groups of shards. A copy counts the groups; a change copies one shard.

use rustc_hash::{FxBuildHasher, FxHashMap};
use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

/// A copy counts the groups, and the first change of a shard afterwards copies its group, which counts shards, and the shard,
/// which has some hundreds of a million pods: microseconds each.
const GROUPS: usize = 64;
/// Shards in each group.
const SHARDS_PER_GROUP: usize = 64;

type Shard<K, V> = Arc<FxHashMap<K, V>>;
type Group<K, V> = Arc<[Shard<K, V>]>;

#[derive(Debug, Clone)]
pub(crate) struct ShardedMap<K, V> {
    groups: Box<[Group<K, V>]>,
    /// All groups are this one until something is put into them: a map of few entries has few groups to go through.
    empty: Group<K, V>,
}

impl<K, V> Default for ShardedMap<K, V> {
    fn default() -> Self {
        let empty: Group<K, V> = vec![Shard::default(); SHARDS_PER_GROUP].into();
        Self {
            groups: vec![empty.clone(); GROUPS].into(),
            empty,
        }
    }
}

impl<K: Clone + Eq + Hash, V: Clone> ShardedMap<K, V> {
    pub fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.shard(key).get(key)
    }

    pub fn get_key_value<Q>(&self, key: &Q) -> Option<(&K, &V)>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.shard(key).get_key_value(key)
    }

    pub fn contains_key<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.shard(key).contains_key(key)
    }

    pub fn get_mut<Q>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        // What is not there needs no copy of its shard.
        if !self.contains_key(key) {
            return None;
        }
        self.shard_mut(key).get_mut(key)
    }

    /// The value of a key, made of nothing if there is none.
    pub fn get_or_insert_with(&mut self, key: K, new: impl FnOnce() -> V) -> &mut V {
        self.shard_mut(&key).entry(key).or_insert_with(new)
    }

    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.shard_mut(&key).insert(key, value)
    }

    pub fn remove<Q>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        if !self.contains_key(key) {
            return None;
        }
        self.shard_mut(key).remove(key)
    }

    /// All entries, in no order: for sums, and for what is put into an order afterwards.
    #[expect(
        clippy::disallowed_methods,
        reason = "the name says that there is no order"
    )]
    pub(crate) fn iter_unordered(&self) -> impl Iterator<Item = (&K, &V)> {
        let filled = self
            .groups
            .iter()
            .filter(|group| !Arc::ptr_eq(group, &self.empty));
        filled
            .flat_map(|group| group.iter())
            .flat_map(|shard| shard.iter())
    }

    /// The entries of shards that another map does not share, in no order.
    #[expect(
        clippy::disallowed_methods,
        reason = "the caller puts them into an order, or needs none"
    )]
    pub(crate) fn unshared_with<'a>(
        &'a self,
        other: &'a Self,
    ) -> impl Iterator<Item = (&'a K, &'a V)> {
        let groups = self
            .groups
            .iter()
            .zip(&other.groups)
            .filter(|(own, theirs)| !Arc::ptr_eq(own, theirs));
        let shards = groups.flat_map(|(own, theirs)| own.iter().zip(&**theirs));
        shards
            .filter(|(own, theirs)| !Arc::ptr_eq(own, theirs))
            .flat_map(|(own, _)| own.iter())
    }

    /// Changes all values, each by itself.
    #[expect(
        clippy::disallowed_methods,
        reason = "nothing follows from the order of what is changed by itself"
    )]
    pub(crate) fn change_each(&mut self, mut change: impl FnMut(&mut V)) {
        for group in self
            .groups
            .iter_mut()
            .filter(|group| !Arc::ptr_eq(group, &self.empty))
        {
            for shard in Arc::make_mut(group)
                .iter_mut()
                .filter(|shard| !shard.is_empty())
            {
                Arc::make_mut(shard).values_mut().for_each(&mut change);
            }
        }
    }

    fn shard<Q: Hash + ?Sized>(&self, key: &Q) -> &Shard<K, V> {
        let (group, shard) = shard_index(key);
        &self.groups[group][shard]
    }

    fn shard_mut<Q: Hash + ?Sized>(&mut self, key: &Q) -> &mut FxHashMap<K, V> {
        let (group, shard) = shard_index(key);
        Arc::make_mut(&mut Arc::make_mut(&mut self.groups[group])[shard])
    }
}

impl<K: Clone + Eq + Hash, V: Clone> FromIterator<(K, V)> for ShardedMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self::default();
        entries
            .into_iter()
            .for_each(|(key, value)| drop(map.insert(key, value)));
        map
    }
}

/// The group and shard of a key, by bits of the hash that the shard itself does not go by.
fn shard_index<Q: Hash + ?Sized>(key: &Q) -> (usize, usize) {
    let bits = (FxBuildHasher.hash_one(key) >> 40) as usize;
    (bits / SHARDS_PER_GROUP % GROUPS, bits % SHARDS_PER_GROUP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(n: usize) -> String {
        format!("{n:08x}-0000-4000-8000-000000000000")
    }

    fn filled(count: usize) -> ShardedMap<String, usize> {
        let mut map = ShardedMap::default();
        for n in 0..count {
            map.insert(uid(n), n);
        }
        map
    }

    #[test]
    fn what_one_side_changes_the_other_does_not_see() {
        let mut map = filled(1000);
        let mut copy = map.clone();
        *map.get_mut(&uid(7)).unwrap() += 5000;
        *copy.get_mut(&uid(8)).unwrap() += 5000;
        copy.remove(&uid(9));
        *map.get_or_insert_with(uid(1000), || 1) += 1;
        let seen =
            |map: &ShardedMap<String, usize>| [7, 8, 9, 1000].map(|n| map.get(&uid(n)).copied());
        assert_eq!(seen(&map), [Some(5007), Some(8), Some(9), Some(2)]);
        assert_eq!(seen(&copy), [Some(7), Some(5008), None, None]);
        assert_eq!(
            (map.iter_unordered().count(), copy.iter_unordered().count()),
            (1001, 999)
        );
    }

    #[test]
    fn a_change_copies_one_shard_and_what_is_not_there_none() {
        let mut map = filled(1000);
        let copy = map.clone();
        let shards = |map: &ShardedMap<String, usize>| -> Vec<_> {
            map.groups
                .iter()
                .flat_map(|group| group.iter().map(Arc::as_ptr))
                .collect()
        };
        let shared = |map: &ShardedMap<String, usize>| {
            shards(map)
                .into_iter()
                .zip(shards(&copy))
                .filter(|(own, theirs)| own == theirs)
                .count()
        };
        assert!(map.get_mut(&uid(5000)).is_none() && map.remove(&uid(5000)).is_none());
        assert_eq!(shared(&map), GROUPS * SHARDS_PER_GROUP);
        *map.get_mut(&uid(7)).unwrap() += 1;
        assert_eq!(shared(&map), GROUPS * SHARDS_PER_GROUP - 1);
        let changed: Vec<_> = map
            .unshared_with(&copy)
            .filter(|(uid, n)| copy.get(*uid) != Some(n))
            .collect();
        assert_eq!(changed, [(&uid(7), &8)]);
    }

    #[test]
    fn shards_fill_evenly() {
        let map = filled(160_000);
        let most = map
            .groups
            .iter()
            .flat_map(|group| group.iter().map(|shard| shard.len()))
            .max()
            .unwrap();
        assert!(most < 100, "of 39 on the average one has {most}");
    }
}
