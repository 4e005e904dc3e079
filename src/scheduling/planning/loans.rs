//! Loans that end: which borrowers to evict so that engines have their VRAM back.
//!
//! An engine asks before it wakes, or wakes without asking, or its class lends no more: then borrowers are evicted, the cheapest
//! first, until each GPU has what its pods are owed. Nothing else is asked of a borrower: that it leaves when its lender wakes is
//! the condition on which it came, and its Binding says so.

use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::ledger::{Ledger, NodeState, PodState, Preemptor, ResidentPod};
use crate::units::Bytes;
use std::cell::OnceCell;
use std::collections::BTreeSet;

/// A borrower to evict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoanEviction {
    pub uid: PodUid,
    pub key: PodKey,
    /// The pod that needs the VRAM; `None` if it may be one of several.
    pub lender: Option<PodKey>,
    pub gpu: GpuUuid,
    /// Whether the eviction is early: the lender has not asked yet, and will be needed soon.
    pub is_early: bool,
}

/// The borrowers to evict now, those first that an engine waits for. Those in `leaving` are being evicted, those in `deferred`
/// could not be, a moment ago.
pub fn loans_to_end(
    ledger: &Ledger,
    leaving: &BTreeSet<PodUid>,
    deferred: &BTreeSet<PodUid>,
) -> Vec<LoanEviction> {
    // Where each model could be loaded from is looked up once, and only if a pod is evicted at all.
    let preemptor = OnceCell::new();
    let mut evictions = Vec::new();
    for (name, node_state) in ledger.nodes_with_loans() {
        evict_on(
            ledger,
            name,
            node_state,
            &preemptor,
            (leaving, deferred),
            &mut evictions,
        );
    }
    evictions.sort_by_key(|eviction| eviction.is_early);
    evictions
}

/// Whether a GPU of the borrower still owes its lenders more VRAM than it has: the eviction may have been ordered a while ago.
pub fn is_vram_owed(ledger: &Ledger, borrower: &PodUid) -> bool {
    let node_state = ledger
        .pod_state(borrower)
        .and_then(PodState::node)
        .and_then(|on| ledger.node_state(on));
    let has_borrower = |(.., borrowers): &(usize, Bytes, Vec<&ResidentPod>)| {
        borrowers.iter().any(|resident| resident.uid == *borrower)
    };
    node_state.is_some_and(|node_state| overdrawn(ledger, node_state).iter().any(has_borrower))
}

fn overdrawn<'l>(
    ledger: &Ledger,
    node_state: &'l NodeState,
) -> Vec<(usize, Bytes, Vec<&'l ResidentPod>)> {
    // A Binding that is on its way is no departure.
    let stays = |resident: &ResidentPod| {
        !resident.is_leaving
            || ledger
                .pod_state(&resident.uid)
                .is_some_and(|pod_state| ledger.is_staying(pod_state))
    };
    node_state.over_allocations(stays)
}

fn evict_on(
    ledger: &Ledger,
    name: &NodeName,
    node_state: &NodeState,
    preemptor: &OnceCell<Preemptor>,
    (leaving, deferred): (&BTreeSet<PodUid>, &BTreeSet<PodUid>),
    evictions: &mut Vec<LoanEviction>,
) {
    let mut chosen: BTreeSet<&PodUid> = BTreeSet::new();
    for (index, owed, borrowers) in overdrawn(ledger, node_state) {
        let is_leaving = |borrower: &&ResidentPod| {
            leaving.contains(&borrower.uid) || chosen.contains(&borrower.uid)
        };
        let leaving_vram: Bytes = borrowers
            .iter()
            .copied()
            .filter(is_leaving)
            .map(|borrower| borrower.per_gpu)
            .sum();
        let mut owed = owed.minus(leaving_vram);
        if owed == Bytes::ZERO {
            continue;
        }
        let in_need = node_state.pods_in_need(index);
        let Some(first) = in_need.first() else {
            continue;
        };
        let is_early = !first.is_waking && node_state.is_recalled(&first.uid);
        let lender = match &in_need[..] {
            [one] => ledger.pod_state(&one.uid).map(|pod| pod.key.clone()),
            _ => None,
        };
        let gpu = &node_state.view().devices[index].uuid;
        // A Binding that is on its way is waited for: then the pod can be evicted.
        let is_evictable = |borrower: &&ResidentPod| {
            borrower.bound_since.is_some()
                && !deferred.contains(&borrower.uid)
                && !is_leaving(borrower)
        };
        let preemptor = preemptor.get_or_init(|| ledger.pricing_preemptor());
        let mut candidates: Vec<_> = borrowers
            .iter()
            .copied()
            .filter(is_evictable)
            .filter_map(|borrower| {
                let cost = ledger.cost_of_leaving(&borrower.uid, node_state, preemptor)?;
                Some((cost.total(), &borrower.uid, borrower.per_gpu))
            })
            .collect();
        candidates.sort_unstable();
        for (_, uid, per_gpu) in candidates {
            if owed == Bytes::ZERO {
                break;
            }
            let Some(pod_state) = ledger
                .pod_state(uid)
                .filter(|pod_state| pod_state.node() == Some(name))
            else {
                continue;
            };
            owed = owed.minus(per_gpu);
            chosen.insert(uid);
            let (uid, key) = (uid.clone(), pod_state.key.clone());
            evictions.push(LoanEviction {
                uid,
                key,
                lender: lender.clone(),
                gpu: gpu.clone(),
                is_early,
            });
        }
    }
}
