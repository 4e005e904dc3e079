//! The numbers of replicas that were asked for recently: the least and the most within a window.
//!
//! However often a number is added, few are kept: those of one part of the window are kept as their least and most, for as long
//! as the latest of them counts. So a window never forgets too early.

use crate::units::{Millis, Moment};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Parts of a window: with the default of five minutes, each is shorter than the fifteen seconds between two evaluations.
const WINDOW_PARTS: u64 = 32;
/// More parts are kept only after the window was made shorter.
const MAX_PARTS: usize = 2 * WINDOW_PARTS as usize;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Recommendations {
    parts: VecDeque<Part>,
    /// Everything since then is kept; before the first number, nothing.
    since: Option<Moment>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Part {
    first: Moment,
    last: Moment,
    least: u32,
    most: u32,
}

impl Recommendations {
    /// Times do not go back.
    pub(super) fn add(&mut self, replicas: u32, now: Moment, window: Millis) {
        self.since.get_or_insert(now);
        while self
            .parts
            .front()
            .is_some_and(|part| now.since(part.last) > window)
        {
            self.drop_oldest();
        }
        let width = window.0 / WINDOW_PARTS;
        match self
            .parts
            .back_mut()
            .filter(|part| now.since(part.first).0 < width)
        {
            Some(part) => {
                part.last = now;
                (part.least, part.most) = (part.least.min(replicas), part.most.max(replicas));
            }
            None => self.parts.push_back(Part {
                first: now,
                last: now,
                least: replicas,
                most: replicas,
            }),
        }
        while self.parts.len() > MAX_PARTS {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(gone) = self.parts.pop_front() {
            self.since = self.since.map(|since| since.max(gone.last));
        }
    }

    /// Begins again: what was asked for before says nothing about what was asked for meanwhile.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether nothing of a window that ends now is missing.
    pub(super) fn covers(&self, now: Moment, window: Millis) -> bool {
        self.since.is_some_and(|since| now.since(since) >= window)
    }

    pub(super) fn max_within(&self, now: Moment, window: Millis) -> Option<u32> {
        self.within(now, window).map(|part| part.most).max()
    }

    pub(super) fn min_within(&self, now: Moment, window: Millis) -> Option<u32> {
        self.within(now, window).map(|part| part.least).min()
    }

    fn within(&self, now: Moment, window: Millis) -> impl Iterator<Item = &Part> {
        self.parts
            .iter()
            .filter(move |part| now.since(part.last) <= window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Beside a list of all numbers: the most is never less, the least never more, and few are kept.
        #[test]
        fn a_window_forgets_nothing_too_early(
            steps in prop::collection::vec((0u64..40_000, 0u32..100), 1..300),
            window in 0u64..400_000,
        ) {
            let (mut kept, mut all, mut now) = (Recommendations::default(), Vec::new(), Moment(1_000_000));
            for (step, replicas) in steps {
                now = now + Millis(step);
                kept.add(replicas, now, Millis(window));
                all.push((now, replicas));
                let within = || all.iter().filter(|(at, _)| now.since(*at).0 <= window).map(|(_, n)| *n);
                prop_assert!(kept.max_within(now, Millis(window)) >= within().max());
                prop_assert!(kept.min_within(now, Millis(window)) <= within().min());
                prop_assert!(kept.parts.len() <= MAX_PARTS);
                prop_assert!(!kept.covers(now, Millis(window)) || now.since(all[0].0).0 >= window);
            }
        }
    }

    #[test]
    fn a_number_counts_for_the_window_and_not_for_much_longer() {
        let (mut kept, window) = (Recommendations::default(), Millis::seconds(320));
        let at = |seconds: u64| Moment(0) + Millis::seconds(seconds);
        kept.add(9, at(0), window);
        (1..=32).for_each(|n| kept.add(3, at(10 * n), window));
        assert_eq!(kept.max_within(at(320), window), Some(9));
        kept.add(3, at(330), window);
        assert_eq!(kept.max_within(at(330), window), Some(3));
        assert!(kept.covers(at(330), window));
    }
}
