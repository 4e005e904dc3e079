//! The stand-in's filters: those of kube-scheduler's that it has.
//!
//! Pure. Unschedulable nodes, taints, the node selector and resources; the first plugin that rejects gives the reason, as in
//! the real framework. No affinity, spread, ports or volumes.

use super::objects::{Resources, SchedulerNode, SchedulerPod, add, list};
use serde_json::Value;

/// The rejecting plugin, which decides what may wake the pod again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rejector {
    /// Woken by any event.
    Extender,
    /// The resource check: woken when resources may have become free.
    Resources,
    /// Selector, taints, unschedulable nodes: woken by a change of those.
    Placement,
}

/// Why a node was rejected, and whether evictions could change that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRejection {
    pub by: Rejector,
    pub resolvable: Resolvable,
    pub reasons: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resolvable {
    /// `Unschedulable`: preemption is tried.
    ByEviction,
    /// `UnschedulableAndUnresolvable`.
    Never,
}

impl NodeRejection {
    pub fn new(by: Rejector, resolvable: Resolvable, reason: impl Into<String>) -> Self {
        Self {
            by,
            resolvable,
            reasons: vec![reason.into()],
        }
    }

    /// A rejection by a filter that decides where the pod may run at all.
    fn for_placement(reason: &str) -> Self {
        Self::new(Rejector::Placement, Resolvable::Never, reason)
    }
}

/// A node's used resources: requests, and the number of pods.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeUsage {
    pub requests: Resources,
    pub pods: usize,
}

impl NodeUsage {
    pub fn from_pods<'a>(pods: impl IntoIterator<Item = &'a SchedulerPod>) -> Self {
        let mut usage = Self::default();
        pods.into_iter().for_each(|pod| usage.add(pod));
        usage
    }

    pub fn add(&mut self, pod: &SchedulerPod) {
        add(&mut self.requests, &pod.requests);
        self.pods += 1;
    }
}

/// Filters one node for a pod. `ignored` is the managed resource when the extender alone counts it.
pub(crate) fn run_filters(
    pod: &SchedulerPod,
    node: &SchedulerNode,
    usage: &NodeUsage,
    ignored: Option<&str>,
) -> Result<(), NodeRejection> {
    check_schedulable(pod, node)?;
    check_taints(pod, node)?;
    check_selector(pod, node)?;
    check_resources(pod, node, usage, ignored)
}

fn check_schedulable(pod: &SchedulerPod, node: &SchedulerNode) -> Result<(), NodeRejection> {
    let taint =
        serde_json::json!({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"});
    if !node.is_unschedulable || tolerates(pod, &taint) {
        return Ok(());
    }
    Err(NodeRejection::for_placement("node(s) were unschedulable"))
}

fn check_taints(pod: &SchedulerPod, node: &SchedulerNode) -> Result<(), NodeRejection> {
    let is_hard_taint =
        |taint: &&Value| matches!(taint["effect"].as_str(), Some("NoSchedule" | "NoExecute"));
    if node
        .taints()
        .iter()
        .filter(is_hard_taint)
        .all(|taint| tolerates(pod, taint))
    {
        return Ok(());
    }
    Err(NodeRejection::for_placement(
        "node(s) had untolerated taint(s)",
    ))
}

fn tolerates(pod: &SchedulerPod, taint: &Value) -> bool {
    list(&pod.object["spec"]["tolerations"])
        .iter()
        .any(|toleration| {
            let unset_or_same = |field: &str| {
                let wanted = toleration[field].as_str().unwrap_or_default();
                wanted.is_empty() || wanted == taint[field].as_str().unwrap_or_default()
            };
            let same_value = || {
                toleration["operator"] == "Exists"
                    || toleration["value"].as_str().unwrap_or_default()
                        == taint["value"].as_str().unwrap_or_default()
            };
            unset_or_same("effect") && unset_or_same("key") && same_value()
        })
}

fn check_selector(pod: &SchedulerPod, node: &SchedulerNode) -> Result<(), NodeRejection> {
    let mut wanted = pod.object["spec"]["nodeSelector"]
        .as_object()
        .into_iter()
        .flatten();
    if wanted.all(|(key, value)| node.label(key) == value.as_str()) {
        return Ok(());
    }
    Err(NodeRejection::for_placement(
        "node(s) didn't match Pod's node affinity/selector",
    ))
}

fn check_resources(
    pod: &SchedulerPod,
    node: &SchedulerNode,
    usage: &NodeUsage,
    ignored: Option<&str>,
) -> Result<(), NodeRejection> {
    let mut reasons = Vec::new();
    let mut resolvable = Resolvable::ByEviction;
    let pods_allowed = node.allocatable.get("pods").copied().unwrap_or_default();
    if (i128::try_from(usage.pods)
        .unwrap_or(i128::MAX)
        .saturating_add(1))
    .saturating_mul(1000)
        > pods_allowed
    {
        reasons.push("Too many pods".to_owned());
    }
    let requested = pod
        .requests
        .iter()
        .filter(|(name, amount)| **amount > 0 && Some(name.as_str()) != ignored);
    for (name, amount) in requested {
        let total = node.allocatable.get(name).copied().unwrap_or_default();
        let used = usage.requests.get(name).copied().unwrap_or_default();
        if *amount > total - used {
            reasons.push(format!("Insufficient {name}"));
            if *amount > total {
                resolvable = Resolvable::Never;
            }
        }
    }
    if reasons.is_empty() {
        Ok(())
    } else {
        Err(NodeRejection {
            by: Rejector::Resources,
            resolvable,
            reasons,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::sync::Arc;

    fn pod(spec: Value) -> SchedulerPod {
        SchedulerPod::parse(Arc::new(
            json!({"metadata": {"name": "p", "uid": "u"}, "spec": spec}),
        ))
        .unwrap()
    }

    fn node(spec: Value) -> SchedulerNode {
        let status = json!({"allocatable": {"pods": "10", "stowage.dev/vram": "80Gi"}});
        let metadata = json!({"name": "n", "labels": {"zone": "a"}});
        SchedulerNode::parse(Arc::new(
            json!({"metadata": metadata, "spec": spec, "status": status}),
        ))
    }

    fn asks(vram: &str) -> Value {
        json!({"containers": [{"resources": {"requests": {"stowage.dev/vram": vram}}}]})
    }

    #[test]
    fn a_sum_that_falls_short_is_resolvable_unless_the_empty_node_is_too_small() {
        let usage = NodeUsage::from_pods([&pod(asks("60Gi"))]);
        let refusal =
            |vram| run_filters(&pod(asks(vram)), &node(json!({})), &usage, None).unwrap_err();
        assert_eq!(refusal("40Gi").resolvable, Resolvable::ByEviction);
        assert_eq!(refusal("40Gi").reasons, ["Insufficient stowage.dev/vram"]);
        assert_eq!(refusal("90Gi").resolvable, Resolvable::Never);
    }

    #[test]
    fn an_ignored_resource_is_the_extenders_alone() {
        let classified = run_filters(
            &pod(asks("900Gi")),
            &node(json!({})),
            &NodeUsage::default(),
            Some("stowage.dev/vram"),
        );
        assert_eq!(classified, Ok(()));
    }

    #[test]
    fn taints_and_selectors_are_respected() {
        let tainted =
            node(json!({"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}));
        let tolerant = json!({"tolerations": [{"key": "gpu", "operator": "Exists"}], "nodeSelector": {"zone": "a"}});
        assert!(run_filters(&pod(json!({})), &tainted, &NodeUsage::default(), None).is_err());
        assert!(run_filters(&pod(tolerant), &tainted, &NodeUsage::default(), None).is_ok());
        let elsewhere = pod(json!({"nodeSelector": {"zone": "b"}}));
        assert!(run_filters(&elsewhere, &node(json!({})), &NodeUsage::default(), None).is_err());
    }
}
