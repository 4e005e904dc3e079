//! The scheduler's cache: nodes, and pods by node, whether bound, assumed or nominated.
//!
//! Synchronous; updated by the watches and by the scheduler's own assumptions. It decides nothing.

use super::filters::NodeUsage;
use super::objects::{SchedulerNode, SchedulerPod, subtract};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Debug, Default)]
pub(crate) struct SchedulerCache {
    nodes: BTreeMap<String, Arc<SchedulerNode>>,
    pods: BTreeMap<String, Arc<SchedulerPod>>,
    /// Pod UID → node, from the scheduling cycle until the watch shows it or the bind fails.
    assumed: BTreeMap<String, String>,
    nominated: BTreeMap<String, String>,
    /// Each node's used resources, of bound and assumed pods.
    usage_by_node: BTreeMap<String, CachedNode>,
}

#[derive(Debug, Default)]
struct CachedNode {
    uids: BTreeSet<String>,
    usage: NodeUsage,
}

impl SchedulerCache {
    pub fn nodes(&self) -> impl ExactSizeIterator<Item = &Arc<SchedulerNode>> {
        self.nodes.values()
    }

    pub fn node(&self, name: &str) -> Option<&Arc<SchedulerNode>> {
        self.nodes.get(name)
    }

    pub fn pod(&self, uid: &str) -> Option<&Arc<SchedulerPod>> {
        self.pods.get(uid)
    }

    pub fn uids(&self) -> impl Iterator<Item = &String> {
        self.pods.keys()
    }

    /// Bound to a node or assumed on it, and not ended.
    pub fn pods_on(&self, node: &str) -> impl Iterator<Item = &Arc<SchedulerPod>> {
        let uids = self
            .usage_by_node
            .get(node)
            .into_iter()
            .flat_map(|entry| &entry.uids);
        uids.filter_map(|uid| self.pods.get(uid))
    }

    /// What a pod finds used: existing pods, and nominated pods that have precedence.
    pub(crate) fn usage_for(&self, pod: &SchedulerPod, node: &str) -> NodeUsage {
        let mut usage = self
            .usage_by_node
            .get(node)
            .map(|entry| entry.usage.clone())
            .unwrap_or_default();
        self.nominated_before(pod, node)
            .for_each(|nominated| usage.add(nominated));
        usage
    }

    /// Pods of at least the same priority that are nominated to the node.
    pub(crate) fn nominated_before<'a>(
        &'a self,
        pod: &'a SchedulerPod,
        node: &'a str,
    ) -> impl Iterator<Item = &'a Arc<SchedulerPod>> {
        self.nominated_to(node)
            .filter(|other| other.uid != pod.uid && other.priority >= pod.priority)
    }

    pub fn nominated_to(&self, node: &str) -> impl Iterator<Item = &Arc<SchedulerPod>> {
        let there = self
            .nominated
            .iter()
            .filter(move |(_, nominated)| *nominated == node);
        there.filter_map(|(uid, _)| self.pods.get(uid))
    }

    pub fn is_assumed(&self, uid: &str) -> bool {
        self.assumed.contains_key(uid)
    }

    pub fn apply_node(&mut self, node: Arc<SchedulerNode>) -> Option<Arc<SchedulerNode>> {
        self.nodes.insert(node.name.clone(), node)
    }

    pub fn delete_node(&mut self, name: &str) {
        self.nodes.remove(name);
    }

    /// Applies a pod as the watch shows it; a bound pod ends its assumption. The nomination of a new gated pod is noticed only
    /// at its next change, because it does not pass through the queue.
    pub fn apply_pod(&mut self, pod: Arc<SchedulerPod>) -> Option<Arc<SchedulerPod>> {
        self.discharge(&pod.uid);
        if pod.node.is_some() || pod.has_ended {
            self.assumed.remove(&pod.uid);
        }
        // An assumed pod counts where it is assumed, and only there.
        let is_unassigned = pod.node.is_none() && !pod.has_ended && !self.is_assumed(&pod.uid);
        let is_counted = !pod.is_gated || self.pods.contains_key(&pod.uid);
        self.nominate(
            &pod.uid,
            pod.nominated_node
                .clone()
                .filter(|_| is_unassigned && is_counted),
        );
        let before = self.pods.insert(pod.uid.clone(), pod.clone());
        self.charge(&pod);
        before
    }

    pub fn delete_pod(&mut self, uid: &str) -> Option<Arc<SchedulerPod>> {
        self.discharge(uid);
        self.assumed.remove(uid);
        self.nominated.remove(uid);
        self.pods.remove(uid)
    }

    /// Counts a pod on a node before the Binding is written.
    pub fn assume(&mut self, uid: &str, node: &str) {
        self.discharge(uid);
        self.assumed.insert(uid.to_owned(), node.to_owned());
        self.nominated.remove(uid);
        if let Some(pod) = self.pods.get(uid).cloned() {
            self.charge(&pod);
        }
    }

    pub fn forget(&mut self, uid: &str) {
        self.discharge(uid);
        self.assumed.remove(uid);
        if let Some(pod) = self.pods.get(uid).cloned() {
            self.charge(&pod);
        }
    }

    pub fn nominate(&mut self, uid: &str, node: Option<String>) {
        match node {
            Some(node) => self.nominated.insert(uid.to_owned(), node),
            None => self.nominated.remove(uid),
        };
    }

    fn node_of<'a>(&'a self, pod: &'a SchedulerPod) -> Option<&'a String> {
        if pod.has_ended {
            None
        } else {
            pod.node.as_ref().or_else(|| self.assumed.get(&pod.uid))
        }
    }

    fn charge(&mut self, pod: &SchedulerPod) {
        let Some(node) = self.node_of(pod).cloned() else {
            return;
        };
        let entry = self.usage_by_node.entry(node).or_default();
        if entry.uids.insert(pod.uid.clone()) {
            entry.usage.add(pod);
        }
    }

    fn discharge(&mut self, uid: &str) {
        let Some(pod) = self.pods.get(uid).cloned() else {
            return;
        };
        let Some(node) = self.node_of(&pod).cloned() else {
            return;
        };
        if let Some(entry) = self.usage_by_node.get_mut(&node)
            && entry.uids.remove(uid)
        {
            subtract(&mut entry.usage.requests, &pod.requests);
            entry.usage.pods -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, node: Option<&str>) -> Arc<SchedulerPod> {
        let object = json!({
            "metadata": {"name": uid, "uid": uid},
            "spec": {"nodeName": node, "containers": [{"resources": {"requests": {"gpu": "1"}}}]},
        });
        Arc::new(SchedulerPod::parse(Arc::new(object)).unwrap())
    }

    #[test]
    fn assume_confirm_and_forget_count_a_pod_once() {
        let mut view = SchedulerCache::default();
        let other = pod("other", None);
        view.apply_pod(pod("p", None));
        view.assume("p", "a");
        assert_eq!(view.usage_for(&other, "a").pods, 1);
        view.apply_pod(pod("p", Some("b")));
        assert_eq!(
            (
                view.usage_for(&other, "a").pods,
                view.usage_for(&other, "b").pods
            ),
            (0, 1)
        );
        view.forget("p");
        assert_eq!(view.usage_for(&other, "b").requests["gpu"], 1000);
        view.delete_pod("p");
        assert_eq!(view.usage_for(&other, "b").pods, 0);
    }
}
