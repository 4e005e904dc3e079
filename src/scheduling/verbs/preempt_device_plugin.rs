//! `preempt` for pods that request GPUs from a device plugin: of the nodes on which kube-scheduler could preempt, the best one
//! that the policy allows, with exactly kube-scheduler's victims.
//!
//! The kubelet picks the GPUs, so Stowage can neither improve the victim set nor reserve GPUs: kube-scheduler counts devices as
//! Stowage does, and its nomination keeps them for the pod. But filter refuses the nominated node as long as the ledger has the
//! victims, and then kube-scheduler, which may have seen them go, asks again about the others: none of those is emptied, too.

use super::preempt::OfferedNode;
use super::request::VerbRequest;
use super::{Change, Cluster};
use crate::ids::{NodeName, PodUid};
use crate::policy::{Mode, Policy, ViolateBudgets};
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
    pub chosen_index: Option<usize>,
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
        request.record_in(ledger);
        let policy = ledger.policy().clone();
        let no_choice = |code| NarrowedCandidates {
            chosen_index: None,
            code,
            policy: policy.clone(),
        };
        if !request.demand.may_preempt {
            return no_choice("preemption-policy-never");
        }
        if ledger.reserved_placement(&request.uid).is_some() {
            return no_choice("already-placed");
        }
        let preemptor = ledger
            .preemptor(&request.uid)
            .with_volumes(&cluster.kube_filters.snapshot());
        let may_violate_budgets =
            policy.preemption.violate_budgets == ViolateBudgets::WhenNothingElse;
        let emptied_node = ledger
            .scheduler_eviction_node(&request.uid)
            .filter(|_| policy.mode == Mode::Enforce);
        let allowed = offered.iter().enumerate().filter(|(_, node)| {
            (may_violate_budgets || node.pdb_violations == 0)
                && emptied_node.is_none_or(|awaited| awaited.as_str() == node.node)
        });
        let candidates = allowed.filter_map(|(index, offered)| {
            let (node, victims) = parsed(offered)?;
            let eviction_cost = ledger.eviction_cost_of(&preemptor, &node, &victims)?;
            Some((offered.pdb_violations, eviction_cost, node, index, victims))
        });
        let Some((.., node, index, victims)) = candidates.min() else {
            return no_choice(match emptied_node {
                Some(_) => "victims-leaving",
                None => "no-candidate",
            });
        };
        // In shadow mode kube-scheduler makes its own choice.
        if policy.mode == Mode::Enforce {
            ledger.record_scheduler_evictions(&request.uid, node, victims);
        }
        NarrowedCandidates {
            chosen_index: Some(index),
            code: "",
            policy,
        }
    }
}

/// The node and its victims. kube-scheduler treats a node without victims as an error of the whole preemption.
fn parsed(offered: &OfferedNode) -> Option<(NodeName, Vec<PodUid>)> {
    let node = NodeName::parse(&offered.node).ok()?;
    let victims = offered.victims.iter().map(|uid| PodUid::parse(uid).ok());
    let victims: Vec<PodUid> = victims.collect::<Option<_>>()?;
    (!victims.is_empty()).then_some((node, victims))
}

#[cfg(test)]
mod tests;
