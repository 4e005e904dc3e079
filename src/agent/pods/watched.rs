//! Watches the pods of this node, and only those, at the API server.
//!
//! Known pods stay while the watch is down: pods come and go more slowly than API servers restart.

use super::{PodOnNode, PodSource};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_telemetry::root_cause;
use tokio::task::JoinHandle;

/// Pods in one page of a list: what a node's tenants write has to fit into the agent's memory, page by page.
const LIST_PAGE_SIZE: u32 = 16;
/// A server ends a watch after this many seconds and it is resumed; a connection that died silently is noticed then.
const WATCH_TIMEOUT_SECONDS: u32 = 60;

/// Dropping it ends the watch.
pub struct WatchedPods {
    state: Arc<Mutex<WatchedState>>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct WatchedState {
    /// The pods of the node; `None` until the first list is complete.
    pods: Option<BTreeMap<PodUid, PodOnNode>>,
    /// The list in progress.
    listing: BTreeMap<PodUid, PodOnNode>,
    problem: Option<String>,
}

impl WatchedPods {
    /// Must be called inside a tokio runtime.
    pub fn start(client: Client, node: &NodeName) -> Self {
        let problem = Some("the API server has not listed the node's pods yet".into());
        let state = Arc::new(Mutex::new(WatchedState {
            pods: None,
            listing: BTreeMap::new(),
            problem,
        }));
        let task = tokio::spawn(watch(client, node.clone(), state.clone()));
        Self { state, task }
    }
}

impl Drop for WatchedPods {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PodSource for WatchedPods {
    fn pods(&mut self) -> Result<Vec<PodOnNode>, String> {
        let state = self.state.lock();
        match (&state.pods, &state.problem) {
            (Some(pods), _) => Ok(pods.values().cloned().collect()),
            (None, problem) => Err(problem.clone().unwrap_or_default()),
        }
    }
}

async fn watch(client: Client, node: NodeName, state: Arc<Mutex<WatchedState>>) {
    let config = watcher::Config::default()
        .fields(&format!("spec.nodeName={node}"))
        .timeout(WATCH_TIMEOUT_SECONDS)
        .page_size(LIST_PAGE_SIZE);
    let events = watcher(Api::<Pod>::all(client), config);
    let mut events = objects::with_growing_pauses(events).boxed();
    while let Some(event) = events.next().await {
        state.lock().handle_event(event);
    }
}

impl WatchedState {
    fn handle_event(&mut self, event: Result<Event<Pod>, watcher::Error>) {
        match event {
            Ok(event) => {
                if let Event::InitApply(pod) | Event::Apply(pod) = &event
                    && objects::is_stand_in(&pod.metadata)
                {
                    let name = |part: &Option<String>| part.clone().unwrap_or_default();
                    let (namespace, name) =
                        (name(&pod.metadata.namespace), name(&pod.metadata.name));
                    tracing::warn!(
                        "the pod {namespace}/{name} is larger than the agent reads: no engine of it is looked for"
                    );
                }
                self.apply(event);
                // During the first list there are no pods yet.
                if self.pods.is_some() && self.problem.take().is_some() {
                    tracing::info!("the API server lists this node's pods");
                }
            }
            Err(error) => {
                let problem = format!(
                    "the API server does not list this node's pods: {}",
                    root_cause(&error)
                );
                // Until the first list, the report says so.
                if self.pods.is_some() && self.problem.as_ref() != Some(&problem) {
                    tracing::warn!("{problem}; those known stay");
                }
                self.problem = Some(problem);
            }
        }
    }

    fn apply(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(pod) => {
                self.listing
                    .extend(PodOnNode::from_pod(&pod).map(|pod| (pod.uid.clone(), pod)));
            }
            Event::InitDone => self.pods = Some(std::mem::take(&mut self.listing)),
            Event::Apply(pod) => match (PodOnNode::from_pod(&pod), &mut self.pods) {
                (Some(pod), Some(pods)) => drop(pods.insert(pod.uid.clone(), pod)),
                (None, _) => self.remove_pod(&pod),
                (Some(_), None) => {}
            },
            Event::Delete(pod) => self.remove_pod(&pod),
        }
    }

    fn remove_pod(&mut self, pod: &Pod) {
        if let (Some(pods), Some(uid)) = (&mut self.pods, &pod.metadata.uid) {
            pods.retain(|pod_uid, _| pod_uid.as_str() != uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_pods_before_the_first_complete_list() {
        let reason = "not yet".to_owned();
        let mut seen = WatchedState {
            pods: None,
            listing: BTreeMap::new(),
            problem: Some(reason.clone()),
        };
        seen.handle_event(Ok(Event::Init));
        assert_eq!((&seen.pods, &seen.problem), (&None, &Some(reason)));
        seen.handle_event(Ok(Event::InitDone));
        assert_eq!((seen.pods, seen.problem), (Some(BTreeMap::new()), None));
    }
}
