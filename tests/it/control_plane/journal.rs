//! The history of pods, in the order of the API server: one watch, so one order.

use super::processes::eventually;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::task::JoinHandle;

#[derive(Debug, Clone, PartialEq)]
pub enum PodChange {
    /// It has a node for the first time, and these annotations in the same write.
    Bound {
        node: String,
        annotations: BTreeMap<String, String>,
    },
    /// Its condition shows a reservation: node, devices, victims, deadline.
    Holds(Value),
    Nominated(String),
    Leaving,
    Gone,
}

type JournalEntries = Arc<Mutex<Vec<(String, PodChange)>>>;

/// Dropping this ends the watch; what was written stays readable until then.
pub struct ClusterJournal {
    entries: JournalEntries,
    task: JoinHandle<()>,
}

impl ClusterJournal {
    pub fn start(client: Client) -> Self {
        let entries = JournalEntries::default();
        let task = tokio::spawn(write(client, entries.clone()));
        Self { entries, task }
    }

    /// Everything that happened to pods of that name, with its place in the order of all things.
    pub fn entries_of(&self, pod: &str) -> Vec<(usize, PodChange)> {
        let entries = self.entries.lock();
        let numbered = entries.iter().enumerate();
        numbered
            .filter(|(_, (name, _))| name == pod)
            .map(|(place, (_, happening))| (place, happening.clone()))
            .collect()
    }

    /// When the first such thing happened to a pod.
    pub fn position_of(&self, pod: &str, is_it: impl Fn(&PodChange) -> bool) -> Option<usize> {
        self.entries_of(pod)
            .into_iter()
            .find(|(_, happening)| is_it(happening))
            .map(|(place, _)| place)
    }

    /// Waits until it contains the pod's binding, and so everything before that: another request may have shown it already.
    pub async fn binding_of(&self, pod: &str) -> (usize, String, BTreeMap<String, String>) {
        eventually(
            &format!("the watch tells of the binding of {pod}"),
            async || {
                self.entries_of(pod)
                    .into_iter()
                    .find_map(|(place, happening)| match happening {
                        PodChange::Bound { node, annotations } => Some((place, node, annotations)),
                        _ => None,
                    })
            },
        )
        .await
    }

    /// The pods that such a thing happened to, in order.
    pub fn pods_with(&self, is_it: impl Fn(&PodChange) -> bool) -> Vec<String> {
        let entries = self.entries.lock();
        entries
            .iter()
            .filter(|(_, happening)| is_it(happening))
            .map(|(name, _)| name.clone())
            .collect()
    }
}

impl Drop for ClusterJournal {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn write(client: Client, entries: JournalEntries) {
    let pods: Api<Pod> = Api::all(client);
    let mut events = watcher(pods, watcher::Config::default())
        .default_backoff()
        .boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => record_changes(&entries, &pod),
            Ok(Event::Delete(pod)) => record(&entries, &pod, PodChange::Gone),
            _ => {}
        }
    }
}

fn record_changes(entries: &JournalEntries, pod: &Pod) {
    let reservation = stowage_kubernetes_objects::ReservationMessage::read(pod);
    if let Some(message) = reservation {
        record(
            entries,
            pod,
            PodChange::Holds(serde_json::to_value(message).unwrap()),
        );
    }
    if let Some(node) = pod
        .status
        .as_ref()
        .and_then(|status| status.nominated_node_name.clone())
    {
        record(entries, pod, PodChange::Nominated(node));
    }
    if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) {
        let annotations = pod.metadata.annotations.clone().unwrap_or_default();
        record(entries, pod, PodChange::Bound { node, annotations });
    }
    if pod.metadata.deletion_timestamp.is_some() {
        record(entries, pod, PodChange::Leaving);
    }
}

/// The first time only; a later write of the same kind with other contents counts as new where contents matter.
fn record(entries: &JournalEntries, pod: &Pod, happening: PodChange) {
    let name = pod.metadata.name.clone().unwrap_or_default();
    let mut entries = entries.lock();
    let is_known = |(known, before): &(String, PodChange)| {
        *known == name
            && match (before, &happening) {
                (PodChange::Bound { node, .. }, PodChange::Bound { node: now, .. }) => node == now,
                (before, now) => before == now,
            }
    };
    if !entries.iter().any(is_known) {
        entries.push((name, happening));
    }
}
