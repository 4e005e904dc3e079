//! What shadow mode reports: how each decision compares with what kube-scheduler did instead.
//!
//! The verbs decide as always. No pod is allocated GPUs, reserved for, evicted or requeued, and no soft reservation steers other
//! pods; the ledger keeps the decision for comparison with the pod's bind.

use super::filter::{FilterDecided, offer_of, refusal_of};
use super::input::changes;
use super::preempt_device_plugin::NarrowedCandidates;
use super::request::{DecisionView, VerbRequest};
use crate::ids::{NodeName, PodUid};
use crate::ledger::{Ledger, PodPhase};
use crate::placing::rank::Shortlist;
use crate::policy::{Digest, Mode};
use crate::vocabulary::device_plugin::GpuRequest;
use serde::{Deserialize, Serialize};

/// How Stowage's decision compares with what was done.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "kebab-case", const_into_str)]
#[serde(rename_all = "kebab-case")]
pub enum ShadowOutcome {
    Same,
    /// filter: it would have rejected some of the nodes. bind: it ranked another node first.
    Different,
    /// It would have rejected every node.
    WouldReject,
    /// It would have ranked the nodes; kube-scheduler ranked them itself.
    WouldRank,
    /// It would have kept one of the nodes to preempt on.
    WouldNarrow,
    WouldNotPreempt,
    /// Bound without any request to this process.
    NotAsked,
    /// The pod requests VRAM, which shadow mode does not provide.
    Refused,
}

/// The node that the latest filter decision would have chosen for a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedBind {
    pub policy: Digest,
    node: ExpectedNode,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum ExpectedNode {
    Node(NodeName),
    None,
    NotAsked,
}

/// A pod whose request is invalid is let through. Its bind finds it in the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LetThrough(pub VerbRequest);

impl ShadowOutcome {
    /// Whether the pod would have been treated differently.
    pub fn is_difference(self) -> bool {
        !matches!(self, Self::Same | Self::WouldRank | Self::NotAsked)
    }

    /// The outcome of a filter decision. A pod that requests VRAM is refused: without Stowage's allocation it would get none.
    pub fn for_filter(view: &DecisionView, list: &Shortlist) -> Self {
        match (
            &view.request.demand.ask,
            list.best.is_empty(),
            list.rejected.is_empty(),
        ) {
            (GpuRequest::Vram, ..) => Self::Refused,
            (_, true, _) => Self::WouldReject,
            (_, _, true) => Self::Same,
            _ => Self::Different,
        }
    }

    pub fn for_prioritize(list: &Shortlist) -> Self {
        if list.best.is_empty() {
            Self::WouldReject
        } else {
            Self::WouldRank
        }
    }

    /// The outcome of a choice among `offered` candidates.
    pub fn for_preempt(
        request: &VerbRequest,
        narrowed: &NarrowedCandidates,
        offered: usize,
    ) -> Self {
        match (&request.demand.ask, narrowed.chosen_index) {
            (GpuRequest::Vram, _) => Self::Refused,
            (_, None) => Self::WouldNotPreempt,
            (_, Some(_)) if offered == 1 => Self::Same,
            (_, Some(_)) => Self::WouldNarrow,
        }
    }
}

impl ExpectedBind {
    /// `None` unless the pod is about to be bound in shadow mode.
    pub fn for_pod(ledger: &Ledger, uid: &PodUid) -> Option<Self> {
        let policy = ledger.policy();
        let PodPhase::Waiting(waiting) = &ledger.pod_state(uid)?.phase else {
            return None;
        };
        let node = match (&waiting.offered, &waiting.refused) {
            (Some(node), _) => ExpectedNode::Node(node.clone()),
            (None, Some(_)) => ExpectedNode::None,
            (None, None) => ExpectedNode::NotAsked,
        };
        (policy.mode == Mode::Shadow).then_some(Self {
            policy: policy.digest,
            node,
        })
    }

    /// Compares it with kube-scheduler's node; the expected node, if there is one.
    pub fn compare(&self, bound_to: &NodeName) -> (ShadowOutcome, Option<&NodeName>) {
        match &self.node {
            ExpectedNode::Node(first) if first == bound_to => (ShadowOutcome::Same, Some(first)),
            ExpectedNode::Node(first) => (ShadowOutcome::Different, Some(first)),
            ExpectedNode::None => (ShadowOutcome::WouldReject, None),
            ExpectedNode::NotAsked => (ShadowOutcome::NotAsked, None),
        }
    }
}

/// The input that records a filter decision. If a pod that requests VRAM is refused, and the policy changes to
/// enforcing, nothing else would requeue it.
pub fn decision_of(view: &DecisionView, list: &Shortlist) -> FilterDecided {
    match list
        .best
        .first()
        .filter(|_| view.request.demand.ask != GpuRequest::Vram)
    {
        Some(first) => offer_of(view, first),
        None => refusal_of(view, list),
    }
}

changes! { cluster, LetThrough(request) -> () { request.record_in(&mut cluster.ledger) } }
