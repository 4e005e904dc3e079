//! The event queue, which is the simulation's clock. Events at the same moment are handled in the order of their insertion, so
//! that a run is reproducible. The meaning of events is not known here.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use stowage_scheduling::units::Moment;

#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    next: BinaryHeap<Reverse<(Moment, u64)>>,
    /// The events, by their order of insertion.
    what: BTreeMap<u64, T>,
    put_in: u64,
    now: Moment,
}

impl<T> Default for EventQueue<T> {
    fn default() -> Self {
        Self {
            next: BinaryHeap::new(),
            what: BTreeMap::new(),
            put_in: 0,
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
    pub fn at(&mut self, when: Moment, what: T) {
        self.next.push(Reverse((when.max(self.now), self.put_in)));
        self.what.insert(self.put_in, what);
        self.put_in += 1;
    }

    /// The next event; its time becomes the present.
    pub fn take(&mut self) -> Option<T> {
        let Reverse((when, place)) = self.next.pop()?;
        self.now = when;
        self.what.remove(&place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_in_the_order_in_which_they_were_put_in() {
        let mut events = EventQueue::default();
        for (when, what) in [(5, "later"), (3, "first"), (5, "last"), (3, "second")] {
            events.at(Moment(when), what);
        }
        let order: Vec<&str> = std::iter::from_fn(|| events.take()).collect();
        assert_eq!(order, ["first", "second", "later", "last"]);
        assert_eq!(events.now(), Moment(5));
    }

    #[test]
    fn an_event_in_the_past_happens_now() {
        let mut events = EventQueue::default();
        events.at(Moment(9), "first");
        events.take();
        events.at(Moment(1), "too late");
        assert_eq!((events.take(), events.now()), (Some("too late"), Moment(9)));
    }
}
