//! Gated pods that cannot be placed: their condition gets the reason, and their gate is lifted when they have waited long
//! enough, or would wait forever.

use super::ended_reservations::is_nominated;
use super::planning_run::PlanBasis;
use super::pod_write::StatusPurpose;
use super::start_run::PODS_PER_RUN;
use super::{ClusterAccess, ControlLoop, LockedCluster, LoopNotice};
use crate::control_loop::{PlanState, PodEventReason, StatusChange};
use crate::ids::{PodKey, PodUid};
use crate::ledger::{PodPhase, PodState, SchedulingGate, WaitKind};
use crate::planning::WaitReason;
use crate::units::{Millis, Moment};
use crate::verbs::wait::{NoPlacementFound, TakePending};
use std::ops::Bound;
use std::sync::Arc;

/// The claims of a pod and their volumes may come later than the pod: the watches are not in step, a list of all claims takes its
/// time, and a volume is provisioned after its claim.
const VOLUMES_VISIBLE_WITHIN: Millis = Millis::seconds(30);
/// Time before a pod's first wait reason is written: most pods are placed by then, and the write would be useless.
const FIRST_REASON_DELAY: Millis = Millis::seconds(2);
/// Time before another reason is written: with each reading another node may be the nearest to fit. No person reads faster.
const REASON_REPEAT_INTERVAL: Millis = Millis::seconds(30);

/// Recorded reasons that one run checks, in turn.
const REASONS_CHECKED_PER_RUN: usize = 512;

/// The last wait reason in a pod's condition.
#[derive(Debug)]
pub(crate) struct RecordedReason {
    why: Arc<str>,
    at: Moment,
}

impl<B: ClusterAccess> ControlLoop<B> {
    /// Handles a pod that cannot be placed. It stays behind the gate only as long as the policy says, and not at all if the
    /// planner would never place it.
    pub(super) fn handle_unplaced(
        &mut self,
        uid: PodUid,
        key: PodKey,
        why: WaitReason,
        basis: PlanBasis,
        now: Moment,
    ) {
        let mut cluster = self.cluster_access.lock();
        cluster.apply(NoPlacementFound {
            uid: uid.clone(),
            generation: basis.generation,
        });
        let Some(pod_state) = cluster
            .ledger()
            .pod_state(&uid)
            .filter(|pod_state| pod_state.reservation().is_none())
        else {
            return;
        };
        let PodPhase::Waiting(waiting) = &pod_state.phase else {
            return;
        };
        let waited = now.since(waiting.since);
        let max_gated_time = cluster.ledger().policy().planning.max_gated_time;
        let has_waited = waited >= max_gated_time;
        let (is_gated, is_grouped) = (
            waiting.gate == SchedulingGate::Planned,
            pod_state.disruption_info.placement_group().is_some(),
        );
        drop(cluster);
        if !is_gated {
            return self.publish_eviction_limit(uid, key, why);
        }
        if waited < max_gated_time.min(VOLUMES_VISIBLE_WITHIN) && self.may_be_supported_soon(&why) {
            return self.write_wait_reason(uid, key, why, waited, now);
        }
        if is_grouped {
            let text = format!("The pod's group cannot be placed: {why}.");
            let (key, uid) = (key.clone(), uid.clone());
            self.publish(key, uid, PodEventReason::GroupFailed, text);
        }
        let is_hopeless = matches!(
            why,
            WaitReason::UnsupportedFilter(_) | WaitReason::DevicePlugin
        );
        if !is_grouped && (has_waited || is_hopeless) {
            self.release_from_gate(uid, key, why);
        } else {
            self.write_wait_reason(uid, key, why, waited, now);
        }
    }

    /// Whether the reason is a volume that the API server has not shown yet, and that it lets this replica read.
    fn may_be_supported_soon(&self, why: &WaitReason) -> bool {
        matches!(why, WaitReason::UnsupportedFilter(rule) if rule.entry()) && !self.lacks_volumes
    }

    /// kube-scheduler's condition has the other reasons for which a rejected pod is pending. This one is an Event: a change of
    /// its status would requeue the pod.
    fn publish_eviction_limit(&mut self, uid: PodUid, key: PodKey, why: WaitReason) {
        if let WaitReason::EvictionLimit(limit) = why {
            let text = format!("Other pods could be evicted for this pod, but {limit}.");
            self.publish(key, uid, PodEventReason::EvictionLimit, text);
        }
    }

    /// Writes the reason why a pod waits into its condition, once for each reason, however often the pod is planned.
    fn write_wait_reason(
        &mut self,
        uid: PodUid,
        key: PodKey,
        why: WaitReason,
        waited: Millis,
        now: Moment,
    ) {
        let why = Arc::<str>::from(why.condition());
        let is_news = match self.recorded_reasons.get(&uid) {
            None => waited >= FIRST_REASON_DELAY,
            Some(recorded) => recorded.why != why && recorded.at + REASON_REPEAT_INTERVAL <= now,
        };
        if !is_news || self.writes.has_pod(&uid) {
            return;
        }
        if self.writes.is_full() {
            return self.record(LoopNotice::WritePostponed("reason"));
        }
        self.recorded_reasons.insert(
            uid.clone(),
            RecordedReason {
                why: why.clone(),
                at: now,
            },
        );
        let change = StatusChange::plan(PlanState::Unschedulable { why });
        self.write_status(key, uid, change, StatusPurpose::ExplainWait);
    }

    /// Forgets pods that do not wait behind the gate any more. Checks some of them each time, in turn.
    pub(super) fn forget_recorded_reasons(&mut self) {
        let after = self.reasons_checked_up_to.take();
        let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let next: Vec<PodUid> = self
            .recorded_reasons
            .range::<PodUid, _>((from, Bound::Unbounded))
            .take(REASONS_CHECKED_PER_RUN)
            .map(|(uid, _)| uid.clone())
            .collect();
        if next.len() == REASONS_CHECKED_PER_RUN {
            self.reasons_checked_up_to = next.last().cloned();
        }
        let cluster = self.cluster_access.lock();
        let waits = |uid: &PodUid| {
            let waiting = cluster.ledger().pod_state(uid).and_then(PodState::waiting);
            waiting.is_some_and(|waiting| {
                waiting.gate == SchedulingGate::Planned && waiting.reservation.is_none()
            })
        };
        let (recorded, gone) = (
            &mut self.recorded_reasons,
            next.iter().filter(|uid| !waits(uid)),
        );
        gone.for_each(|uid| drop(recorded.remove(uid)));
    }

    /// Releases all gated pods: in shadow mode no pod is placed, and one behind the gate would wait forever.
    pub(super) fn release_all_gated(&mut self) {
        let pending = self.cluster_access.lock().apply(TakePending {
            limit: PODS_PER_RUN,
        });
        for pod in pending
            .into_iter()
            .filter(|pod| matches!(pod.wait_kind, WaitKind::Gated))
        {
            let mut cluster = self.cluster_access.lock();
            let generation = cluster.ledger().generation();
            cluster.apply(NoPlacementFound {
                uid: pod.uid.clone(),
                generation,
            });
            drop(cluster);
            self.release_from_gate(pod.uid, pod.key, WaitReason::ShadowMode);
        }
    }

    /// Lifts a pod's gate without a placement: autoscalers and users only see pods that kube-scheduler has rejected. Returns
    /// whether the write is in progress.
    pub(super) fn release_from_gate(&mut self, uid: PodUid, key: PodKey, why: WaitReason) -> bool {
        if self.writes.has_pod(&uid) {
            return true;
        }
        if self.writes.is_full() {
            self.record(LoopNotice::WritePostponed("release"));
            return false;
        }
        let mut change = StatusChange::plan(PlanState::GateRemoved {
            why: Arc::from(why.condition()),
        });
        // From an earlier plan that failed.
        if is_nominated(self.cluster_access.lock().ledger(), &uid) {
            change = change.and_clear_nomination();
        }
        let purpose = StatusPurpose::Release {
            why: Arc::from(why.to_string()),
        };
        self.write_status(key, uid, change, purpose);
        true
    }

    pub(super) fn publish_release(&mut self, key: &PodKey, uid: &PodUid, why: &str) {
        let text =
            format!("The planner found no node for the pod and left it to kube-scheduler: {why}.");
        let (key, uid, kind) = (key.clone(), uid.clone(), PodEventReason::PlanFailed);
        self.publish(key, uid, kind, text);
    }
}
