//! What a pod shows to kube-scheduler's filters: of a pending pod everything, of a bound pod only what affects others.

use super::host_ports::HostPort;
use super::node::{FilterNode, NodeTerm, ObjectLabels, Toleration};
use super::resources::Amounts;
use crate::ids::NodeName;
use crate::scheduling::vocabulary::label_selector::Selector;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What a pending pod requires of its node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requirements {
    pub namespace: String,
    pub labels: ObjectLabels,
    pub amounts: Amounts,
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
    pub amounts: Amounts,
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

/// Why it is unknown whether kube-scheduler would accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, thiserror::Error, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnsupportedRule {
    #[error("the pod has required pod affinity or anti-affinity")]
    InterPodAffinity,
    #[error(
        "another pod there, or in the same topology, has a required anti-affinity against pods like this one"
    )]
    AntiAffinityOfAnotherPod,
    #[error("the pod has topologySpreadConstraints with DoNotSchedule")]
    TopologySpread,
    #[error("the pod has a volume that may be bound to nodes and is no persistent volume claim")]
    Volumes,
    #[error(
        "the API server has not shown a persistent volume claim of the pod, its volume or its storage class"
    )]
    VolumeUnknown,
    #[error(
        "a persistent volume claim of the pod is not bound, and its storage class does not wait for a pod"
    )]
    VolumeUnbound,
    #[error(
        "a persistent volume claim of the pod waits for a volume that its storage class does not provision"
    )]
    VolumeNotProvisioned,
    #[error("a persistent volume claim of the pod is ReadWriteOncePod, and another pod may use it")]
    ReadWriteOncePod,
    #[error("with the pod's volumes the node would have more than it surely can attach")]
    AttachLimit,
    #[error("the pod has resource claims")]
    ResourceClaims,
    #[error("the pod sets spec.nodeName")]
    NodeNamePreset,
    #[error("the pod has another scheduling gate than stowage.dev/plan")]
    SchedulingGate,
    #[error("the pod has a quantity or a rule that cannot be read")]
    Unreadable,
    #[error("the pod has more labels, selectors, terms and tolerations than are looked at")]
    TooManyRules,
    #[error("the API server has not shown a pod that is planned for the node")]
    UnknownNeighbor,
    #[error("the API server has not shown the pod yet")]
    UnknownPod,
}

impl Requirements {
    /// Whether its node selector and its node affinity match a node.
    pub fn selects(&self, machine: &FilterNode) -> bool {
        let has = |(key, value): (&String, &String)| machine.labels.get(key) == Some(value);
        let terms = self.node_affinity.as_ref();
        self.node_selector.iter().all(has)
            && terms.is_none_or(|terms| terms.iter().any(|term| term.takes(machine)))
    }
}

impl AntiAffinity {
    /// Whether it may exclude this pod.
    pub fn may_take(&self, pod: &Requirements) -> bool {
        let in_scope = match &self.scope {
            NamespaceScope::Of(namespaces) => namespaces.contains(&pod.namespace),
            NamespaceScope::Selected => true,
        };
        in_scope && self.selector.matches(&pod.labels)
    }
}

impl UnsupportedRule {
    /// Whether it may hold only for a moment: claims, volumes and pods come by watches of their own, and a volume is provisioned
    /// after its claim is created.
    pub fn may_pass(self) -> bool {
        matches!(self, Self::VolumeUnknown | Self::VolumeUnbound)
    }

    /// A short name for metrics and conditions.
    pub fn code(self) -> &'static str {
        match self {
            Self::InterPodAffinity => "inter-pod-affinity",
            Self::AntiAffinityOfAnotherPod => "anti-affinity-of-another-pod",
            Self::TopologySpread => "topology-spread",
            Self::Volumes => "volumes",
            Self::VolumeUnknown => "volume-unknown",
            Self::VolumeUnbound => "volume-unbound",
            Self::VolumeNotProvisioned => "volume-not-provisioned",
            Self::ReadWriteOncePod => "read-write-once-pod",
            Self::AttachLimit => "attach-limit",
            Self::ResourceClaims => "resource-claims",
            Self::NodeNamePreset => "node-name-preset",
            Self::SchedulingGate => "scheduling-gate",
            Self::Unreadable => "unreadable",
            Self::TooManyRules => "too-many-rules",
            Self::UnknownNeighbor => "unknown-neighbor",
            Self::UnknownPod => "unknown-pod",
        }
    }
}
