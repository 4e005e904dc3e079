//! A hash map in shards. A copy counts the shards; a change copies one.

use rustc_hash::{FxBuildHasher, FxHashMap};
use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

/// So many that a shard has some hundreds of a million pods, and few enough to be counted in some tens of microseconds.
const SHARDS: usize = 2048;

#[derive(Debug, Clone)]
pub struct ShardedMap<K, V> {
    shards: Box<[Arc<FxHashMap<K, V>>]>,
}

impl<K, V> Default for ShardedMap<K, V> {
    fn default() -> Self {
        // They share one empty shard until something is put into them.
        let empty = Arc::default();
        Self { shards: vec![empty; SHARDS].into() }
    }
}

impl<K: Clone + Eq + Hash, V: Clone> ShardedMap<K, V> {
    pub fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.shards[shard_of(key)].get(key)
    }

    pub fn get_key_value<Q>(&self, key: &Q) -> Option<(&K, &V)>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.shards[shard_of(key)].get_key_value(key)
    }

    pub fn contains_key<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.shards[shard_of(key)].contains_key(key)
    }

    pub fn get_mut<Q>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let shard = &mut self.shards[shard_of(key)];
        // What is not there needs no copy of its shard.
        if !shard.contains_key(key) {
            return None;
        }
        Arc::make_mut(shard).get_mut(key)
    }

    /// The value of a key, made of nothing if there is none.
    pub fn get_or_insert_with(&mut self, key: K, new: impl FnOnce() -> V) -> &mut V {
        let shard = &mut self.shards[shard_of(&key)];
        Arc::make_mut(shard).entry(key).or_insert_with(new)
    }

    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        Arc::make_mut(&mut self.shards[shard_of(&key)]).insert(key, value)
    }

    pub fn remove<Q>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let shard = &mut self.shards[shard_of(key)];
        if !shard.contains_key(key) {
            return None;
        }
        Arc::make_mut(shard).remove(key)
    }

    /// All entries, in no order: for sums, and for what is put into an order afterwards.
    #[expect(clippy::disallowed_methods, reason = "the name says that there is no order")]
    pub fn in_no_order(&self) -> impl Iterator<Item = (&K, &V)> {
        self.shards.iter().flat_map(|shard| shard.iter())
    }

    /// The entries of shards that another map does not share, in no order.
    #[expect(clippy::disallowed_methods, reason = "the caller puts them into an order, or needs none")]
    pub fn unshared_with<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'a K, &'a V)> {
        let own = self.shards.iter().zip(&other.shards).filter(|(own, theirs)| !Arc::ptr_eq(own, theirs));
        own.flat_map(|(own, _)| own.iter())
    }

    /// Changes all values, each by itself.
    #[expect(
        clippy::disallowed_methods,
        reason = "nothing follows from the order of what is changed by itself"
    )]
    pub fn change_each(&mut self, mut change: impl FnMut(&mut V)) {
        for shard in self.shards.iter_mut().filter(|shard| !shard.is_empty()) {
            Arc::make_mut(shard).values_mut().for_each(&mut change);
        }
    }
}

/// By bits of the hash that the shard itself does not go by.
fn shard_of<Q: Hash + ?Sized>(key: &Q) -> usize {
    (FxBuildHasher.hash_one(key) >> 40) as usize % SHARDS
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
        let seen = |map: &ShardedMap<String, usize>| [7, 8, 9, 1000].map(|n| map.get(&uid(n)).copied());
        assert_eq!(seen(&map), [Some(5007), Some(8), Some(9), Some(2)]);
        assert_eq!(seen(&copy), [Some(7), Some(5008), None, None]);
        assert_eq!((map.in_no_order().count(), copy.in_no_order().count()), (1001, 999));
    }

    #[test]
    fn a_change_copies_one_shard_and_what_is_not_there_none() {
        let mut map = filled(1000);
        let copy = map.clone();
        let shared = |map: &ShardedMap<String, usize>| {
            map.shards.iter().zip(copy.shards.iter()).filter(|(a, b)| Arc::ptr_eq(a, b)).count()
        };
        assert!(map.get_mut(&uid(5000)).is_none() && map.remove(&uid(5000)).is_none());
        assert_eq!(shared(&map), SHARDS);
        *map.get_mut(&uid(7)).unwrap() += 1;
        assert_eq!(shared(&map), SHARDS - 1);
        let changed: Vec<_> = map.unshared_with(&copy).filter(|(uid, n)| copy.get(*uid) != Some(n)).collect();
        assert_eq!(changed, [(&uid(7), &8)]);
    }

    #[test]
    fn shards_fill_evenly() {
        let most = filled(80_000).shards.iter().map(|shard| shard.len()).max().unwrap();
        assert!(most < 100, "of 39 on the average one has {most}");
    }
}
