//! `preempt` for pods that request GPUs from a device plugin: of the nodes on which kube-scheduler could preempt, the best one
//! that the policy allows, with exactly kube-scheduler's victims.
//!
//! The kubelet picks the GPUs, so Stowage can neither improve the victim set nor reserve GPUs: kube-scheduler counts devices as
//! Stowage does, and its nomination keeps them for the pod.

use super::Extender;
use super::filter::VerbRequest;
use super::wire::{AnsweredVictim, AnsweredVictims, OfferedNode, PreemptionResult};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::evicting::EvictionCost;
use crate::scheduling::ledger::{Ledger, Preemptor};
use crate::scheduling::policy::{Policy, ViolateBudgets};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The result of the choice among the candidates.
pub struct NarrowedCandidates {
    /// Index of the best candidate among those that were offered.
    pub chosen: Option<usize>,
    /// Why there is none; empty if there is one.
    pub code: &'static str,
    pub policy: Arc<Policy>,
}

/// Fewest disruption budget violations (none, unless the policy permits them), then the least eviction cost, then node name.
pub fn narrow(extender: &Extender, asking: &VerbRequest, offered: &[OfferedNode<'_>]) -> NarrowedCandidates {
    let mut ledger = extender.service.ledger();
    asking.enter(&mut ledger);
    let policy = ledger.policy().clone();
    let refused = |code| NarrowedCandidates { chosen: None, code, policy: policy.clone() };
    if !asking.demand.may_preempt {
        return refused("preemption-policy-never");
    }
    if ledger.reserved_placement(&asking.uid).is_some() {
        return refused("already-placed");
    }
    let preemptor = ledger.preemptor(&asking.uid);
    let bends = policy.preemption.violate_budgets == ViolateBudgets::WhenNothingElse;
    let offered_to_us = || offered.iter().enumerate().filter(|(_, node)| bends || node.pdb_violations == 0);
    let with_eviction_cost = offered_to_us().filter_map(|(place, node)| {
        let eviction_cost = eviction_cost(&ledger, &preemptor, node)?;
        Some((node.pdb_violations, eviction_cost, node.node, place))
    });
    match with_eviction_cost.min() {
        Some((.., place)) => NarrowedCandidates { chosen: Some(place), code: "", policy: policy.clone() },
        None => refused("no-candidate"),
    }
}

/// Eviction cost of the node's victims, if all of them may be evicted and the pod fits then. kube-scheduler treats a node
/// without victims as an error of the whole preemption.
fn eviction_cost(ledger: &Ledger, preemptor: &Preemptor, offered: &OfferedNode<'_>) -> Option<EvictionCost> {
    let node = NodeName::parse(offered.node).ok()?;
    let victims: Vec<PodUid> =
        offered.victims.iter().map(|victim| PodUid::parse(victim).ok()).collect::<Option<_>>()?;
    if victims.is_empty() {
        return None;
    }
    ledger.eviction_cost_of(preemptor, &node, &victims)
}

/// The chosen node with kube-scheduler's own victims.
pub fn answer(offered: &[OfferedNode<'_>], narrowed: &NarrowedCandidates) -> PreemptionResult {
    let answered = narrowed.chosen.map(|place| {
        let OfferedNode { node, victims, pdb_violations } = &offered[place];
        let pods = victims.iter().map(|uid| AnsweredVictim { uid: (*uid).to_owned() }).collect();
        ((*node).to_owned(), AnsweredVictims { pods, num_pdb_violations: *pdb_violations })
    });
    PreemptionResult { node_name_to_meta_victims: BTreeMap::from_iter(answered) }
}
