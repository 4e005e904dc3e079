//! Makes a failing history small: fewer steps and fewer kinds of faults, as long as it still fails.
//!
//! Dice fall whether or not their fault may happen, so that a history without a kind keeps much of its shape. It need not fail
//! in the same way; any failure is worth looking at.

use super::fault::FaultKind;
use super::{History, play};
use std::time::{Duration, Instant};

/// The smallest failing history that was found within this time; a failing history is the worst answer.
pub fn shrink(failing: &History, within: Duration) -> History {
    let until = Instant::now() + within;
    let fails = |history: &History| Instant::now() < until && !play(history).violations.is_empty();
    let mut smallest = failing.clone();
    minimize_steps(&mut smallest, &fails);
    // Halves first: most kinds have nothing to do with it.
    let mut size = FaultKind::ALL.len() / 2;
    while size > 0 {
        for kinds in FaultKind::ALL.chunks(size) {
            if kinds.iter().all(|kind| smallest.without.contains(kind)) {
                continue;
            }
            let mut candidate = smallest.clone();
            candidate.without.extend(kinds);
            if fails(&candidate) {
                smallest = candidate;
            }
        }
        size /= 2;
    }
    minimize_steps(&mut smallest, &fails);
    smallest
}

/// The fewest steps, by halves. More steps need not fail whenever fewer do; what is found fails.
fn minimize_steps(history: &mut History, fails: &impl Fn(&History) -> bool) {
    let (mut longest_passing, mut step) = (0, history.steps);
    while step > 1 {
        step = step.div_ceil(2);
        let fewer = history.steps.saturating_sub(step).max(longest_passing + 1);
        if fewer >= history.steps {
            continue;
        }
        let candidate = History {
            steps: fewer,
            ..history.clone()
        };
        if fails(&candidate) {
            *history = candidate;
        } else {
            longest_passing = fewer;
        }
    }
}
