//! Pods that wait for a placement, and which of them the planner tries next: pods behind the planner's gate, and pods that were
//! refused and may fit by now.
//!
//! kube-scheduler requeues a refused pod when the API server shows a change. What an agent sees is no such change: an engine
//! whose queue has run empty, VRAM that a process gave back, an agent that reports again. Only the planner looks at a gated
//! pod at all.
//!
//! What a round costs does not grow with the number of pods that wait: [`super::waiting_queue`] has them in order.

use super::Ledger;
use super::node_state::NodeState;
use super::pod_state::{FailedAttempt, FilterRefusal, SchedulingGate, WaitingPod};
use super::pod_state::{PodPhase, PodState};
use super::waiting_queue::{QueueBand, WaitingLine, WaitingQueue};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::placing::snapshot::NodeSet;
use crate::units::{Millis, Moment};
use crate::vocabulary::classification::TenantId;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::disruption_info::GroupKey;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// How long a refused pod is not requeued: within it kube-scheduler retries after an API event, or preempts after a refusal.
const REQUEUE_QUIET_PERIOD: Millis = Millis::seconds(1);
/// The longest pause before a pod that was requeued and refused again is requeued once more (another pod was faster, or a figure
/// hovers about a limit): no refusal outlives its cause by five seconds.
const MAX_REQUEUE_PAUSE_AFTER_REFUSAL: Millis = Millis::seconds(4);
/// The longest pause after a requeue that no attempt followed: something that Stowage does not see keeps the pod back.
const MAX_REQUEUE_PAUSE_WITHOUT_ATTEMPT: Millis = Millis::seconds(60);
/// The first pause before a gated pod that was not placed is tried again; it doubles each time.
const FIRST_PLACEMENT_RETRY: Millis = Millis(250);
/// The longest of these pauses once anything has changed in the ledger since the last attempt.
const MAX_PLACEMENT_RETRY_AFTER_CHANGE: Millis = Millis::seconds(1);
/// The longest of these pauses while nothing has changed: then the result would be the same.
const MAX_PLACEMENT_RETRY: Millis = Millis::seconds(4);
/// How often to check whether anything has changed for a pod that was not placed.
const CHANGE_CHECK_INTERVAL: Millis = Millis(500);
/// Pods that become ready in one round, for each that is handed out. Further ones become ready in the next round.
const DUE_PODS_PER_HANDOUT: usize = 4;
/// The first pause before evicting again for a pod that was not bound in place of its victims. It doubles each time.
const FIRST_EVICTION_RETRY: Millis = Millis::seconds(60);
/// The longest of these pauses: something that Stowage does not see prevents the bind.
const MAX_EVICTION_RETRY: Millis = Millis::seconds(1800);

/// A pod that waits for the planner.
#[derive(Debug, Clone)]
pub struct PendingPod {
    pub uid: PodUid,
    pub key: PodKey,
    pub demand: Demand,
    pub wait_kind: WaitKind,
    /// Since when it waits.
    pub since: Moment,
    /// Its index among those that a run is handed.
    pub turn: usize,
}

/// How a pod waits.
#[derive(Debug, Clone)]
pub enum WaitKind {
    /// Behind the planner's gate: the scheduler has not seen it.
    Gated,
    /// The scheduler asked about these nodes, and none fitted; `None` if they are not known.
    Refused { nodes: Option<Arc<NodeSet>> },
    /// It was requeued a moment ago and has not tried yet: what it was requeued for is not for the next pod.
    Requeued { nodes: Option<Arc<NodeSet>> },
}

/// The pods of a group, as far as they exist.
#[derive(Debug, Clone, Default)]
pub struct PodGroup {
    /// Without a reservation, behind the planner's gate or, of a group that is planned without it, refused.
    pub pending: Vec<PendingPod>,
    /// Bound, assumed, or with a reservation; and those that need no place.
    pub placed: u32,
    /// One of these has a GPU, or has had one: the group as a whole has been placed before.
    pub has_begun: bool,
    /// How many it takes, if any of them says.
    pub size: Option<u32>,
}

/// Pods that were refused, and the queue in which pods wait for the planner.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct WaitingPods {
    /// Pods that were refused and have not asked again since.
    refused: BTreeSet<PodUid>,
    queue: WaitingQueue,
}

impl WaitingPods {
    /// Pods that were refused and have not asked again since, in order of UID.
    pub(super) fn refused(&self) -> impl Iterator<Item = &PodUid> {
        self.refused.iter()
    }

    fn contains(&self, uid: &PodUid) -> bool {
        self.queue.contains(uid) || self.refused.contains(uid)
    }

    /// Pods due at or before `now` are ready. `refusal` is what the pod was refused, if it was.
    fn set(
        &mut self,
        uid: &PodUid,
        turn: Option<(Moment, QueueBand)>,
        refusal: Option<&FilterRefusal>,
        now: Moment,
    ) {
        match turn {
            None => self.queue.remove(uid),
            Some((due, queue_band)) if due <= now => self.queue.set_ready(uid, queue_band),
            Some((due, _)) => self.queue.set_later(uid, due),
        }
        let requeued = refusal.filter(|refusal| refusal.requeues > 0);
        self.queue
            .set_requeued(uid, requeued.map(|refusal| refusal.at));
        if refusal.is_none() {
            self.refused.remove(uid);
        }
    }
}

/// A pod that requests plugin devices may be another scheduler's; Stowage's own is requeued by what the API server shows.
fn may_be_refused(pod_state: &PodState) -> bool {
    let is_free = |waiting: &WaitingPod| {
        waiting.soft_reservation.is_none() && waiting.gate == SchedulingGate::Open
    };
    pod_state.waiting().is_some_and(is_free) && !pod_state.demand.is_allocated_externally()
}

impl Ledger {
    /// Records that none of these nodes fits the pod; `None` if it is unknown which were tried.
    pub(crate) fn record_refusal(&mut self, uid: &PodUid, nodes: Option<NodeSet>) {
        let at = self.now;
        self.record_refusal_with(uid, |waiting| waiting.record_refusal(at, nodes));
    }

    fn record_refusal_with(&mut self, uid: &PodUid, note: impl FnOnce(&mut WaitingPod)) {
        if self.pod_states.edit_waiting(uid, note).is_some() {
            self.waiting_pods.refused.insert(uid.clone());
        }
        self.update_queue(uid);
    }

    /// Pods that may have been refused by a process of which this ledger knows nothing: the last leader, or this process before its
    /// restart. Looks at all pods.
    pub fn possibly_refused_pods(&self) -> BTreeSet<PodUid> {
        let waiting = self
            .pods_in_no_order()
            .filter(|(_, pod_state)| may_be_refused(pod_state));
        waiting.map(|(uid, _)| uid.clone()).collect()
    }

    /// The pod counts as refused from now on, if it still may be and this process has not refused it since `since`.
    pub(crate) fn presume_refused(&mut self, uid: &PodUid, since: Moment) {
        let is_known = |pod_state: &PodState| {
            pod_state
                .refusal()
                .is_some_and(|refused| refused.at >= since)
        };
        if self
            .pod_states
            .get(uid)
            .is_some_and(|pod_state| may_be_refused(pod_state) && !is_known(pod_state))
        {
            self.record_presumed_refusal(uid);
        }
    }

    /// Presumes that all waiting pods were refused, whatever this process has recorded.
    pub(crate) fn presume_all_refused(&mut self) {
        self.possibly_refused_pods()
            .iter()
            .for_each(|uid| self.record_presumed_refusal(uid));
    }

    fn record_presumed_refusal(&mut self, uid: &PodUid) {
        let at = self.now;
        self.record_refusal_with(uid, |waiting| waiting.presume_refused(at));
    }

    /// The next pods for the planner, in the order in which they are to be placed: those just requeued first, then by
    /// priority, class, and turn; a run gives the tenants of one priority their turns. At most `limit` of the refused and as many
    /// of the gated, in turn: of those of one priority, tenant and class the next call answers others, as long as there are any.
    pub(crate) fn pending(&mut self, limit: usize) -> Vec<PendingPod> {
        self.ready_due_pods(limit.saturating_mul(DUE_PODS_PER_HANDOUT));
        let whole = self.cluster_total();
        let shares: BTreeMap<TenantId, u64> = self
            .policy
            .tenant_ids()
            .map(|id| (id, self.borrowed_share(Some(id), whole)))
            .collect();
        let share =
            |tenant: Option<TenantId>| tenant.and_then(|id| shares.get(&id).copied()).unwrap_or(0);
        let refused = self
            .waiting_pods
            .queue
            .hand_out(WaitingLine::Refused, limit, share);
        let gated = self
            .waiting_pods
            .queue
            .hand_out(WaitingLine::Gated, limit, share);
        let requeued = if refused.is_empty() {
            Vec::new()
        } else {
            self.waiting_pods.queue.last_requeued(limit)
        };
        let due: BTreeSet<&PodUid> = refused.iter().collect();
        let requeued = requeued.iter().filter(|uid| !due.contains(uid));
        let refused = refused.iter().chain(requeued).enumerate();
        let refused = refused.filter_map(|(turn, uid)| {
            Some(PendingPod {
                turn,
                ..self.pending_refused(uid)?
            })
        });
        let gated = gated.iter().enumerate();
        let gated = gated.filter_map(|(turn, uid)| {
            Some(PendingPod {
                turn,
                ..self.pending_gated(uid)?
            })
        });
        let mut pending: Vec<PendingPod> = refused.chain(gated).collect();
        pending.sort_by_cached_key(PendingPod::order);
        pending
    }

    /// Gives back the turns of pods that [`Ledger::pending`] handed out and no plan tried: they come first again.
    pub(crate) fn put_back<'a>(&mut self, pods: impl IntoIterator<Item = &'a PodUid>) {
        pods.into_iter()
            .for_each(|uid| self.waiting_pods.queue.put_back(uid));
    }

    /// How many pods wait for the planner, due or not.
    pub fn pending_count(&self) -> usize {
        self.waiting_pods.queue.len()
    }

    /// Updates the pod's position in the queue. Whatever changes how a pod waits ends here.
    pub(super) fn update_queue(&mut self, uid: &PodUid) {
        let pod_state = self.pod_states.get(uid);
        let waiting = pod_state.filter(|pod_state| matches!(pod_state.phase, PodPhase::Waiting(_)));
        if waiting.is_none() && !self.waiting_pods.contains(uid) {
            return;
        }
        let turn =
            waiting.and_then(|pod_state| Some((self.due_at(pod_state)?, queue_band_of(pod_state))));
        self.waiting_pods
            .set(uid, turn, waiting.and_then(PodState::refusal), self.now);
    }

    /// Gives all pods that wait a turn by the class and the tenant that they have now.
    pub(super) fn update_whole_queue(&mut self) {
        self.waiting_pods
            .queue
            .all()
            .iter()
            .for_each(|uid| self.update_queue(uid));
    }

    /// A group's pods; the pending ones in the order in which they are to be placed.
    pub(crate) fn group(&self, key: &GroupKey) -> PodGroup {
        let mut group = PodGroup::default();
        for (uid, pod_state) in self.members(key) {
            group.size = group.size.max(pod_state.disruption_info.group_size);
            match pod_state
                .waiting()
                .filter(|waiting| waiting.reservation.is_none())
            {
                Some(waiting) => {
                    let pending = self
                        .wait_kind_in_group(key, waiting)
                        .map(|way| self.pending_pod(uid, pod_state, way, waiting.since));
                    group.pending.extend(pending);
                }
                // What replaces it is a member, too.
                None if pod_state.is_leaving() => {}
                None => group.placed += 1,
            }
        }
        let [there, ended] = self.count_placeless(key);
        group.has_begun = group.placed + ended > 0;
        group.placed += there + ended;
        group.pending.sort_by_cached_key(PendingPod::order);
        group
    }

    /// How a member waits, if it is planned with its group now. Whether its own turn has come does not matter: members that take
    /// turns would never be planned together.
    fn wait_kind_in_group(&self, key: &GroupKey, waiting: &WaitingPod) -> Option<WaitKind> {
        match waiting.gate {
            SchedulingGate::Planned => Some(WaitKind::Gated),
            SchedulingGate::Open if key.kind.is_planned_without_gate() => {
                // The scheduler may still find a node for it by a preemption of its own.
                let refused = waiting
                    .refused
                    .as_ref()
                    .filter(|refused| refused.at + REQUEUE_QUIET_PERIOD <= self.now)?;
                Some(WaitKind::Refused {
                    nodes: refused.queried_nodes.clone(),
                })
            }
            SchedulingGate::Open | SchedulingGate::Others => None,
        }
    }

    /// Pods that are to come to a node and are not bound yet: assumed, or with a reservation there.
    pub fn incoming_pods(&self, node: &NodeName) -> &[PodUid] {
        self.node_states
            .get(node)
            .map_or(&[], NodeState::incoming_pods)
    }

    /// The incoming pods of each node that exists: those of the snapshot, in its order.
    pub(crate) fn incoming_pods_by_node(&self) -> impl Iterator<Item = (&NodeName, &[PodUid])> {
        self.node_states
            .all_existing()
            .map(|node_state| (&node_state.view().name, node_state.incoming_pods()))
    }

    /// All pods of a group.
    pub fn members<'a>(
        &'a self,
        key: &GroupKey,
    ) -> impl Iterator<Item = (&'a PodUid, &'a PodState)> {
        self.member_uids(key)
            .filter_map(|uid| Some((uid, self.pod_states.get(uid)?)))
    }

    /// Records that the pod was requeued.
    pub(crate) fn record_requeue(&mut self, uid: &PodUid) {
        let at = self.now;
        self.pod_states
            .edit_waiting(uid, |waiting| waiting.record_requeue(at));
        self.update_queue(uid);
    }

    /// Records that no node fitted the pod in that generation of the ledger.
    pub(crate) fn record_no_placement(&mut self, uid: &PodUid, generation: u64) {
        let at = self.now;
        self.pod_states
            .edit_waiting(uid, |waiting| waiting.record_no_placement(at, generation));
        self.update_queue(uid);
    }

    /// Records that the pod was not bound in place of its victims in time.
    pub(crate) fn record_failed_eviction(&mut self, uid: &PodUid) {
        let (at, generation) = (self.now, self.generation());
        self.pod_states.edit_waiting(uid, |waiting| {
            waiting.record_failed_eviction(at, generation)
        });
    }

    /// Whether pods may be evicted for the pod (again).
    pub(crate) fn may_evict_for(&self, uid: &PodUid) -> bool {
        let Some(waiting) = self.pod_states.waiting(uid) else {
            return false;
        };
        let pause = |times: u32| {
            FIRST_EVICTION_RETRY
                .times(1 << (times - 1).min(8))
                .min(MAX_EVICTION_RETRY)
        };
        waiting
            .failed_eviction
            .is_none_or(|failed| failed.at + pause(failed.times) <= self.now)
    }

    /// Makes pods ready that are due, at most so many of them.
    fn ready_due_pods(&mut self, limit: usize) {
        for _ in 0..limit {
            let Some(uid) = self.waiting_pods.queue.next_due(self.now).cloned() else {
                return;
            };
            let failed_attempt = self
                .pod_states
                .waiting(&uid)
                .and_then(|waiting| waiting.failed_attempt);
            match self.is_retry_due(failed_attempt) {
                true => self.update_queue(&uid),
                false => self
                    .waiting_pods
                    .queue
                    .set_later(&uid, self.now + CHANGE_CHECK_INTERVAL),
            }
        }
    }

    /// When a pod may be tried again, if something has changed by then; `None` for one that does not wait for the planner.
    fn due_at(&self, pod_state: &PodState) -> Option<Moment> {
        let Some(WaitingPod {
            reservation: None,
            gate,
            refused,
            failed_requeues,
            failed_attempt,
            ..
        }) = pod_state.waiting()
        else {
            return None;
        };
        let quiet_until = match (gate, refused) {
            (SchedulingGate::Planned, _) => Moment::default(),
            (SchedulingGate::Open, Some(refused)) => {
                refused.at + requeue_pause(refused.requeues, *failed_requeues)
            }
            (SchedulingGate::Open | SchedulingGate::Others, _) => return None,
        };
        let retry_at = |failed_attempt: FailedAttempt| {
            failed_attempt.at
                + placement_retry_pause(failed_attempt, MAX_PLACEMENT_RETRY_AFTER_CHANGE)
        };
        Some(failed_attempt.map_or(quiet_until, |failed_attempt| {
            quiet_until.max(retry_at(failed_attempt))
        }))
    }

    /// A refused pod that is due or was requeued; `None` for any other, and for one that has a reservation.
    fn pending_refused(&self, uid: &PodUid) -> Option<PendingPod> {
        let pod_state = self.pod_states.get(uid)?;
        let Some(WaitingPod {
            refused: Some(refused),
            failed_requeues,
            reservation: None,
            gate: SchedulingGate::Open,
            failed_attempt,
            ..
        }) = pod_state.waiting()
        else {
            return None;
        };
        let is_due = refused.at + requeue_pause(refused.requeues, *failed_requeues) <= self.now
            && self.is_retry_due(*failed_attempt);
        let nodes = refused.queried_nodes.clone();
        let way = match (is_due, refused.requeues) {
            (true, _) => WaitKind::Refused { nodes },
            (false, 0) => return None,
            (false, _) => WaitKind::Requeued { nodes },
        };
        Some(self.pending_pod(uid, pod_state, way, refused.at))
    }

    fn pending_gated(&self, uid: &PodUid) -> Option<PendingPod> {
        let pod_state = self.pod_states.get(uid)?;
        let Some(WaitingPod {
            gate: SchedulingGate::Planned,
            reservation: None,
            failed_attempt,
            since,
            ..
        }) = pod_state.waiting()
        else {
            return None;
        };
        self.is_retry_due(*failed_attempt)
            .then(|| self.pending_pod(uid, pod_state, WaitKind::Gated, *since))
    }

    fn is_retry_due(&self, failed_attempt: Option<FailedAttempt>) -> bool {
        let max_pause =
            |failed_attempt: FailedAttempt| match failed_attempt.generation == self.generation() {
                true => MAX_PLACEMENT_RETRY,
                false => MAX_PLACEMENT_RETRY_AFTER_CHANGE,
            };
        failed_attempt.is_none_or(|failed_attempt| {
            failed_attempt.at + placement_retry_pause(failed_attempt, max_pause(failed_attempt))
                <= self.now
        })
    }

    fn pending_pod(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        wait_kind: WaitKind,
        since: Moment,
    ) -> PendingPod {
        let (key, demand) = (
            pod_state.key.clone(),
            self.for_placing(uid, pod_state.demand.clone()),
        );
        PendingPod {
            uid: uid.clone(),
            key,
            demand,
            wait_kind,
            since,
            turn: 0,
        }
    }
}

impl PendingPod {
    pub fn is_requeued(&self) -> bool {
        matches!(self.wait_kind, WaitKind::Requeued { .. })
    }

    fn order(&self) -> impl Ord + use<> {
        let Demand {
            priority, class, ..
        } = self.demand;
        (
            !self.is_requeued(),
            Reverse(priority),
            class,
            self.turn,
            self.since,
            self.uid.clone(),
        )
    }
}

fn queue_band_of(pod_state: &PodState) -> QueueBand {
    let Demand {
        priority,
        class,
        tenant,
        ..
    } = pod_state.demand;
    let is_gated = pod_state
        .waiting()
        .is_some_and(|waiting| waiting.gate == SchedulingGate::Planned);
    let line = if is_gated {
        WaitingLine::Gated
    } else {
        WaitingLine::Refused
    };
    let namespace = tenant.is_none().then(|| pod_state.key.namespace.clone());
    QueueBand {
        line,
        priority: Reverse(priority),
        class,
        tenant,
        namespace,
    }
}

fn placement_retry_pause(failed_attempt: FailedAttempt, max_pause: Millis) -> Millis {
    FIRST_PLACEMENT_RETRY
        .times(1 << failed_attempt.times.min(8))
        .min(max_pause)
}

/// How long a pod is not requeued, by its requeues without an attempt and its requeues that ended in a refusal.
fn requeue_pause(requeues: u32, failed_requeues: u32) -> Millis {
    match requeues {
        0 => REQUEUE_QUIET_PERIOD
            .times(1 << failed_requeues.min(8))
            .min(MAX_REQUEUE_PAUSE_AFTER_REFUSAL),
        _ => REQUEUE_QUIET_PERIOD
            .times(1 << requeues.min(8))
            .min(MAX_REQUEUE_PAUSE_WITHOUT_ATTEMPT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_requeue_pause_doubles_with_each_failure_up_to_a_limit() {
        let seconds = |pauses: [Millis; 8]| pauses.map(|pause| pause.0 / 1000);
        assert_eq!(
            seconds(std::array::from_fn(|n| requeue_pause(n as u32 + 1, 0))),
            [2, 4, 8, 16, 32, 60, 60, 60]
        );
        assert_eq!(
            seconds(std::array::from_fn(|n| requeue_pause(0, n as u32))),
            [1, 2, 4, 4, 4, 4, 4, 4]
        );
        assert_eq!(
            requeue_pause(u32::MAX, u32::MAX),
            MAX_REQUEUE_PAUSE_WITHOUT_ATTEMPT
        );
    }
}
