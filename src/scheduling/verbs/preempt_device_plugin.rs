//! `preempt` for pods that request GPUs from a device plugin: of the nodes on which kube-scheduler could preempt, the best one
//! that the policy allows, with exactly kube-scheduler's victims.
//!
//! The kubelet picks the GPUs, so Stowage can neither improve the victim set nor reserve GPUs: kube-scheduler counts devices as
//! Stowage does, and its nomination keeps them for the pod.

use super::preempt::OfferedNode;
use super::request::VerbRequest;
use super::{Change, Cluster};
use crate::evicting::EvictionCost;
use crate::ids::{NodeName, PodUid};
use crate::ledger::{Ledger, Preemptor};
use crate::policy::{Policy, ViolateBudgets};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// kube-scheduler asks whether it may preempt on one of these nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NarrowAsked {
    pub request: VerbRequest,
    pub offered: Vec<OfferedNode>,
}

/// The choice among the candidates.
#[derive(Debug, Clone)]
pub struct NarrowedCandidates {
    /// Index of the best candidate among those that were offered.
    pub chosen: Option<usize>,
    /// Why there is none; empty if there is one.
    pub code: &'static str,
    pub policy: Arc<Policy>,
}

impl Change for NarrowAsked {
    /// Fewest disruption budget violations (none, unless the policy permits them), then the least eviction cost, then node name.
    type Output = NarrowedCandidates;

    fn apply_to(self, cluster: &mut Cluster) -> NarrowedCandidates {
        let Self { request, offered } = self;
        let ledger = &mut cluster.ledger;
        request.enter(ledger);
        let policy = ledger.policy().clone();
        let refused = |code| NarrowedCandidates {
            chosen: None,
            code,
            policy: policy.clone(),
        };
        if !request.demand.may_preempt {
            return refused("preemption-policy-never");
        }
        if ledger.reserved_placement(&request.uid).is_some() {
            return refused("already-placed");
        }
        let preemptor = ledger
            .preemptor(&request.uid)
            .beside_volumes(&cluster.kube_filters.snapshot());
        let bends = policy.preemption.violate_budgets == ViolateBudgets::WhenNothingElse;
        let allowed = offered
            .iter()
            .enumerate()
            .filter(|(_, node)| bends || node.pdb_violations == 0);
        let with_eviction_cost = allowed.filter_map(|(place, node)| {
            let eviction_cost = eviction_cost(ledger, &preemptor, node)?;
            Some((node.pdb_violations, eviction_cost, &node.node, place))
        });
        match with_eviction_cost.min() {
            Some((.., place)) => NarrowedCandidates {
                chosen: Some(place),
                code: "",
                policy: policy.clone(),
            },
            None => refused("no-candidate"),
        }
    }
}

/// Eviction cost of the node's victims, if all of them may be evicted and the pod fits then. kube-scheduler treats a node
/// without victims as an error of the whole preemption.
fn eviction_cost(
    ledger: &Ledger,
    preemptor: &Preemptor,
    offered: &OfferedNode,
) -> Option<EvictionCost> {
    let node = NodeName::parse(&offered.node).ok()?;
    let victims: Vec<PodUid> = offered
        .victims
        .iter()
        .map(|victim| PodUid::parse(victim).ok())
        .collect::<Option<_>>()?;
    if victims.is_empty() {
        return None;
    }
    ledger.eviction_cost_of(preemptor, &node, &victims)
}

#[cfg(test)]
mod tests;
