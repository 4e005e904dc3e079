//! Starts planning runs beside the ticks, and applies their steps: the ledger checks and makes each reservation before anything
//! is written.

use super::failing_pods::ChosenPods;
use super::planning_run::{PlanBasis, PlanningJob, RunEnd};
use super::pod_event::reserved_text;
use super::pod_write::StatusPurpose;
use super::reservation_progress::ReservationProgress;
use super::{Act, Books, ControlLoop, LockedBooks, Notice};
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
const NOMINATED_AT_ONCE: usize = 512;

impl<B: Books> ControlLoop<B> {
    /// Starts a planning run if a pod is due and none is in progress. No pod is due again until the ledger or its time has
    /// changed.
    pub(super) fn seek(&mut self, now: Moment) {
        if !self.run.may_begin(now) {
            return;
        }
        let mut cluster = self.books.lock();
        let mut pending = cluster.apply(TakePending {
            limit: PODS_PER_RUN,
        });
        if self
            .progress_of
            .values()
            .filter(|progress| progress.waits_to_be_bound())
            .count()
            > NOMINATED_AT_ONCE
        {
            let is_gated = |pod: &PendingPod| matches!(pod.way, WaitKind::Gated);
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
        let began = PlanBasis {
            at: now,
            generation: cluster.ledger().generation(),
        };
        let (scratch, kube_filters) = (
            cluster.ledger().scratch(),
            cluster.kube_filters().snapshot(),
        );
        drop(cluster);
        for PendingPod { uid, key, .. } in failing {
            self.wait(uid, key, WaitReason::PlanningFailed, began, now);
        }
        if pending.is_empty() {
            return;
        }
        self.run.begin(began);
        self.acts.push_back(Act::Plan(PlanningJob {
            scratch,
            kube_filters,
            pending,
        }));
    }

    pub(super) fn stop_planning(&mut self) {
        if self.run.stop() {
            self.acts.push_back(Act::StopPlanning);
        }
    }

    /// Applies a run's result. It is discarded if this replica has stopped leading, or stopped placing, meanwhile.
    pub fn planned(&mut self, ended: RunEnd, may_act: bool, now: Moment) {
        let mode = self.books.lock().ledger().policy().mode;
        let has_failed = matches!(ended, RunEnd::Failed);
        let Some((began, is_needed)) = self.run.end(has_failed, now) else {
            return;
        };
        let (outcome, left_over) = match &ended {
            _ if !is_needed => ("cancelled", 0),
            RunEnd::Failed => ("failed", 0),
            RunEnd::Planned(plan) if plan.left_over.is_empty() => ("complete", 0),
            RunEnd::Planned(plan) => ("limited", plan.left_over.len()),
        };
        self.note(Notice::RunEnded {
            took: now.since(began.at),
            outcome,
            left_over,
        });
        let Plan {
            steps,
            left_over,
            reserved,
            ..
        } = match ended {
            _ if !is_needed => return,
            RunEnd::Planned(plan) => plan,
            RunEnd::Failed => return self.note_failed_run(now),
        };
        self.failing_pods.run_ended();
        let mut cluster = self.books.lock();
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
                PlanStep::Place(places) => self.take(places, began, now),
                PlanStep::Wake { uid, key } => self.wake(uid, key),
                PlanStep::Wait { uid, key, why } => self.wait(uid, key, why, began, now),
            }
        }
        self.forget_told_reasons();
    }

    fn note_failed_run(&mut self, now: Moment) {
        let (pods, is_found) = self.failing_pods.run_failed(now);
        let mut cluster = self.books.lock();
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
            self.note(Notice::PlanningFails(key));
        }
    }

    /// Reserves the placements, all or none.
    fn take(&mut self, mut places: Vec<PlannedPlacement>, began: PlanBasis, now: Moment) {
        // The deadlines count from when the run began.
        let took = now.since(began.at);
        places
            .iter_mut()
            .for_each(|place| place.reservation.deadline = place.reservation.deadline + took);
        let reserve = ReservePlaces {
            places: places.clone(),
            generation: began.generation,
        };
        let taken = self.books.lock().apply(reserve);
        if let Err((place, refusal)) = taken {
            let (pod, refusal) = (places[place].key.clone(), refusal.to_string());
            return self.note(Notice::PlaceLost { pod, refusal });
        }
        for place in places {
            self.note(Notice::Planned(Box::new(place.clone()), took));
            let progress = ReservationProgress::own(place.reservation.clone(), now, place.by);
            self.progress_of.insert(place.uid.clone(), progress);
            self.begin(place, now);
        }
    }

    /// A reservation with victims is written before the first eviction. One without is not: the pod itself is nominated.
    fn begin(&mut self, place: PlannedPlacement, now: Moment) {
        let PlannedPlacement {
            uid,
            key,
            reservation,
            ..
        } = place;
        let is_gated = self.scheduling_gate_of(&uid) == Some(SchedulingGate::Planned);
        if reservation.victims.is_empty() {
            let reservation_status = self.books.lock().ledger().reservation_of(&uid);
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
        if let Some(progress) = self.progress_of.get_mut(&uid) {
            progress.begin_write();
        }
        let purpose = StatusPurpose::Reserve { reservation };
        self.write_status(key, uid, change, purpose);
    }

    fn scheduling_gate_of(&mut self, uid: &PodUid) -> Option<SchedulingGate> {
        match &self.books.lock().ledger().pod_state(uid)?.phase {
            PodPhase::Waiting(waiting) => Some(waiting.gate),
            _ => None,
        }
    }

    fn wake(&mut self, uid: PodUid, key: PodKey) {
        let mut cluster = self.books.lock();
        // It may have been requested again during the run.
        if !cluster
            .ledger()
            .pod_state(&uid)
            .is_some_and(|entry| entry.refused().is_some() && entry.reservation().is_none())
        {
            return;
        }
        if self.writes.are_too_many() {
            drop(cluster);
            return self.note(Notice::PutOff("requeue"));
        }
        cluster.apply(PodRequeued(uid.clone()));
        drop(cluster);
        // Any write requeues it.
        if self.writes.concern(&uid) {
            return;
        }
        let (change, purpose) = (StatusChange::touch(), StatusPurpose::Requeue);
        self.write_status(key, uid, change, purpose);
    }
}
