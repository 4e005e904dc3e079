//! Every version of every pod, in order, as a watch shows them.

use super::super::processes::eventually;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::Value;
use std::sync::Arc;
use tokio::task::JoinHandle;

/// Dropping this ends the watch.
pub struct PodVersions {
    versions: Arc<Mutex<Vec<Value>>>,
    task: JoinHandle<()>,
}

impl PodVersions {
    pub fn start(client: Client) -> Self {
        let versions: Arc<Mutex<Vec<Value>>> = Arc::default();
        let seen = versions.clone();
        let task = tokio::spawn(async move {
            // Not as `Pod`: what the API server has and the type has not is recorded as well.
            let pods: Api<DynamicObject> = Api::all_with(client, &ApiResource::erase::<Pod>(&()));
            let mut events = watcher(pods, watcher::Config::default()).boxed();
            while let Some(event) = events.next().await {
                if let Ok(Event::Apply(pod) | Event::InitApply(pod)) = event {
                    seen.lock().push(serde_json::to_value(pod).unwrap());
                }
            }
        });
        Self { versions, task }
    }

    /// The first version of a pod of which this is so.
    pub async fn first(&self, what: &str, pod: &str, is_it: impl Fn(&Pod) -> bool) -> Value {
        let is_it =
            |version: &Value| is_it(&serde_json::from_value(version.clone()).expect("it is a pod"));
        eventually(&format!("{pod} {what}"), async || {
            let versions = self.versions.lock();
            versions
                .iter()
                .find(|version| version["metadata"]["name"] == pod && is_it(version))
                .cloned()
        })
        .await
    }
}

impl Drop for PodVersions {
    fn drop(&mut self) {
        self.task.abort();
    }
}
