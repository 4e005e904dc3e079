//! Explanations: why a pod is where it is, or is pending, and what would have to change. For people, and never for a decision.
//!
//! The questions are those that decisions ask ([`rank::shortlist`], [`fit`], [`evicting`]), so an explanation cannot differ from
//! the filter; here they are asked again with one thing changed ([`remedy`]), and what helps is listed. [`facts`] reads the
//! ledger, [`classification`] and [`pod_stage`] say what the pod is and at which stage, [`pod_access`] which pods are named, [`nodes`]
//! how each node suits it, [`obstacle`] how each GPU does. [`explanation`] is the answer. [`models`] says where models are, [`fleet`]
//! shows the whole cluster, [`usage`] says how much of it each class and tenant has, and [`fragmentation`] what is free and of no use.
//! Nothing here changes anything or has a clock.
//!
//! [`rank::shortlist`]: crate::placing::rank::shortlist
//! [`fit`]: crate::placing::fit
//! [`evicting`]: crate::evicting

mod classification;
pub mod explanation;
mod facts;
pub mod fleet;
pub mod fragmentation;
mod loans;
pub mod models;
mod nodes;
pub mod obstacle;
mod pod_access;
mod pod_stage;
pub mod remedy;
pub mod units;
mod unsupported;
pub mod usage;
mod vram_limits;

pub use explanation::Explanation;
pub use pod_access::PodAccess;
pub use remedy::sentence::eviction_cost_text;

use super::verbs::ClusterCopy;
use crate::ids::{NodeName, PodUid};
use explanation::{NodePart, PodVerdict};
use facts::{Facts, NodeDetails};
use nodes::NodeOutline;

/// The selection of nodes that are shown in detail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShownNodes {
    /// The best nodes that fit, at most this many; nodes that do not fit are grouped if they are many.
    Best(usize),
    All,
    Node(NodeName),
}

impl Default for ShownNodes {
    /// The best ten: as many as a person compares.
    fn default() -> Self {
        Self::Best(10)
    }
}

/// Explains the pod of `uid`, of a copy of the cluster, because all nodes are looked at; `None` if the ledger has no such pod. The
/// findings of the continuous audit are not in the ledger; the caller adds them.
pub fn explain(
    cluster: &mut ClusterCopy,
    uid: &PodUid,
    options: &ShownNodes,
) -> Option<Explanation> {
    explain_for(PodAccess::All, cluster, uid, options)
}

/// Explains a pod as [`explain`] does, to a reader who may not see every pod.
pub fn explain_for(
    reader: PodAccess,
    cluster: &mut ClusterCopy,
    uid: &PodUid,
    options: &ShownNodes,
) -> Option<Explanation> {
    let facts = Facts::collect(reader, cluster, uid)?.without_own_reservation();
    let outline = NodeOutline::new(&facts, options);
    let group = pod_stage::group_obstacle(cluster, &facts);
    let verdict = match pod_stage::verdict(&facts, outline.counts.fit) {
        PodVerdict::Fits if group.is_some() => PodVerdict::DoesNotFit,
        verdict => verdict,
    };
    let nodes = node_parts(cluster, &facts, &outline, options);
    Some(Explanation {
        pod: facts.entry.key.clone(),
        uid: facts.uid.clone(),
        verdict,
        request: classification::request_part(facts.demand()),
        class: classification::class_part(&facts),
        tenant: classification::tenant_part(&facts),
        spare: classification::spare_parts(&facts),
        borrowing: loans::borrowing(&facts),
        policy: classification::policy_part(&facts),
        stage: pod_stage::stage(&facts),
        group,
        unsupported: unsupported::unsupported(&facts),
        standby: None,
        counts: outline.counts,
        nodes,
        groups: outline.groups(&facts, options),
        impasse: remedy::impasse(&facts).filter(|_| verdict == PodVerdict::DoesNotFit),
        remedies: remedy::remedies(cluster, &facts, &outline, verdict),
        over_allocations: Vec::new(),
    })
}

fn node_parts(
    cluster: &ClusterCopy,
    facts: &Facts,
    outline: &NodeOutline,
    options: &ShownNodes,
) -> Vec<NodePart> {
    if let ShownNodes::Node(name) = options
        && facts.snapshot.node(name.as_str()).is_none()
    {
        return vec![nodes::unknown_node(name)];
    }
    let nodes = facts.snapshot.nodes();
    let part = |index: usize| {
        let details = NodeDetails::collect(cluster.ledger(), &nodes[index].name)
            .with_reasons(cluster.ledger(), facts);
        outline.part(index, facts, &details)
    };
    outline
        .shown(facts, options)
        .into_iter()
        .map(part)
        .collect()
}

#[cfg(test)]
mod filter_tests;
#[cfg(test)]
mod proptests;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;
#[cfg(test)]
mod tests;
