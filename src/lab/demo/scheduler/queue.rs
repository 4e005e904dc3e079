//! The scheduling queue: the next pod, pods in back-off, unschedulable pods, and the events that wake them.
//!
//! ```text
//!            pop                   refused                       woken, back-off over
//!  active ─────────► in flight ───────────────► unschedulable ───────────────────────► active
//!    ▲                   │                            └── woken early ──► back-off ──────▲
//!    └─ back-off over ── error back-off ◄── error ────┘
//! ```
//!
//! Synchronous; the time is an argument. An idle scheduler takes pods out of back-off early, but never out of
//! error back-off.

use super::config::SchedulerConfig;
use super::filters::Rejector;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use tokio::time::Instant;

/// What happened in the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterEvent {
    NodeAdded,
    NodeAllocatable,
    /// Labels, taints or `unschedulable`.
    NodePlacement,
    /// Annotations and the rest that counts as a change.
    NodeOther,
    /// A bound pod was deleted or has ended.
    BoundPodDeleted,
    BoundPodChanged,
    /// The pod's own object changed, and with it its spec or labels.
    PodSpecChanged,
    /// The pod's own object changed otherwise: its status, an annotation.
    PodOtherChanged,
    /// All unschedulable pods are moved.
    All,
}

impl ClusterEvent {
    fn requeues(self, rejectors: &BTreeSet<Rejector>) -> bool {
        let rejected_by = |rejector| rejectors.contains(&rejector);
        match self {
            Self::All | Self::NodeAdded | Self::PodSpecChanged => true,
            Self::NodeAllocatable | Self::BoundPodDeleted => {
                rejected_by(Rejector::Extender) || rejected_by(Rejector::Resources)
            }
            Self::NodePlacement => {
                rejected_by(Rejector::Extender) || rejected_by(Rejector::Placement)
            }
            Self::NodeOther | Self::BoundPodChanged | Self::PodOtherChanged => {
                rejected_by(Rejector::Extender)
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum QueueState {
    Active,
    BackOff,
    ErrorBackOff,
    Unschedulable {
        since: Instant,
        rejectors: BTreeSet<Rejector>,
    },
    InFlight,
}

#[derive(Debug)]
struct QueuedPod {
    priority: i64,
    /// Its arrival, as a number: the tie-break among equal priorities.
    order: u64,
    refusals: u32,
    errors: u32,
    back_off_until: Instant,
    state: QueueState,
}

#[derive(Debug, Default)]
pub(crate) struct SchedulingQueue {
    entries: BTreeMap<String, QueuedPod>,
    arrivals: u64,
}

impl SchedulingQueue {
    pub fn contains(&self, uid: &str) -> bool {
        self.entries.contains_key(uid)
    }

    /// Adds a pod to be tried; one that is already queued only gets its new priority.
    pub fn add(&mut self, uid: &str, priority: i64, now: Instant) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.priority = priority;
            return;
        }
        self.arrivals += 1;
        let entry = QueuedPod {
            priority,
            order: self.arrivals,
            refusals: 0,
            errors: 0,
            back_off_until: now,
            state: QueueState::Active,
        };
        self.entries.insert(uid.to_owned(), entry);
    }

    pub fn remove(&mut self, uid: &str) {
        self.entries.remove(uid);
    }

    /// Pops the next pod to try, which is then in flight.
    pub fn pop(&mut self, now: Instant) -> Option<String> {
        self.end_error_back_offs(now);
        let uid = self
            .first(|state| *state == QueueState::Active)
            .or_else(|| self.earliest_in_back_off())?;
        self.entries.get_mut(&uid)?.state = QueueState::InFlight;
        Some(uid)
    }

    /// Moves a rejected pod to the unschedulable pods.
    pub fn add_unschedulable(
        &mut self,
        uid: &str,
        rejectors: BTreeSet<Rejector>,
        now: Instant,
        config: &SchedulerConfig,
    ) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.refusals += 1;
            entry.errors = 0;
            entry.back_off_until = now + config.back_off(entry.refusals);
            entry.state = QueueState::Unschedulable {
                since: now,
                rejectors,
            };
        }
    }

    /// Puts a pod whose cycle or bind failed into error back-off, from which it returns without an event.
    pub fn add_to_error_back_off(&mut self, uid: &str, now: Instant, config: &SchedulerConfig) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.errors += 1;
            entry.back_off_until = now + config.back_off(entry.errors);
            entry.state = QueueState::ErrorBackOff;
        }
    }

    pub fn requeue(&mut self, uid: &str, waker: ClusterEvent, now: Instant) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.wake(waker, now);
        }
    }

    pub(crate) fn requeue_all(&mut self, waker: ClusterEvent, now: Instant) {
        self.entries
            .values_mut()
            .for_each(|entry| entry.wake(waker, now));
    }

    /// A nomination changed or was cleared: pods that it may have kept out are retried.
    pub(crate) fn requeue_up_to_priority(&mut self, priority: i64, now: Instant) {
        let below = self
            .entries
            .values_mut()
            .filter(|entry| entry.priority <= priority);
        below.for_each(|entry| entry.wake(ClusterEvent::All, now));
    }

    /// Requeues pods that have been unschedulable for too long.
    pub fn flush_unschedulable(&mut self, now: Instant, config: &SchedulerConfig) {
        for entry in self.entries.values_mut() {
            if let QueueState::Unschedulable { since, .. } = entry.state
                && now >= since + config.flush_unschedulable_after
            {
                entry.wake(ClusterEvent::All, now);
            }
        }
    }

    /// The next time at which the queue changes without an event.
    pub(crate) fn next_deadline(&self, config: &SchedulerConfig) -> Option<Instant> {
        let deadline = |entry: &QueuedPod| match entry.state {
            QueueState::ErrorBackOff => Some(entry.back_off_until),
            QueueState::Unschedulable { since, .. } => {
                Some(since + config.flush_unschedulable_after)
            }
            QueueState::Active | QueueState::BackOff | QueueState::InFlight => None,
        };
        self.entries.values().filter_map(deadline).min()
    }

    fn end_error_back_offs(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            if entry.state == QueueState::ErrorBackOff && now >= entry.back_off_until {
                entry.state = QueueState::Active;
            }
        }
    }

    fn first(&self, is_eligible: impl Fn(&QueueState) -> bool) -> Option<String> {
        let eligible = self
            .entries
            .iter()
            .filter(|(_, entry)| is_eligible(&entry.state));
        eligible
            .min_by_key(|(_, entry)| (Reverse(entry.priority), entry.order))
            .map(|(uid, _)| uid.clone())
    }

    fn earliest_in_back_off(&self) -> Option<String> {
        let waiting = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.state == QueueState::BackOff);
        waiting
            .min_by_key(|(_, entry)| (entry.back_off_until, entry.order))
            .map(|(uid, _)| uid.clone())
    }
}

impl QueuedPod {
    fn wake(&mut self, waker: ClusterEvent, now: Instant) {
        if let QueueState::Unschedulable { rejectors, .. } = &self.state
            && waker.requeues(rejectors)
        {
            self.state = if now < self.back_off_until {
                QueueState::BackOff
            } else {
                QueueState::Active
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn refused_by(rejector: Rejector) -> (SchedulingQueue, Instant, SchedulerConfig) {
        let (mut queue, now, config) = (
            SchedulingQueue::default(),
            Instant::now(),
            SchedulerConfig::as_shipped(""),
        );
        queue.add("a", 0, now);
        assert_eq!(queue.pop(now).as_deref(), Some("a"));
        queue.add_unschedulable("a", BTreeSet::from([rejector]), now, &config);
        (queue, now, config)
    }

    #[test]
    fn an_extender_rejection_is_requeued_by_an_annotation_change_without_back_off() {
        let (mut queue, now, _) = refused_by(Rejector::Extender);
        assert_eq!(queue.pop(now), None);
        queue.requeue("a", ClusterEvent::PodOtherChanged, now);
        assert_eq!(queue.pop(now).as_deref(), Some("a"));
    }

    #[test]
    fn a_resource_rejection_is_not_requeued_by_an_annotation_change() {
        let (mut queue, now, _) = refused_by(Rejector::Resources);
        queue.requeue("a", ClusterEvent::PodOtherChanged, now);
        queue.requeue_all(ClusterEvent::NodeOther, now);
        assert_eq!(queue.pop(now), None);
        queue.requeue_all(ClusterEvent::BoundPodDeleted, now);
        assert_eq!(queue.pop(now).as_deref(), Some("a"));
    }

    #[test]
    fn an_error_back_off_is_not_ended_by_events() {
        let (mut queue, now, config) = (
            SchedulingQueue::default(),
            Instant::now(),
            SchedulerConfig::as_shipped(""),
        );
        queue.add("a", 0, now);
        queue.pop(now);
        queue.add_to_error_back_off("a", now, &config);
        queue.requeue_all(ClusterEvent::All, now);
        assert_eq!(queue.pop(now), None);
        assert_eq!(
            queue.pop(now + Duration::from_secs(1)).as_deref(),
            Some("a")
        );
    }

    #[test]
    fn the_highest_priority_goes_first_and_then_the_oldest() {
        let (mut queue, now) = (SchedulingQueue::default(), Instant::now());
        for (uid, priority) in [("x", 0), ("b", 5), ("a", 5)] {
            queue.add(uid, priority, now);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop(now)).collect();
        assert_eq!(order, ["b", "a", "x"]);
    }

    #[test]
    fn an_unschedulable_pod_is_requeued_after_the_timeout() {
        let (mut queue, now, config) = refused_by(Rejector::Resources);
        let later = now + config.flush_unschedulable_after;
        assert_eq!(queue.next_deadline(&config), Some(later));
        queue.flush_unschedulable(later, &config);
        assert_eq!(queue.pop(later).as_deref(), Some("a"));
    }
}
