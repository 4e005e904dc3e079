//! The continuous audit: compares the bound pods and reservations of each GPU, as the watches show them, with the GPU's capacity.
//!
//! It is an external view. It never reads the ledger, so a Binding that was written late, two leaders at once or a mistake in the
//! ledger itself shows here, even if the ledger does not know of it. [`mod@check`] finds the conflicts of one node; [`remedy`] finds
//! the pods that could be evicted; [`audited_pod`] is what is read of a pod, [`over_allocation`] what is reported.
//!
//! ```text
//!  watch ─► observe · remove ─► pods by node ─► due (changed nodes, and some more in turn) ─► check_nodes ─► begun · ended
//! ```
//!
//! **Cost.** One round checks the nodes whose pods changed since the last one, and a few more in turn ([`AuditPace`]), because a
//! GPU's capacity changes without a pod's event.
//!
//! **When a finding counts.** A conflict counts once it has stood for [`OverAllocationKind::confirmation_time`] and a second check has
//! found it again; while pods are being listed nothing is checked, because a deleted pod is still known then. It ends with the
//! first check that does not find it.

mod audited_pod;
mod check;
mod check_queue;
mod over_allocation;
mod remedy;

pub use audited_pod::{AuditedPod, BindTimes, GpuShare, Grant, ReservedShare};
pub use over_allocation::{OverAllocation, OverAllocationKind};
pub(crate) use over_allocation::{Party, PartyRole};
pub use remedy::OverAllocationVictim;

use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::units::{Millis, Moment};
use crate::vocabulary::gpu::Device;
use check::FoundOverAllocation;
pub(crate) use check::{NodePods, find_over_allocations};
use check_queue::CheckQueue;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

impl OverAllocationKind {
    /// How long a conflict stands before it counts. Pods come by one watch, in the order of their changes, so two bound pods
    /// overlap there only if they did in fact; a check between two events of a node's report is ruled out all the same.
    /// Reservations are ended by writes that may have to be repeated.
    pub(crate) fn confirmation_time(self) -> Millis {
        match self {
            Self::Overcommitted | Self::ExclusiveShared | Self::UnknownGpu => Millis::seconds(2),
            Self::ReservationsOverlap | Self::ReservationOverBound => Millis::seconds(10),
        }
    }
}

/// The greatest number of nodes that one round checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AuditPace {
    /// Nodes that changed. The others wait for the next round.
    pub changed: usize,
    /// Other nodes, checked in turn.
    pub in_turn: usize,
}

impl Default for AuditPace {
    /// At a round per second, 5,000 nodes that all changed are checked within five seconds, and a GPU that shrank is noticed
    /// within twenty.
    fn default() -> Self {
        Self {
            changed: 1000,
            in_turn: 250,
        }
    }
}

#[derive(Debug, Default)]
pub struct OverAllocationAudit {
    pace: AuditPace,
    /// The node under which each pod is stored.
    node_of: FxHashMap<PodUid, NodeName>,
    nodes: BTreeMap<NodeName, AuditedNode>,
    queue: CheckQueue,
    /// The node that was last checked in turn.
    last_in_turn: Option<NodeName>,
    counts: BTreeMap<OverAllocationKind, usize>,
    is_listing: bool,
}

/// Pods among which an equal name is searched for: as many as a node has GPUs at most, and few even on a node that a user fills
/// with made-up pods.
const MAX_PODS_SEARCHED: usize = 64;

/// The audited pods and open findings of one node.
#[derive(Debug, Default)]
struct AuditedNode {
    pods: NodePods,
    tracked: Vec<TrackedOverAllocation>,
}

/// An over-allocation that checks have found, and since when.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TrackedOverAllocation {
    over_allocation: Arc<OverAllocation>,
    since: Moment,
    /// Since when each of its pods takes part, in their order.
    party_since: Vec<Moment>,
    is_confirmed: bool,
}

/// The changes of one round.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AuditRound {
    /// Conflicts that count from now on.
    pub begun: Vec<Arc<OverAllocation>>,
    /// Conflicts that counted and have ended.
    pub ended: Vec<Arc<OverAllocation>>,
}

impl OverAllocationAudit {
    #[cfg(test)]
    pub(crate) fn with_pace(pace: AuditPace) -> Self {
        Self {
            pace,
            ..Self::default()
        }
    }

    /// Records a pod as it is now; `None` if it has neither GPUs nor a reservation.
    pub fn observe(&mut self, uid: &PodUid, observed: Option<AuditedPod>) {
        let before = self
            .node_of
            .get(uid)
            .and_then(|node| self.nodes.get(node)?.pods.get(uid));
        let observed = match (observed, before) {
            (Some(observed), Some(before)) => Some(observed.keeping_first_record(before)),
            (observed, _) => observed,
        };
        if observed.as_ref() == before {
            return;
        }
        self.remove(uid);
        if let Some(mut observed) = observed {
            // One copy of each name, however many pods are on the node.
            if let Some((name, on)) = self.nodes.get_key_value(&observed.node) {
                observed.node = name.clone();
                observed.gpus = on.share_names(&observed.gpus);
            }
            let node = observed.node.clone();
            self.node_of.insert(uid.clone(), node.clone());
            self.queue.add(&node);
            self.nodes
                .entry(node)
                .or_default()
                .pods
                .insert(uid.clone(), observed);
        }
    }

    /// The pod has ended or is gone.
    pub fn remove(&mut self, uid: &PodUid) {
        let Some(node) = self.node_of.remove(uid) else {
            return;
        };
        if let Some(on) = self.nodes.get_mut(&node) {
            on.pods.remove(uid);
        }
        self.queue.add(&node);
    }

    /// A relist has begun: until it is complete, deleted pods are still known.
    pub fn begin_relist(&mut self) {
        self.is_listing = true;
    }

    pub fn end_relist(&mut self) {
        self.is_listing = false;
    }

    /// The nodes to check now. Pass their GPUs to [`OverAllocationAudit::check_nodes`]; a node that changes in between is checked as
    /// it is then, and once more.
    pub fn due(&mut self, now: Moment) -> Vec<NodeName> {
        if self.is_listing {
            return Vec::new();
        }
        let mut due = self.queue.take(now, self.pace.changed);
        let in_turn = self.next_in_turn();
        due.extend(in_turn);
        due.sort_unstable();
        due.dedup();
        due
    }

    /// Checks these nodes, each with its known GPUs, or with none if the node is unknown.
    pub fn check_nodes(&mut self, nodes: &[(NodeName, Arc<[Device]>)], now: Moment) -> AuditRound {
        let mut round = AuditRound::default();
        if self.is_listing {
            nodes.iter().for_each(|(name, _)| self.queue.add(name));
            return round;
        }
        for (name, devices) in nodes {
            self.check_node(name, devices, now, &mut round);
        }
        for (over_allocations, change) in [(&round.begun, 1), (&round.ended, -1)] {
            for over_allocation in over_allocations {
                let count = self.counts.entry(over_allocation.kind).or_default();
                *count = count.saturating_add_signed(change);
            }
        }
        round
    }

    /// The number of changed nodes that wait for a later round.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// The number of conflicts of a kind that count.
    pub fn count(&self, kind: OverAllocationKind) -> usize {
        self.counts.get(&kind).copied().unwrap_or_default()
    }

    /// The conflicts that count, in order of node, GPU and kind.
    pub fn confirmed(&self) -> impl Iterator<Item = &Arc<OverAllocation>> {
        let all = self.nodes.values().flat_map(|on| &on.tracked);
        all.filter(|tracked| tracked.is_confirmed)
            .map(|tracked| &tracked.over_allocation)
    }

    /// The conflicts that a pod takes part in.
    pub fn involving(&self, uid: &PodUid) -> Vec<Arc<OverAllocation>> {
        let on = self.node_of.get(uid).and_then(|node| self.nodes.get(node));
        let counting = on
            .into_iter()
            .flat_map(|on| &on.tracked)
            .filter(|tracked| tracked.is_confirmed);
        let is_party = |over_allocation: &&Arc<OverAllocation>| {
            over_allocation
                .parties
                .iter()
                .any(|party| party.uid == *uid)
        };
        counting
            .map(|tracked| &tracked.over_allocation)
            .filter(is_party)
            .cloned()
            .collect()
    }

    /// The next nodes after the last one, starting over at the end.
    fn next_in_turn(&mut self) -> Vec<NodeName> {
        let from = self
            .last_in_turn
            .take()
            .map_or(Bound::Unbounded, Bound::Excluded);
        let after = self
            .nodes
            .range((from, Bound::Unbounded))
            .map(|(name, _)| name);
        let names: Vec<NodeName> = after.take(self.pace.in_turn).cloned().collect();
        if names.len() == self.pace.in_turn {
            self.last_in_turn = names.last().cloned();
        }
        names
    }

    fn check_node(
        &mut self,
        name: &NodeName,
        devices: &[Device],
        now: Moment,
        round: &mut AuditRound,
    ) {
        let Some(on) = self.nodes.get_mut(name) else {
            return;
        };
        let found = find_over_allocations(devices, &on.pods, now);
        let mut previous = std::mem::take(&mut on.tracked);
        for found in found {
            let is_same = |one: &TrackedOverAllocation| {
                (one.over_allocation.kind, &one.over_allocation.gpu) == (found.kind, &found.gpu)
            };
            let previous_finding = previous
                .iter()
                .position(is_same)
                .map(|index| previous.swap_remove(index));
            let did_count = previous_finding
                .as_ref()
                .is_some_and(|finding| finding.is_confirmed);
            let finding = TrackedOverAllocation::from_finding(name, found, previous_finding, now);
            if finding.is_confirmed && !did_count {
                round.begun.push(finding.over_allocation.clone());
            }
            on.tracked.push(finding);
        }
        previous.sort_by(|a, b| a.key().cmp(&b.key()));
        round.ended.extend(
            previous
                .into_iter()
                .filter(|one| one.is_confirmed)
                .map(|one| one.over_allocation),
        );
        match on.next_check(now) {
            Some(at) => self.queue.schedule(name, at),
            None => self.queue.cancel_scheduled(name),
        }
        if on.pods.is_empty() {
            self.nodes.remove(name);
        }
    }
}

impl AuditedNode {
    /// These GPU names, as copies that other pods of the node have.
    fn share_names(&self, names: &Arc<[GpuUuid]>) -> Arc<[GpuUuid]> {
        let others = || {
            self.pods
                .values()
                .take(MAX_PODS_SEARCHED)
                .map(|pod| &pod.gpus)
        };
        if let Some(same) = others().find(|gpus| *gpus == names) {
            return same.clone();
        }
        let shared_name = |name: &GpuUuid| {
            others()
                .flat_map(|gpus| gpus.iter())
                .find(|candidate| *candidate == name)
        };
        names
            .iter()
            .map(|name| shared_name(name).unwrap_or(name).clone())
            .collect()
    }

    /// The next moment at which time alone changes what is found: a conflict has stood long enough, or a reservation expires.
    fn next_check(&self, now: Moment) -> Option<Moment> {
        let confirmations = self.tracked.iter().filter(|one| !one.is_confirmed);
        let confirmations =
            confirmations.map(|one| one.since + one.over_allocation.kind.confirmation_time());
        let ends = self
            .pods
            .values()
            .filter_map(|pod| pod.active_reservation(now))
            .map(|kept| kept.deadline);
        confirmations.chain(ends).min()
    }
}

impl TrackedOverAllocation {
    fn from_finding(
        node: &NodeName,
        found: FoundOverAllocation,
        previous: Option<Self>,
        now: Moment,
    ) -> Self {
        let over_allocation = found.at_node(node);
        let (kind, parties) = (over_allocation.kind, &over_allocation.parties);
        let since = previous.as_ref().map_or(now, |previous| previous.since);
        let joined = |party: &Party| {
            previous
                .as_ref()
                .and_then(|previous| previous.party_since(&party.uid))
                .unwrap_or(now)
        };
        let party_since = parties.iter().map(joined).collect();
        let counts = previous
            .as_ref()
            .is_some_and(|previous| previous.is_confirmed)
            || since + kind.confirmation_time() <= now;
        // An unchanged conflict is shared with the readers that already have it.
        let over_allocation = match previous {
            Some(previous) if *previous.over_allocation == over_allocation => {
                previous.over_allocation
            }
            _ => Arc::new(over_allocation),
        };
        Self {
            over_allocation,
            since,
            party_since,
            is_confirmed: counts,
        }
    }

    fn party_since(&self, uid: &PodUid) -> Option<Moment> {
        let index = self
            .over_allocation
            .parties
            .binary_search_by(|party| party.uid.cmp(uid))
            .ok()?;
        self.party_since.get(index).copied()
    }

    fn key(&self) -> (&GpuUuid, OverAllocationKind) {
        (&self.over_allocation.gpu, self.over_allocation.kind)
    }
}

#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;
