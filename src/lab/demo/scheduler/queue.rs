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
pub(crate) enum Waker {
    NodeAdded,
    NodeAllocatable,
    /// Labels, taints or `unschedulable`.
    NodePlacement,
    /// Annotations and the rest that counts as a change.
    NodeOther,
    /// A bound pod was deleted or has ended.
    PodGone,
    BoundPodChanged,
    /// The pod's own object changed, and with it its spec or labels.
    OwnSpec,
    /// The pod's own object changed otherwise: its status, an annotation.
    OwnOther,
    /// All unschedulable pods are moved.
    All,
}

impl Waker {
    fn wakes(self, rejectors: &BTreeSet<Rejector>) -> bool {
        let also = |rejector| rejectors.contains(&rejector);
        match self {
            Self::All | Self::NodeAdded | Self::OwnSpec => true,
            Self::NodeAllocatable | Self::PodGone => {
                also(Rejector::Extender) || also(Rejector::Resources)
            }
            Self::NodePlacement => also(Rejector::Extender) || also(Rejector::Placement),
            Self::NodeOther | Self::BoundPodChanged | Self::OwnOther => also(Rejector::Extender),
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
struct Entry {
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
    entries: BTreeMap<String, Entry>,
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
        let entry = Entry {
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
    pub fn refused(
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
    pub fn failed(&mut self, uid: &str, now: Instant, config: &SchedulerConfig) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.errors += 1;
            entry.back_off_until = now + config.back_off(entry.errors);
            entry.state = QueueState::ErrorBackOff;
        }
    }

    pub fn wake(&mut self, uid: &str, waker: Waker, now: Instant) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.wake(waker, now);
        }
    }

    pub(crate) fn wake_all(&mut self, waker: Waker, now: Instant) {
        self.entries
            .values_mut()
            .for_each(|entry| entry.wake(waker, now));
    }

    /// A nomination changed or was cleared: pods that it may have kept out are retried.
    pub(crate) fn wake_up_to_priority(&mut self, priority: i64, now: Instant) {
        let below = self
            .entries
            .values_mut()
            .filter(|entry| entry.priority <= priority);
        below.for_each(|entry| entry.wake(Waker::All, now));
    }

    /// Requeues pods that have been unschedulable for too long.
    pub fn flush(&mut self, now: Instant, config: &SchedulerConfig) {
        for entry in self.entries.values_mut() {
            if let QueueState::Unschedulable { since, .. } = entry.state
                && now >= since + config.flush_unschedulable_after
            {
                entry.wake(Waker::All, now);
            }
        }
    }

    /// The next time at which the queue changes without an event.
    pub(crate) fn next_deadline(&self, config: &SchedulerConfig) -> Option<Instant> {
        let deadline = |entry: &Entry| match entry.state {
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

impl Entry {
    fn wake(&mut self, waker: Waker, now: Instant) {
        if let QueueState::Unschedulable { rejectors, .. } = &self.state
            && waker.wakes(rejectors)
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
            SchedulerConfig::shipped(""),
        );
        queue.add("a", 0, now);
        assert_eq!(queue.pop(now).as_deref(), Some("a"));
        queue.refused("a", BTreeSet::from([rejector]), now, &config);
        (queue, now, config)
    }

    #[test]
    fn a_pod_the_extender_refused_is_woken_by_a_touch_and_an_idle_queue_does_not_wait() {
        let (mut queue, now, _) = refused_by(Rejector::Extender);
        assert_eq!(queue.pop(now), None);
        queue.wake("a", Waker::OwnOther, now);
        assert_eq!(queue.pop(now).as_deref(), Some("a"));
    }

    #[test]
    fn a_pod_the_resource_check_refused_is_not_woken_by_a_touch() {
        let (mut queue, now, _) = refused_by(Rejector::Resources);
        queue.wake("a", Waker::OwnOther, now);
        queue.wake_all(Waker::NodeOther, now);
        assert_eq!(queue.pop(now), None);
        queue.wake_all(Waker::PodGone, now);
        assert_eq!(queue.pop(now).as_deref(), Some("a"));
    }

    #[test]
    fn an_error_waits_its_back_off_whatever_happens() {
        let (mut queue, now, config) = (
            SchedulingQueue::default(),
            Instant::now(),
            SchedulerConfig::shipped(""),
        );
        queue.add("a", 0, now);
        queue.pop(now);
        queue.failed("a", now, &config);
        queue.wake_all(Waker::All, now);
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
    fn a_sleeper_is_flushed_in_the_end() {
        let (mut queue, now, config) = refused_by(Rejector::Resources);
        let later = now + config.flush_unschedulable_after;
        assert_eq!(queue.next_deadline(&config), Some(later));
        queue.flush(later, &config);
        assert_eq!(queue.pop(later).as_deref(), Some("a"));
    }
}
