//! Evicts preemptible neighbors of engines under pressure.
//!
//! A failed eviction is retried at growing intervals; meanwhile another neighbor may be evicted.

use super::outcome::record_attempt;
use super::pod_write::EvictionTask;
use super::retry::Backoff;
use super::{ClusterAccess, ControlLoop, LockedCluster, LoopAction};
use crate::control_loop::{EvictionOutcome, EvictionReason};
use crate::ids::PodUid;
use crate::ledger::Ledger;
use crate::planning::{PressureWatch, ReliefEviction};
use crate::units::{Millis, Moment};
use crate::verbs::wait::EvictionsOrdered;
use std::collections::BTreeSet;

/// How often engine load is checked: agents report once a second, so more often there is nothing new.
const PRESSURE_CHECK_INTERVAL: Millis = Millis::seconds(1);
/// No pending pod waits for this eviction. What a disruption budget refuses is seldom allowed within seconds, and a condition
/// that changes twice a minute is of no use to the pod's owner.
const RELIEF_BACKOFF: Backoff = Backoff {
    min: Millis::seconds(20),
    max: Millis::seconds(600),
};

/// A check for engines under pressure, which goes through all GPUs.
#[derive(Debug)]
pub struct PressureJob {
    pressure: PressureWatch,
    ledger: Ledger,
    deferred: BTreeSet<PodUid>,
}

/// The result of a check, and the state that the next one continues from.
#[derive(Debug, Default)]
pub struct FoundPressure {
    pressure: PressureWatch,
    leaving: Vec<ReliefEviction>,
}

impl PressureJob {
    pub fn run(mut self) -> FoundPressure {
        let leaving = self.pressure.check(&self.ledger, &self.deferred);
        FoundPressure {
            pressure: self.pressure,
            leaving,
        }
    }
}

impl<B: ClusterAccess> ControlLoop<B> {
    /// Starts a check for engines under pressure, if one is due and none is in progress.
    pub(super) fn start_pressure_check(&mut self, now: Moment) {
        if now < self.check_engine_load_at {
            return;
        }
        let Some(pressure) = self.pressure.take() else {
            return;
        };
        self.check_engine_load_at = now + PRESSURE_CHECK_INTERVAL;
        let ledger = self.cluster_access.lock().ledger().scratch();
        self.relief_attempts
            .retain(|uid, _| ledger.pod_state(uid).is_some());
        let deferred = self
            .relief_attempts
            .iter()
            .filter(|(_, attempt)| !attempt.is_due(now));
        let deferred = deferred.map(|(uid, _)| uid.clone()).collect();
        self.actions
            .push_back(LoopAction::CheckPressure(PressureJob {
                pressure,
                ledger,
                deferred,
            }));
    }

    /// Evicts what a check has found; `None` if the check failed. Whether its reason still holds is checked once more when the
    /// eviction is sent.
    pub fn handle_pressure(&mut self, found: Option<FoundPressure>) {
        let is_outdated = std::mem::take(&mut self.is_outdated_check);
        let FoundPressure { pressure, leaving } =
            found.filter(|_| !is_outdated).unwrap_or_default();
        self.pressure = Some(pressure);
        leaving
            .into_iter()
            .for_each(|relief| self.evict_neighbor(relief));
    }

    fn evict_neighbor(&mut self, relief: ReliefEviction) {
        let ReliefEviction {
            uid,
            key,
            engine,
            gpu,
        } = relief;
        let mut cluster = self.cluster_access.lock();
        if !cluster
            .ledger()
            .is_within_eviction_rates(std::slice::from_ref(&uid))
        {
            drop(cluster);
            let why = format!("{engine} is under pressure");
            return self.report_failure(
                &key,
                "it stays: enough pods were evicted within the minute",
                why,
            );
        }
        cluster.apply(EvictionsOrdered(std::slice::from_ref(&uid).to_vec()));
        drop(cluster);
        self.relief_attempts.entry(uid.clone()).or_default().begin();
        let why = EvictionReason::Pressure { engine, gpu };
        self.write_eviction(key, uid, why, EvictionTask::Relief);
    }

    /// Records the eviction. If the pressure lasts, this pod is tried again after a pause, or another one before.
    pub(super) fn record_relief_eviction(
        &mut self,
        uid: &PodUid,
        outcome: EvictionOutcome,
        now: Moment,
    ) {
        let attempt = self.relief_attempts.entry(uid.clone()).or_default();
        // One that is refused is tried again after the longest pause.
        let _ = record_attempt(attempt, outcome, now, RELIEF_BACKOFF);
    }
}
