//! The watches of persistent volumes, claims and storage classes.

use super::{LIST_PAGE_SIZE, WatchFeed, WatchHandler, retry_or_relist, watch};
use kube::runtime::watcher::Event;
use kube::{Client, Resource};
use stowage_kubernetes_objects::StorageResource;

pub(crate) const CLAIMS: &str = "persistentvolumeclaims";
pub(crate) const VOLUMES: &str = "persistentvolumes";
pub const STORAGE_CLASSES: &str = "storageclasses";
/// All of them are needed to evaluate a pod with claims.
pub(crate) const STORAGE_RESOURCES: [&str; 3] = [CLAIMS, VOLUMES, STORAGE_CLASSES];

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
    let handler = WatchHandler {
        apply: WatchFeed::apply_storage_event::<K>,
        on_error: retry_or_relist,
        while_unreadable: "the planner plans no pod with persistent volume claims",
        expect_list: |_, _| {},
        page_size: LIST_PAGE_SIZE,
    };
    watch(client, &feed, what, handler).await;
}

impl WatchFeed {
    fn apply_storage_event<K: StorageResource>(&self, event: Event<K>) {
        let mut index = self.index.lock();
        match event {
            Event::Init => index.begin_storage_list(&self.state, K::KIND),
            Event::InitApply(object) | Event::Apply(object) => {
                index.apply_storage(&self.state, &object)
            }
            Event::Delete(object) => index.delete_storage(&self.state, &object),
            Event::InitDone => index.end_storage_list(&self.state, K::KIND),
        }
    }
}
