//! What a pod shows to kube-scheduler's filters: of a pending pod everything, of a bound pod only what affects others.

use super::node::{
    FilterNode, HOSTNAME_LABEL, NodeTerm, ObjectLabels, Toleration, select_single_node,
};
use super::resources::HostPort;
use super::resources::ResourceList;
use crate::coded::coded;
use crate::ids::NodeName;
use crate::vocabulary::label_selector::Selector;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What a pending pod requires of its node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requirements {
    pub namespace: String,
    pub labels: ObjectLabels,
    pub amounts: ResourceList,
    pub ports: Vec<HostPort>,
    /// Labels that its node must have, all of them.
    pub node_selector: ObjectLabels,
    /// Terms of which its node must match one; `None` without a node affinity.
    pub node_affinity: Option<Vec<NodeTerm>>,
    pub tolerations: Vec<Toleration>,
    /// Its required pod anti-affinities.
    pub repels: Arc<[Arc<AntiAffinity>]>,
    /// Its persistent volume claims, by name.
    #[serde(default)]
    pub claims: Arc<[Arc<str>]>,
    /// A rule of the pod that is not understood here.
    // As recordings and checkpoints name it.
    #[serde(rename = "unjudged")]
    pub unsupported: Option<UnsupportedRule>,
}

/// What a pod uses of the node it is bound to, until it is gone from there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFootprint {
    pub node: NodeName,
    pub amounts: ResourceList,
    pub ports: Arc<[HostPort]>,
    pub repels: Arc<[Arc<AntiAffinity>]>,
    /// Its persistent volume claims: volumes that may be attached to the node.
    #[serde(default)]
    pub volumes: u16,
    /// It has ResourceClaims: devices of DRA drivers may be its own.
    #[serde(default)]
    pub claims_devices: bool,
}

/// One required anti-affinity of a pod: matching pods must not be placed on nodes that share the topology label's value with its
/// own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AntiAffinity {
    pub scope: NamespaceScope,
    pub selector: Selector,
    pub topology: String,
}

/// The namespaces it applies to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NamespaceScope {
    Of(BTreeSet<String>),
    /// Namespaces that a selector selects. Labels of namespaces are not watched: it may be any.
    Selected,
}

coded! {
    /// Why it is unknown whether kube-scheduler would accept; and whether that may hold only for a moment: claims, volumes and pods come by
    /// watches of their own, and a volume is provisioned after its claim is created.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum UnsupportedRule: bool {
        "inter-pod-affinity" InterPodAffinity,
            "the pod has required pod affinity or anti-affinity"
            => false;
        "anti-affinity-of-another-pod" AntiAffinityOfAnotherPod,
            "another pod there, or in the same topology, has a required anti-affinity against pods like this one, or more of them \
         than are looked at"
            => false;
        "topology-spread" TopologySpread,
            "the pod has topologySpreadConstraints with DoNotSchedule"
            => false;
        "volumes" Volumes,
            "the pod has a volume that may be bound to nodes and is no persistent volume claim"
            => false;
        "volume-unknown" VolumeUnknown,
            "the API server has not shown a persistent volume claim of the pod, its volume or its storage class"
            => true;
        "volume-unbound" VolumeUnbound,
            "a persistent volume claim of the pod is not bound, and its storage class does not wait for a pod"
            => true;
        "volume-not-provisioned" VolumeNotProvisioned,
            "a persistent volume claim of the pod waits for a volume that its storage class does not provision"
            => false;
        "read-write-once-pod" ReadWriteOncePod,
            "a persistent volume claim of the pod is ReadWriteOncePod, and another pod may use it"
            => false;
        "attach-limit" AttachLimit,
            "with the pod's volumes the node would have more than it surely can attach"
            => false;
        "resource-claims" ResourceClaims,
            "the pod has resource claims"
            => false;
        "node-name-preset" NodeNamePreset,
            "the pod sets spec.nodeName"
            => false;
        "scheduling-gate" SchedulingGate,
            "the pod has another scheduling gate than stowage.dev/plan"
            => false;
        "unreadable" Unreadable,
            "the pod has a quantity or a rule that cannot be read"
            => false;
        "too-many-rules" TooManyRules,
            "the pod has more labels, selectors, terms and tolerations than are looked at"
            => false;
        "unknown-neighbor" UnknownNeighbor,
            "the API server has not shown a pod that is planned for the node"
            => false;
        "unknown-pod" UnknownPod,
            "the API server has not shown the pod yet"
            => false;
    }
}

impl Requirements {
    /// Whether its node selector and its node affinity match a node.
    pub fn matches_node(&self, machine: &FilterNode) -> bool {
        let has = |(key, value): (&String, &String)| machine.labels.get(key) == Some(value);
        let terms = self.node_affinity.as_ref();
        self.node_selector.iter().all(has)
            && terms.is_none_or(|terms| terms.iter().any(|term| term.matches_node(machine)))
    }

    /// Whether they name a single node.
    pub fn select_single_node(&self) -> bool {
        self.node_selector.contains_key(HOSTNAME_LABEL)
            || self
                .node_affinity
                .as_deref()
                .is_some_and(select_single_node)
    }
}

impl AntiAffinity {
    /// Whether it may exclude this pod.
    pub fn may_exclude(&self, pod: &Requirements) -> bool {
        let in_scope = match &self.scope {
            NamespaceScope::Of(namespaces) => namespaces.contains(&pod.namespace),
            NamespaceScope::Selected => true,
        };
        in_scope && self.selector.matches(&pod.labels)
    }
}
