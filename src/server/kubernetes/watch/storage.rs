//! The watches of persistent volumes, claims and storage classes.

use super::{PAGE, WatchFeed, WatchHandler, retry_or_relist, watch};
use kube::runtime::watcher::Event;
use kube::{Client, Resource};
use stowage_kubernetes_objects::StorageResource;

pub(crate) const CLAIMS: &str = "persistentvolumeclaims";
pub(crate) const VOLUMES: &str = "persistentvolumes";
pub const CLASSES: &str = "storageclasses";
/// All of them are needed to evaluate a pod with claims.
pub(crate) const STORAGE: [&str; 3] = [CLAIMS, VOLUMES, CLASSES];

/// Watches one kind of storage object, by which the planner evaluates pods with volumes. Readiness does not wait for it.
pub async fn storage<K>(client: Client, feed: WatchFeed, what: &'static str)
where
    K: StorageResource
        + Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let taking = WatchHandler {
        take: WatchFeed::storage::<K>,
        fails: retry_or_relist,
        unread: "the planner plans no pod with persistent volume claims",
        expect_list: |_, _| {},
        page: PAGE,
    };
    watch(client, &feed, what, taking).await;
}

impl WatchFeed {
    fn storage<K: StorageResource>(&self, event: Event<K>) {
        let mut index = self.index.lock();
        match event {
            Event::Init => index.begin_storage(&self.service, K::KIND),
            Event::InitApply(object) | Event::Apply(object) => {
                index.apply_storage(&self.service, &object)
            }
            Event::Delete(object) => index.delete_storage(&self.service, &object),
            Event::InitDone => index.end_storage(&self.service, K::KIND),
        }
    }
}
