//! A node as the stock filters see it, and what of a pod is held against it alone: taints, node selector, node affinity.
//!
//! Plain predicates of one node and one pod; nothing here knows who else is there.

use super::resources::Amounts;
use crate::ids::NodeName;
use crate::scheduling::vocabulary::label_selector::{Requirement, Rule};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Of a node and of a pod alike.
pub type ObjectLabels = BTreeMap<String, String>;

/// The taint that stands for `spec.unschedulable`: a pod that tolerates it may be placed on a cordoned node.
pub const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";

/// A node as its object shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilterNode {
    pub name: NodeName,
    pub labels: Arc<ObjectLabels>,
    /// A cordoned node has [`UNSCHEDULABLE`] among them.
    pub taints: Arc<[Taint]>,
    pub allocatable: Amounts,
    /// How many pods it takes.
    pub pods: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taint {
    pub key: String,
    pub value: String,
    pub effect: Effect,
}

/// Only the effects that keep pods away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Effect {
    NoSchedule,
    NoExecute,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Toleration {
    /// Empty: every key.
    pub key: String,
    pub rule: TolerationRule,
    /// `None`: every effect.
    pub effect: Option<Effect>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TolerationRule {
    Exists,
    Equal(String),
}

/// One of the terms of a required node affinity: all of it must hold, and one term is enough.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeTerm {
    pub labels: Vec<Requirement>,
    /// What `matchFields` asks of the node's name.
    pub name: Vec<Rule>,
}

impl FilterNode {
    /// The first taint that keeps away who tolerates only this.
    pub fn untolerated(&self, tolerations: &[Toleration]) -> Option<&Taint> {
        self.taints.iter().find(|taint| !tolerations.iter().any(|toleration| toleration.covers(taint)))
    }
}

impl Taint {
    pub fn unschedulable() -> Self {
        Self { key: UNSCHEDULABLE.into(), value: String::new(), effect: Effect::NoSchedule }
    }
}

impl Toleration {
    fn covers(&self, taint: &Taint) -> bool {
        self.effect.is_none_or(|effect| effect == taint.effect)
            && (self.key.is_empty() || self.key == taint.key)
            && match &self.rule {
                TolerationRule::Exists => true,
                TolerationRule::Equal(value) => *value == taint.value,
            }
    }
}

impl NodeTerm {
    /// A term that asks for nothing takes no node.
    pub fn takes(&self, machine: &FilterNode) -> bool {
        let asks = !self.labels.is_empty() || !self.name.is_empty();
        asks && self.labels.iter().all(|requirement| requirement.holds_in(&machine.labels))
            && self.name.iter().all(|rule| rule.holds_for(Some(machine.name.as_str())))
    }
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
