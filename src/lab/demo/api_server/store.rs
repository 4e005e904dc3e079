//! The stored objects, one global resource version, and the change log that watches read.
//!
//! Synchronous and unaware of HTTP. `write` decides what a write means for a pod; here it only gets its version and goes into
//! the log, and is dropped if it would change nothing (as the real server does: a client that writes the same condition twice
//! wakes no watcher).

use super::error::ApiError;
use super::resource::Resource;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

/// How many changes a watch may lag behind: far more than a demo or test makes while a client reconnects.
const MAX_LOG_LENGTH: usize = 1 << 16;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ObjectKey {
    pub resource: &'static Resource,
    pub namespace: String,
    pub name: String,
}

/// One write. Creations have no `before`, deletions no `after`.
#[derive(Debug, Clone)]
pub(crate) struct StoredChange {
    pub revision: u64,
    pub resource: &'static Resource,
    pub before: Option<Arc<Value>>,
    pub after: Option<Arc<Value>>,
}

#[derive(Debug, Default)]
pub struct Store {
    objects: BTreeMap<ObjectKey, Arc<Value>>,
    revision: u64,
    log: VecDeque<StoredChange>,
    /// Changes up to this version are no longer in the log.
    compacted_revision: u64,
    objects_created: u64,
}

impl Store {
    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub fn get(&self, key: &ObjectKey) -> Result<&Arc<Value>, ApiError> {
        self.objects
            .get(key)
            .ok_or_else(|| ApiError::not_found(key.resource, &key.name))
    }

    /// All objects of a kind, by namespace and name.
    pub fn list(&self, resource: &'static Resource) -> impl Iterator<Item = &Arc<Value>> {
        let first = ObjectKey {
            resource,
            namespace: String::new(),
            name: String::new(),
        };
        self.objects
            .range((Bound::Included(first), Bound::Unbounded))
            .take_while(move |(key, _)| key.resource == resource)
            .map(|(_, object)| object)
    }

    /// Stores a new object; `now` becomes its creation time.
    pub fn create(
        &mut self,
        key: ObjectKey,
        mut object: Value,
        now: &str,
    ) -> Result<Arc<Value>, ApiError> {
        if self.objects.contains_key(&key) {
            return Err(ApiError::already_exists(key.resource, &key.name));
        }
        self.objects_created += 1;
        object["metadata"]["uid"] = json!(uid(self.objects_created));
        object["metadata"]["creationTimestamp"] = json!(now);
        Ok(self.write(key, object))
    }

    /// Replaces an object; a write that changes nothing gets no version.
    pub fn update(&mut self, key: &ObjectKey, object: Value) -> Result<Arc<Value>, ApiError> {
        let current = self.get(key)?;
        if **current == object {
            Ok(current.clone())
        } else {
            Ok(self.write(key.clone(), object))
        }
    }

    pub fn remove(&mut self, key: &ObjectKey) -> Result<Arc<Value>, ApiError> {
        let before = self.get(key)?.clone();
        self.objects.remove(key);
        self.revision += 1;
        let mut last = Value::clone(&before);
        last["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let last = Arc::new(last);
        self.record(StoredChange {
            revision: self.revision,
            resource: key.resource,
            before: Some(last.clone()),
            after: None,
        });
        Ok(last)
    }

    /// The changes after `revision`, or `Expired` when the log no longer reaches back that far.
    pub(crate) fn changes_after(
        &self,
        revision: u64,
    ) -> Result<impl Iterator<Item = &StoredChange>, ApiError> {
        if revision < self.compacted_revision {
            return Err(ApiError::expired(revision, self.compacted_revision));
        }
        Ok(self.retained_changes_after(revision))
    }

    /// The changes after `revision` that the log still has.
    pub(crate) fn retained_changes_after(
        &self,
        revision: u64,
    ) -> impl Iterator<Item = &StoredChange> {
        let start = self
            .log
            .partition_point(|change| change.revision <= revision);
        self.log.range(start..)
    }

    /// Forgets the log, as etcd's compaction does.
    pub fn compact(&mut self) {
        self.log.clear();
        self.compacted_revision = self.revision;
    }

    fn write(&mut self, key: ObjectKey, mut object: Value) -> Arc<Value> {
        self.revision += 1;
        object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let object = Arc::new(object);
        let resource = key.resource;
        let before = self.objects.insert(key, object.clone());
        self.record(StoredChange {
            revision: self.revision,
            resource,
            before,
            after: Some(object.clone()),
        });
        object
    }

    fn record(&mut self, change: StoredChange) {
        self.log.push_back(change);
        if self.log.len() > MAX_LOG_LENGTH
            && let Some(oldest) = self.log.pop_front()
        {
            self.compacted_revision = oldest.revision;
        }
    }
}

/// Deterministic, and still shaped like a UID.
fn uid(number: u64) -> String {
    format!("00000000-0000-4000-8000-{number:012x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> ObjectKey {
        ObjectKey {
            resource: Resource::named("nodes").unwrap(),
            namespace: String::new(),
            name: name.to_owned(),
        }
    }

    #[test]
    fn a_write_that_changes_nothing_gets_no_version() {
        let mut store = Store::default();
        let created = store
            .create(node("a"), json!({"metadata": {"name": "a"}}), "now")
            .unwrap();
        let again = store.update(&node("a"), Value::clone(&created)).unwrap();
        assert_eq!(again, created);
        assert_eq!(store.revision(), 1);
    }

    #[test]
    fn the_log_is_read_from_any_version_until_it_is_compacted() {
        let mut store = Store::default();
        store
            .create(node("a"), json!({"metadata": {"name": "a"}}), "now")
            .unwrap();
        store
            .create(node("b"), json!({"metadata": {"name": "b"}}), "now")
            .unwrap();
        assert_eq!(store.changes_after(1).unwrap().count(), 1);
        store.compact();
        assert_eq!(
            store.changes_after(1).err().map(|error| error.code),
            Some(410)
        );
        assert_eq!(store.changes_after(2).unwrap().count(), 0);
    }

    #[test]
    fn a_deletion_has_a_version_of_its_own() {
        let mut store = Store::default();
        store
            .create(node("a"), json!({"metadata": {"name": "a"}}), "now")
            .unwrap();
        let last = store.remove(&node("a")).unwrap();
        assert_eq!(last["metadata"]["resourceVersion"], "2");
        assert_eq!(store.get(&node("a")).unwrap_err().code, 404);
    }
}
