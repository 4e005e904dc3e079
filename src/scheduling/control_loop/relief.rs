//! Evicts preemptible neighbors of engines under pressure.
//!
//! A failed eviction is retried at growing intervals; meanwhile another neighbor may be evicted.

use super::outcome::tried;
use super::pod_write::EvictionTask;
use super::retry::Backoff;
use super::{Act, Books, ControlLoop, LockedBooks};
use crate::control_loop::{EvictionOutcome, EvictionReason};
use crate::ids::PodUid;
use crate::ledger::Ledger;
use crate::planning::{PressureWatch, ReliefEviction};
use crate::units::{Millis, Moment};
use crate::verbs::wait::EvictionsOrdered;
use std::collections::BTreeSet;

/// How often engine load is checked: agents report once a second, so more often there is nothing new.
const LOOK_EVERY: Millis = Millis::seconds(1);
/// No pending pod waits for this eviction. What a disruption budget refuses is seldom allowed within seconds, and a condition
/// that changes twice a minute is of no use to the pod's owner.
const PAUSES: Backoff = Backoff {
    first: Millis::seconds(20),
    longest: Millis::seconds(600),
};

/// A check for engines under pressure, which goes through all GPUs.
#[derive(Debug)]
pub struct PressureJob {
    pressure: PressureWatch,
    ledger: Ledger,
    not_now: BTreeSet<PodUid>,
}

/// The result of a check, and the state that the next one continues from.
#[derive(Debug, Default)]
pub struct FoundPressure {
    pressure: PressureWatch,
    leaving: Vec<ReliefEviction>,
}

impl PressureJob {
    pub fn run(mut self) -> FoundPressure {
        let leaving = self.pressure.look(&self.ledger, &self.not_now);
        FoundPressure {
            pressure: self.pressure,
            leaving,
        }
    }
}

impl<B: Books> ControlLoop<B> {
    /// Starts a check for engines under pressure, if one is due and none is in progress.
    pub(super) fn look_for_pressure(&mut self, now: Moment) {
        if now < self.check_engine_load_at {
            return;
        }
        let Some(pressure) = self.pressure.take() else {
            return;
        };
        self.check_engine_load_at = now + LOOK_EVERY;
        let ledger = self.books.lock().ledger().scratch();
        self.staying
            .retain(|uid, _| ledger.pod_state(uid).is_some());
        let not_now = self
            .staying
            .iter()
            .filter(|(_, attempt)| !attempt.is_due(now));
        let not_now = not_now.map(|(uid, _)| uid.clone()).collect();
        self.acts.push_back(Act::LookForPressure(PressureJob {
            pressure,
            ledger,
            not_now,
        }));
    }

    /// Evicts what a look has found; `None` if the look failed. Whether its reason still stands is looked at once more when the
    /// eviction is sent.
    pub fn found_pressure(&mut self, found: Option<FoundPressure>) {
        let is_old = std::mem::take(&mut self.is_old_look);
        let FoundPressure { pressure, leaving } = found.filter(|_| !is_old).unwrap_or_default();
        self.pressure = Some(pressure);
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
        let mut cluster = self.books.lock();
        if !cluster.ledger().may_order(std::slice::from_ref(&uid)) {
            drop(cluster);
            let why = format!("{engine} is under pressure");
            return self.failed(
                &key,
                "it stays: enough pods were evicted within the minute",
                why,
            );
        }
        cluster.apply(EvictionsOrdered(std::slice::from_ref(&uid).to_vec()));
        drop(cluster);
        self.staying.entry(uid.clone()).or_default().begin();
        let why = EvictionReason::Pressure { engine, gpu };
        self.write_eviction(key, uid, why, EvictionTask::Relief);
    }

    /// Records the eviction. If the pressure lasts, this pod is tried again after a pause, or another one before.
    pub(super) fn note_relief(&mut self, uid: &PodUid, outcome: EvictionOutcome, now: Moment) {
        let attempt = self.staying.entry(uid.clone()).or_default();
        // One that is refused is tried again after the longest pause.
        let _ = tried(attempt, outcome, now, PAUSES);
    }
}
