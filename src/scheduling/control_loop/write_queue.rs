//! The loop's writes in progress: many at once, but for each pod one after the other, in the order in which they were requested.
//!
//! Two patches of one pod's status that are sent at once may arrive in any order, and the last one wins: a reservation that was
//! written and released would be back. The queue does not know what a write means.

use super::pod_write::PodWrite;
use crate::ids::PodUid;
use std::collections::{BTreeMap, VecDeque};

/// Limit for all pods together: enough to keep an API server busy, and few beside its other load.
const MAX_IN_PROGRESS: usize = 32;
/// Limit of writes that can wait, within the limit of all: an eviction or a nomination finds a place beside any number of explanations of
/// other pods.
const MAX_DEFERRABLE_IN_PROGRESS: usize = 24;
/// Limit of pods with a write in progress or waiting for its turn. Beyond it only writes that a reservation needs are added: a
/// pending pod's condition can wait.
const MAX_QUEUED_PODS: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct WriteQueue {
    /// The pods with a write in progress or on a list below, and the writes behind it.
    queued_by_pod: BTreeMap<PodUid, VecDeque<PodWrite>>,
    /// Writes whose turn has come, and their numbers.
    urgent: VecDeque<(u64, PodWrite)>,
    can_wait: VecDeque<(u64, PodWrite)>,
    added: u64,
    /// The pods with a write in progress, and whether it could wait.
    in_progress: BTreeMap<PodUid, bool>,
}

impl WriteQueue {
    /// Sends the write after all earlier writes of this pod.
    pub fn add(&mut self, write: PodWrite) {
        match self.queued_by_pod.get_mut(write.uid()) {
            Some(behind) => behind.push_back(write),
            None => {
                self.queued_by_pod
                    .insert(write.uid().clone(), VecDeque::new());
                self.enqueue(write);
            }
        }
    }

    /// Whether a write that can wait should be postponed.
    pub fn is_full(&self) -> bool {
        self.queued_by_pod.len() >= MAX_QUEUED_PODS
    }

    /// Whether any write of the pod is in progress or queued.
    pub fn has_pod(&self, uid: &PodUid) -> bool {
        self.queued_by_pod.contains_key(uid)
    }

    /// The next write to send: the oldest for which there is a place.
    pub fn next(&mut self) -> Option<PodWrite> {
        if self.in_progress.len() >= MAX_IN_PROGRESS {
            return None;
        }
        let deferrable = self.in_progress.values().filter(|waited| **waited).count();
        let number = |queue: &VecDeque<(u64, PodWrite)>| queue.front().map(|(number, _)| *number);
        let urgent = number(&self.urgent);
        let can_wait = number(&self.can_wait).filter(|_| deferrable < MAX_DEFERRABLE_IN_PROGRESS);
        let is_deferrable = match (urgent, can_wait) {
            (None, None) => return None,
            (urgent, can_wait) => urgent.is_none_or(|first| can_wait.is_some_and(|it| it < first)),
        };
        let queue = if is_deferrable {
            &mut self.can_wait
        } else {
            &mut self.urgent
        };
        let (_, write) = queue.pop_front()?;
        self.in_progress.insert(write.uid().clone(), is_deferrable);
        Some(write)
    }

    /// A write of the pod that was in progress has ended.
    pub fn end(&mut self, uid: &PodUid) {
        if self.in_progress.remove(uid).is_none() {
            return;
        }
        match self
            .queued_by_pod
            .get_mut(uid)
            .and_then(VecDeque::pop_front)
        {
            Some(next) => self.enqueue(next),
            None => drop(self.queued_by_pod.remove(uid)),
        }
    }

    /// Drops all writes that have not been sent, and returns them.
    pub fn drop_unsent(&mut self) -> Vec<PodWrite> {
        let behind = self
            .queued_by_pod
            .values_mut()
            .flat_map(|queue| queue.drain(..));
        let mut dropped: Vec<PodWrite> = behind.collect();
        for (_, write) in self.urgent.drain(..).chain(self.can_wait.drain(..)) {
            self.queued_by_pod.remove(write.uid());
            dropped.push(write);
        }
        dropped
    }

    #[cfg(any(test, feature = "testkit"))]
    pub fn is_empty(&self) -> bool {
        self.queued_by_pod.is_empty()
    }

    fn enqueue(&mut self, write: PodWrite) {
        self.added += 1;
        let queue = match write.can_wait() {
            true => &mut self.can_wait,
            false => &mut self.urgent,
        };
        queue.push_back((self.added, write));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control_loop::{StatusChange, StatusPurpose};
    use crate::testkit::{key, node, uid};

    fn write(name: &str, change: StatusChange, purpose: StatusPurpose) -> PodWrite {
        PodWrite::Status {
            key: key(name),
            uid: uid(name),
            change,
            purpose,
        }
    }

    fn nominate(name: &str, to: &str) -> PodWrite {
        let change = StatusChange::nominate(node(to));
        write(name, change, StatusPurpose::AbandonReservation)
    }

    fn requeue(name: &str) -> PodWrite {
        write(name, StatusChange::requeue(), StatusPurpose::Requeue)
    }

    #[test]
    fn writes_of_one_pod_keep_their_order_and_those_of_others_run_meanwhile() {
        let mut writes = WriteQueue::default();
        writes.add(nominate("a", "n"));
        writes.add(nominate("a", "m"));
        writes.add(requeue("b"));
        assert_eq!(writes.next(), Some(nominate("a", "n")));
        assert_eq!(writes.next(), Some(requeue("b")));
        assert_eq!(writes.next(), None);
        writes.end(&uid("a"));
        assert_eq!(writes.next(), Some(nominate("a", "m")));
        writes.end(&uid("a"));
        writes.end(&uid("b"));
        assert!(writes.is_empty() && !writes.has_pod(&uid("a")));
    }

    #[test]
    fn a_write_that_a_reservation_needs_finds_a_place_beside_those_that_can_wait() {
        let mut writes = WriteQueue::default();
        (0..200).for_each(|nth| writes.add(requeue(&format!("pod-{nth:03}"))));
        let first: Vec<PodWrite> = std::iter::from_fn(|| writes.next()).collect();
        assert_eq!(first.len(), MAX_DEFERRABLE_IN_PROGRESS);
        (0..200).for_each(|nth| writes.add(nominate(&format!("urgent-{nth:03}"), "n")));
        let urgent: Vec<PodWrite> = std::iter::from_fn(|| writes.next()).collect();
        assert_eq!(urgent.len(), MAX_IN_PROGRESS - MAX_DEFERRABLE_IN_PROGRESS);
        // Neither kind keeps the other out for ever: the oldest is next.
        writes.end(first[0].uid());
        assert_eq!(writes.next(), Some(requeue("pod-024")));
        writes.end(urgent[0].uid());
        assert_eq!(writes.next(), Some(nominate("urgent-008", "n")));
    }

    #[test]
    fn writes_that_have_not_been_sent_are_dropped_when_the_replica_stops_leading() {
        let mut writes = WriteQueue::default();
        writes.add(nominate("a", "n"));
        writes.next();
        writes.add(nominate("a", "m"));
        writes.add(nominate("b", "n"));
        let dropped = writes.drop_unsent();
        assert_eq!(dropped, [nominate("a", "m"), nominate("b", "n")]);
        assert!(writes.has_pod(&uid("a")) && !writes.has_pod(&uid("b")));
        writes.end(&uid("a"));
        assert!(writes.is_empty() && writes.next().is_none());
        writes.add(nominate("b", "m"));
        assert_eq!(writes.next(), Some(nominate("b", "m")));
    }

    #[test]
    fn an_answer_that_nothing_was_sent_for_frees_no_place() {
        let mut writes = WriteQueue::default();
        writes.add(nominate("a", "n"));
        writes.end(&uid("a"));
        assert_eq!(writes.next(), Some(nominate("a", "n")));
    }
}
