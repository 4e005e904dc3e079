//! Pods that use more VRAM than they were granted, where the policy evicts them: first the Event with the figures, then the
//! eviction.
//!
//! The ledger says what is due ([`TakeOveruse`]), within the eviction rates. An eviction that fails is due again later, as long as
//! the pod stays over its grant.

use super::Planner;
use super::write::{EvictionTask, PlannerWrite};
use stowage_kubernetes_objects::port::{EvictionOutcome, EvictionReason, PodEvent, PodEventReason};
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::ledger::{OveruseAction, OveruseStep};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::verbs::tick::TakeOveruse;
use tracing::{info, warn};

/// Agents report once a second: more often there is nothing new.
const LOOK_EVERY: Millis = Millis::seconds(1);

impl Planner {
    pub(super) fn enforce_grants(&mut self, now: Moment) {
        if now < self.check_overuse_at {
            return;
        }
        self.check_overuse_at = now + LOOK_EVERY;
        let steps = self.service.cluster().apply(TakeOveruse);
        steps.into_iter().for_each(|step| self.enforce_grant(step));
    }

    fn enforce_grant(&mut self, step: OveruseStep) {
        let OveruseStep {
            uid,
            key,
            granted,
            used,
            ..
        } = step.clone();
        match step.action {
            // `StowageUngranted` has told it.
            OveruseAction::Announce { .. } if step.is_ungranted => {}
            OveruseAction::Announce { evicted_in } => {
                let (kind, text) = (PodEventReason::Overuse, announcement(&step, evicted_in));
                self.control_plane.record_event(PodEvent {
                    key,
                    uid,
                    kind,
                    text,
                });
            }
            OveruseAction::Evict => {
                let why = match step.is_ungranted {
                    true => EvictionReason::Ungranted { used },
                    false => EvictionReason::Overuse { granted, used },
                };
                self.writes.add(PlannerWrite::Evict {
                    key,
                    uid,
                    why,
                    task: EvictionTask::Overuse,
                });
            }
        }
    }

    pub(super) fn note_overuse_eviction(&self, key: &PodKey, outcome: &EvictionOutcome) {
        let evictions = &self.service.metrics.planner.overuse_evictions;
        evictions.with_label_values(&[outcome.code()]).inc();
        match outcome {
            EvictionOutcome::Evicted => {
                info!(pod = %key, "evicted: it used more VRAM than it was granted")
            }
            outcome => {
                warn!(pod = %key, %outcome, "not evicted yet, although it uses more VRAM than it was granted")
            }
        }
    }
}

fn announcement(step: &OveruseStep, evicted_in: Millis) -> String {
    let OveruseStep {
        node,
        granted,
        used,
        lasted,
        ..
    } = step;
    format!(
        "The pod's processes have used more VRAM than it was granted for {} s: {used} ({} bytes) of {granted} ({} bytes) on \
         {node}. It is evicted in {} s unless it uses less by then (overuse: evict). Start its engine with the share in the \
         annotation stowage.dev/gpu-memory-fraction, or ask for more stowage.dev/vram.",
        lasted.0 / 1000,
        used.0,
        granted.0,
        evicted_in.0 / 1000
    )
}
