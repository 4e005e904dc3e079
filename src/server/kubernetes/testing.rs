//! For tests of the edges that write: a control plane that records each call, and returns the answers that a test sets.

use futures::future::BoxFuture;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use stowage_kubernetes_objects::port::{BindOrder, BindOutcome, ControlPlane, IsDue};
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionCondition, EvictionOutcome, EvictionReason, FreshPod,
    NominationChange, PlanState, PodEvent, ReservationChange, StatusChange,
};
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::vocabulary::placement::Reservation;
use tokio::sync::oneshot;

#[derive(Default)]
pub(crate) struct Recorder {
    /// Writes in order, as text: `a: hold n`, `b: evict Preempted`, `a: nominate n, touch`, `a: lift`.
    written: Mutex<Vec<String>>,
    events: Mutex<Vec<PodEvent>>,
    /// The outcome of evictions by pod; those of all others succeed.
    pub eviction_outcomes: Mutex<BTreeMap<String, EvictionOutcome>>,
    /// Runs while the condition of the next pod to be evicted is written.
    pub during_next_eviction: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// What a read of a pod shows; all others are gone.
    pub pods_on_record: Mutex<BTreeMap<String, FreshPod>>,
    /// The next write of a pod's status completes when this is answered.
    pub stalled_status_write: Mutex<Option<oneshot::Receiver<()>>>,
    /// Each write of a pod's status lets the others have their turn first.
    pub yields_before_status_writes: Mutex<bool>,
    /// Writes of these pods' status find no such pod.
    pub missing_pods: Mutex<BTreeSet<String>>,
    /// Reads and writes of a pod's status fail.
    pub is_unreachable: Mutex<bool>,
    /// The reservation that was written last of each pod.
    pub reservations: Mutex<BTreeMap<String, Reservation>>,
}

impl Recorder {
    /// What was written since the last call.
    pub fn written(&self) -> Vec<String> {
        std::mem::take(&mut self.written.lock())
    }

    /// Reasons of the Events since the last call.
    pub fn event_reasons(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.events.lock())
            .into_iter()
            .map(|event| event.kind.into_str())
            .collect()
    }

    fn record_write(&self, key: &PodKey, what: &str) {
        self.written.lock().push(format!("{}: {what}", key.name));
    }
}

fn describe(change: &StatusChange) -> String {
    let reservation = change
        .reservation
        .as_ref()
        .map(|reservation| match reservation {
            ReservationChange::Set(reservation) => format!("hold {}", reservation.node),
            ReservationChange::Ended => "end hold".into(),
        });
    let nomination = change
        .nomination
        .as_ref()
        .map(|nomination| match nomination {
            NominationChange::To(node) => format!("nominate {node}"),
            NominationChange::Cleared => "clear nomination".into(),
        });
    let plan = change.plan.as_ref().map(|plan| match plan {
        PlanState::Nominated { .. } => "placed".into(),
        PlanState::Preempting { .. } => "making room".into(),
        PlanState::GateRemoved { .. } => "released".into(),
        PlanState::Unschedulable { why } => format!("waits: {why}"),
        PlanState::Rejected { node, why } => format!("refused on {node}: {why}"),
    });
    let eviction = change.eviction.as_ref().map(|mark| match mark {
        EvictionCondition::Evicting(why) => why.reason().into(),
        EvictionCondition::Cancelled => "stays".into(),
    });
    let requeue = change.requeue.map(|_| "touch".to_owned());
    [reservation, nomination, plan, eviction, requeue]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(", ")
}

impl ControlPlane for Recorder {
    fn bind<'a>(&'a self, _: &'a BindOrder) -> BoxFuture<'a, BindOutcome> {
        unreachable!("the planner binds nobody")
    }

    fn read_pod<'a>(
        &'a self,
        key: &'a PodKey,
    ) -> BoxFuture<'a, Result<Option<FreshPod>, ControlPlaneError>> {
        let read = match *self.is_unreachable.lock() {
            true => Err(ControlPlaneError::Unknown("no answer".into())),
            false => Ok(self.pods_on_record.lock().get(&*key.name).cloned()),
        };
        Box::pin(std::future::ready(read))
    }

    fn write_status<'a>(
        &'a self,
        key: &'a PodKey,
        _: &'a PodUid,
        change: &'a StatusChange,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        let stall = self.stalled_status_write.lock().take();
        Box::pin(async move {
            if *self.yields_before_status_writes.lock() {
                tokio::task::yield_now().await;
            }
            if let Some(stall) = stall {
                stall.await.expect("a test that stalls a write resumes it");
            }
            let is_unreachable = *self.is_unreachable.lock();
            self.record_write(key, &describe(change));
            if let Some(ReservationChange::Set(reservation)) = &change.reservation {
                self.reservations
                    .lock()
                    .insert(key.name.to_string(), reservation.clone());
            }
            if self.missing_pods.lock().contains(&*key.name) {
                return Err(ControlPlaneError::Gone);
            }
            if is_unreachable {
                Err(ControlPlaneError::Unknown("no answer".into()))
            } else {
                Ok(())
            }
        })
    }

    fn evict<'a>(
        &'a self,
        key: &'a PodKey,
        _: &'a PodUid,
        why: &'a EvictionReason,
        is_due: &'a IsDue<'a>,
    ) -> BoxFuture<'a, EvictionOutcome> {
        if let Some(happens) = self.during_next_eviction.lock().take() {
            happens();
        }
        if !is_due() {
            return Box::pin(std::future::ready(EvictionOutcome::CalledOff));
        }
        self.record_write(key, &format!("evict {}", why.reason()));
        let outcome = self
            .eviction_outcomes
            .lock()
            .get(&*key.name)
            .cloned()
            .unwrap_or(EvictionOutcome::Evicted);
        Box::pin(std::future::ready(outcome))
    }

    fn remove_scheduling_gate<'a>(
        &'a self,
        key: &'a PodKey,
        _: &'a PodUid,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        self.record_write(key, "lift");
        let is_unreachable = *self.is_unreachable.lock();
        let removed = if is_unreachable {
            Err(ControlPlaneError::Unknown("no answer".into()))
        } else {
            Ok(())
        };
        Box::pin(std::future::ready(removed))
    }

    fn record_event(&self, event: PodEvent) {
        self.events.lock().push(event);
    }
}
