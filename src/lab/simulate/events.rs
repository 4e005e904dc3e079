//! The event queue, which is the simulation's clock. Events at the same moment are handled in the order of their insertion, so
//! that a run is reproducible. The meaning of events is not known here.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use stowage_scheduling::units::Moment;

#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    queue: BinaryHeap<Reverse<(Moment, u64)>>,
    /// The events, by their order of insertion.
    events: BTreeMap<u64, T>,
    inserted: u64,
    now: Moment,
}

impl<T> Default for EventQueue<T> {
    fn default() -> Self {
        Self {
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            inserted: 0,
            now: Moment::default(),
        }
    }
}

impl<T> EventQueue<T> {
    /// The time of the latest event that was removed.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// Inserts an event at `when`, or now if that is in the past.
    pub fn schedule(&mut self, when: Moment, what: T) {
        self.queue
            .push(Reverse((when.max(self.now), self.inserted)));
        self.events.insert(self.inserted, what);
        self.inserted += 1;
    }

    /// The next event; its time becomes the present.
    pub fn pop(&mut self) -> Option<T> {
        let Reverse((when, sequence)) = self.queue.pop()?;
        self.now = when;
        self.events.remove(&sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_ordered_by_time_then_insertion() {
        let mut events = EventQueue::default();
        for (when, what) in [(5, "later"), (3, "first"), (5, "last"), (3, "second")] {
            events.schedule(Moment(when), what);
        }
        let order: Vec<&str> = std::iter::from_fn(|| events.pop()).collect();
        assert_eq!(order, ["first", "second", "later", "last"]);
        assert_eq!(events.now(), Moment(5));
    }

    #[test]
    fn an_event_in_the_past_happens_now() {
        let mut events = EventQueue::default();
        events.schedule(Moment(9), "first");
        events.pop();
        events.schedule(Moment(1), "too late");
        assert_eq!((events.pop(), events.now()), (Some("too late"), Moment(9)));
    }
}
