//! Applies watch events: updates the view, and wakes the pods in the queue that they concern.
//!
//! Synchronous. docs/inside/kube-scheduler.md has the rules ("What requeues a refused pod").

use super::config::SchedulerConfig;
use super::objects::{SchedulerNode, SchedulerPod};
use super::observations::SchedulerObservations;
use super::queue::{ClusterEvent, SchedulingQueue};
use super::view::SchedulerCache;
use crate::demo::watching::WatchNotice;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::time::Instant;

/// Objects that a list in progress has not contained yet.
#[derive(Debug)]
enum Listing {
    /// Nothing was ever listed.
    Never,
    InProgress {
        unlisted: BTreeSet<String>,
    },
    Complete,
}

/// The view and the queue, updated together from the API server.
pub(crate) struct SchedulerState {
    pub cache: SchedulerCache,
    pub queue: SchedulingQueue,
    nodes: Listing,
    pods: Listing,
}

impl SchedulerState {
    pub fn new() -> Self {
        Self {
            cache: SchedulerCache::default(),
            queue: SchedulingQueue::default(),
            nodes: Listing::Never,
            pods: Listing::Never,
        }
    }

    /// Whether both first lists are complete: before, a cycle would see half a cluster.
    pub fn is_synced(&self) -> bool {
        matches!(
            (&self.nodes, &self.pods),
            (Listing::Complete, Listing::Complete)
        )
    }

    pub(crate) fn apply_node_notice(
        &mut self,
        notice: WatchNotice,
        observations: &SchedulerObservations,
        now: Instant,
    ) {
        match notice {
            WatchNotice::Relisting => {
                let unseen = self.cache.nodes().map(|node| node.name.clone()).collect();
                self.nodes = Listing::InProgress { unlisted: unseen };
            }
            WatchNotice::Applied(object) => {
                let node = SchedulerNode::parse(object);
                self.nodes.observe(&node.name);
                observations.record_node_version(version(&node.object));
                self.apply_node(Arc::new(node), now);
            }
            WatchNotice::Deleted(object) => {
                observations.record_node_version(version(&object));
                self.cache.delete_node(&SchedulerNode::parse(object).name);
            }
            WatchNotice::Synced => {
                self.nodes
                    .complete()
                    .iter()
                    .for_each(|gone| self.cache.delete_node(gone));
            }
        }
    }

    pub(crate) fn apply_pod_notice(
        &mut self,
        notice: WatchNotice,
        config: &SchedulerConfig,
        observations: &SchedulerObservations,
        now: Instant,
    ) {
        match notice {
            WatchNotice::Relisting => {
                let unseen = self.cache.uids().cloned().collect();
                self.pods = Listing::InProgress { unlisted: unseen };
            }
            WatchNotice::Applied(object) => {
                let pod_version = version(&object);
                if let Some(pod) = SchedulerPod::parse(object) {
                    self.pods.observe(&pod.uid);
                    observations
                        .record_outcome(pod.full_name(), |outcome| outcome.node = pod.node.clone());
                    self.apply_pod(Arc::new(pod), config, now);
                }
                observations.record_pod_version(pod_version);
            }
            WatchNotice::Deleted(object) => {
                let pod_version = version(&object);
                if let Some(pod) = SchedulerPod::parse(object) {
                    self.delete_pod(&pod.uid, now);
                }
                observations.record_pod_version(pod_version);
            }
            WatchNotice::Synced => {
                for gone in self.pods.complete() {
                    self.delete_pod(&gone, now);
                }
            }
        }
    }

    fn apply_node(&mut self, node: Arc<SchedulerNode>, now: Instant) {
        let waker = match self.cache.apply_node(node.clone()) {
            None => Some(ClusterEvent::NodeAdded),
            Some(before) => node_change(&before, &node),
        };
        if let Some(waker) = waker {
            self.queue.requeue_all(waker, now);
        }
    }

    fn apply_pod(&mut self, pod: Arc<SchedulerPod>, config: &SchedulerConfig, now: Instant) {
        let before = self.cache.apply_pod(pod.clone());
        if pod.node.is_some() || pod.has_ended {
            self.queue.remove(&pod.uid);
            self.bound_pod_changed(before.as_deref(), &pod, now);
            return;
        }
        if let Some(before) = &before
            && before.nominated_node.is_some()
            && before.nominated_node != pod.nominated_node
        {
            self.queue.requeue_up_to_priority(pod.priority, now);
        }
        if pod.scheduler_name != config.scheduler_name || pod.is_gated || pod.is_terminating {
            self.queue.remove(&pod.uid);
        } else if !self.queue.contains(&pod.uid) {
            self.queue.add(&pod.uid, pod.priority, now);
        } else if let Some(before) = before
            && pod.differs_from(&before)
        {
            self.queue.requeue(&pod.uid, pod_change(&before, &pod), now);
        }
    }

    fn bound_pod_changed(
        &mut self,
        before: Option<&SchedulerPod>,
        pod: &SchedulerPod,
        now: Instant,
    ) {
        let held_resources =
            before.is_some_and(|before| before.node.is_some() && !before.has_ended);
        let waker = match (held_resources, pod.has_ended) {
            (true, true) => ClusterEvent::BoundPodDeleted,
            (true, false) => ClusterEvent::BoundPodChanged,
            // A pod that was just bound frees nothing.
            (false, _) => return,
        };
        self.queue.requeue_all(waker, now);
    }

    fn delete_pod(&mut self, uid: &str, now: Instant) {
        self.queue.remove(uid);
        let assumed = self.cache.is_assumed(uid);
        let Some(pod) = self.cache.delete_pod(uid) else {
            return;
        };
        if assumed || (pod.node.is_some() && !pod.has_ended) {
            self.queue.requeue_all(ClusterEvent::BoundPodDeleted, now);
        } else if pod.nominated_node.is_some() {
            self.queue.requeue_up_to_priority(pod.priority, now);
        }
    }
}

impl Listing {
    fn observe(&mut self, name: &str) {
        if let Self::InProgress { unlisted: unseen } = self {
            unseen.remove(name);
        }
    }

    /// Ends a list; objects that it did not contain are gone.
    fn complete(&mut self) -> BTreeSet<String> {
        match std::mem::replace(self, Self::Complete) {
            Self::InProgress { unlisted: unseen } => unseen,
            Self::Never | Self::Complete => BTreeSet::new(),
        }
    }
}

/// Heartbeats and image lists do not count as changes.
fn node_change(before: &SchedulerNode, after: &SchedulerNode) -> Option<ClusterEvent> {
    let differs = |pointer: &str| before.object.pointer(pointer) != after.object.pointer(pointer);
    if before.allocatable != after.allocatable {
        Some(ClusterEvent::NodeAllocatable)
    } else if differs("/metadata/labels")
        || differs("/spec/taints")
        || differs("/spec/unschedulable")
    {
        Some(ClusterEvent::NodePlacement)
    } else if differs("/metadata/annotations") {
        Some(ClusterEvent::NodeOther)
    } else {
        None
    }
}

fn pod_change(before: &SchedulerPod, after: &SchedulerPod) -> ClusterEvent {
    let differs = |pointer: &str| before.object.pointer(pointer) != after.object.pointer(pointer);
    if differs("/spec") || differs("/metadata/labels") {
        ClusterEvent::PodSpecChanged
    } else {
        ClusterEvent::PodOtherChanged
    }
}

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"]
        .as_str()
        .and_then(|text| text.parse().ok())
        .unwrap_or_default()
}
