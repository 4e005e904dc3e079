//! Pods that use more VRAM than they were granted, where the policy evicts them: first the Event with the figures, then the
//! eviction.
//!
//! The ledger says what is due ([`TakeOveruse`]), within the eviction rates. An eviction that fails is due again later, as long as
//! the pod stays over its grant.

use super::pod_write::EvictionTask;
use super::{ClusterAccess, ControlLoop, LockedCluster};
use crate::control_loop::{EvictionReason, PodEventReason};
use crate::ledger::{OveruseAction, OveruseStep};
use crate::units::{Millis, Moment};
use crate::verbs::tick::TakeOveruse;

/// How often overuse is checked: agents report once a second, so more often there is nothing new.
const OVERUSE_CHECK_INTERVAL: Millis = Millis::seconds(1);

impl<B: ClusterAccess> ControlLoop<B> {
    pub(super) fn enforce_grants(&mut self, now: Moment) {
        if now < self.check_overuse_at {
            return;
        }
        self.check_overuse_at = now + OVERUSE_CHECK_INTERVAL;
        let steps = self.cluster_access.lock().apply(TakeOveruse);
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
                self.publish(key, uid, kind, text);
            }
            OveruseAction::Evict => {
                let why = match step.is_ungranted {
                    true => EvictionReason::Ungranted { used },
                    false => EvictionReason::Overuse { granted, used },
                };
                self.write_eviction(key, uid, why, EvictionTask::Overuse);
            }
        }
    }
}

fn announcement(step: &OveruseStep, evicted_in: Millis) -> String {
    let OveruseStep {
        node,
        granted,
        used,
        duration: lasted,
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
