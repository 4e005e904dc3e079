//! Sleeping engines that wake: evicts the pods that borrow from them, and tells them when they may.
//!
//! Runs before every other use of the planner's evictions, and within the same rates. Everything but the state of retries follows
//! from the ledger: from the pods' annotations and conditions, and from the pods that borrow. A new leader goes on where the last
//! one stopped.

use super::outcome::record_attempt;
use super::pod_write::{EvictionTask, StatusPurpose};
use super::retry::{Backoff, RetryState};
use super::{ClusterAccess, ControlLoop, LockedCluster, LoopNotice};
use crate::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, StatusChange, WakeAnswer,
};
use crate::ids::{PodKey, PodUid};
use crate::ledger::WakeStatus;
use crate::planning::{LoanEviction, RecallWatch, loans_to_end};
use crate::units::{Millis, Moment};
use crate::verbs::wait::EvictionsOrdered;
use std::collections::{BTreeMap, BTreeSet};

/// Pauses between failed evictions of a borrower: short, because an engine waits for them.
const LOAN_EVICTION_BACKOFF: Backoff = Backoff {
    min: Millis(500),
    max: Millis::seconds(10),
};
/// Agents report once a second: more often there is nothing new.
const RECALL_CHECK_INTERVAL: Millis = Millis::seconds(1);
/// How long a condition may take to appear in the watch before it is written again.
const WAKE_ANSWER_VISIBLE_WITHIN: Millis = Millis::seconds(5);

/// Loans that end, beyond what the ledger has of them.
#[derive(Debug, Default)]
pub(super) struct EndingLoans {
    evictions: BTreeMap<PodUid, BorrowerEviction>,
    /// Which models' sleeping engines will be needed soon.
    recall: RecallWatch,
    check_load_at: Moment,
    /// The last answer to each pod, and when it is written again if it does not show.
    answers: BTreeMap<PodUid, (WakeAnswer, Moment)>,
}

/// The eviction of one borrower.
#[derive(Debug, Default)]
struct BorrowerEviction {
    attempt: RetryState,
    has_failed: bool,
}

impl EndingLoans {
    /// The retry state of this borrower's eviction.
    pub(super) fn attempt(&mut self, borrower: &PodUid) -> Option<&mut RetryState> {
        self.evictions.get_mut(borrower).map(|end| &mut end.attempt)
    }
}

impl<B: ClusterAccess> ControlLoop<B> {
    /// Evicts borrowers whose lenders wake, and answers those lenders.
    pub(super) fn end_loans(&mut self, now: Moment) {
        // A copy, which costs next to nothing: with many borrowers the search takes longer than the lock should be held.
        let mut ledger = self.cluster_access.lock().ledger().scratch();
        if now >= self.loans.check_load_at {
            self.loans.check_load_at = now + RECALL_CHECK_INTERVAL;
            let recalls = self.loans.recall.check(&ledger);
            if !recalls.is_empty() {
                self.record(LoopNotice::Recalls {
                    begun: recalls.begin.len(),
                    ended: recalls.end.len(),
                });
                let mut cluster = self.cluster_access.lock();
                cluster.apply(recalls);
                ledger = cluster.ledger().scratch();
            }
        }
        self.loans
            .evictions
            .retain(|uid, _| ledger.pod_state(uid).is_some());
        let pending = self
            .loans
            .evictions
            .iter()
            .filter(|(_, end)| !end.attempt.is_due(now));
        let (failed, leaving): (Vec<_>, Vec<_>) = pending.partition(|(_, end)| end.has_failed);
        let uids = |ends: Vec<(&PodUid, &BorrowerEviction)>| -> BTreeSet<PodUid> {
            ends.into_iter().map(|(uid, _)| uid.clone()).collect()
        };
        let (leaving, failed) = (uids(leaving), uids(failed));
        let evictions = loans_to_end(&ledger, &leaving, &failed);
        let wakes = ledger.unanswered_wakes();
        evictions
            .into_iter()
            .for_each(|eviction| self.evict_borrower(eviction));
        self.answer_wakes(wakes, now);
    }

    fn evict_borrower(&mut self, eviction: LoanEviction) {
        let LoanEviction {
            uid,
            key,
            lender,
            gpu,
            is_early,
        } = eviction;
        let mut cluster = self.cluster_access.lock();
        if !cluster
            .ledger()
            .is_within_eviction_rates(std::slice::from_ref(&uid))
        {
            drop(cluster);
            return self.record(LoopNotice::LoanEviction("rate-limited"));
        }
        cluster.apply(EvictionsOrdered(vec![uid.clone()]));
        drop(cluster);
        let end = self.loans.evictions.entry(uid.clone()).or_default();
        end.attempt.begin();
        end.has_failed = false;
        self.record(LoopNotice::LoanEnds {
            pod: key.clone(),
            lender: lender.clone(),
            gpu: gpu.clone(),
        });
        let why = EvictionReason::LoanEnded {
            lender,
            gpu,
            is_early,
        };
        self.write_eviction(key, uid, why, EvictionTask::LoanEnd);
    }

    /// A failed eviction is tried again after a pause; another borrower may be evicted before.
    pub(super) fn record_loan_eviction(
        &mut self,
        uid: &PodUid,
        outcome: EvictionOutcome,
        now: Moment,
    ) {
        self.record(LoopNotice::LoanEviction(outcome.code()));
        let end = self.loans.evictions.entry(uid.clone()).or_default();
        end.has_failed = matches!(
            outcome,
            EvictionOutcome::TryLater { .. }
                | EvictionOutcome::CalledOff
                | EvictionOutcome::Refused { .. }
        );
        // One that is refused is tried again after the longest pause.
        let _ = record_attempt(&mut end.attempt, outcome, now, LOAN_EVICTION_BACKOFF);
    }

    /// The condition shows late, or was refused: it is written again when it does not show in time.
    pub(super) fn record_wake_answer(
        &mut self,
        key: &PodKey,
        answer: &WakeAnswer,
        written: Result<(), ControlPlaneError>,
    ) {
        match (written, answer) {
            (Ok(()), WakeAnswer::Wakeable { .. }) => {
                self.record(LoopNotice::MayWake(key.clone()));
            }
            (Ok(()), _) | (Err(ControlPlaneError::Gone), _) => {}
            (Err(error), _) => {
                self.report_failure(key, "could not write whether the engine may wake", error);
            }
        }
    }

    /// The answer was not sent, because it was another by then. It is sent if it becomes that again.
    pub(super) fn record_dropped_wake_answer(&mut self, uid: &PodUid, answer: &WakeAnswer) {
        if self
            .loans
            .answers
            .get(uid)
            .is_some_and(|(last_answer, _)| last_answer == answer)
        {
            self.loans.answers.remove(uid);
        }
    }

    fn answer_wakes(&mut self, wakes: Vec<WakeStatus>, now: Moment) {
        let asking: BTreeSet<&PodUid> = wakes.iter().map(|wake| &wake.uid).collect();
        self.loans.answers.retain(|uid, _| asking.contains(uid));
        let waiting = wakes
            .iter()
            .filter(|wake| wake.request.is_some() && wake.answered_request.is_none());
        self.record(LoopNotice::WakesWaiting(waiting.count()));
        for wake in wakes {
            let Some(answer) = due_wake_answer(&wake) else {
                continue;
            };
            let last = self.loans.answers.get(&wake.uid);
            let is_answered = last.is_some_and(|(last_answer, again)| {
                let is_under_way = || now < *again || self.writes.has_pod(&wake.uid);
                *last_answer == answer && (answer == WakeAnswer::Reclaiming || is_under_way())
            });
            if is_answered {
                continue;
            }
            self.loans.answers.insert(
                wake.uid.clone(),
                (answer.clone(), now + WAKE_ANSWER_VISIBLE_WITHIN),
            );
            let (change, purpose) = (
                StatusChange::wake(answer.clone()),
                StatusPurpose::AnswerWake(answer),
            );
            self.write_status(wake.key, wake.uid, change, purpose);
        }
    }
}

/// The answer that a pod is due and does not show; `None` if it needs none.
pub(super) fn due_wake_answer(wake: &WakeStatus) -> Option<WakeAnswer> {
    match (&wake.request, &wake.answered_request) {
        (Some(request), answered) if wake.is_wakeable && answered.as_ref() != Some(request) => {
            Some(WakeAnswer::Wakeable {
                request: request.clone(),
            })
        }
        (Some(_), None) => Some(WakeAnswer::Reclaiming),
        (None, Some(_)) => Some(WakeAnswer::Withdrawn),
        (Some(_), Some(_)) | (None, None) => None,
    }
}
