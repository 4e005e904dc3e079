//! Simulated time: tokio's paused clock, counted from the history's beginning, and the wall clocks of the hosts, which may be
//! wrong.
//!
//! A [`TimeSource`] has plain functions, so what they read is the thread's: a history has one thread.

use jiff::{SignedDuration, Timestamp};
use std::cell::Cell;
use std::time::Duration;
use stowage_server::service::TimeSource;
use tokio::time::Instant;

/// Hosts on which a replica may run.
pub const HOSTS: [&str; 2] = ["stowage-a", "stowage-b"];

/// 2026-01-01T00:00:00Z: any time that every machine's clock has passed.
const START_UNIX_SECONDS: i64 = 1_767_225_600;

thread_local! {
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
    /// By how many milliseconds each host's wall clock is ahead.
    static AHEAD: Cell<[i64; 2]> = const { Cell::new([0; 2]) };
}

/// A history begins now, with clocks that are right.
pub fn start_history() {
    BEGAN.set(Some(Instant::now()));
    AHEAD.set([0; 2]);
}

/// Simulated time since the history's beginning.
pub fn elapsed() -> Duration {
    BEGAN.get().map_or(Duration::ZERO, |began| began.elapsed())
}

/// The true wall time, which the API server has.
pub fn wall() -> Timestamp {
    wall_clock_ahead_by(0)
}

/// Sets by how much a host's wall clock is ahead.
pub(crate) fn set_wall_clock_ahead(host: usize, millis: i64) {
    let mut ahead = AHEAD.get();
    ahead[host] = millis;
    AHEAD.set(ahead);
}

/// The clocks of a host.
pub(crate) fn host_time_source(host: usize) -> TimeSource {
    TimeSource {
        monotonic: elapsed,
        wall: [host_wall_clock::<0>, host_wall_clock::<1>][host],
    }
}

fn host_wall_clock<const HOST: usize>() -> Timestamp {
    wall_clock_ahead_by(AHEAD.get()[HOST])
}

fn wall_clock_ahead_by(millis: i64) -> Timestamp {
    let first = Timestamp::from_second(START_UNIX_SECONDS).expect("a time of this century");
    let since = SignedDuration::try_from(elapsed()).expect("a history is short");
    first + since + SignedDuration::from_millis(millis)
}
