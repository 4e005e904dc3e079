//! The pods that could be evicted to end a conflict: `conflicts: evict-unstarted`.
//!
//! A pod is evicted only where the records of the Bindings themselves prove the conflict, and no agent's report is part of the
//! proof:
//!
//! - A GPU that one pod was granted exclusively has another pod: the records say so.
//! - Pods were granted more than the largest GPU that any of their Bindings can have been made for (what was granted, over
//!   the share of the GPU that was). A report that makes the GPU smaller than it is changes no record.
//!
//! All else is reported and left to a person: a GPU that is smaller than it was, a GPU that the node does not list, reservations
//! (a reservation that another contradicts is ended by the leader that adopts it, which needs no eviction).
//!
//! Among the pods in conflict that have not started, the one bound last is evicted, and among equals the one created last and then
//! the greater UID; a pod whose eviction ends the conflict goes before one whose eviction does not. Where all have started, none
//! is evicted. A pod that is being deleted is not counted: its end may end the conflict.

use super::audited_pod::{AuditedPod, BindTimes, Grant};
use super::{AuditedNode, OverAllocationAudit, OverAllocationKind, TrackedOverAllocation};
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::units::{Bytes, Moment};
use crate::vocabulary::demand::Sharing;
use std::collections::BTreeSet;

/// A pod to evict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverAllocationVictim {
    pub uid: PodUid,
    pub key: PodKey,
    pub node: NodeName,
    pub gpu: GpuUuid,
    /// The pod with the largest grant of those that stay.
    pub remaining_pod: PodKey,
    pub remaining_uid: PodUid,
}

type BoundOnGpu<'a> = (&'a PodUid, &'a AuditedPod, &'a Grant);

impl OverAllocationAudit {
    /// The pods to evict, in order of node and GPU; one at a time for each GPU.
    pub fn victims(&self, now: Moment) -> Vec<OverAllocationVictim> {
        let counting = self.nodes.iter().flat_map(|(name, on)| {
            let mut chosen = BTreeSet::new();
            let confirmed = on.tracked.iter().filter(|tracked| tracked.is_confirmed);
            confirmed.filter_map(move |tracked| find_victim(name, on, tracked, now, &mut chosen))
        });
        counting.collect()
    }
}

fn find_victim<'a>(
    node: &NodeName,
    on: &'a AuditedNode,
    tracked: &'a TrackedOverAllocation,
    now: Moment,
    chosen: &mut BTreeSet<&'a PodUid>,
) -> Option<OverAllocationVictim> {
    let kind = tracked.over_allocation.kind;
    if !matches!(
        kind,
        OverAllocationKind::Overcommitted | OverAllocationKind::ExclusiveShared
    ) {
        return None;
    }
    let parties = tracked
        .over_allocation
        .parties
        .iter()
        .zip(&tracked.party_since);
    // A pod that has just joined is not evicted for a conflict that others began.
    let settled = parties.filter(|(_, since)| **since + kind.confirmation_time() <= now);
    let remaining: Vec<BoundOnGpu<'a>> = settled
        .filter(|(party, _)| !chosen.contains(&party.uid))
        .filter_map(|(party, _)| {
            let pod = on.pods.get(&party.uid)?;
            Some((
                &party.uid,
                pod,
                pod.grant().filter(|grant| !grant.is_leaving)?,
            ))
        })
        .collect();
    if !is_proven(kind, &remaining) {
        return None;
    }
    let without = |uid: &PodUid| -> Vec<BoundOnGpu<'a>> {
        remaining
            .iter()
            .copied()
            .filter(|(other, ..)| *other != uid)
            .collect()
    };
    let unstarted = remaining
        .iter()
        .filter(|(_, _, grant)| !grant.has_started && !grant.is_static);
    let rank = |&&(uid, _, grant): &&BoundOnGpu<'a>| -> (bool, BindTimes, &PodUid) {
        (!is_proven(kind, &without(uid)), grant.bind_times, uid)
    };
    let (uid, pod, _) = *unstarted.max_by_key(rank)?;
    let others = without(uid);
    let (stays_uid, stays, _) = others
        .iter()
        .max_by_key(|(uid, _, grant)| (grant.per_gpu, *uid))?;
    chosen.insert(uid);
    let (node, gpu) = (node.clone(), tracked.over_allocation.gpu.clone());
    let (stays, stays_uid) = (stays.key.clone(), (*stays_uid).clone());
    Some(OverAllocationVictim {
        uid: uid.clone(),
        key: pod.key.clone(),
        node,
        gpu,
        remaining_pod: stays,
        remaining_uid: stays_uid,
    })
}

/// Whether the records of these Bindings alone contradict each other. A record that has been edited since the conflict was found
/// may name other GPUs: that a pod is exclusive counts only if it did then.
fn is_proven(kind: OverAllocationKind, pods: &[BoundOnGpu<'_>]) -> bool {
    if pods.len() < 2 {
        return false;
    }
    if kind == OverAllocationKind::ExclusiveShared
        && pods
            .iter()
            .any(|(_, _, grant)| grant.sharing == Sharing::Exclusive)
    {
        return true;
    }
    let granted: Bytes = pods.iter().map(|(_, _, grant)| grant.per_gpu).sum();
    let largest: Option<Vec<Bytes>> = pods
        .iter()
        .map(|(_, _, grant)| grant.largest_gpu())
        .collect();
    largest
        .and_then(|all| all.into_iter().max())
        .is_some_and(|largest| granted > largest)
}
