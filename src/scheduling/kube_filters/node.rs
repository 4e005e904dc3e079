//! A node as kube-scheduler's filters see it, and the rules that concern it alone: taints, node selector, node affinity.
//!
//! Plain predicates of one node and one pod, without other pods.

use super::resources::ResourceList;
use crate::ids::NodeName;
use crate::vocabulary::label_selector::{Requirement, Rule};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// The labels of a node or of a pod.
pub type ObjectLabels = BTreeMap<String, String>;

/// The label by which a pod or a volume names its node.
pub const HOSTNAME_LABEL: &str = "kubernetes.io/hostname";

/// The taint that stands for `spec.unschedulable`: a pod that tolerates it may be placed on a cordoned node.
pub const UNSCHEDULABLE_TAINT: &str = "node.kubernetes.io/unschedulable";

/// A node as its object shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterNode {
    pub name: NodeName,
    pub labels: Arc<ObjectLabels>,
    /// Includes [`UNSCHEDULABLE_TAINT`] if the node is cordoned.
    pub taints: Arc<[Taint]>,
    pub allocatable: ResourceList,
    /// The greatest number of pods.
    pub pods: u64,
}

/// Taints by which the control plane keeps new pods off a node, whatever they are.
const UNAVAILABLE_TAINTS: [&str; 3] = [
    UNSCHEDULABLE_TAINT,
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
];

impl FilterNode {
    /// Whether new pods go there, apart from such as tolerate anything: it is not cordoned, and its kubelet answers.
    pub(crate) fn accepts_new_pods(&self) -> bool {
        !self
            .taints
            .iter()
            .any(|taint| UNAVAILABLE_TAINTS.contains(&taint.key.as_str()))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taint {
    pub key: String,
    pub value: String,
    pub effect: TaintEffect,
}

/// Only the effects that exclude pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaintEffect {
    NoSchedule,
    NoExecute,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Toleration {
    /// Empty: every key.
    pub key: String,
    pub rule: TolerationRule,
    /// `None`: every effect.
    pub effect: Option<TaintEffect>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TolerationRule {
    Exists,
    Equal(String),
}

/// One term of a required node affinity: all of its rules must hold, and one term is enough.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTerm {
    pub labels: Vec<Requirement>,
    /// What `matchFields` requires of the node's name.
    pub name: Vec<Rule>,
}

impl FilterNode {
    /// The first taint that these tolerations do not tolerate.
    pub fn first_untolerated_taint(&self, tolerations: &[Toleration]) -> Option<&Taint> {
        self.taints.iter().find(|taint| {
            !tolerations
                .iter()
                .any(|toleration| toleration.tolerates(taint))
        })
    }
}

impl Taint {
    pub fn unschedulable() -> Self {
        Self {
            key: UNSCHEDULABLE_TAINT.into(),
            value: String::new(),
            effect: TaintEffect::NoSchedule,
        }
    }
}

impl Toleration {
    fn tolerates(&self, taint: &Taint) -> bool {
        self.effect.is_none_or(|effect| effect == taint.effect)
            && (self.key.is_empty() || self.key == taint.key)
            && match &self.rule {
                TolerationRule::Exists => true,
                TolerationRule::Equal(value) => *value == taint.value,
            }
    }
}

impl NodeTerm {
    /// A term without rules matches no node.
    pub fn matches_node(&self, machine: &FilterNode) -> bool {
        self.matches(&machine.labels, &machine.name)
    }

    /// Whether it matches a node with these labels and this name. A term without rules matches no node.
    pub fn matches(&self, labels: &ObjectLabels, name: &NodeName) -> bool {
        let has_rules = !self.labels.is_empty() || !self.name.is_empty();
        has_rules
            && self
                .labels
                .iter()
                .all(|requirement| requirement.holds_in(labels))
            && self
                .name
                .iter()
                .all(|rule| rule.holds_for(Some(name.as_str())))
    }

    /// The node that it names, if it takes no other.
    fn single_named_node(&self) -> Option<&str> {
        let hostnames = self
            .labels
            .iter()
            .filter(|one| one.key == HOSTNAME_LABEL)
            .map(|one| &one.rule);
        hostnames.chain(&self.name).find_map(|rule| match rule {
            Rule::In(names) if names.len() == 1 => names.first().map(String::as_str),
            _ => None,
        })
    }
}

/// Whether these terms, of which one must match, leave a single node.
pub fn select_single_node(terms: &[NodeTerm]) -> bool {
    let named: Option<BTreeSet<&str>> = terms.iter().map(NodeTerm::single_named_node).collect();
    named.is_some_and(|names| names.len() == 1)
}

impl fmt::Display for TaintEffect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
