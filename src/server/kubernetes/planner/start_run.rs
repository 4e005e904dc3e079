//! Starts planning runs beside the ticks, and applies their steps: the ledger checks and makes each reservation before anything
//! is written.

use super::Planner;
use super::failing_pods::ChosenPods;
use super::reservation_progress::ReservationProgress;
use super::run::{FinishedPlan, PlanBasis, RunEnd};
use super::write::{PlannerWrite, StatusPurpose};
use std::time::Duration;
use stowage_kubernetes_objects::port::{
    PlanState, PodEvent, PodEventReason, StatusChange, reserved_text,
};
use stowage_scheduling::ids::{PodKey, PodUid, listed};
use stowage_scheduling::ledger::{PendingPod, PodPhase, SchedulingGate, WaitKind};
use stowage_scheduling::planning::{
    Plan, PlanBounds, PlanStep, PlannedPlacement, WaitReason, plan_within, steps_of_run,
};
use stowage_scheduling::policy::Mode;
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::verbs::wait::{
    PodRequeued, PutBack, ReservePlaces, ScopeReserved, TakePending,
};
use tracing::{error, info};

/// Maximum pods of each kind, gated and rejected, in one run. Of fifty thousand equal ones that cannot be placed each is tried
/// within five seconds.
pub(super) const PODS_PER_RUN: usize = 2048;
/// Maximum pods placed in one run: all of them take effect at once.
const PLACED_AT_ONCE: usize = 256;
/// Gated pods that are nominated and not bound. kube-scheduler binds some hundreds a second, so this many are enough for now,
/// and each one that waits keeps VRAM from others.
const NOMINATED_AT_ONCE: usize = 512;

impl Planner {
    /// Starts a planning run if a pod is due and none is in progress. No pod is due again until the ledger or its time has
    /// changed.
    pub(super) fn seek(&mut self, now: Moment) {
        if !self.run.may_begin(now) {
            return;
        }
        let mut ledger = self.service.cluster();
        let mut pending = ledger.apply(TakePending {
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
            ledger.apply(PutBack(
                pending
                    .iter()
                    .filter(|pod| is_gated(pod))
                    .map(|pod| &pod.uid)
                    .cloned()
                    .collect(),
            ));
            pending.retain(|pod| !is_gated(pod));
        }
        self.service
            .metrics
            .planner
            .waiting
            .set(ledger.pending_count() as i64);
        if pending.is_empty() {
            return;
        }
        let ChosenPods {
            to_plan: pending,
            put_back,
            failing,
        } = self.failing_pods.choose(pending, now);
        if !put_back.is_empty() {
            ledger.apply(PutBack(put_back));
        }
        let began = PlanBasis {
            at: now,
            generation: ledger.generation(),
        };
        let mut scratch = ledger.scratch();
        drop(ledger);
        for PendingPod { uid, key, .. } in failing {
            self.wait(uid, key, WaitReason::PlanningFailed, began, now);
        }
        if pending.is_empty() {
            return;
        }
        let service = self.service.clone();
        #[cfg(test)]
        let poison = self.poison;
        self.run.begin(began, move |is_stopped| {
            #[cfg(test)]
            assert!(
                !pending.iter().any(|pod| Some(&*pod.key.name) == poison),
                "planted"
            );
            let kube_filters = service.cluster().kube_filters().snapshot();
            let steps = steps_of_run(scratch.snapshot().nodes().len());
            let bounds = PlanBounds {
                free: steps,
                evictions: steps,
                places: PLACED_AT_ONCE,
                is_stopped,
            };
            plan_within(scratch, &kube_filters, &pending, bounds)
        });
    }

    /// Applies a run's result. It is discarded if this replica has stopped leading, or stopped placing, meanwhile.
    pub(super) fn put_into_force(&mut self, ended: RunEnd, now: Moment) {
        let mode = self.service.cluster().policy().mode;
        let took = self.run.rest(&ended, now);
        self.count_run(took, &ended);
        let FinishedPlan {
            plan:
                Plan {
                    steps,
                    left_over,
                    reserved,
                    ..
                },
            began,
        } = match ended {
            RunEnd::Planned(planned) => {
                self.failing_pods.run_ended();
                planned
            }
            RunEnd::Stopped => return,
            RunEnd::Failed => return self.note_failed_run(now),
        };
        let mut ledger = self.service.cluster();
        ledger.apply(PutBack(left_over.clone()));
        reserved
            .into_iter()
            .for_each(|(scope, uid)| ledger.apply(ScopeReserved { scope, uid }));
        drop(ledger);
        if !self.service.leadership.is_open() || mode == Mode::Shadow {
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
        let mut ledger = self.service.cluster();
        if is_found && let Some(pod_state) = pods.first().and_then(|uid| ledger.pod_state(uid)) {
            error!(pod = %pod_state.key, "{}", WaitReason::PlanningFailed);
        }
        ledger.apply(PutBack(pods));
        self.failing_pods
            .retain(|uid| ledger.pod_state(uid).is_some());
    }

    fn count_run(&self, took: Millis, ended: &RunEnd) {
        let metrics = &self.service.metrics.planner;
        metrics.run_seconds.observe(took.0 as f64 / 1e3);
        let (outcome, left_over) = match ended {
            RunEnd::Stopped => ("cancelled", 0),
            RunEnd::Failed => ("failed", 0),
            RunEnd::Planned(planned) => match planned.plan.left_over.len() {
                0 => ("complete", 0),
                left_over => ("limited", left_over),
            },
        };
        metrics.runs.with_label_values(&[outcome]).inc();
        metrics.left_over.set(left_over as i64);
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
        let taken = self.service.cluster().apply(reserve);
        if let Err((place, refusal)) = taken {
            return info!(pod = %places[place].key, %refusal, "the cluster or the policy changed while the plan was made");
        }
        for place in places {
            self.trace(&place, took);
            let progress = ReservationProgress::own(place.reservation.clone(), now, place.by);
            self.progress_of.insert(place.uid.clone(), progress);
            self.begin(place, now);
        }
    }

    /// A span of the run in the trace of the pod that it placed.
    fn trace(&self, place: &PlannedPlacement, took: Millis) {
        let span =
            self.service
                .traces()
                .planned(&place.uid, &place.key, Duration::from_millis(took.0));
        if span.is_recorded() {
            span.set_node(&place.reservation.node);
            span.set(
                "stowage.gpus",
                listed(&*place.reservation.devices).to_string(),
            );
            span.set("stowage.victims", place.reservation.victims.len() as i64);
        }
    }

    /// A reservation with victims is written before the first eviction. One without is not: the pod itself is nominated.
    fn begin(&mut self, place: PlannedPlacement, now: Moment) {
        let PlannedPlacement {
            uid,
            key,
            reservation,
            eviction_cost,
            exact,
            by,
        } = place;
        let (node, victims) = (&reservation.node, listed(reservation.victims.iter()));
        let (lost_gpu_ms, by) = (eviction_cost.cost, by.code());
        info!(pod = %key, %node, %victims, lost_gpu_ms, exact, by, "place planned");
        let is_gated = self.scheduling_gate_of(&uid) == Some(SchedulingGate::Planned);
        if reservation.victims.is_empty() {
            let reservation_status = self.service.cluster().reservation_of(&uid);
            return reservation_status
                .iter()
                .for_each(|reservation_status| self.nominate(reservation_status, now));
        }
        let text = reserved_text(&reservation);
        self.control_plane.record_event(PodEvent {
            key: key.clone(),
            uid: uid.clone(),
            kind: PodEventReason::Reserved,
            text,
        });
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
        self.writes.add(PlannerWrite::Status {
            key,
            uid,
            change,
            purpose,
        });
    }

    fn scheduling_gate_of(&self, uid: &PodUid) -> Option<SchedulingGate> {
        match &self.service.cluster().pod_state(uid)?.phase {
            PodPhase::Waiting(waiting) => Some(waiting.gate),
            _ => None,
        }
    }

    fn wake(&mut self, uid: PodUid, key: PodKey) {
        let mut ledger = self.service.cluster();
        // It may have been requested again during the run.
        if !ledger
            .pod_state(&uid)
            .is_some_and(|entry| entry.refused().is_some() && entry.reservation().is_none())
        {
            return;
        }
        if self.writes.are_too_many() {
            drop(ledger);
            return self.put_off("requeue");
        }
        ledger.apply(PodRequeued(uid.clone()));
        drop(ledger);
        // Any write wakes it.
        if self.writes.concern(&uid) {
            return;
        }
        let (change, purpose) = (StatusChange::touch(), StatusPurpose::Wake);
        self.writes.add(PlannerWrite::Status {
            key,
            uid,
            change,
            purpose,
        });
    }
}

impl Planner {
    /// Too many writes are in progress for one that can wait. It is tried again.
    pub(super) fn put_off(&self, kind: &str) {
        self.service
            .metrics
            .planner
            .postponed
            .with_label_values(&[kind])
            .inc();
    }
}
