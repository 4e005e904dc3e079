//! A number that grows, and tasks that wait until it has grown.
//!
//! tokio's `watch` channel wakes its receivers in an order drawn at random. This one wakes them in the order in which they began
//! to wait, so that a simulation of many tasks can be repeated.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;

#[derive(Debug, Default, Clone)]
pub struct ChangeCount(Arc<CounterState>);

#[derive(Debug, Default)]
struct CounterState {
    number: AtomicU64,
    changed: Notify,
}

impl ChangeCount {
    pub fn get(&self) -> u64 {
        self.0.number.load(Ordering::Acquire)
    }

    /// Adds one, and wakes all that wait.
    pub fn increment(&self) {
        self.0.number.fetch_add(1, Ordering::AcqRel);
        self.0.changed.notify_waiters();
    }

    /// A receiver that has seen the present number.
    pub fn subscribe(&self) -> ChangeReceiver {
        ChangeReceiver {
            count: self.clone(),
            last_seen: self.get(),
        }
    }
}

/// A receiver of changes, with the number that it saw last.
#[derive(Debug)]
pub struct ChangeReceiver {
    count: ChangeCount,
    last_seen: u64,
}

impl ChangeReceiver {
    /// Marks the present number as seen, and returns it.
    pub fn mark_seen(&mut self) -> u64 {
        self.last_seen = self.count.get();
        self.last_seen
    }

    pub(crate) fn has_changed(&self) -> bool {
        self.count.get() != self.last_seen
    }

    /// Waits until the number is another than the one last seen, and sees it.
    pub async fn changed(&mut self) {
        loop {
            // Before the comparison: it is woken by every change from here on.
            let notified = self.count.0.changed.notified();
            if self.has_changed() {
                break;
            }
            notified.await;
        }
        self.mark_seen();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    #[tokio::test]
    async fn tasks_wake_in_the_order_in_which_they_began_to_wait() {
        let (count, woken) = (ChangeCount::default(), Arc::new(Mutex::new(Vec::new())));
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..50 {
            let (mut seen, woken) = (count.subscribe(), woken.clone());
            tasks.spawn(async move {
                seen.changed().await;
                woken.lock().push(n);
            });
        }
        tokio::task::yield_now().await;
        count.increment();
        tasks.join_all().await;
        assert_eq!(*woken.lock(), (0..50).collect::<Vec<u32>>());
    }

    #[tokio::test]
    async fn a_change_between_two_waits_is_not_missed() {
        let count = ChangeCount::default();
        let mut seen = count.subscribe();
        assert!(!seen.has_changed());
        count.increment();
        count.increment();
        seen.changed().await;
        assert!(!seen.has_changed());
        assert_eq!((seen.mark_seen(), count.get()), (2, 2));
    }
}
