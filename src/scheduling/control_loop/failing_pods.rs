//! Pods on which planning fails: a panic, which is a defect of Stowage and must keep no other pod from being planned.
//!
//! A failed run has many pods. The planner bisects it: it plans each half by itself, then the halves of the half that fails, down
//! to a single pod. It leaves that pod out of other runs from then on, and plans it alone after a growing pause. Until then the
//! pod waits like any pod that cannot be placed.

use super::retry::{Backoff, RetryState};
use crate::ids::PodUid;
use crate::ledger::PendingPod;
use crate::units::{Millis, Moment};
use std::collections::{BTreeMap, BTreeSet};

/// Pauses before a pod is planned again on which planning failed: each failure costs a whole run.
const PLANNING_BACKOFF: Backoff = Backoff {
    min: Millis::seconds(60),
    max: Millis::seconds(1800),
};

#[derive(Debug, Default)]
pub(crate) struct FailingPods {
    /// The pods of the present run.
    in_run: Vec<PodUid>,
    /// Sets of pods of runs that failed, in one of which is a pod on which planning fails. The last is planned next.
    suspects: Vec<BTreeSet<PodUid>>,
    /// Pods on which planning fails, and when they are tried again.
    failing: BTreeMap<PodUid, RetryState>,
}

/// The pods that are due, by what becomes of them in this run.
#[derive(Debug, Default)]
pub(crate) struct ChosenPods {
    pub to_plan: Vec<PendingPod>,
    /// Pods that a later run plans.
    pub put_back: Vec<PodUid>,
    /// Pods on which planning fails; they wait.
    pub failing: Vec<PendingPod>,
}

impl FailingPods {
    /// Chooses from the pods that are due those that the next run plans together.
    pub fn choose(&mut self, due: Vec<PendingPod>, now: Moment) -> ChosenPods {
        let mut chosen = ChosenPods::default();
        let suspects = self.suspects.pop();
        let mut retried = None;
        for pod in due {
            let is_suspect = suspects
                .as_ref()
                .is_none_or(|suspects| suspects.contains(&pod.uid));
            match self.failing.get(&pod.uid) {
                Some(attempt) if attempt.is_due(now) && retried.is_none() => retried = Some(pod),
                Some(_) => chosen.failing.push(pod),
                None if is_suspect => chosen.to_plan.push(pod),
                None => chosen.put_back.push(pod.uid),
            }
        }
        if let Some(pod) = retried {
            // The others are planned after it.
            self.suspects.extend(suspects);
            chosen
                .put_back
                .extend(chosen.to_plan.drain(..).map(|pod| pod.uid));
            chosen.to_plan.push(pod);
        }
        self.in_run = chosen.to_plan.iter().map(|pod| pod.uid.clone()).collect();
        chosen
    }

    /// The run has a plan.
    pub(crate) fn record_success(&mut self) {
        for uid in self.in_run.drain(..) {
            self.failing.remove(&uid);
        }
    }

    /// The run has failed. Answers its pods, and whether planning fails on the one that it had.
    pub(crate) fn record_failure(&mut self, now: Moment) -> (Vec<PodUid>, bool) {
        let in_run = std::mem::take(&mut self.in_run);
        if let [uid] = &in_run[..] {
            self.failing.entry(uid.clone()).or_default().record_failure(
                now,
                PLANNING_BACKOFF,
                PLANNING_BACKOFF.min,
            );
            return (in_run, true);
        }
        let (first, second) = in_run.split_at(in_run.len() / 2);
        for half in [second, first] {
            self.suspects.push(half.iter().cloned().collect());
        }
        (in_run, false)
    }

    /// Forgets pods that are gone.
    pub fn retain(&mut self, is_there: impl Fn(&PodUid) -> bool) {
        self.failing.retain(|uid, _| is_there(uid));
    }
}
