//! The continuous audit: compares the bound pods and reservations of each GPU, as the watches show them, with the GPU's capacity.
//!
//! It is an external view. It never reads the ledger, so a Binding that was written late, two leaders at once or a mistake in the
//! ledger itself shows here, even if the ledger does not know of it. [`mod@check`] finds the conflicts of one node; [`remedy`] finds
//! the pods that could be evicted; [`audited_pod`] is what is read of a pod, [`gpu_conflict`] what is reported.
//!
//! ```text
//!  watch ─► observe · remove ─► pods by node ─► due (changed nodes, and some more in turn) ─► check_nodes ─► begun · ended
//! ```
//!
//! **Cost.** One round checks the nodes whose pods changed since the last one, and a few more in turn ([`AuditPace`]), because a
//! GPU's capacity changes without a pod's event.
//!
//! **When a finding counts.** A conflict counts once it has stood for [`GpuConflictKind::confirmation_time`] and a second check has
//! found it again; while pods are being listed nothing is checked, because a deleted pod is still known then. It ends with the
//! first check that does not find it.

mod audited_pod;
mod check;
mod check_queue;
mod gpu_conflict;
mod remedy;

pub use audited_pod::{AuditedPod, GpuClaim, Grant, ReservedShare, Since};
pub use gpu_conflict::{GpuConflict, GpuConflictKind};
pub(crate) use gpu_conflict::{Party, PartyRole};
pub use remedy::ConflictVictim;

use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::units::{Millis, Moment};
use crate::vocabulary::gpu::Device;
use check::FoundConflict;
pub(crate) use check::{NodePods, check};
use check_queue::CheckQueue;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

impl GpuConflictKind {
    /// How long a conflict stands before it counts. Pods come by one watch, in the order of their changes, so two bound pods
    /// overlap there only if they did in fact; a check between two events of a node's report is ruled out all the same.
    /// Reservations are ended by writes that may have to be repeated.
    pub(crate) fn stands_for(self) -> Millis {
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
pub struct Conflicts {
    pace: AuditPace,
    /// The node under which each pod is stored.
    of: FxHashMap<PodUid, NodeName>,
    nodes: BTreeMap<NodeName, OnNode>,
    queue: CheckQueue,
    /// The node that was last checked in turn.
    last: Option<NodeName>,
    counts: BTreeMap<GpuConflictKind, usize>,
    is_listing: bool,
}

/// Pods among which an equal name is searched for: as many as a node has GPUs at most, and few even on a node that a user fills
/// with made-up pods.
const SHARED_WITH: usize = 64;

/// The audited pods and open findings of one node.
#[derive(Debug, Default)]
struct OnNode {
    pods: NodePods,
    standing: Vec<StandingConflict>,
}

/// An over-allocation that checks have found, and since when.
#[derive(Debug, Clone, PartialEq, Eq)]
struct StandingConflict {
    conflict: Arc<GpuConflict>,
    since: Moment,
    /// Since when each of its pods takes part, in their order.
    party_since: Vec<Moment>,
    counts: bool,
}

/// The changes of one round.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AuditRound {
    /// Conflicts that count from now on.
    pub begun: Vec<Arc<GpuConflict>>,
    /// Conflicts that counted and have ended.
    pub ended: Vec<Arc<GpuConflict>>,
}

impl Conflicts {
    #[cfg(test)]
    pub(crate) fn with_pace(pace: AuditPace) -> Self {
        Self {
            pace,
            ..Self::default()
        }
    }

    /// Records a pod as it is now; `None` if it has neither GPUs nor a reservation.
    pub fn see(&mut self, uid: &PodUid, observed: Option<AuditedPod>) {
        let before = self
            .of
            .get(uid)
            .and_then(|node| self.nodes.get(node)?.pods.get(uid));
        let observed = match (observed, before) {
            (Some(observed), Some(before)) => Some(observed.after(before)),
            (observed, _) => observed,
        };
        if observed.as_ref() == before {
            return;
        }
        self.forget(uid);
        if let Some(mut observed) = observed {
            // One copy of each name, however many pods are on the node.
            if let Some((name, on)) = self.nodes.get_key_value(&observed.node) {
                observed.node = name.clone();
                observed.gpus = on.shared(&observed.gpus);
            }
            let node = observed.node.clone();
            self.of.insert(uid.clone(), node.clone());
            self.queue.add(&node);
            self.nodes
                .entry(node)
                .or_default()
                .pods
                .insert(uid.clone(), observed);
        }
    }

    /// The pod has ended or is gone.
    pub fn forget(&mut self, uid: &PodUid) {
        let Some(node) = self.of.remove(uid) else {
            return;
        };
        if let Some(on) = self.nodes.get_mut(&node) {
            on.pods.remove(uid);
        }
        self.queue.add(&node);
    }

    /// A relist has begun: until it is complete, deleted pods are still known.
    pub fn begin_list(&mut self) {
        self.is_listing = true;
    }

    pub fn end_list(&mut self) {
        self.is_listing = false;
    }

    /// The nodes to check now. Pass their GPUs to [`OverAllocationAudit::check_nodes`]; a node that changes in between is checked as
    /// it is then, and once more.
    pub fn due(&mut self, now: Moment) -> Vec<NodeName> {
        if self.is_listing {
            return Vec::new();
        }
        let mut due = self.queue.take(now, self.pace.changed);
        let in_turn = self.in_turn();
        due.extend(in_turn);
        due.sort_unstable();
        due.dedup();
        due
    }

    /// Checks these nodes, each with its known GPUs, or with none if the node is unknown.
    pub fn look(&mut self, nodes: &[(NodeName, Arc<[Device]>)], now: Moment) -> AuditRound {
        let mut look = AuditRound::default();
        if self.is_listing {
            nodes.iter().for_each(|(name, _)| self.queue.add(name));
            return look;
        }
        for (name, devices) in nodes {
            self.check_node(name, devices, now, &mut look);
        }
        for (conflicts, change) in [(&look.begun, 1), (&look.ended, -1)] {
            for conflict in conflicts {
                let count = self.counts.entry(conflict.kind).or_default();
                *count = count.saturating_add_signed(change);
            }
        }
        look
    }

    /// The number of changed nodes that wait for a later round.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// The number of conflicts of a kind that count.
    pub fn count(&self, kind: GpuConflictKind) -> usize {
        self.counts.get(&kind).copied().unwrap_or_default()
    }

    /// The conflicts that count, in order of node, GPU and kind.
    pub fn standing(&self) -> impl Iterator<Item = &Arc<GpuConflict>> {
        let all = self.nodes.values().flat_map(|on| &on.standing);
        all.filter(|standing| standing.counts)
            .map(|standing| &standing.conflict)
    }

    /// The conflicts that a pod takes part in.
    pub fn of(&self, uid: &PodUid) -> Vec<Arc<GpuConflict>> {
        let on = self.of.get(uid).and_then(|node| self.nodes.get(node));
        let counting = on
            .into_iter()
            .flat_map(|on| &on.standing)
            .filter(|standing| standing.counts);
        let is_party =
            |conflict: &&Arc<GpuConflict>| conflict.parties.iter().any(|party| party.uid == *uid);
        counting
            .map(|standing| &standing.conflict)
            .filter(is_party)
            .cloned()
            .collect()
    }

    /// The next nodes after the last one, starting over at the end.
    fn in_turn(&mut self) -> Vec<NodeName> {
        let from = self.last.take().map_or(Bound::Unbounded, Bound::Excluded);
        let after = self
            .nodes
            .range((from, Bound::Unbounded))
            .map(|(name, _)| name);
        let names: Vec<NodeName> = after.take(self.pace.in_turn).cloned().collect();
        if names.len() == self.pace.in_turn {
            self.last = names.last().cloned();
        }
        names
    }

    fn check_node(
        &mut self,
        name: &NodeName,
        devices: &[Device],
        now: Moment,
        look: &mut AuditRound,
    ) {
        let Some(on) = self.nodes.get_mut(name) else {
            return;
        };
        let found = check(devices, &on.pods, now);
        let mut before = std::mem::take(&mut on.standing);
        for found in found {
            let same = |one: &StandingConflict| {
                (one.conflict.kind, &one.conflict.gpu) == (found.kind, &found.gpu)
            };
            let known = before
                .iter()
                .position(same)
                .map(|place| before.swap_remove(place));
            let did_count = known.as_ref().is_some_and(|known| known.counts);
            let standing = StandingConflict::of(name, found, known, now);
            if standing.counts && !did_count {
                look.begun.push(standing.conflict.clone());
            }
            on.standing.push(standing);
        }
        before.sort_by(|a, b| a.key().cmp(&b.key()));
        look.ended.extend(
            before
                .into_iter()
                .filter(|one| one.counts)
                .map(|one| one.conflict),
        );
        match on.next_check(now) {
            Some(at) => self.queue.add_at(name, at),
            None => self.queue.drop_later(name),
        }
        if on.pods.is_empty() {
            self.nodes.remove(name);
        }
    }
}

impl OnNode {
    /// These GPU names, as copies that other pods of the node have.
    fn shared(&self, names: &Arc<[GpuUuid]>) -> Arc<[GpuUuid]> {
        let others = || self.pods.values().take(SHARED_WITH).map(|pod| &pod.gpus);
        if let Some(same) = others().find(|gpus| *gpus == names) {
            return same.clone();
        }
        let known = |name: &GpuUuid| {
            others()
                .flat_map(|gpus| gpus.iter())
                .find(|known| *known == name)
        };
        names
            .iter()
            .map(|name| known(name).unwrap_or(name).clone())
            .collect()
    }

    /// The next moment at which time alone changes what is found: a conflict has stood long enough, or a reservation expires.
    fn next_check(&self, now: Moment) -> Option<Moment> {
        let stands = self.standing.iter().filter(|one| !one.counts);
        let stands = stands.map(|one| one.since + one.conflict.kind.stands_for());
        let ends = self
            .pods
            .values()
            .filter_map(|pod| pod.kept(now))
            .map(|kept| kept.deadline);
        stands.chain(ends).min()
    }
}

impl StandingConflict {
    fn of(node: &NodeName, found: FoundConflict, known: Option<Self>, now: Moment) -> Self {
        let conflict = found.on(node);
        let (kind, parties) = (conflict.kind, &conflict.parties);
        let since = known.as_ref().map_or(now, |known| known.since);
        let joined = |party: &Party| {
            known
                .as_ref()
                .and_then(|known| known.joined(&party.uid))
                .unwrap_or(now)
        };
        let party_since = parties.iter().map(joined).collect();
        let counts =
            known.as_ref().is_some_and(|known| known.counts) || since + kind.stands_for() <= now;
        // An unchanged conflict is shared with the readers that already have it.
        let conflict = match known {
            Some(known) if *known.conflict == conflict => known.conflict,
            _ => Arc::new(conflict),
        };
        Self {
            conflict,
            since,
            party_since,
            counts,
        }
    }

    fn joined(&self, uid: &PodUid) -> Option<Moment> {
        let place = self
            .conflict
            .parties
            .binary_search_by(|party| party.uid.cmp(uid))
            .ok()?;
        self.party_since.get(place).copied()
    }

    fn key(&self) -> (&GpuUuid, GpuConflictKind) {
        (&self.conflict.gpu, self.conflict.kind)
    }
}

#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;
