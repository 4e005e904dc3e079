//! The `bind` verb on the wire: the core allocates, then this writes the Binding, reads and waits, as the core tells step by
//! step ([`binding`](stowage_scheduling::verbs::binding)).
//!
//! Answering OK for a pod that is not bound would strand it until kube-scheduler restarts; that never happens here.

use super::request::BadRequest;
use super::wire::{BindingArgs, BindingResult};
use super::{Extender, shadow};
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, SystemTime};
use stowage_kubernetes_objects::port::{BindOrder, BindOutcome};
use stowage_recording::answer::Decision;
use stowage_scheduling::control_loop::{
    ControlPlaneError, FreshPod, PodEvent, PodEventReason, StatusChange,
};
use stowage_scheduling::ids::{NodeName, PodKey, PodUid, comma_separated};
use stowage_scheduling::ledger::AllocationFailure;
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked, BindDecision};
use stowage_scheduling::verbs::binding::{
    BindingAnswer, BindingAnswered, BindingRead, BindingStage, BindingStep, PodRead, SettlingAsked,
};
use stowage_scheduling::verbs::shadow::ExpectedBind;
use stowage_telemetry::NO_CODE;
use tracing::{info, warn};

/// Open Bindings that are read or written again at one time. After an outage of the API server there may be thousands, and their
/// requests must not keep it from coming back.
pub(super) const MAX_CONCURRENT_SETTLING: usize = 16;

/// Binds, even if the client's connection closes meanwhile.
pub async fn bind(extender: &Extender, args: &BindingArgs) -> Result<BindingResult, BadRequest> {
    bind_arrived_at(extender, args, extender.state.traces().arrival_time()).await
}

/// Binds for a call that arrived at that time, which is the start of its span.
pub(super) async fn bind_arrived_at(
    extender: &Extender,
    args: &BindingArgs,
    arrived: Option<SystemTime>,
) -> Result<BindingResult, BadRequest> {
    let uid = PodUid::parse(&args.pod_uid)
        .map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    let key = PodKey::parse(&args.pod_namespace, &args.pod_name)
        .map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    let node =
        NodeName::parse(&args.node).map_err(|e| BadRequest::unprocessable("bad-node-name", e))?;
    let call = extender.state.traces().call("bind", arrived, &uid, &key);
    call.set_node(&node);
    let task = BindTask {
        extender: extender.clone(),
        input: BindAsked { uid, key, node },
        pending_for: None,
    };
    let answers = extender.state.metrics.answers.clone();
    let bound = extender
        .writes
        .spawn(call.instrument(async move { task.run().await }))
        .await;
    let (outcome, result) = match bound.unwrap_or(Err(AllocationFailure::Unanswered)) {
        Ok(()) => (("bound", NO_CODE), BindingResult { error: "" }),
        Err(unbound) => {
            call.fail(unbound.code());
            (
                ("unbound", unbound.code()),
                BindingResult {
                    error: unbound.phrase(),
                },
            )
        }
    };
    answers
        .with_label_values(&["bind", outcome.0, outcome.1])
        .inc();
    Ok(result)
}

#[derive(Clone)]
struct BindTask {
    extender: Extender,
    input: BindAsked,
    /// How long the pod was without an allocation, if this request is the one that allocated its GPUs.
    pending_for: Option<Millis>,
}

impl BindTask {
    async fn run(&self) -> Result<(), AllocationFailure> {
        let BindAsked { uid, key, node } = &self.input;
        let expected = ExpectedBind::for_pod(self.extender.state.cluster().ledger(), uid);
        self.bind().await?;
        if let Some(expected) = expected {
            shadow::record_bound(&self.extender, uid, key, node, &expected);
        }
        Ok(())
    }

    async fn bind(&self) -> Result<(), AllocationFailure> {
        let step = self.extender.state.traces().step("decide");
        let state = &self.extender.state;
        let (answer, recorded_input) = {
            let mut cluster = state.cluster();
            (
                cluster.apply(self.input.clone()),
                cluster.last_recorded_input(),
            )
        };
        state.record_answer(recorded_input, || Decision::Bind(answer.clone()));
        let decision = match answer {
            Ok(BindAnswer::AlreadyBound) => return Ok(()),
            Ok(BindAnswer::Write(decision)) => decision,
            Err(failure) => {
                step.fail(failure.code());
                return Err(failure);
            }
        };
        if step.is_recorded() {
            step.set(
                "stowage.gpus",
                comma_separated(&*decision.placement.devices).to_string(),
            );
            step.set("stowage.policy.digest", decision.policy.to_string());
        }
        drop(step);
        let BindDecision {
            placement,
            demand,
            shows_reservation,
            policy,
            epoch,
            is_new,
            wakes_engine: wakes,
            unplaced_time: unplaced,
            ..
        } = decision;
        let BindAsked { uid, key, .. } = self.input.clone();
        let legacy_runtime = self.extender.board.has_legacy_runtime(&placement.node);
        let order = BindOrder {
            key,
            uid,
            demand,
            placement,
            shows_reservation,
            policy,
            epoch,
            legacy_runtime,
        };
        let task = Self {
            pending_for: is_new.then_some(unplaced),
            ..self.clone()
        };
        task.carry_out(order, BindingStep::Write, BindingStage::Request { is_new })
            .await?;
        if wakes && is_new {
            self.extender.state.metrics.bound_to_reusable_engines.inc();
        }
        Ok(())
    }

    /// Carries out step after step until the pod is bound or its binding has failed.
    async fn carry_out(
        &self,
        order: BindOrder,
        mut step: BindingStep,
        stage: BindingStage,
    ) -> Result<(), AllocationFailure> {
        // A permit covers one read of a settling loop and the write that follows from it.
        let mut permit = None;
        loop {
            step = match step {
                BindingStep::Write => self.write(&order, stage).await,
                BindingStep::Read => self.read(&order, stage).await,
                BindingStep::Pause(pause) => {
                    drop(permit);
                    tokio::time::sleep(Duration::from_millis(pause.0)).await;
                    permit = self.extender.settling_slots.acquire().await.ok();
                    if self.extender.state.leadership.is_stopping() {
                        return Err(AllocationFailure::Unanswered);
                    }
                    self.read(&order, stage).await
                }
                BindingStep::Bound => {
                    self.record_bound(&order);
                    return Ok(());
                }
                BindingStep::Failed(why) => return Err(why),
                BindingStep::Settle => {
                    self.start_settling_loop(order);
                    return Err(AllocationFailure::Unanswered);
                }
                BindingStep::Over => return Err(AllocationFailure::Unanswered),
            };
        }
    }

    /// Writes the Binding. A write that panics counts as unanswered: otherwise the Binding would stay open for good.
    async fn write(&self, order: &BindOrder, stage: BindingStage) -> BindingStep {
        let Extender {
            state,
            control_plane,
            ..
        } = &self.extender;
        let (pod, node) = (&order.key, &order.placement.node);
        let span = state.traces().write("write Binding", &order.uid, pod);
        span.set_node(node);
        let writing = AssertUnwindSafe(span.instrument(control_plane.bind(order))).catch_unwind();
        let panicked = |_| BindOutcome::Unknown {
            message: "the write panicked".into(),
        };
        let outcome = writing.await.unwrap_or_else(panicked);
        span.set("stowage.outcome", outcome.code());
        drop(span);
        let answer = match outcome {
            BindOutcome::Written => BindingAnswer::Written,
            BindOutcome::Conflict => BindingAnswer::Conflict,
            BindOutcome::Refused { message } => {
                if stage != BindingStage::Settling {
                    warn!(%pod, %node, message, "binding refused");
                }
                BindingAnswer::Refused
            }
            BindOutcome::Unknown { message } => {
                if stage != BindingStage::Settling {
                    warn!(%pod, %node, message, "binding unanswered");
                }
                BindingAnswer::Unknown
            }
        };
        state.cluster().apply(BindingAnswered {
            uid: order.uid.clone(),
            placement: order.placement.clone(),
            stage,
            answer,
            max_commit_delay: self.max_commit_delay(),
        })
    }

    async fn read(&self, order: &BindOrder, stage: BindingStage) -> BindingStep {
        let Extender {
            state,
            control_plane,
            ..
        } = &self.extender;
        let asked_at = state.now();
        let reading = AssertUnwindSafe(control_plane.read_pod(&order.key)).catch_unwind();
        let panicked = |_| Err(ControlPlaneError::Unknown("the read panicked".into()));
        let record = reading.await.unwrap_or_else(panicked);
        // A settling loop reads again and again while the API server is gone.
        if let (Err(error), BindingStage::Request { .. }) = (&record, stage) {
            warn!(pod = %order.key, %error, "the pod of an open binding could not be read");
        }
        let (uid, placement) = (order.uid.clone(), order.placement.clone());
        let pod = to_pod_read(record, &uid);
        let max_commit_delay = self.max_commit_delay();
        state.cluster().apply(BindingRead {
            uid,
            placement,
            stage,
            pod,
            requested_at: asked_at,
            max_commit_delay,
        })
    }

    fn max_commit_delay(&self) -> Millis {
        Millis(self.extender.control_plane.max_commit_delay().as_millis() as u64)
    }

    fn record_bound(&self, order: &BindOrder) {
        self.observe_placement_seconds(order);
        let (
            placement,
            Extender {
                control_plane,
                writes,
                ..
            },
        ) = (&order.placement, &self.extender);
        info!(pod = %order.key, node = %placement.node, devices = %comma_separated(&*placement.devices), policy = %order.policy, "bound");
        if let Some(greatest) = placement.greatest_fraction {
            let text = format!(
                "The pod's grant is {} of one GPU's memory and {greatest} of another's: stowage.dev/gpu-memory-fraction is the \
                 smaller, so that an engine uses more than it was granted on neither, and less on the second.",
                placement.memory_fraction
            );
            let (key, uid) = (order.key.clone(), order.uid.clone());
            control_plane.record_event(PodEvent {
                key,
                uid,
                kind: PodEventReason::UnevenGpus,
                text,
            });
        }
        if order.shows_reservation {
            let (key, uid, control_plane) =
                (order.key.clone(), order.uid.clone(), control_plane.clone());
            // Clears the reservation's condition. If this fails, the planner clears it for as long as the pod shows it.
            writes.spawn(async move {
                control_plane
                    .write_status(&key, &uid, &StatusChange::end_reservation())
                    .await
            });
        }
    }

    fn observe_placement_seconds(&self, order: &BindOrder) {
        let state = &self.extender.state;
        let policy = state.cluster().ledger().policy().clone();
        if let Some((unplaced, class)) = self
            .pending_for
            .zip(policy.classes().get(order.demand.class.index()))
        {
            let histogram = state
                .metrics
                .placement_seconds
                .with_label_values(&[&class.name]);
            histogram.observe(unplaced.0 as f64 / 1e3);
        }
    }

    /// Starts the placement's settling loop unless one runs.
    fn start_settling_loop(&self, order: BindOrder) {
        let query = SettlingAsked {
            uid: order.uid.clone(),
            placement: order.placement.clone(),
        };
        let Some(first) = self.extender.state.cluster().apply(query) else {
            return;
        };
        let task = self.clone();
        self.extender.writes.spawn(async move {
            let settled = task.carry_out(order, first, BindingStage::Settling).await;
            let outcome = settled.map_or_else(|unbound| unbound.code(), |()| "bound");
            info!(pod = %task.input.key, outcome, "the settling loop of a binding ended");
        });
    }
}

fn to_pod_read(record: Result<Option<FreshPod>, ControlPlaneError>, uid: &PodUid) -> PodRead {
    match record {
        Err(_) => PodRead::Failed,
        Ok(Some(FreshPod {
            uid: found,
            node,
            devices,
            borrows,
            is_over,
            ..
        })) if found == *uid => {
            match node {
                Some(node) => PodRead::Bound {
                    node,
                    devices,
                    borrows,
                },
                // The API server binds no pod that has ended or is being deleted, whatever finalizers keep it.
                None if is_over => PodRead::Gone,
                None => PodRead::Unbound,
            }
        }
        Ok(_) => PodRead::Gone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::testkit::{node, uid};

    /// The API server refuses every Binding of it, and its finalizers may keep it for days.
    #[test]
    fn a_pod_that_ends_before_it_has_a_node_is_gone_and_a_bound_one_is_bound() {
        let record = |on: Option<&str>, is_over| FreshPod {
            uid: uid("a"),
            node: on.map(node),
            devices: None,
            has_started: false,
            is_over,
            borrows: false,
            refusal: None,
        };
        let read = |record| to_pod_read(Ok(Some(record)), &uid("a"));
        assert_eq!(read(record(None, false)), PodRead::Unbound);
        assert_eq!(read(record(None, true)), PodRead::Gone);
        let bound = PodRead::Bound {
            node: node("n"),
            devices: None,
            borrows: false,
        };
        assert_eq!(read(record(Some("n"), true)), bound);
    }
}
