//! A control plane that records each write through it in the service's recent activity. It changes, refuses and delays
//! nothing.

use crate::service::{Activity, ActivityKind, ServerState};
use futures::FutureExt;
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::port::{BindOrder, BindOutcome, ControlPlane, IsDue};
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, FreshPod, NominationChange, PodEvent,
    PodEventReason, ReservationChange, StatusChange,
};
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::units::plural;

pub struct ActivityRecordingControlPlane {
    inner: Arc<dyn ControlPlane>,
    state: Arc<ServerState>,
}

impl ActivityRecordingControlPlane {
    pub fn new(inner: Arc<dyn ControlPlane>, state: Arc<ServerState>) -> Arc<Self> {
        Arc::new(Self { inner, state })
    }

    fn record(&self, what: Activity) {
        self.state.activity.add(self.state.now(), what);
    }

    fn record_binding(&self, order: &BindOrder, outcome: &BindOutcome) {
        let about = |kind| Activity {
            node: Some(order.placement.node.clone()),
            gpus: order.placement.devices.to_vec(),
            ..Activity::new(kind, &order.key, &order.uid)
        };
        let failed = |message: &str| Activity {
            text: message.to_owned(),
            ..about(ActivityKind::NotBound)
        };
        self.record(match outcome {
            BindOutcome::Written => Activity {
                text: order.placement.granted.to_string(),
                ..about(ActivityKind::Bound)
            },
            BindOutcome::Conflict => {
                failed("the pod has a node already, or another pod has its name now")
            }
            BindOutcome::Refused { message } | BindOutcome::Unknown { message } => failed(message),
        });
    }

    fn record_status(&self, key: &PodKey, uid: &PodUid, change: &StatusChange) {
        if let Some(ReservationChange::Set(reservation)) = &change.reservation {
            self.record(Activity {
                node: Some(reservation.node.clone()),
                gpus: reservation.devices.to_vec(),
                text: format!("evicting {}", plural(reservation.victims.len(), "pod")),
                ..Activity::new(ActivityKind::Reserved, key, uid)
            });
        }
        if let Some(NominationChange::To(node)) = &change.nomination {
            let node = Some(node.clone());
            self.record(Activity {
                node,
                ..Activity::new(ActivityKind::Nominated, key, uid)
            });
        }
    }

    fn record_eviction(
        &self,
        key: &PodKey,
        uid: &PodUid,
        why: &EvictionReason,
        outcome: &EvictionOutcome,
    ) {
        let (kind, text) = match outcome {
            EvictionOutcome::Evicted => (ActivityKind::Evicted, why.to_string()),
            EvictionOutcome::Refused { message } => (ActivityKind::NotEvicted, message.clone()),
            // It is tried again, or there is no such pod any more.
            EvictionOutcome::Gone
            | EvictionOutcome::TryLater { .. }
            | EvictionOutcome::CalledOff
            | EvictionOutcome::Unknown { .. } => return,
        };
        self.record(Activity {
            reason: why.reason(),
            text,
            ..Activity::new(kind, key, uid)
        });
    }

    fn record_event_activity(&self, event: &PodEvent) {
        let kind = match event.kind {
            PodEventReason::Unschedulable
            | PodEventReason::PlanFailed
            | PodEventReason::GroupFailed => ActivityKind::Refused,
            PodEventReason::ReservationEnded => ActivityKind::ReservationEnded,
            PodEventReason::PolicyApplied | PodEventReason::PolicyRejected => ActivityKind::Policy,
            // The writes that these tell of are noted themselves.
            PodEventReason::Reserved | PodEventReason::Evicted => return,
            _ => ActivityKind::Warning,
        };
        let (reason, text) = (event.kind.into_str(), event.text.clone());
        self.record(Activity {
            reason,
            text,
            ..Activity::new(kind, &event.key, &event.uid)
        });
    }
}

impl ControlPlane for ActivityRecordingControlPlane {
    fn max_commit_delay(&self) -> Duration {
        self.inner.max_commit_delay()
    }

    fn bind<'a>(&'a self, order: &'a BindOrder) -> BoxFuture<'a, BindOutcome> {
        let binding = self.inner.bind(order);
        binding
            .inspect(|outcome| self.record_binding(order, outcome))
            .boxed()
    }

    fn read_pod<'a>(
        &'a self,
        key: &'a PodKey,
    ) -> BoxFuture<'a, Result<Option<FreshPod>, ControlPlaneError>> {
        self.inner.read_pod(key)
    }

    fn write_status<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        change: &'a StatusChange,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        let writing = self.inner.write_status(key, uid, change);
        let written = |written: &Result<(), _>| {
            if written.is_ok() {
                self.record_status(key, uid, change);
            }
        };
        writing.inspect(written).boxed()
    }

    fn evict<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        why: &'a EvictionReason,
        is_due: &'a IsDue<'a>,
    ) -> BoxFuture<'a, EvictionOutcome> {
        let evicting = self.inner.evict(key, uid, why, is_due);
        evicting
            .inspect(move |outcome| self.record_eviction(key, uid, why, outcome))
            .boxed()
    }

    fn remove_scheduling_gate<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        self.inner.remove_scheduling_gate(key, uid)
    }

    fn record_event(&self, event: PodEvent) {
        self.record_event_activity(&event);
        self.inner.record_event(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::testing::Recorder;
    use stowage_scheduling::ids::NodeName;
    use stowage_scheduling::policy::Policy;
    use stowage_scheduling::vocabulary::placement::Reservation;

    #[tokio::test]
    async fn each_write_is_recorded_once_and_in_order() {
        let state = ServerState::with_stopped_clock(Policy::default());
        let observed =
            ActivityRecordingControlPlane::new(Arc::new(Recorder::default()), state.clone());
        let key = |name: &str| PodKey::parse("default", name).unwrap();
        let uid = |name: &str| PodUid::parse(name).unwrap();
        let event = |kind| PodEvent {
            key: key("a"),
            uid: uid("a"),
            kind,
            text: "because".into(),
        };
        observed.record_event(event(PodEventReason::Unschedulable));
        observed.record_event(event(PodEventReason::Unschedulable));
        let reservation = Reservation {
            node: NodeName::parse("node").unwrap(),
            devices: Arc::default(),
            victims: [uid("b")].into(),
            deadline: state.now(),
        };
        let change = StatusChange::reservation(reservation);
        observed
            .write_status(&key("a"), &uid("a"), &change)
            .await
            .unwrap();
        observed.record_event(event(PodEventReason::Reserved));
        observed
            .evict(
                &key("b"),
                &uid("b"),
                &EvictionReason::Preempted { by: key("a") },
                &|| true,
            )
            .await;
        observed.record_event(event(PodEventReason::GpuLost));
        let entries = state.activity.after(0);
        let noted: Vec<String> = entries
            .iter()
            .map(|entry| {
                format!(
                    "{:?} {} {} {}",
                    entry.what.kind, entry.what.pod.name, entry.what.reason, entry.what.text
                )
            })
            .collect();
        assert_eq!(
            noted,
            [
                "Refused a StowageUnschedulable because",
                "Reserved a  evicting 1 pod",
                "Evicted b Preempted Preempted by pod default/a, which has a higher priority.",
                "Warning a StowageGpuLost because",
            ]
        );
    }
}
