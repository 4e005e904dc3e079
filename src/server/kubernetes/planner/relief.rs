//! Evicts preemptible neighbors of engines under pressure.
//!
//! A failed eviction is retried at growing intervals; meanwhile another neighbor may be evicted.

use super::Planner;
use super::outcome::tried;
use super::write::{EvictionTask, PlannerWrite};
use crate::kubernetes::retry::Backoff;
use crate::service::WorkKind;
use std::collections::BTreeSet;
use stowage_kubernetes_objects::port::{EvictionOutcome, EvictionReason};
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::planning::{PressureWatch, ReliefEviction};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::verbs::wait::EvictionsOrdered;
use tokio::task::JoinHandle;

/// Agents report once a second: more often there is nothing new.
const LOOK_EVERY: Millis = Millis::seconds(1);
/// No pending pod waits for this eviction. What a disruption budget refuses is seldom allowed within seconds, and a condition
/// that changes twice a minute is of no use to the pod's owner.
const PAUSES: Backoff = Backoff {
    first: Millis::seconds(20),
    longest: Millis::seconds(600),
};

/// A look in progress beside the ticks: it goes through all GPUs.
#[derive(Debug, Default)]
pub(super) struct PressureLook {
    task: Option<JoinHandle<FoundPressure>>,
}

/// What a look has found, and what the next one goes on from.
pub(super) type FoundPressure = (PressureWatch, Vec<ReliefEviction>);

impl PressureLook {
    /// The result; `None` if the look failed. Never ends while none is in progress.
    pub(super) async fn end(&mut self) -> Option<FoundPressure> {
        let Some(task) = &mut self.task else {
            return std::future::pending().await;
        };
        let found = task.await;
        self.task = None;
        found
            .inspect_err(
                |error| tracing::error!(%error, "could not check the engines for pressure"),
            )
            .ok()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.task.is_none()
    }
}

impl Planner {
    /// Begins to look for engines under pressure, if that is due.
    pub(super) fn look_for_pressure(&mut self, now: Moment) {
        if now < self.check_engine_load_at || !self.pressure_look.is_idle() {
            return;
        }
        self.check_engine_load_at = now + LOOK_EVERY;
        let ledger = self.service.scratch_ledger();
        self.staying
            .retain(|uid, _| ledger.pod_state(uid).is_some());
        let not_now = self
            .staying
            .iter()
            .filter(|(_, attempt)| !attempt.is_due(now));
        let not_now: BTreeSet<PodUid> = not_now.map(|(uid, _)| uid.clone()).collect();
        let mut pressure = std::mem::take(&mut self.pressure);
        let look = self
            .service
            .heavy_work
            .begin_in_background(WorkKind::Relief, move || {
                let leaving = pressure.look(&ledger, &not_now);
                (pressure, leaving)
            });
        self.pressure_look = PressureLook { task: Some(look) };
    }

    /// Evicts what a look has found. Whether its reason still stands is looked at once more when the eviction is sent.
    pub(super) fn relieve(&mut self, found: Option<FoundPressure>) {
        let Some((pressure, leaving)) = found else {
            return;
        };
        self.pressure = pressure;
        leaving
            .into_iter()
            .for_each(|relief| self.evict_for(relief));
    }

    fn evict_for(&mut self, relief: ReliefEviction) {
        let ReliefEviction {
            uid,
            key,
            engine,
            gpu,
        } = relief;
        let mut ledger = self.service.cluster();
        if !ledger.may_order(std::slice::from_ref(&uid)) {
            return tracing::warn!(pod = %key, %engine, "it stays: enough pods were evicted within the minute");
        }
        ledger.apply(EvictionsOrdered(std::slice::from_ref(&uid).to_vec()));
        drop(ledger);
        self.staying.entry(uid.clone()).or_default().begin();
        let why = EvictionReason::Pressure { engine, gpu };
        self.writes.add(PlannerWrite::Evict {
            key,
            uid,
            why,
            task: EvictionTask::Relief,
        });
    }

    /// If the pressure lasts, this pod is tried again after a pause, or another one before.
    pub(super) fn note_relief(
        &mut self,
        uid: &PodUid,
        key: &PodKey,
        outcome: EvictionOutcome,
        now: Moment,
    ) {
        let attempt = self.staying.entry(uid.clone()).or_default();
        // One that is refused is tried again after the longest pause.
        let _ = tried(attempt, key, outcome, now, PAUSES);
    }
}
