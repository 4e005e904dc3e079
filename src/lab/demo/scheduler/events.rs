//! Applies watch events: updates the view, and wakes the pods in the queue that they concern.
//!
//! Synchronous. docs/inside/kube-scheduler.md has the rules ("What requeues a refused pod").

use super::config::SchedulerConfig;
use super::objects::{SchedulerNode, SchedulerPod};
use super::observations::Observations;
use super::queue::{SchedulingQueue, Waker};
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
        unseen: BTreeSet<String>,
    },
    Complete,
}

/// The view and the queue, updated together from the API server.
pub(crate) struct SchedulerState {
    pub view: SchedulerCache,
    pub queue: SchedulingQueue,
    nodes: Listing,
    pods: Listing,
}

impl SchedulerState {
    pub fn new() -> Self {
        Self {
            view: SchedulerCache::default(),
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

    pub(crate) fn node_notice(
        &mut self,
        notice: WatchNotice,
        observations: &Observations,
        now: Instant,
    ) {
        match notice {
            WatchNotice::Relisting => {
                let unseen = self.view.nodes().map(|node| node.name.clone()).collect();
                self.nodes = Listing::InProgress { unseen };
            }
            WatchNotice::Applied(object) => {
                let node = SchedulerNode::parse(object);
                self.nodes.saw(&node.name);
                observations.saw_node(version(&node.object));
                self.apply_node(Arc::new(node), now);
            }
            WatchNotice::Deleted(object) => {
                observations.saw_node(version(&object));
                self.view.delete_node(&SchedulerNode::parse(object).name);
            }
            WatchNotice::Synced => {
                self.nodes
                    .complete()
                    .iter()
                    .for_each(|gone| self.view.delete_node(gone));
            }
        }
    }

    pub(crate) fn pod_notice(
        &mut self,
        notice: WatchNotice,
        config: &SchedulerConfig,
        observations: &Observations,
        now: Instant,
    ) {
        match notice {
            WatchNotice::Relisting => {
                let unseen = self.view.uids().cloned().collect();
                self.pods = Listing::InProgress { unseen };
            }
            WatchNotice::Applied(object) => {
                let seen = version(&object);
                if let Some(pod) = SchedulerPod::parse(object) {
                    self.pods.saw(&pod.uid);
                    observations.record(pod.full_name(), |outcome| outcome.node = pod.node.clone());
                    self.apply_pod(Arc::new(pod), config, now);
                }
                observations.saw_pod(seen);
            }
            WatchNotice::Deleted(object) => {
                let seen = version(&object);
                if let Some(pod) = SchedulerPod::parse(object) {
                    self.delete_pod(&pod.uid, now);
                }
                observations.saw_pod(seen);
            }
            WatchNotice::Synced => {
                for gone in self.pods.complete() {
                    self.delete_pod(&gone, now);
                }
            }
        }
    }

    fn apply_node(&mut self, node: Arc<SchedulerNode>, now: Instant) {
        let waker = match self.view.apply_node(node.clone()) {
            None => Some(Waker::NodeAdded),
            Some(before) => node_change(&before, &node),
        };
        if let Some(waker) = waker {
            self.queue.wake_all(waker, now);
        }
    }

    fn apply_pod(&mut self, pod: Arc<SchedulerPod>, config: &SchedulerConfig, now: Instant) {
        let before = self.view.apply_pod(pod.clone());
        if pod.node.is_some() || pod.ended {
            self.queue.remove(&pod.uid);
            self.bound_pod_changed(before.as_deref(), &pod, now);
            return;
        }
        if let Some(before) = &before
            && before.nominated.is_some()
            && before.nominated != pod.nominated
        {
            self.queue.wake_up_to_priority(pod.priority, now);
        }
        if pod.scheduler_name != config.scheduler_name || pod.gated || pod.terminating {
            self.queue.remove(&pod.uid);
        } else if !self.queue.contains(&pod.uid) {
            self.queue.add(&pod.uid, pod.priority, now);
        } else if let Some(before) = before
            && pod.differs_from(&before)
        {
            self.queue.wake(&pod.uid, own_change(&before, &pod), now);
        }
    }

    fn bound_pod_changed(
        &mut self,
        before: Option<&SchedulerPod>,
        pod: &SchedulerPod,
        now: Instant,
    ) {
        let held_room = before.is_some_and(|before| before.node.is_some() && !before.ended);
        let waker = match (held_room, pod.ended) {
            (true, true) => Waker::PodGone,
            (true, false) => Waker::BoundPodChanged,
            // A pod that was just bound frees nothing.
            (false, _) => return,
        };
        self.queue.wake_all(waker, now);
    }

    fn delete_pod(&mut self, uid: &str, now: Instant) {
        self.queue.remove(uid);
        let assumed = self.view.is_assumed(uid);
        let Some(pod) = self.view.delete_pod(uid) else {
            return;
        };
        if assumed || (pod.node.is_some() && !pod.ended) {
            self.queue.wake_all(Waker::PodGone, now);
        } else if pod.nominated.is_some() {
            self.queue.wake_up_to_priority(pod.priority, now);
        }
    }
}

impl Listing {
    fn saw(&mut self, name: &str) {
        if let Self::InProgress { unseen } = self {
            unseen.remove(name);
        }
    }

    /// Ends a list; objects that it did not contain are gone.
    fn complete(&mut self) -> BTreeSet<String> {
        match std::mem::replace(self, Self::Complete) {
            Self::InProgress { unseen } => unseen,
            Self::Never | Self::Complete => BTreeSet::new(),
        }
    }
}

/// Heartbeats and image lists do not count as changes.
fn node_change(before: &SchedulerNode, after: &SchedulerNode) -> Option<Waker> {
    let differs = |pointer: &str| before.object.pointer(pointer) != after.object.pointer(pointer);
    if before.allocatable != after.allocatable {
        Some(Waker::NodeAllocatable)
    } else if differs("/metadata/labels")
        || differs("/spec/taints")
        || differs("/spec/unschedulable")
    {
        Some(Waker::NodePlacement)
    } else if differs("/metadata/annotations") {
        Some(Waker::NodeOther)
    } else {
        None
    }
}

fn own_change(before: &SchedulerPod, after: &SchedulerPod) -> Waker {
    let differs = |pointer: &str| before.object.pointer(pointer) != after.object.pointer(pointer);
    if differs("/spec") || differs("/metadata/labels") {
        Waker::OwnSpec
    } else {
        Waker::OwnOther
    }
}

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"]
        .as_str()
        .and_then(|text| text.parse().ok())
        .unwrap_or_default()
}
