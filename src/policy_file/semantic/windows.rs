//! Finds windows that never open.

use super::{WrittenPolicy, key_span, span};
use crate::diagnostic::{Diagnostic, quoted};
use crate::parse::SERVING;
use crate::source::Span;
use crate::tree::YamlNode;
use std::collections::BTreeMap;
use stowage_scheduling::policy::Window;
use stowage_scheduling::policy::window::{DayRange, MINUTES_PER_DAY};

/// Minutes of a week.
const MINUTES_PER_WEEK: u32 = 7 * MINUTES_PER_DAY as u32;
/// The most windows of one list: each is checked twice a second while the policy is in force.
const MAX_WINDOWS: usize = 64;

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let entries = policy.entries("classes");
    for one in &policy.draft.classes {
        let Some(entry) = one.written_index.and_then(|index| entries.get(index)) else {
            continue;
        };
        let Some(list) = entry.get("when") else {
            continue;
        };
        if one.class.name == SERVING {
            found.push(
                Diagnostic::error(
                    "serving-when",
                    key_span(entry, "when"),
                    "`serving` takes every pod that is left, so it has no windows",
                )
                .help("take `when` away, or give a class of your own these windows"),
            );
        }
        check_windows(list, &one.class.when, found);
    }
}

/// The windows of one list.
pub fn check_windows(list: &YamlNode, windows: &[Window], found: &mut Vec<Diagnostic>) {
    if windows.is_empty() {
        found.push(
            Diagnostic::error(
                "window-never-opens",
                list.span,
                "`when` names no window, so it would never hold",
            )
            .help("take `when` away for always, or name a window"),
        );
    }
    let entries = list.items();
    if let Some(beyond) = entries.get(MAX_WINDOWS) {
        let message = format!(
            "`when` has {} windows; {MAX_WINDOWS} are the most",
            entries.len()
        );
        found.push(
            Diagnostic::error("too-many-entries", beyond.span, message)
                .help("put windows of the same hours into one, with all their `days`"),
        );
        return;
    }
    for (entry, window) in entries.iter().zip(windows) {
        check_days(entry, window, found);
        check_hours(entry, window, found);
    }
}

fn check_days(entry: &YamlNode, window: &Window, found: &mut Vec<Diagnostic>) {
    let Some(list) = entry.get("days") else {
        return;
    };
    if window.days.is_empty() {
        found.push(
            Diagnostic::error(
                "window-never-opens",
                list.span,
                "`days` is empty, so the window never opens",
            )
            .help("take the line away for every day, or name some"),
        );
    }
    let mut first: BTreeMap<u8, Span> = BTreeMap::new();
    for range in list.items() {
        let days = range.text().and_then(|text| DayRange::parse(text).ok());
        let again = days
            .into_iter()
            .flat_map(DayRange::days)
            .find_map(|day| Some((day, first.insert(day, range.span)?)));
        if let Some((day, before)) = again {
            let message = format!(
                "the window overlaps itself: {} is said twice",
                quoted(DayRange::name_of(day))
            );
            found.push(
                Diagnostic::error("window-overlaps", range.span, message)
                    .label("again here")
                    .related(before, "first here")
                    .help("name each day once"),
            );
        }
    }
}

fn check_hours(entry: &YamlNode, window: &Window, found: &mut Vec<Diagnostic>) {
    if window.from != window.to {
        return;
    }
    let message = format!(
        "the window closes at {} when it opens, so it never is open",
        window.to
    );
    let at = if entry.get("to").is_some() {
        "to"
    } else {
        "from"
    };
    found.push(
        Diagnostic::error("window-never-opens", span(entry, &[at]), message)
            .help("for whole days leave `from` and `to` out, or write from \"00:00\" to \"24:00\""),
    );
}

/// Whether at every minute of a week in which no clock is changed one of these windows is open that has the first one's time zone.
pub fn cover_the_week(windows: &[Window]) -> bool {
    let mut open = vec![false; MINUTES_PER_WEEK as usize];
    let of_one_zone = windows
        .iter()
        .filter(|one| one.time_zone == windows[0].time_zone);
    for (from, to) in of_one_zone.flat_map(open_minutes) {
        open[from as usize..to as usize].fill(true);
    }
    !open.contains(&false)
}

/// The minutes of a week in which it is open; what goes over the end of the week is at its beginning, too.
fn open_minutes(window: &Window) -> Vec<(u32, u32)> {
    let length = match window.ends_on_the_next_day() {
        true => {
            u32::from(window.to.minutes()) + u32::from(MINUTES_PER_DAY)
                - u32::from(window.from.minutes())
        }
        false => u32::from(window.to.minutes()) - u32::from(window.from.minutes()),
    };
    let begins = (0..7).filter(|day| window.days.contains(*day));
    let begins = begins
        .map(|day| u32::from(day) * u32::from(MINUTES_PER_DAY) + u32::from(window.from.minutes()));
    begins
        .flat_map(|begin| {
            let over = (begin + length).saturating_sub(MINUTES_PER_WEEK);
            [(begin, (begin + length).min(MINUTES_PER_WEEK)), (0, over)]
        })
        .filter(|(from, to)| from < to)
        .collect()
}
