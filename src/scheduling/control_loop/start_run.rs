//! Starts planning runs beside the ticks, and applies their steps: the ledger checks and makes each reservation before anything
//! is written.

use super::failing_pods::ChosenPods;
use super::planning_run::{PlanBasis, PlanningJob, RunEnd};
use super::pod_event::reserved_text;
use super::pod_write::StatusPurpose;
use super::reservation_progress::ReservationProgress;
use super::{ClusterAccess, ControlLoop, LockedCluster, LoopAction, LoopNotice};
use crate::control_loop::{PlanState, PodEventReason, StatusChange};
use crate::ids::{PodKey, PodUid};
use crate::ledger::{PendingPod, PodPhase, SchedulingGate, WaitKind};
use crate::planning::{Plan, PlanStep, PlannedPlacement, WaitReason};
use crate::policy::Mode;
use crate::units::Moment;
use crate::verbs::wait::{PodRequeued, PutBack, ReservePlaces, ScopeReserved, TakePending};

/// Maximum pods of each kind, gated and rejected, in one run. Of fifty thousand equal ones that cannot be placed each is tried
/// within five seconds.
pub(super) const PODS_PER_RUN: usize = 2048;
/// Gated pods that are nominated and not bound. kube-scheduler binds some hundreds a second, so this many are enough for now,
/// and each one that waits keeps VRAM from others.
const MAX_NOMINATED: usize = 512;

impl<B: ClusterAccess> ControlLoop<B> {
    /// Starts a planning run if a pod is due and none is in progress. No pod is due again until the ledger or its time has
    /// changed.
    pub(super) fn start_planning_run(&mut self, now: Moment) {
        if !self.run.may_begin(now) {
            return;
        }
        let mut cluster = self.cluster_access.lock();
        let mut pending = cluster.apply(TakePending {
            limit: PODS_PER_RUN,
        });
        if self
            .reservation_progress
            .values()
            .filter(|progress| progress.was_nominated())
            .count()
            > MAX_NOMINATED
        {
            let is_gated = |pod: &PendingPod| matches!(pod.wait_kind, WaitKind::Gated);
            cluster.apply(PutBack(
                pending
                    .iter()
                    .filter(|pod| is_gated(pod))
                    .map(|pod| &pod.uid)
                    .cloned()
                    .collect(),
            ));
            pending.retain(|pod| !is_gated(pod));
        }
        if pending.is_empty() {
            return;
        }
        let ChosenPods {
            to_plan: pending,
            put_back,
            failing,
        } = self.failing_pods.choose(pending, now);
        if !put_back.is_empty() {
            cluster.apply(PutBack(put_back));
        }
        let basis = PlanBasis {
            began_at: now,
            generation: cluster.ledger().generation(),
        };
        let (scratch, kube_filters) = (
            cluster.ledger().scratch(),
            cluster.kube_filters().snapshot(),
        );
        drop(cluster);
        for PendingPod { uid, key, .. } in failing {
            self.handle_unplaced(uid, key, WaitReason::PlanningFailed, basis, now);
        }
        if pending.is_empty() {
            return;
        }
        self.run.begin(basis);
        self.actions.push_back(LoopAction::Plan(PlanningJob {
            scratch,
            kube_filters,
            pending,
        }));
    }

    pub(super) fn stop_planning(&mut self) {
        if self.run.stop() {
            self.actions.push_back(LoopAction::StopPlanning);
        }
    }

    /// Applies a run's result. It is discarded if this replica has stopped leading, or stopped placing, meanwhile.
    pub fn handle_run_end(&mut self, ended: RunEnd, may_act: bool, now: Moment) {
        let mode = self.cluster_access.lock().ledger().policy().mode;
        let has_failed = matches!(ended, RunEnd::Failed);
        let Some((basis, is_needed)) = self.run.end(has_failed, now) else {
            return;
        };
        let (outcome, left_over) = match &ended {
            _ if !is_needed => ("cancelled", 0),
            RunEnd::Failed => ("failed", 0),
            RunEnd::Planned(plan) if plan.unreached.is_empty() => ("complete", 0),
            RunEnd::Planned(plan) => ("limited", plan.unreached.len()),
        };
        self.record(LoopNotice::RunEnded {
            took: now.since(basis.began_at),
            outcome,
            left_over,
        });
        let Plan {
            steps,
            unreached: left_over,
            reserved_scopes: reserved,
            ..
        } = match ended {
            _ if !is_needed => return,
            RunEnd::Planned(plan) => plan,
            RunEnd::Failed => return self.record_failed_run(now),
        };
        self.failing_pods.record_success();
        let mut cluster = self.cluster_access.lock();
        cluster.apply(PutBack(left_over));
        for (scope, uid) in reserved {
            cluster.apply(ScopeReserved { scope, uid });
        }
        drop(cluster);
        if !may_act || mode == Mode::Shadow {
            return;
        }
        for step in steps {
            match step {
                PlanStep::Place(placements) => self.reserve_placements(placements, basis, now),
                PlanStep::Requeue { uid, key } => self.requeue(uid, key),
                PlanStep::Wait { uid, key, why } => self.handle_unplaced(uid, key, why, basis, now),
            }
        }
        self.forget_recorded_reasons();
    }

    fn record_failed_run(&mut self, now: Moment) {
        let (pods, is_found) = self.failing_pods.record_failure(now);
        let mut cluster = self.cluster_access.lock();
        let failing = pods
            .first()
            .filter(|_| is_found)
            .and_then(|uid| cluster.ledger().pod_state(uid))
            .map(|pod_state| pod_state.key.clone());
        cluster.apply(PutBack(pods));
        self.failing_pods
            .retain(|uid| cluster.ledger().pod_state(uid).is_some());
        drop(cluster);
        if let Some(key) = failing {
            self.record(LoopNotice::PlanningFails(key));
        }
    }

    /// Reserves the placements, all or none.
    fn reserve_placements(
        &mut self,
        mut placements: Vec<PlannedPlacement>,
        basis: PlanBasis,
        now: Moment,
    ) {
        // The deadlines count from when the run began.
        let took = now.since(basis.began_at);
        placements.iter_mut().for_each(|placement| {
            placement.reservation.deadline = placement.reservation.deadline + took
        });
        let reserve = ReservePlaces {
            placements: placements.clone(),
            generation: basis.generation,
        };
        let result = self.cluster_access.lock().apply(reserve);
        if let Err((index, refusal)) = result {
            let (pod, refusal) = (placements[index].key.clone(), refusal.to_string());
            return self.record(LoopNotice::PlacementLost { pod, refusal });
        }
        for placement in placements {
            self.record(LoopNotice::Planned(Box::new(placement.clone()), took));
            let progress =
                ReservationProgress::for_planned(placement.reservation.clone(), now, placement.by);
            self.reservation_progress
                .insert(placement.uid.clone(), progress);
            self.begin_reservation(placement, now);
        }
    }

    /// A reservation with victims is written before the first eviction. One without is not: the pod itself is nominated.
    fn begin_reservation(&mut self, placement: PlannedPlacement, now: Moment) {
        let PlannedPlacement {
            uid,
            key,
            reservation,
            ..
        } = placement;
        let is_gated = self.scheduling_gate_of(&uid) == Some(SchedulingGate::Planned);
        if reservation.victims.is_empty() {
            let reservation_status = self
                .cluster_access
                .lock()
                .ledger()
                .reservation_status_of(&uid);
            return reservation_status
                .iter()
                .for_each(|reservation_status| self.nominate(reservation_status, now));
        }
        let text = reserved_text(&reservation);
        self.publish(key.clone(), uid.clone(), PodEventReason::Reserved, text);
        let mut change = StatusChange::reservation(reservation.clone());
        if is_gated {
            change.plan = Some(PlanState::Preempting {
                node: reservation.node.clone(),
            });
        }
        if let Some(progress) = self.reservation_progress.get_mut(&uid) {
            progress.begin_write();
        }
        let purpose = StatusPurpose::Reserve { reservation };
        self.write_status(key, uid, change, purpose);
    }

    fn scheduling_gate_of(&mut self, uid: &PodUid) -> Option<SchedulingGate> {
        match &self.cluster_access.lock().ledger().pod_state(uid)?.phase {
            PodPhase::Waiting(waiting) => Some(waiting.gate),
            _ => None,
        }
    }

    fn requeue(&mut self, uid: PodUid, key: PodKey) {
        let mut cluster = self.cluster_access.lock();
        // It may have been requested again during the run.
        if !cluster.ledger().pod_state(&uid).is_some_and(|pod_state| {
            pod_state.refusal().is_some() && pod_state.reservation().is_none()
        }) {
            return;
        }
        if self.writes.is_full() {
            drop(cluster);
            return self.record(LoopNotice::WritePostponed("requeue"));
        }
        cluster.apply(PodRequeued(uid.clone()));
        drop(cluster);
        // Any write requeues it.
        if self.writes.has_pod(&uid) {
            return;
        }
        let (change, purpose) = (StatusChange::requeue(), StatusPurpose::Requeue);
        self.write_status(key, uid, change, purpose);
    }
}
